"""The round's edges: logits that cannot be used, and what a trace says of the final draw."""

from __future__ import annotations

import torch

from outrider.control.fixed import FixedController
from outrider.core.draft import Draft, DraftLaw, SeqDraft
from outrider.core.rng import RecordingRng
from outrider.core.step import BAD_LOGITS, spec_step
from outrider.core.trace import StepTrace, trace_of
from outrider.core.types import SamplingParams, Sequence
from outrider.models.table import TableModel
from outrider.verify.coupled import CoupledVerifier
from outrider.verify.greedy import GreedyVerifier
from tests.laws.rounds import TableDrafter, commit, table_model


class Always(TableDrafter):
    """Proposes the same tokens every time."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__(table_model(2, 1, seed=0), SamplingParams(), DraftLaw.POINT)
        self.tokens = tokens

    def propose(self, seqs, budgets, rng) -> Draft:
        return Draft([SeqDraft.chain(self.tokens[:budget]) for budget in budgets])


def ones_then_nan(length: int) -> TableModel:
    """Says 1 until the context has `length` tokens, then NaN."""
    return TableModel(
        lambda context: torch.tensor([0.0, 1.0 if len(context) < length else torch.nan], dtype=torch.float64), 2
    )


def sequence(target: TableModel, stop_ids: frozenset[int] = frozenset()) -> Sequence:
    seq = Sequence(0, [0], SamplingParams(max_tokens=8), seed=0, stop_ids=stop_ids)
    seq.rule, seq.cache = GreedyVerifier(), target.new_cache()
    return seq


def test_nan_inside_a_draft_ends_the_answer_where_plain_decoding_would_meet_it() -> None:
    ends = []
    for k in (0, 1, 4):
        target = ones_then_nan(3)
        seq = sequence(target)
        while not seq.finished:
            spec_step([seq], target, Always([1, 1, 1, 1]), FixedController(k), RecordingRng(), commit)
            seq.stats.check()
        ends.append((seq.tokens, seq.finish_reason))
    assert ends == [([0, 1, 1], BAD_LOGITS)] * 3


class Eager:
    """A controller that asks for more than there is room for, and writes down what it is told."""

    def __init__(self) -> None:
        self.rooms: list[int] = []
        self.seen: list[tuple[int, int, int]] = []

    def budgets(self, seqs, rooms) -> list[int]:
        self.rooms += rooms
        return [9] * len(seqs)

    def observe(self, seq, asked, drafted, accepted, source) -> None:
        self.seen.append((asked, drafted, accepted))


def test_a_controller_hears_what_was_really_asked_for_at_the_end_of_the_context() -> None:
    target, controller = ones_then_nan(9), Eager()
    target.context_length = 4
    spec_step([sequence(target)], target, Always([1, 0, 1, 1]), controller, RecordingRng(), commit)
    assert (controller.rooms, controller.seen) == ([2], [(2, 2, 1)])


def test_nan_behind_a_stop_does_not_matter() -> None:
    target = ones_then_nan(2)
    seq = sequence(target, frozenset({1}))
    spec_step([seq], target, Always([1, 1]), FixedController(2), RecordingRng(), commit)
    assert (seq.tokens, seq.finish_reason) == ([0, 1], "stop")


def test_one_bad_sequence_does_not_stop_its_neighbour() -> None:
    target = ones_then_nan(2)
    good, bad = sequence(target), sequence(target)
    bad.tokens, bad.prompt_len = [0, 0], 2
    bad.cache.tokens = [0]
    spec_step([bad, good], target, Always([1]), FixedController(0), RecordingRng(), commit)
    assert bad.finish_reason == BAD_LOGITS
    assert good.tokens == [0, 1]


class Listener(Always):
    """Offers these forests in turn, and writes down whose features it is told."""

    trees = True
    wants = (0,)

    def __init__(self, *forests: tuple[list[int], list[int]]) -> None:
        super().__init__([])
        self.forests = iter(forests)
        self.heard: list[list[int]] = []

    def propose(self, seqs, budgets, rng) -> Draft:
        return Draft([SeqDraft(*next(self.forests)) for _ in seqs])

    def commit(self, seq, committed) -> None:
        assert committed.features_TF is not None
        self.heard.append(committed.features_TF.argmax(1).tolist())


def test_a_drafter_is_told_the_features_of_what_the_cache_gained() -> None:
    """Of a chain kept whole, of one kept in part, and of the branches of a tree that were kept; in one batch."""
    target = TableModel(lambda context: torch.eye(8, dtype=torch.float64)[(context[-1] + 1) % 8], 8)
    seqs = [sequence(target) for _ in range(3)]
    for number, seq in enumerate(seqs):
        seq.id, seq.tokens = number, [number]
    chain, half = ([1, 2, 3], [-1, 0, 1]), ([2, 7], [-1, 0])
    tree = ([5, 3, 6, 4], [-1, -1, 0, 1])
    listener = Listener(chain, half, tree)
    spec_step(seqs, target, listener, FixedController(4), RecordingRng(), commit)
    assert [seq.tokens for seq in seqs] == [[0, 1, 2, 3, 4], [1, 2, 3], [2, 3, 4, 5]]
    assert listener.heard == [[0, 1, 2, 3], [1, 2], [2, 3, 4]]


def test_a_race_has_no_residual_in_the_trace() -> None:
    """Not even when a draft token was drawn, and equals the recovered one."""
    traces: list[StepTrace] = []
    target, params = table_model(2, 1, seed=1), SamplingParams(temperature=1.0, max_tokens=8)
    drafter = TableDrafter(table_model(2, 1, seed=2), params)
    for seed in range(20):
        seq = Sequence(seed, [0], params, seed=seed)
        seq.rule, seq.cache = CoupledVerifier(), target.new_cache()
        rng = RecordingRng()
        [done] = spec_step([seq], target, drafter, FixedController(3), rng, commit)
        traces.append(trace_of(done, rng.take(seq.id)))
    recovered = [trace for trace in traces if trace.origin == "recovered"]
    assert recovered
    assert all(trace.residual == [] for trace in recovered)
