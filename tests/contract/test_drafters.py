"""What every drafter promises (core.protocols.Drafter), for every name in the registry and every variant of it."""

from __future__ import annotations

import gc
import random
import re
import weakref
from collections import defaultdict
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from outrider.core.draft import DraftLaw, SeqDraft, sanitise
from outrider.core.protocols import Drafter
from outrider.core.registry import DRAFTERS, drafter_class
from outrider.core.rng import CounterRng, ExhaustiveRng, Rng
from outrider.core.row import Row
from outrider.core.types import SamplingParams, Sequence
from outrider.drafters.block_drafter import BlockDrafter
from outrider.drafters.cascade import CascadeDrafter
from outrider.drafters.draft_model import DraftModelDrafter
from outrider.drafters.fixed import FixedDrafter
from outrider.drafters.none import NoneDrafter
from tests.contract.factories import FACTORIES, LEARNING, VARIANTS
from tests.contract.world import (
    GREEDY,
    RULED_PARAMS,
    VOCAB,
    WatchedModel,
    begin,
    commit_tokens,
    finish,
    needs_q,
    same,
    sequence,
    start,
    watched,
)

Q_ERROR = defaultdict(float, eagle3=1e-6, mtp=1e-6, medusa=1e-6, dflash=1e-6, dspark=1e-6)
"""Networks add up in another order when they run other rows beside."""
PROMPTS = [[1, 2, 3, 1, 2], [4], [0, 5, 5, 0, 5, 5, 0]]


@pytest.fixture(params=VARIANTS, ids=lambda pair: "-".join(filter(None, pair)))
def variant(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


@pytest.fixture
def model() -> WatchedModel:
    return watched(1)


@pytest.fixture
def drafter(variant: tuple[str, str], model: WatchedModel) -> Drafter:
    return make(variant, model)


def make(variant: tuple[str, str], model: WatchedModel) -> Drafter:
    name, kind = variant
    return FACTORIES[name][kind](model)


def propose_one(drafter: Drafter, seq: Sequence, budget: int, rng: Rng | None = None) -> SeqDraft:
    return drafter.propose([seq], [budget], rng or CounterRng()).seqs[0]


def digests(drafter: Drafter, seq: Sequence) -> list[str]:
    """Of the draft caches that a drafter holds for a sequence."""
    members = getattr(drafter, "drafters", [drafter])
    states = [member._states[seq.id] for member in members if isinstance(member, DraftModelDrafter)]
    return [state.cache.digest() for state in states if state.cache is not None]


def wander(drafter: Drafter, seq: Sequence, rounds: int, dice: random.Random) -> None:
    """Rounds whose drafts are accepted up to a random length, and rounds that others drafted."""
    for _ in range(rounds):
        draft = propose_one(drafter, seq, dice.randrange(6))
        accepted = dice.randint(0, draft.size)
        tokens = draft.tokens[:accepted] if dice.random() < 0.8 else [dice.randrange(VOCAB) for _ in range(accepted)]
        commit_tokens(drafter, seq, [*tokens, dice.randrange(VOCAB)], accepted)


def test_every_registered_drafter_has_a_factory() -> None:
    assert set(FACTORIES) == set(DRAFTERS)


def test_declarations(variant: tuple[str, str], drafter: Drafter) -> None:
    assert drafter.name == variant[0]
    assert type(drafter) is drafter_class(variant[0])
    assert drafter.laws
    assert drafter.laws <= frozenset(DraftLaw)
    assert isinstance(drafter.trees, bool)
    assert isinstance(drafter.wants, tuple)


@pytest.mark.parametrize(("rule", "params"), RULED_PARAMS, ids=[rule for rule, _ in RULED_PARAMS])
def test_drafts_are_what_was_declared(drafter: Drafter, rule: str, params: SamplingParams) -> None:
    sources = {member.name for member in getattr(drafter, "drafters", [drafter])}
    for seq_id, prompt in enumerate(PROMPTS):
        seq = sequence(seq_id, prompt, params, rule, seed=seq_id)
        begin(drafter, seq)
        dice = random.Random(seq_id)
        for _ in range(8):
            draft = propose_one(drafter, seq, 5)
            if draft.size:
                assert draft.law in drafter.laws
                assert draft.law in seq.rule.laws
                assert draft.source in sources
            assert drafter.trees or draft.is_chain
            assert len(draft.confidence) in (0, draft.size)
            assert all(0 <= c <= 1 for c in draft.confidence)
            assert len(draft.q_rows) == len(draft.q_row) == (draft.size if needs_q(draft) else 0)
            assert sanitise(draft, 5, VOCAB) == (draft, None)
            commit_tokens(drafter, seq, [*draft.tokens[:2], dice.randrange(VOCAB)], min(draft.size, 2))


def test_a_budget_is_a_limit_and_zero_is_no_work(drafter: Drafter, model: WatchedModel) -> None:
    seqs = [sequence(i, PROMPTS[i % 3]) for i in range(6)]
    for seq in seqs:
        begin(drafter, seq)
    before = model.passes
    nothing = drafter.propose(seqs, [0] * 6, CounterRng())
    assert model.passes == before
    assert all(d.passes == d.size == 0 for d in nothing.seqs)
    assert not model.held
    budgets = [0, 1, 2, 5, 0, 3]
    for _ in range(4):
        draft = drafter.propose(seqs, budgets, CounterRng())
        assert all(d.size <= budget for d, budget in zip(draft.seqs, budgets, strict=True))
        for seq in seqs:
            commit_tokens(drafter, seq, [3, 1, 2], 0)


def test_passes_are_counted(variant: tuple[str, str]) -> None:
    model = watched(1)
    drafter = make(variant, model)
    counted = drafter if hasattr(drafter, "passes") else getattr(drafter, "model", model)
    seqs = [sequence(i, prompt) for i, prompt in enumerate(PROMPTS)]
    for seq in seqs:
        begin(drafter, seq)
    draft = drafter.propose(seqs, [3, 3, 2], CounterRng())
    assert max(d.passes for d in draft.seqs) == counted.passes


@pytest.mark.parametrize("seed", range(3))
def test_state_after_any_history_is_that_of_a_fresh_drafter(variant: tuple[str, str], seed: int) -> None:
    if variant in LEARNING:
        pytest.skip("its drafts depend on earlier drafts")
    model, dice = watched(1), random.Random(seed)
    rule, params = RULED_PARAMS[2 * seed]
    old = make(variant, model)
    seq = sequence(7, PROMPTS[seed % 3], params, rule, seed=seed)
    begin(old, seq)
    for _ in range(6):
        wander(old, seq, dice.randrange(4), dice)
        fresh = make(variant, model)
        begin(fresh, seq)
        budget = dice.randint(1, 5)
        assert same(propose_one(old, seq, budget), propose_one(fresh, seq, budget), Q_ERROR[variant[0]])
        if getattr(old, "drafters", None) is None:
            assert digests(old, seq) == digests(fresh, seq)
        fresh.close(seq)


@pytest.mark.parametrize(("rule", "params"), RULED_PARAMS[::2], ids=["greedy", "block", "coupled"])
def test_batched_equals_solo(variant: tuple[str, str], rule: str, params: SamplingParams) -> None:
    def run(groups: list[list[int]]) -> list[tuple[list[int], int, int]]:
        target, results = watched(0), {}
        for group in groups:
            drafter = make(variant, watched(1))
            seqs = [sequence(i, PROMPTS[i], params, rule, seed=i) for i in group]
            start(seqs, target, drafter)
            for seq, answer in zip(seqs, finish(seqs, target, drafter, 3), strict=True):
                results[seq.id] = (answer, seq.stats.drafted, seq.stats.accepted)
        return [results[i] for i in range(3)]

    assert run([[2, 0, 1]]) == run([[0], [1], [2]])


def test_interleaved_opens_and_closes_do_not_mix(
    variant: tuple[str, str], drafter: Drafter, model: WatchedModel
) -> None:
    if variant in LEARNING:
        pytest.skip("its drafts depend on earlier drafts")
    dice, ids = random.Random(5), count(10)
    live = [sequence(next(ids), PROMPTS[0])]
    begin(drafter, live[0])
    for turn in range(8):
        if turn % 2 == 0:
            live.append(sequence(next(ids), PROMPTS[turn % 3]))
            begin(drafter, live[-1])
        if turn % 3 == 2:
            drafter.close(live.pop(dice.randrange(len(live))))
        draft = drafter.propose(live, [3] * len(live), CounterRng())
        for seq, own in zip(live, draft.seqs, strict=True):
            fresh = make(variant, model)
            begin(fresh, seq)
            assert same(own, propose_one(fresh, seq, 3), Q_ERROR[variant[0]])
            fresh.close(seq)
        dice.shuffle(live)
        for seq in live:
            commit_tokens(drafter, seq, [dice.randrange(VOCAB) for _ in range(dice.randint(1, 4))], 0)


def test_nothing_is_left_after_close(drafter: Drafter) -> None:
    seqs = [sequence(i, prompt) for i, prompt in enumerate(PROMPTS)]
    caches = [model.caches for model in models(drafter)]
    for seq in seqs:
        begin(drafter, seq)
        wander(drafter, seq, 4, random.Random(1))
    for seq in seqs:
        drafter.close(seq)
    for member in getattr(drafter, "drafters", [drafter]):
        tables = [value for value in vars(member).values() if isinstance(value, dict) and member.name != "fixed"]
        assert all(not table for table in tables)
    assert all(cache.length == 0 for group in caches for cache in group)
    ghosts = [weakref.ref(seq) for seq in seqs]
    del seqs, seq
    gc.collect()
    assert all(ghost() is None for ghost in ghosts)


def models(drafter: Drafter) -> list[WatchedModel]:
    members = getattr(drafter, "drafters", [drafter])
    return [member.model for member in members if isinstance(member, DraftModelDrafter)]


def test_closing_twice_or_unopened_is_harmless(drafter: Drafter) -> None:
    seq = sequence(1, PROMPTS[0])
    drafter.close(seq)
    drafter.open(seq)
    drafter.close(seq)
    drafter.close(seq)


def test_an_id_can_be_used_again(variant: tuple[str, str], drafter: Drafter, model: WatchedModel) -> None:
    first, second = sequence(1, PROMPTS[0]), sequence(1, PROMPTS[2])
    begin(drafter, first)
    wander(drafter, first, 5, random.Random(0))
    drafter.close(first)
    begin(drafter, second)
    fresh = make(variant, model)
    begin(fresh, second)
    assert same(propose_one(drafter, second, 4), propose_one(fresh, second, 4), Q_ERROR[variant[0]])


def test_a_drafter_switched_in_midway_continues_the_answer(variant: tuple[str, str]) -> None:
    target = watched(0)
    plain = sequence(0, PROMPTS[0])
    start([plain], target, NoneDrafter())
    (expected,) = finish([plain], target, NoneDrafter(), 0)
    seq = sequence(1, PROMPTS[0])
    first = make(("ngram", ""), target)
    start([seq], target, first)
    seq.params = SamplingParams(max_tokens=4)
    finish([seq], target, first, 3)
    seq.params, seq.finish_reason = GREEDY, None
    second = make(variant, watched(1))
    begin(second, seq)
    assert finish([seq], target, second, 4) == [expected]


@pytest.mark.parametrize(("rule", "params"), RULED_PARAMS[2::2], ids=["block", "coupled"])
def test_the_same_seed_gives_the_same_drafts(variant: tuple[str, str], rule: str, params: SamplingParams) -> None:
    def answer() -> tuple[list[list[int]], int]:
        target, drafter = watched(0), make(variant, watched(1))
        seqs = [sequence(i, PROMPTS[i], params, rule, seed=40 + i) for i in range(3)]
        start(seqs, target, drafter)
        return finish(seqs, target, drafter, 4), sum(seq.stats.drafted for seq in seqs)

    assert answer() == answer()


@pytest.mark.parametrize(("rule", "params"), [RULED_PARAMS[0], RULED_PARAMS[-1]], ids=["greedy", "coupled"])
@pytest.mark.parametrize("k", [1, 4])
def test_the_answer_is_the_plain_one(variant: tuple[str, str], rule: str, params: SamplingParams, k: int) -> None:
    target = watched(0)
    drafter = make(variant, watched(1))
    seqs = [sequence(i, PROMPTS[i], params, rule, seed=i) for i in range(3)]
    start(seqs, target, drafter)
    assert finish(seqs, target, drafter, k) == plain_answers(rule, params.temperature)


@cache
def plain_answers(rule: str, temperature: float) -> list[list[int]]:
    target = watched(0)
    params = SamplingParams(temperature=temperature, max_tokens=GREEDY.max_tokens)
    seqs = [sequence(i, PROMPTS[i], params, rule, seed=i) for i in range(3)]
    start(seqs, target, NoneDrafter())
    return finish(seqs, target, NoneDrafter(), 0)


@pytest.mark.parametrize("rule", ["block", "coupled"])
def test_the_law_of_the_answer_is_the_targets(variant: tuple[str, str], rule: str) -> None:
    """Over every outcome of every draw, three tokens long. Of races we can add up two laws a position: K = 1."""
    model = watched(3, vocab=2)
    subset = variant == ("draft_model", "subset")
    drafter = DraftModelDrafter(model=model, draft_vocab=[1]) if subset else make(variant, model)
    assert distance(drafter, rule, k=1 if rule == "coupled" else 2) < 1e-12


def test_a_cascade_that_turns_sampled_drafts_down_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant gates an IID draft by confidences that depend on its own first token."""

    def cascade() -> Drafter:
        member = DraftModelDrafter(model=watched(3, vocab=2), draft_sample_method="probabilistic")
        return CascadeDrafter(drafters=[member, FixedDrafter(script=lambda seq, budget: [0] * budget)])

    assert distance(cascade(), "block", 2) < 1e-12
    monkeypatch.setattr("outrider.drafters.cascade.SAMPLED", ())
    assert distance(cascade(), "block", 2) > 0.01


@pytest.mark.parametrize("variant", sorted(LEARNING), ids=lambda pair: pair[1])
def test_what_is_learned_is_the_sequence_s_own_and_ends_with_it(variant: tuple[str, str]) -> None:
    """The same rounds give the same drafts: beside other sequences, and again behind a closing."""

    def history(drafter: Drafter, company: list[Sequence]) -> list[SeqDraft]:
        dice, drafts = random.Random(3), []
        seq = sequence(1, PROMPTS[0], RULED_PARAMS[1][1], "chain", seed=5)
        for one in (seq, *company):
            begin(drafter, one)
        for _ in range(8):
            batch = drafter.propose([*company, seq], [2] * len(company) + [3], CounterRng())
            drafts.append(batch.seqs[-1])
            commit_tokens(drafter, seq, [dice.randrange(3), dice.randrange(3)], 0)
            for one in company:
                commit_tokens(drafter, one, [1, 2], 0)
        drafter.close(seq)
        return drafts

    drafter = make(variant, watched(1))
    alone = history(drafter, [])
    again = history(drafter, [])
    beside = history(make(variant, watched(1)), [sequence(2, PROMPTS[2]), sequence(3, PROMPTS[1])])
    for other in (again, beside):
        assert all(same(a, b, Q_ERROR["dspark"]) for a, b in zip(alone, other, strict=True))


def test_habits_that_learn_from_their_own_round_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant steps away from a token once it is drawn, and says that it drew from what q is behind that step."""

    def dspark() -> Drafter:
        return FACTORIES["dspark"]["adapts"](watched(1, vocab=2))

    def draw_and_learn(self: BlockDrafter, run: Any, q: Row, rng: Rng) -> None:
        before = len(run.tokens)
        draw(self, run, q, rng)
        if len(run.tokens) > before:
            weight_V = q.to_dense().clone()
            weight_V[run.tokens[-1]] /= 2
            run.q_rows[-1] = Row.dense(weight_V / weight_V.sum())

    assert distance(dspark(), "block", 2) < 1e-12
    draw = BlockDrafter._draw
    monkeypatch.setattr(BlockDrafter, "_draw", draw_and_learn)
    assert distance(dspark(), "block", 2) > 0.01


def test_a_confidence_that_looks_at_its_own_token_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant decides as a confidence head does, but one token later: it drops a token for what it turned out to
    be (2607.05147, appendix A)."""

    def dspark() -> Drafter:
        return FACTORIES["dspark"]["probabilistic"](watched(1, vocab=2))

    def drop(self: BlockDrafter, run: Any, token: int, peak: float) -> None:
        if token == 1:
            run.q_rows.pop()
            run.done = True
        else:
            take(self, run, token, peak)

    assert distance(dspark(), "block", 2) < 1e-12
    take = BlockDrafter._take
    monkeypatch.setattr(BlockDrafter, "_take", drop)
    assert distance(dspark(), "block", 2) > 0.01


def test_the_documented_drafter_works() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/drafters.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class " in block]
    names: dict[str, Any] = {}
    exec(code, names)
    drafter = names["PingPongDrafter"]()
    assert distance(drafter, "block", 2) < 1e-12
    drafter.open(seq := sequence(0, [1, 2]))
    assert propose_one(drafter, seq, 3).tokens == [1, 2, 1]


def law(drafter: Drafter, rule: str, k: int) -> dict[tuple[int, ...], float]:
    target = watched(0, vocab=2)
    params = SamplingParams(temperature=1.3, max_tokens=3)

    def answer(rng: Rng) -> tuple[int, ...]:
        seq = sequence(0, [1, 0, 1, 0], params, rule)
        seq.prediction = [1, 0, 0]
        start([seq], target, drafter)
        return tuple(finish([seq], target, drafter, k, rng)[0])

    return ExhaustiveRng().law(answer)


def distance(drafter: Drafter, rule: str, k: int) -> float:
    """Total variation between the drafter's answers and the target's."""
    exact, got = plain_law(rule), law(drafter, rule, k)
    assert sum(got.values()) == pytest.approx(1.0, abs=1e-12)
    return sum(abs(exact.get(a, 0) - got.get(a, 0)) for a in exact.keys() | got.keys()) / 2


@cache
def plain_law(rule: str) -> dict[tuple[int, ...], float]:
    return law(NoneDrafter(), rule, 0)
