"""Keyed randomness: what the generators promise, and that the exhaustive one really is exhaustive."""

from __future__ import annotations

import math

import pytest
import torch

from outrider.core.rng import (
    CounterRng,
    ExhaustiveRng,
    Key,
    Purpose,
    RecordingRng,
    exponential_clocks,
    fold_seed,
    joint_race_law,
)
from outrider.core.row import Row


def vector(*weights: float) -> torch.Tensor:
    return torch.tensor(weights, dtype=torch.float64)


def row(*weights: float) -> Row:
    return Row.dense(vector(*weights))


KEYS = [
    Key(seed, position, purpose, offset)
    for seed in (0, 1, -1, 2**63, 2**64 - 2)
    for position in (0, 1, 100_000)
    for purpose in Purpose
    for offset in (0, 1, 7)
]


def test_draws_depend_on_the_key_alone() -> None:
    """Another generator, in another order, draws the same."""
    first, second = CounterRng(), CounterRng()
    forward = [first.uniform(key) for key in KEYS]
    backward = [second.uniform(key) for key in reversed(KEYS)]
    assert forward == backward[::-1]
    assert len(set(forward)) == len(KEYS)
    assert all(0.0 < u < 1.0 for u in forward)


def test_noise_is_pinned() -> None:
    """Seeds are a promise to users: these numbers change only with a note in the release."""
    assert CounterRng().uniform(Key(1, 2, Purpose.TARGET, 3)) == pytest.approx(0.43587567318510984, abs=1e-16)
    clocks = [3.795367548207561, 0.7957958846500462, 1.7927848886306113]
    assert exponential_clocks(Key(1, 2, Purpose.RACE), 3).tolist() == pytest.approx(clocks, abs=1e-15)


def test_scalar_and_vector_noise_agree() -> None:
    """The plain-Python word and the torch words are the same SplitMix64."""
    for key in KEYS:
        assert float(exponential_clocks(key, 1)[0]) == pytest.approx(-math.log(CounterRng().uniform(key)), abs=1e-15)


def test_a_longer_vocabulary_keeps_the_clocks() -> None:
    """A padded vocabulary does not change the text."""
    key = Key(3, 4, Purpose.RACE)
    assert torch.equal(exponential_clocks(key, 1000)[:10], exponential_clocks(key, 10))


def test_uniforms_are_uniform() -> None:
    """Chi-square over 20 bins: positions of one seed, and seeds at one position; 43.8 is the 0.1 % point."""
    rng = CounterRng()
    for draws in (
        [rng.uniform(Key(5, position, Purpose.ACCEPT)) for position in range(10_000)],
        [rng.uniform(Key(seed, 5, Purpose.ACCEPT)) for seed in range(10_000)],
    ):
        counts = torch.histc(vector(*draws), bins=20, min=0.0, max=1.0)
        assert float(((counts - 500) ** 2 / 500).sum()) < 43.8


def test_neighbouring_keys_are_uncorrelated() -> None:
    rng = CounterRng()
    for a, b in [
        (Key(1, 0, Purpose.ACCEPT), Key(1, 1, Purpose.ACCEPT)),
        (Key(1, 0, Purpose.ACCEPT), Key(2, 0, Purpose.ACCEPT)),
        (Key(1, 0, Purpose.ACCEPT), Key(1, 0, Purpose.TARGET)),
        (Key(1, 0, Purpose.ACCEPT, 0), Key(1, 0, Purpose.ACCEPT, 1)),
    ]:
        pairs = vector(*(rng.uniform(k._replace(seed=k.seed + 2 * i)) for i in range(4_000) for k in (a, b))).view(
            -1, 2
        )
        assert abs(float(torch.corrcoef(pairs.T)[0, 1])) < 0.06


def test_bernoulli_at_the_ends() -> None:
    rng = CounterRng()
    assert not any(rng.bernoulli(0.0, key) for key in KEYS)
    assert all(rng.bernoulli(1.0, key) for key in KEYS)


def test_categorical_and_race_never_draw_the_impossible() -> None:
    p = row(0.0, 0.3, 0.0, 1e-300, 0.7, 0.0)
    for draw in (CounterRng().categorical, CounterRng().race):
        assert {draw(p, key) for key in KEYS} <= {1, 3, 4}
        assert {draw(row(0.0, 0.0, 1.0), key) for key in KEYS} == {2}


def test_categorical_takes_weights_that_do_not_sum_to_1() -> None:
    for key in KEYS:
        draws = {CounterRng().categorical(row(1.0 / c, 2.0 / c, 5.0 / c), key) for c in (1.0, 8.0)}
        assert len(draws) == 1


def test_frequencies() -> None:
    """0.1 % point of chi-square with 2 degrees: 13.8."""
    p_V = vector(0.5, 0.3, 0.2)
    for draw in (CounterRng().categorical, CounterRng().race):
        counts = torch.zeros(3, dtype=torch.float64)
        for seed in range(3_000):
            counts[draw(Row.dense(p_V), Key(seed, 1, Purpose.TARGET))] += 1
        assert float(((counts - 3_000 * p_V) ** 2 / (3_000 * p_V)).sum()) < 13.8


def test_choices_have_seeds_of_their_own() -> None:
    seeds = [fold_seed(7, choice) for choice in range(100)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 100


def test_recording_changes_nothing_and_is_taken_by_sequence() -> None:
    recording, plain = RecordingRng(), CounterRng()
    p = row(0.2, 0.8)
    for key in KEYS:
        source = recording.of(key.position)
        assert source.bernoulli(0.4, key) == plain.bernoulli(0.4, key)
        assert source.categorical(p, key) == plain.categorical(p, key)
        assert source.race(p, key) == plain.race(p, key)
    position = KEYS[0].position
    taken = recording.take(position)
    assert len(taken) == 3 * sum(key.position == position for key in KEYS) > 0
    assert recording.take(position) == []
    categorical = next(draw for draw in taken if draw.kind == "categorical")
    assert categorical.likeliest == ((1, 0.8), (0, 0.2))
    assert categorical.probability == pytest.approx(p[categorical.outcome])


def test_exhaustive_law_of_two_draws() -> None:
    def two(rng) -> tuple[bool, int]:
        heads = rng.bernoulli(0.25, Key(0, 0, Purpose.ACCEPT))
        return heads, rng.categorical(row(1.0, 3.0) if heads else row(1.0, 0.0), Key(0, 0, Purpose.TARGET))

    assert ExhaustiveRng().law(two) == pytest.approx({(True, 0): 0.0625, (True, 1): 0.1875, (False, 0): 0.75})


def test_exhaustive_skips_what_cannot_happen() -> None:
    law = ExhaustiveRng().law(lambda rng: rng.bernoulli(1.5, Key(0, 0, Purpose.ACCEPT)))
    assert law == {True: 1.0}


def test_exhaustive_refuses_a_key_twice() -> None:
    key = Key(0, 0, Purpose.TARGET)
    with pytest.raises(AssertionError, match="drawn twice"):
        ExhaustiveRng().law(lambda rng: (rng.categorical(row(0.5, 0.5), key), rng.bernoulli(0.5, key)))


def test_joint_race_law_by_hand() -> None:
    """Two tokens, q = (1/2, 1/2), p = (1/4, 3/4): P(0, 0) = 1 / (1 + 3) and P(1, 0) = 0."""
    law = joint_race_law(vector(0.5, 0.5), vector(0.25, 0.75))
    assert law.flatten().tolist() == pytest.approx([0.25, 0.25, 0.0, 0.5], abs=1e-15)


@pytest.mark.parametrize(
    ("q", "p"),
    [
        (vector(0.2, 0.3, 0.5), vector(0.5, 0.3, 0.2)),
        (vector(0.5, 0.5, 0.0), vector(0.0, 0.5, 0.5)),
        (vector(1.0, 0.0, 0.0), vector(0.2, 0.2, 0.6)),
        (vector(0.1, 0.2, 0.3, 0.4), vector(0.25, 0.25, 0.25, 0.25)),
    ],
)
def test_joint_race_law_has_the_right_margins(q: torch.Tensor, p: torch.Tensor) -> None:
    law = joint_race_law(q, p)
    assert torch.allclose(law.sum(1), q, atol=1e-14)
    assert torch.allclose(law.sum(0), p, atol=1e-14)
    assert float(law.min()) >= 0.0


def test_exhaustive_race_of_two_rows_follows_the_joint_law() -> None:
    q, p = row(0.2, 0.3, 0.5), row(0.5, 0.3, 0.2)
    key = Key(0, 0, Purpose.RACE)
    law = ExhaustiveRng().law(lambda rng: (rng.race(q, key), rng.race(p, key)))
    joint = joint_race_law(q.to_dense(), p.to_dense())
    for (i, j), probability in law.items():
        assert probability == pytest.approx(float(joint[i, j]), abs=1e-15)
