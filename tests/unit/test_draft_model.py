"""Drafter `draft_model`: laws and noise, catching up, vocabularies, context, failures. And `layer_skip`, `cascade`."""

from __future__ import annotations

import operator
from collections.abc import Sequence as Seq
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from outrider.bench.timing import Stopwatch, TimedDrafter
from outrider.core.draft import DraftLaw, SeqDraft
from outrider.core.protocols import Committed, Drafter, LanguageModel, Pass, Segment
from outrider.core.registry import verifier_class
from outrider.core.rng import CounterRng, ExhaustiveRng, Key, Purpose, Rng
from outrider.core.row import Row
from outrider.core.step import PREFILL_CHUNK
from outrider.core.types import SamplingParams, Sequence
from outrider.core.warp import RowContext, distribution, warp
from outrider.drafters.cascade import CascadeDrafter
from outrider.drafters.chain import full_length
from outrider.drafters.draft_model import DraftModelDrafter
from outrider.drafters.fixed import FixedDrafter
from outrider.drafters.layer_skip import LayerSkipDrafter
from outrider.errors import ConfigError
from outrider.models.table import TableCache, TableModel

V = 6
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.9)


class SpyModel(TableModel):
    """Remembers the rows and the logits flag of every pass; fails while a cache holds `poison`."""

    n_layers = 4

    def __init__(self, seed: int = 0, vocab: int = V, *, context_length: int = 4096, scale: float = 2.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn((vocab, vocab, vocab), generator=generator, dtype=torch.float64) * scale
        super().__init__(self.row, vocab, context_length=context_length)
        self.seen: list[tuple[list[int], bool]] = []
        self.poison: int | None = None

    def row(self, context: tuple[int, ...]) -> Tensor:
        a, b = (0, 0, *context)[-2:]
        return self.table[a, b]

    def forward(self, segments: Seq[Segment], *, logits: bool = True, taps: Seq[int] = ()) -> Pass:
        self.seen.append(([len(segment.tokens) for segment in segments], logits))
        for segment in segments:
            assert isinstance(segment.cache, TableCache)
            if self.poison in [*segment.cache.tokens, *segment.tokens]:
                raise RuntimeError("poisoned")
        return super().forward(segments, logits=logits, taps=taps)


class NarrowModel(SpyModel):
    """Can leave rows of its head out."""

    def with_head_rows(self, ids: Seq[int]) -> LanguageModel:
        narrow = TableModel(lambda context: self.row(context)[list(ids)], V)
        narrow.vocab_size = V
        return narrow


def sequence(seq_id: int, prompt: Seq[int], params: SamplingParams = GREEDY, rule: str = "", seed: int = 3) -> Sequence:
    seq = Sequence(seq_id, list(prompt), params, seed=seed)
    seq.rule = verifier_class(rule or ("greedy" if params.greedy else "block"))()
    return seq


def opened(drafter: Drafter, *seqs: Sequence) -> None:
    for seq in seqs:
        drafter.open(seq)


def propose(drafter: Drafter, seq: Sequence, budget: int = 3) -> SeqDraft:
    return drafter.propose([seq], [budget], CounterRng()).seqs[0]


def commit(drafter: Drafter, seq: Sequence, tokens: Seq[int], accepted: int = 0) -> None:
    seq.tokens.extend(tokens)
    drafter.commit(seq, Committed(tokens, accepted))


def q_after(model: SpyModel, seq: Sequence, path: Seq[int]) -> Row:
    return warp(model.row((*seq.tokens, *path))[None], [RowContext(seq, tuple(path))])[0]


# The laws of drafts


def test_greedy_drafts_are_the_likeliest_tokens_after_processing() -> None:
    model = SpyModel()
    penalised = SamplingParams(temperature=0.9, frequency_penalty=2.0, top_p=0.5, bad_token_ids=(2,))
    drafter = DraftModelDrafter(model=model, draft_sample_method="greedy")
    seq = sequence(0, [1, 2], penalised)
    opened(drafter, seq)
    commit(drafter, seq, [3, 3, 4])
    draft = propose(drafter, seq, 5)
    assert draft.law is DraftLaw.POINT
    for i, token in enumerate(draft.tokens):
        logits_V = model.row((*seq.tokens, *draft.tokens[:i])).clone()
        for t in [*seq.tokens[2:], *draft.tokens[:i]]:
            logits_V[t] -= 2.0
        logits_V[2] = -torch.inf
        assert token == int(logits_V.argmax())


def test_probabilistic_drafts_come_with_the_very_rows_that_were_sampled() -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, presence_penalty=1.0, repetition_penalty=1.3)
    model = SpyModel()
    drafter = DraftModelDrafter(model=model, draft_sample_method="probabilistic")
    seq = sequence(0, [1, 2, 5], params)
    sampled_from: dict[Key, Row] = {}

    class Watching(CounterRng):
        def categorical(self, row: Row, key: Key) -> int:
            sampled_from[key] = row
            return super().categorical(row, key)

    opened(drafter, seq)
    commit(drafter, seq, [0, 4])
    draft = drafter.propose([seq], [4], Watching()).seqs[0]
    assert draft.law is DraftLaw.IID
    assert list(sampled_from) == [Key(seq.seed, 2, Purpose.DRAFT, i) for i in range(4)]
    for i, row in enumerate(sampled_from.values()):
        assert draft.q(i) is row
        assert row == q_after(model, seq, draft.tokens[:i])


def test_coupled_drafts_race_the_noise_of_their_own_output_position() -> None:
    model = SpyModel()
    drafter = DraftModelDrafter(model=model, draft_sample_method="coupled")
    seq = sequence(0, [1, 2], SAMPLED, "coupled")
    opened(drafter, seq)
    commit(drafter, seq, [0])
    draft = propose(drafter, seq, 3)
    assert draft.law is DraftLaw.SHARED_NOISE
    for i, token in enumerate(draft.tokens):
        q = q_after(model, seq, draft.tokens[:i])
        assert token == CounterRng().race(q, Key(seq.seed, 1 + i, Purpose.RACE))


@pytest.mark.parametrize(
    ("rule", "temperature", "law"),
    [
        ("greedy", 0.0, DraftLaw.POINT),
        ("block", 0.1, DraftLaw.POINT),
        ("block", 0.3, DraftLaw.IID),
        ("chain", 0.3, DraftLaw.IID),
        ("match", 1.0, DraftLaw.POINT),
        ("coupled", 0.1, DraftLaw.SHARED_NOISE),
        ("coupled", 1.0, DraftLaw.SHARED_NOISE),
    ],
)
def test_auto_chooses_by_rule_and_temperature(rule: str, temperature: float, law: DraftLaw) -> None:
    drafter = DraftModelDrafter(model=SpyModel(), greedy_below_temperature=0.2)
    seq = sequence(0, [1], SamplingParams(temperature=temperature), rule)
    opened(drafter, seq)
    assert propose(drafter, seq).law is law


@pytest.mark.parametrize("method", ["auto", "greedy", "probabilistic", "coupled"])
def test_the_laws_declared_are_the_laws_produced(method: str) -> None:
    drafter = DraftModelDrafter(model=SpyModel(), draft_sample_method=method)
    produced = set()
    for i, (rule, params) in enumerate([("greedy", GREEDY), ("block", SAMPLED), ("coupled", SAMPLED)]):
        seq = sequence(i, [1], params, rule)
        opened(drafter, seq)
        draft = propose(drafter, seq)
        produced |= {draft.law} if draft.size else set()
    assert produced == drafter.laws


def test_a_rule_that_cannot_judge_the_method_gets_no_draft_and_a_reason() -> None:
    model = SpyModel()
    drafter = DraftModelDrafter(model=model, draft_sample_method="coupled")
    seq = sequence(0, [1], SAMPLED, "block")
    opened(drafter, seq)
    assert propose(drafter, seq).size == 0
    assert not model.seen
    assert dict(seq.stats.dropped) == {"rule block cannot judge shared_noise drafts": 3}


# When a draft ends


def test_a_draft_ends_before_it_gets_unsure_whatever_is_drawn() -> None:
    model = SpyModel()
    for seed in range(20):
        free, careful = (
            DraftModelDrafter(model=model, draft_sample_method="probabilistic", min_confidence=c) for c in (0.0, 0.5)
        )
        seq = sequence(0, [1, 2], SAMPLED, seed=seed)
        opened(free, seq)
        opened(careful, seq)
        whole, cut = propose(free, seq, 6), propose(careful, seq, 6)
        sure = list(accumulate((float(whole.q(i).weight_S.max()) for i in range(6)), operator.mul))
        assert whole.confidence == pytest.approx(sure)
        assert cut.tokens == whole.tokens[: sum(confidence >= 0.5 for confidence in sure)]


def test_a_drafter_of_full_length_asks_for_no_confidence() -> None:
    """By itself, timed, and in a cascade; the drafter that it was made of stays as it is."""
    careful = DraftModelDrafter(model=SpyModel(), min_confidence=1.0)
    for drafter in (careful, TimedDrafter(careful, Stopwatch()), CascadeDrafter(drafters=[careful])):
        free, seq = full_length(drafter), sequence(0, [1, 2])
        for one, size in ((free, 3), (drafter, 0)):
            one.open(seq)
            assert one.propose([seq], [3], CounterRng()).seqs[0].size == size
            one.close(seq)


def test_a_draft_ends_at_a_token_that_would_end_the_answer() -> None:
    drafter = DraftModelDrafter(model=SpyModel())
    seq = sequence(0, [1, 2])
    opened(drafter, seq)
    tokens = propose(drafter, seq, 6).tokens
    seq.stop_ids = frozenset({tokens[2]})
    assert propose(drafter, seq, 6).tokens == tokens[: tokens.index(tokens[2]) + 1]


@pytest.mark.parametrize("rule", ["chain", "block"])
@pytest.mark.parametrize("min_confidence", [0.0, 0.6])
def test_draft_lengths_do_not_bias_a_sampled_draft(rule: str, min_confidence: float) -> None:
    """P(first draft token) is q, whatever the later ones and the stopping did."""
    model = SpyModel(vocab=3)
    drafter = DraftModelDrafter(model=model, draft_sample_method="probabilistic", min_confidence=min_confidence)

    def first(rng: Rng) -> tuple[int, ...]:
        seq = sequence(0, [1, 2], SAMPLED, rule)
        drafter.open(seq)
        draft = drafter.propose([seq], [3], rng).seqs[0]
        drafter.close(seq)
        return tuple(draft.tokens[:1])

    law = ExhaustiveRng().law(first)
    q = distribution(model.row((1, 2)), SAMPLED)
    assert all(law[(token,)] == pytest.approx(q[token], abs=1e-12) for token in range(3))


# Catching up


def test_rows_fed_after_each_kind_of_round() -> None:
    model = SpyModel()
    drafter = DraftModelDrafter(model=model)
    seq = sequence(0, [1, 2, 3])
    opened(drafter, seq)

    def first_rows() -> int:
        model.seen.clear()
        propose(drafter, seq, 3)
        assert len(model.seen) == 3
        assert [rows for rows, _ in model.seen[1:]] == [[1], [1]]
        return model.seen[0][0][0]

    assert first_rows() == 3
    draft = propose(drafter, seq, 3).tokens
    wrong = (draft[1] + 1) % V
    commit(drafter, seq, [draft[0], wrong], 1)
    assert first_rows() == 1
    draft = propose(drafter, seq, 3).tokens
    commit(drafter, seq, [*draft, 0], 3)
    assert first_rows() == 2
    commit(drafter, seq, [0, 1, 2, 3, 4], 4)
    assert 1 <= first_rows() <= 5


def test_a_long_prompt_runs_without_the_head_in_chunks() -> None:
    model = SpyModel()
    drafter = DraftModelDrafter(model=model)
    long, short = sequence(0, [1, 2] * 600), sequence(1, [3, 4])
    opened(drafter, long, short)
    draft = drafter.propose([long, short], [2, 2], CounterRng())
    rest = 1200 - 2 * PREFILL_CHUNK
    assert model.seen == [
        ([PREFILL_CHUNK], False),
        ([PREFILL_CHUNK], False),
        ([rest - 1], False),
        ([1, 2], True),
        ([1, 1], True),
    ]
    assert [d.passes for d in draft.seqs] == [5, 2]


def test_budget_zero_costs_nothing_and_is_caught_up_later() -> None:
    model = SpyModel()
    drafter, fresh = DraftModelDrafter(model=model), DraftModelDrafter(model=model)
    seq = sequence(0, [1, 2, 3])
    opened(drafter, seq)
    propose(drafter, seq, 2)
    model.seen.clear()
    for token in range(5):
        propose(drafter, seq, 0)
        commit(drafter, seq, [token])
    assert not model.seen
    opened(fresh, seq)
    assert propose(drafter, seq) == propose(fresh, seq)


def test_a_ragged_batch_takes_as_many_passes_as_its_longest_draft() -> None:
    model = SpyModel()
    drafter = DraftModelDrafter(model=model)
    seqs = [sequence(i, [i, 1]) for i in range(4)]
    opened(drafter, *seqs)
    draft = drafter.propose(seqs, [1, 4, 0, 2], CounterRng())
    assert [d.size for d in draft.seqs] == [1, 4, 0, 2]
    assert [len(rows) for rows, _ in model.seen] == [3, 2, 1, 1]
    assert max(d.passes for d in draft.seqs) == 4


# Vocabularies


@pytest.mark.parametrize("target_vocab", [V - 2, V, V + 3])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_padded_vocabularies(target_vocab: int, params: SamplingParams) -> None:
    drafter = DraftModelDrafter(model=SpyModel(), vocab_size=target_vocab)
    for seq_id in range(8):
        seq = sequence(seq_id, [1, 2], params, seed=seq_id)
        opened(drafter, seq)
        draft = propose(drafter, seq, 6)
        assert draft.size == 6
        assert max(draft.tokens) < min(V, target_vocab)
        assert all(q.size == target_vocab and not q.to_dense()[V:].any() for q in draft.q_rows)


def test_a_target_token_that_the_draft_does_not_know_ends_drafting() -> None:
    drafter = DraftModelDrafter(model=SpyModel(), vocab_size=V + 3)
    seq = sequence(0, [1, 2])
    opened(drafter, seq)
    assert propose(drafter, seq).size == 3
    commit(drafter, seq, [V + 1])
    assert propose(drafter, seq).size == 0
    assert seq.stats.dropped["draft model does not know a token"] == 1


@pytest.mark.parametrize("kind", [SpyModel, NarrowModel])
def test_a_smaller_output_vocabulary(kind: type[SpyModel]) -> None:
    kept = [4, 1, 3]
    model = kind()
    drafter = DraftModelDrafter(model=model, draft_vocab=kept, draft_sample_method="probabilistic")
    seq = sequence(0, [0, 5], SAMPLED)
    opened(drafter, seq)
    draft = propose(drafter, seq, 6)
    assert set(draft.tokens) <= set(kept)
    for i in range(6):
        logits_V = torch.full((V,), -torch.inf, dtype=torch.float64)
        logits_V[kept] = model.row((*seq.tokens, *draft.tokens[:i]))[kept]
        expected_V = distribution(logits_V, SAMPLED).to_dense()
        assert torch.allclose(draft.q(i).to_dense(), expected_V, rtol=1e-12, atol=0)
    assert (drafter.model is model) == (kind is SpyModel)


# What can go wrong


def test_a_full_draft_context_shrinks_then_ends_drafting() -> None:
    model = SpyModel(context_length=8)
    drafter = DraftModelDrafter(model=model)
    seq, other = sequence(0, [1, 2, 3, 4, 5]), sequence(1, [1])
    opened(drafter, seq, other)
    sizes = []
    for token in range(5):
        sizes.append(propose(drafter, seq, 3).size)
        commit(drafter, seq, [token])
    assert sizes == [3, 3, 2, 1, 0]
    assert dict(seq.stats.dropped) == {"draft context is full": 1}
    assert propose(drafter, other, 3).size == 3


def test_a_model_that_fails_on_one_sequence_goes_on_with_the_others() -> None:
    model, twin = SpyModel(), SpyModel()
    for each in (model, twin):
        each.table[:, :, 5] = -9.0
    drafter, alone = DraftModelDrafter(model=model), DraftModelDrafter(model=twin)
    good, bad, late = sequence(0, [1, 2]), sequence(1, [5, 1]), sequence(2, [3])
    opened(drafter, good, bad, late)
    opened(alone, good, late)
    model.poison = 5
    for _ in range(2):
        draft = drafter.propose([good, bad, late], [2, 2, 2], CounterRng())
        assert draft.seqs[1].size == 0
        assert draft.seqs[0].tokens == propose(alone, good, 2).tokens
        assert draft.seqs[2].tokens == propose(alone, late, 2).tokens
        model.poison = None
        for seq in (good, bad, late):
            commit(drafter, seq, [2])
    assert dict(bad.stats.dropped) == {"draft model failed (RuntimeError)": 1}
    assert not good.stats.dropped


def test_a_failure_in_the_middle_keeps_what_was_drafted() -> None:
    model = SpyModel()
    drafter = DraftModelDrafter(model=model)
    seq = sequence(0, [1, 2])
    opened(drafter, seq)
    tokens = propose(drafter, seq, 4).tokens
    model.poison = next(token for token in tokens if token not in seq.tokens)
    assert propose(drafter, seq, 4).tokens == tokens[: tokens.index(model.poison) + 1]


def test_unusable_draft_logits_end_the_draft_only() -> None:
    model = SpyModel()
    model.table[:, 2] = torch.nan
    drafter = DraftModelDrafter(model=model)
    seq = sequence(0, [1, 2])
    opened(drafter, seq)
    assert propose(drafter, seq).size == 0
    commit(drafter, seq, [3])
    assert propose(drafter, seq, 1).size == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"draft_sample_method": "gredy"}, "greedy, probabilistic"),
        ({"min_confidence": 1.5}, "min_confidence = 1.5"),
        ({"greedy_below_temperature": -1}, "greedy_below_temperature = -1"),
        ({"vocab_size": 0}, "vocab_size = 0"),
        ({"draft_vocab": []}, "draft_vocab is empty"),
        ({"draft_vocab": [1, V]}, f"draft_vocab holds {V}"),
        ({"draft_vocab": [1, 1]}, "twice"),
    ],
)
def test_options_are_checked(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DraftModelDrafter(model=SpyModel(), **options)  # type: ignore[arg-type]


# layer_skip


class DeepModel(SpyModel):
    def first_layers(self, count: int) -> LanguageModel:
        shallow = SpyModel(scale=count / self.n_layers)
        shallow.name = f"first {count}"
        return shallow


@pytest.mark.parametrize(("layers", "runs"), [(1, "first 1"), (None, "first 2")])
def test_layer_skip_runs_the_first_layers(layers: int | None, runs: str) -> None:
    drafter = LayerSkipDrafter(target=DeepModel(), layers=layers)
    assert drafter.model.name == runs
    seq = sequence(0, [1, 2])
    opened(drafter, seq)
    assert propose(drafter, seq).source == "layer_skip"


def test_layer_skip_needs_a_target_that_can() -> None:
    with pytest.raises(ConfigError, match="cannot run as its first layers"):
        LayerSkipDrafter(target=SpyModel(), layers=1)
    for layers in (0, 5):
        with pytest.raises(ConfigError, match=f"layers = {layers}"):
            LayerSkipDrafter(target=DeepModel(), layers=layers)


# cascade


def offer(tokens: list[int], confidence: Seq[float] = (), law: DraftLaw = DraftLaw.POINT) -> FixedDrafter:
    """A drafter that offers this draft."""
    rows = [Row.dense(torch.full((V,), 1 / V, dtype=torch.float64))] * len(tokens) if law is DraftLaw.IID else []
    draft = SeqDraft.chain(tokens, law, rows, confidence=confidence, source="fixed")
    return FixedDrafter(script=lambda seq, budget: draft, laws=[law])


@pytest.mark.parametrize(
    ("first", "taken"),
    [
        (offer([1, 2], [0.9, 0.8]), [5]),
        (offer([1, 2, 3], [0.9, 0.8, 0.7]), [1, 2, 3]),
        (offer([1, 2]), [1, 2]),
        (offer([]), [5]),
        (offer([1], [0.1], DraftLaw.IID), [1]),
    ],
    ids=["expects too little", "expects enough", "states nothing", "empty", "was sampled"],
)
def test_the_gate(first: FixedDrafter, taken: list[int]) -> None:
    cascade = CascadeDrafter(drafters=[first, offer([5], [0.1])], min_expected=2.0)
    seq = sequence(0, [1], SAMPLED)
    opened(cascade, seq)
    assert propose(cascade, seq, 4).tokens == taken


def test_a_small_budget_lowers_the_gate() -> None:
    cascade = CascadeDrafter(drafters=[offer([1], [0.9]), offer([5])], min_expected=2.0)
    seq = sequence(0, [1])
    opened(cascade, seq)
    assert propose(cascade, seq, 1).tokens == [1]


def test_what_was_turned_down_is_better_than_nothing() -> None:
    cascade = CascadeDrafter(drafters=[offer([1], [0.2]), offer([2], [0.5]), offer([3], [0.4]), offer([])])
    seq = sequence(0, [1])
    opened(cascade, seq)
    assert propose(cascade, seq, 4).tokens == [2]


def test_the_model_runs_only_for_sequences_that_need_it() -> None:
    model = SpyModel()
    script = {"easy": [1, 2, 3], "hard": []}
    first = FixedDrafter(script=lambda seq, budget: script["easy" if seq.id == 0 else "hard"])
    cascade = CascadeDrafter(drafters=[first, DraftModelDrafter(model=model)])
    easy, hard = sequence(0, [1, 2], SAMPLED), sequence(1, [1, 2], SAMPLED)
    opened(cascade, easy, hard)
    draft = cascade.propose([easy, hard], [3, 2], CounterRng())
    assert [d.law for d in draft.seqs] == [DraftLaw.POINT, DraftLaw.IID]
    assert [d.source for d in draft.seqs] == ["fixed", "draft_model"]
    assert [rows for rows, _ in model.seen] == [[2], [1]]
    assert max(d.passes for d in draft.seqs) == 2


def test_members_hear_of_every_commit_with_their_own_features() -> None:
    heard: dict[str, list[Committed]] = {"a": [], "b": [], "c": []}

    class Listener(FixedDrafter):
        def __init__(self, label: str, wants: tuple[int, ...]) -> None:
            super().__init__()
            self.label, self.wants = label, wants

        def commit(self, seq: Sequence, committed: Committed) -> None:
            heard[self.label].append(committed)

    cascade = CascadeDrafter(drafters=[Listener("a", ()), Listener("b", (7,)), Listener("c", (3, 7))])
    assert cascade.wants == (3, 7)
    seq = sequence(0, [1])
    opened(cascade, seq)
    cascade.commit(seq, Committed([4], 0, torch.tensor([[30.0, 31.0, 70.0, 71.0]])))
    (a,), (b,), (c,) = heard.values()
    assert a.features_TF is None
    assert b.features_TF is not None
    assert c.features_TF is not None
    assert b.features_TF.tolist() == [[70.0, 71.0]]
    assert c.features_TF.tolist() == [[30.0, 31.0, 70.0, 71.0]]


def test_cascade_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="drafters is empty"):
        CascadeDrafter(drafters=[])
    with pytest.raises(ConfigError, match="min_expected = -1"):
        CascadeDrafter(drafters=[offer([])], min_expected=-1)
