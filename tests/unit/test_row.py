"""Rows: a support and its weights say the same as the full vector."""

from __future__ import annotations

import pytest
import torch

from outrider.core.rng import CounterRng, ExhaustiveRng, Key, Purpose, RecordingRng
from outrider.core.row import Row

P = [0.0, 0.5, 0.0, 0.2, 0.3, 0.0]
Q = [0.1, 0.6, 0.1, 0.0, 0.1, 0.1]


def full(weights: list[float]) -> Row:
    return Row.dense(torch.tensor(weights, dtype=torch.float64))


def sparse(weights: list[float]) -> Row:
    token_S = torch.tensor([token for token, weight in enumerate(weights) if weight > 0])
    return Row(len(weights), torch.tensor(weights, dtype=torch.float64)[token_S], token_S)


KINDS = pytest.mark.parametrize("make", [full, sparse])
PAIRS = pytest.mark.parametrize(
    ("make_p", "make_q"),
    [(full, full), (full, sparse), (sparse, full), (sparse, sparse)],
    ids=lambda make: make.__name__,
)


@KINDS
def test_reading(make) -> None:
    row = make(P)
    assert [row[token] for token in range(6)] == P
    assert row.to_dense().tolist() == P
    assert (row.size, row.total(), row.likeliest()) == (6, 1.0, 1)
    assert row == full(P)
    assert row != full(Q)


def test_one_hot() -> None:
    row = Row.one_hot(2, 4)
    assert row.only == row.likeliest() == 2
    assert [row[token] for token in range(4)] == row.to_dense().tolist() == [0.0, 0.0, 1.0, 0.0]
    assert (row.weight_S.tolist(), row.token_S.tolist(), row.total()) == ([1.0], [2], 1.0)
    assert row == Row.one_hot(2, 4) == full([0.0, 0.0, 1.0, 0.0])
    assert row.without(2).to_dense().tolist() == [0.0] * 4
    assert row.excess(full([0.1, 0.2, 0.3, 0.4])).to_dense().tolist() == [0.0, 0.0, 0.7, 0.0]
    assert full(P).only is sparse(P).only is None


@KINDS
@pytest.mark.parametrize("token", [0, 3, 5])
def test_without(make, token: int) -> None:
    row = make(P)
    assert row.without(token).to_dense().tolist() == [0.0 if x == token else p for x, p in enumerate(P)]
    assert row == full(P)


@PAIRS
def test_excess(make_p, make_q) -> None:
    p, q = make_p(P), make_q(Q)
    assert p.excess(q, 0.5).to_dense().tolist() == [max(0.5 * a - b, 0.0) for a, b in zip(P, Q, strict=True)]
    assert q.excess(p).to_dense().tolist() == [max(b - a, 0.0) for a, b in zip(P, Q, strict=True)]
    assert (p, q) == (full(P), full(Q))


def test_draws_do_not_depend_on_how_a_row_is_held() -> None:
    for seed in range(200):
        key = Key(seed, 0, Purpose.TARGET)
        assert CounterRng().categorical(sparse(P), key) == CounterRng().categorical(full(P), key)
        assert CounterRng().race(sparse(P), key) == CounterRng().race(full(P), key)


def test_traces_and_laws_name_tokens() -> None:
    key, recording = Key(5, 0, Purpose.TARGET), RecordingRng()
    token = recording.of(1).categorical(sparse(P), key)
    [draw] = recording.take(1)
    assert (draw.outcome, draw.probability) == (token, P[token])
    assert draw.likeliest == ((1, 0.5), (4, 0.3), (3, 0.2))
    for draws in (lambda rng: rng.categorical(sparse(P), key), lambda rng: rng.race(sparse(P), key)):
        assert ExhaustiveRng().law(draws) == pytest.approx({1: 0.5, 3: 0.2, 4: 0.3})


def test_two_races_of_rows_held_differently_share_their_clocks() -> None:
    key = Key(0, 0, Purpose.RACE)
    law = ExhaustiveRng().law(lambda rng: (rng.race(sparse(P), key), rng.race(full(P), key)))
    assert law == pytest.approx({(1, 1): 0.5, (3, 3): 0.2, (4, 4): 0.3})
