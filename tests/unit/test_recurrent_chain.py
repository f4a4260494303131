"""Drafts of recurrent heads in one call: the same drafts as token by token, and when the call is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from outrider import kernels
from outrider.core.draft import SeqDraft
from outrider.core.rng import CounterRng, Key
from outrider.core.types import SamplingParams, Sequence
from outrider.drafters import token_rows
from outrider.drafters.mtp import MtpDrafter
from outrider.drafters.token_rows import SharedRows
from tests.contract.factories import mtp
from tests.contract.world import GREEDY, PENALISED, SAMPLED, VOCAB, begin, commit_tokens, same, sequence, watched

needs_kernels = pytest.mark.skipif(not kernels.available(), reason="without kernels drafts are made token by token")
SOME = [0, 2, 3, 5]
CUT = SamplingParams(temperature=1.0, top_k=3, max_tokens=10)


def rounds(
    drafter: MtpDrafter, params: SamplingParams, rule: str, budgets: list[int]
) -> list[tuple[list[SeqDraft], dict[str, int]]]:
    """Drafts and the kernels' calls of some rounds, in which all of a draft or less is accepted."""
    seqs: list[Sequence] = [sequence(i, [1, 2, 3, 1, 4 + i], params, rule, seed=i) for i in range(len(budgets))]
    for seq in seqs:
        begin(drafter, seq)
    made = []
    for turn in range(4):
        before = kernels.fast_calls()
        draft = drafter.propose(seqs, budgets, CounterRng())
        made.append((draft.seqs, {k: n - before.get(k, 0) for k, n in kernels.fast_calls().items()}))
        for seq, own in zip(seqs, draft.seqs, strict=True):
            commit_tokens(drafter, seq, [*own.tokens[:turn], 6], min(turn, own.size))
    return made


@needs_kernels
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"draft_ids": SOME},
        {"own_head": True, "own_embedding": True},
        {"min_confidence": 0.4},
        {"copy": 1.7},
        {"copy": 6.1, "draft_ids": SOME},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(temperature=0.2, max_tokens=10), SAMPLED], ids=["greedy", "cool", "drawn"]
)
def test_one_call_drafts_what_a_pass_a_token_does(fields: dict[str, Any], params: SamplingParams) -> None:
    """Also where one sequence has all its tokens, where temperature asks for the likeliest anyway, and of drawn tokens,
    q included."""
    rule = "greedy" if params.greedy else "block"
    whole, single = mtp(watched(1), **fields), mtp(watched(1), **fields)
    assert whole._chain is not None
    single._chain = None
    pairs = list(zip(rounds(whole, params, rule, [4, 1, 3]), rounds(single, params, rule, [4, 1, 3]), strict=True))
    for (found, calls), (expected, passes) in pairs:
        assert all(same(a, b) for a, b in zip(found, expected, strict=True))
        assert [a.passes for a in found] == [b.passes for b in expected]
        assert (calls["chain"], calls.get("stack", 0)) == (1, 0)
        assert passes.get("chain", 0) == 0
    assert whole.passes == single.passes


@needs_kernels
@pytest.mark.parametrize(("params", "rule"), [(PENALISED, "greedy"), (CUT, "block"), (SAMPLED, "coupled")])
def test_other_drafts_are_made_token_by_token(params: SamplingParams, rule: str) -> None:
    """Processors look at what was drafted; truncated rows and races are drawn from outside."""
    drafter = mtp(watched(1))
    if params is PENALISED:
        drafter.sample_method = "greedy"
        rule = "match"
    for made, calls in rounds(drafter, params, rule, [3]):
        assert made[0].size == 3
        assert (calls.get("chain", 0), calls["stack"]) == (0, 3)


@needs_kernels
@pytest.mark.parametrize("copy", [0.0, 5.0])
def test_a_draft_goes_on_where_embeddings_were_not_at_hand(monkeypatch: pytest.MonkeyPatch, copy: float) -> None:
    """Of a table that keeps one token and remembers another: more calls, the same drafts."""
    expected = rounds(mtp(watched(1), copy=copy), GREEDY, "greedy", [4, 3])
    monkeypatch.setattr(token_rows, "KEPT", 1)
    monkeypatch.setattr(token_rows, "RECENT", 2)
    drafter = mtp(watched(1), copy=copy)
    found = rounds(drafter, GREEDY, "greedy", [4, 3])
    for (a, calls), (b, _) in zip(found, expected, strict=True):
        assert all(same(x, y) and x.passes == y.passes for x, y in zip(a, b, strict=True))
        assert calls["chain"] >= 1
    assert sum(calls["chain"] for _, calls in found) > len(found)


class Elsewhere(CounterRng):
    """Foresees other draws than it makes."""

    def foresee(self, key: Key) -> float | None:
        return 1 - super().uniform(key)


@needs_kernels
def test_what_is_drawn_counts_and_not_what_was_foreseen() -> None:
    """A draft ends where the two differ; q is what the token was drawn from."""
    drafter, single = mtp(watched(1)), mtp(watched(1))
    single._chain = None
    sizes = set()
    for seed in range(8):
        seqs = [sequence(seed, [1, 2, 3], SAMPLED, "block", seed=seed) for _ in range(2)]
        drafts = []
        for own, seq, rng in zip((drafter, single), seqs, (Elsewhere(), CounterRng()), strict=True):
            begin(own, seq)
            drafts.append(own.propose([seq], [4], rng).seqs[0])
        cut, whole = drafts
        assert cut.tokens == whole.tokens[: cut.size]
        assert all(torch.equal(a.to_dense(), b.to_dense()) for a, b in zip(cut.q_rows, whole.q_rows, strict=False))
        sizes.add(cut.size)
    assert 1 in sizes


@needs_kernels
@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_numbers_that_are_lost_end_the_draft(params: SamplingParams) -> None:
    drafter = mtp(watched(1))
    seq = sequence(0, [1, 2, 3], params, "greedy" if params.greedy else "block")
    begin(drafter, seq)
    drafter._states[0]._features = [torch.full_like(part, torch.nan) for part in drafter._states[0]._features]
    assert drafter.propose([seq], [4], CounterRng()).seqs[0].size == 0
    assert list(seq.stats.dropped) == ["draft logits are NaN, or every token is forbidden"]


def test_shared_rows_are_those_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked for, in whatever order; what is kept is not looked up again."""
    monkeypatch.setattr(token_rows, "KEPT", 3)
    monkeypatch.setattr(token_rows, "RECENT", 2)
    asked: list[list[int]] = []
    all_Vd = torch.randn(20, 4)

    def look_up(tokens: Any) -> Tensor:
        asked.append(list(tokens))
        return all_Vd[list(tokens)]

    rows = SharedRows(look_up, 20, [4, 5, 9, 11])
    assert asked == [[4, 5, 9]]
    for tokens in ([4, 9, 4], [11, 12], [12, 11], [4, 13], [11], [12], [13, 14, 15, 16], [16, 15], [4, 5, 9]):
        assert torch.equal(rows(tokens), all_Vd[tokens])
        assert rows.table.row_of_V is not None
        at_hand = (rows.table.row_of_V >= 0).nonzero().flatten()
        assert len(at_hand) <= 5
        assert torch.equal(rows.table.rows_Rd[rows.table.row_of_V[at_hand]], all_Vd[at_hand])
    assert asked[1:] == [[11, 12], [4, 13], [11], [12], [13, 14, 15, 16]]


def test_the_world_is_as_wide_as_its_rows() -> None:
    assert mtp(watched(1))._embedded.table.tokens == VOCAB
