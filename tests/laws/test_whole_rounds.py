"""Whole answers, several rounds long, have exactly the target's law: all rules, laws, controllers and processors."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest

from outrider.control.fixed import FixedController
from outrider.control.governor import GovernorController
from outrider.core.draft import Draft, DraftLaw
from outrider.core.protocols import Controller
from outrider.core.registry import verifier_class
from outrider.core.rng import Rng
from outrider.core.types import SamplingParams, Sequence
from outrider.drafters.draft_model import DraftModelDrafter
from tests.given_costs import one_context
from tests.laws.harness import EXACT, rules, total_variation
from tests.laws.rounds import (
    BudgetController,
    CautiousController,
    Setting,
    TableDrafter,
    answer_law,
    joint_law,
    plain_law,
    table_model,
)

SAMPLED = SamplingParams(temperature=1.0, max_tokens=3)
SAMPLED_RULES = [name for name in rules(lossless=True) if name != "greedy"]
CASES = [
    pytest.param(name, law, id=f"{name}-{law.value}")
    for name in SAMPLED_RULES
    for law in (DraftLaw.POINT, DraftLaw.IID)
    if law in verifier_class(name).laws
]
COSTS = one_context({1: 1.0, 9: 1.2}, {"table": [0.2, 0.3, 0.4]})


def governor() -> GovernorController:
    """Drafts two tokens at first; after a round that kept nothing, fewer or none."""
    return GovernorController(COSTS, ["table"], most=2)


CONTROLLERS: dict[str, Callable[[], Controller]] = {
    "fixed": lambda: FixedController(2),
    "past": CautiousController,
    "governor": governor,
}


def setting(name: str, law: DraftLaw, params: SamplingParams, **changes: object) -> Setting:
    """Target and drafter are different order-1 models over two tokens, K = 2; `changes` replaces any of that."""
    vocab_size = int(changes.pop("vocab_size", 2))
    draft_params = changes.pop("draft_params", SamplingParams(temperature=1.0))
    stop = changes.pop("stop", lambda q_V, token: False)
    drafter = TableDrafter(table_model(vocab_size, 1, seed=5), draft_params, law, stop)
    defaults = {"controller": lambda: FixedController(2), "target": table_model(vocab_size, 1, seed=4)}
    return Setting(rule=verifier_class(name)(), drafter=lambda: drafter, params=params, **{**defaults, **changes})


def check(run: Setting) -> None:
    law, plain = answer_law(run), plain_law(run.target, run.params, run.stop_ids, run.prompts[0])
    assert abs(sum(law.values()) - 1.0) <= EXACT
    assert total_variation(law, plain) <= EXACT


def test_the_governor_of_these_laws_decides_by_outcomes() -> None:
    """So that the laws below are those of answers with different drafts in them."""
    decided = set()
    for accepted in (0, 2):
        controller, seq = governor(), Sequence(0, [0], SAMPLED, seed=0)
        seq.params = replace(SAMPLED, max_tokens=50)
        [k] = controller.budgets([seq], [9])
        assert k == 2
        for _ in range(2):
            seq.tokens += [0] * (accepted + 1)
            controller.observe(seq, k, 2, accepted, "table")
            [k] = controller.budgets([seq], [9])
        decided.add(k)
    assert len(decided) == 2


@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize(("name", "law"), CASES)
def test_answer_law(name: str, law: DraftLaw, controller: str) -> None:
    check(setting(name, law, SAMPLED, controller=CONTROLLERS[controller]))


@pytest.mark.parametrize(("name", "law"), CASES)
def test_a_draft_may_end_because_of_its_own_tokens(name: str, law: DraftLaw) -> None:
    """Drafting stops behind an unlikely token; that token stays in the draft."""
    check(setting(name, law, SAMPLED, stop=lambda q_V, token: float(q_V[token]) < 0.5))


@pytest.mark.parametrize(("name", "law"), CASES)
def test_a_draft_may_end_where_its_drafter_is_not_sure(name: str, law: DraftLaw) -> None:
    """`min_confidence` of the drafters that have one: drafts of no token and two, where they are drawn also of one."""
    sizes, method = set(), "greedy" if law is DraftLaw.POINT else "probabilistic"

    def drafter() -> DraftModelDrafter:
        made = DraftModelDrafter(model=table_model(2, 1, seed=8), draft_sample_method=method, min_confidence=0.55)
        propose = made.propose

        def seen(seqs: Seq[Sequence], budgets: Seq[int], rng: Rng) -> Draft:
            draft = propose(seqs, budgets, rng)
            sizes.update(own.size for own in draft.seqs)
            return draft

        made.propose = seen  # type: ignore[method-assign]
        return made

    check(replace(setting(name, law, SAMPLED), drafter=drafter))
    assert sizes >= {0, 2}


@pytest.mark.parametrize(("name", "law"), CASES)
def test_stop_token_and_longer_prompt(name: str, law: DraftLaw) -> None:
    check(setting(name, law, SAMPLED, stop_ids=frozenset({1}), prompts=[[1, 0, 1]]))


PROCESSORS = {
    "temperature": (SamplingParams(temperature=0.6), SamplingParams(temperature=1.4)),
    "top_k": (SamplingParams(temperature=1.0, top_k=2), SamplingParams(temperature=1.0)),
    "top_p": (SamplingParams(temperature=1.0, top_p=0.7), SamplingParams(temperature=1.0, top_p=0.9)),
    "min_p": (SamplingParams(temperature=1.0, min_p=0.4), SamplingParams(temperature=1.0, min_p=0.4)),
    "penalties": (
        SamplingParams(temperature=1.0, presence_penalty=0.8, frequency_penalty=0.5, repetition_penalty=1.5),
        SamplingParams(temperature=1.0),
    ),
    "penalties-both": (
        SamplingParams(temperature=1.0, frequency_penalty=1.5),
        SamplingParams(temperature=1.0, frequency_penalty=1.5),
    ),
    "bias": (
        SamplingParams(temperature=1.0, logit_bias={1: 1.5}, bad_token_ids=(0,)),
        SamplingParams(temperature=1.0, logit_bias={2: -1.0}),
    ),
    "min_tokens": (SamplingParams(temperature=1.0, min_tokens=2), SamplingParams(temperature=1.0)),
}


def check_processors(name: str, processors: str, max_tokens: int) -> None:
    params, draft_params = PROCESSORS[processors]
    stop_ids = frozenset({0}) if processors == "min_tokens" else frozenset[int]()
    law = DraftLaw.IID if DraftLaw.IID in verifier_class(name).laws else DraftLaw.POINT
    params = replace(params, max_tokens=max_tokens)
    check(setting(name, law, params, draft_params=draft_params, stop_ids=stop_ids, vocab_size=3))


@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("name", SAMPLED_RULES)
def test_processors(name: str, processors: str) -> None:
    """p and q are what the processors leave, each with its own; the path inside a draft counts as text."""
    check_processors(name, processors, max_tokens=3 if name == "block" else 2)


@pytest.mark.slow
@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("name", SAMPLED_RULES)
def test_processors_over_more_rounds(name: str, processors: str) -> None:
    check_processors(name, processors, max_tokens=3)


@pytest.mark.parametrize("name", rules(lossless=True))
def test_temperature_0_is_the_same_text_under_every_rule(name: str) -> None:
    run = setting(name, DraftLaw.IID, SamplingParams(max_tokens=3), vocab_size=3)
    if DraftLaw.IID not in run.rule.laws:
        run = setting(name, DraftLaw.POINT, SamplingParams(max_tokens=3), vocab_size=3)
    law, plain = answer_law(run), plain_law(run.target, run.params)
    assert law.keys() == plain.keys()
    assert len(plain) == 1


@pytest.mark.parametrize("name", SAMPLED_RULES)
def test_a_batch_is_independent_sequences(name: str) -> None:
    """Two sequences with different budgets in one batch: the joint law is the product of the two."""
    params = SamplingParams(temperature=1.0, max_tokens=2)
    run = setting(
        name,
        DraftLaw.IID,
        params,
        controller=lambda: BudgetController(1, 0),
        prompts=[[0], [1, 1]],
    )
    alone = [plain_law(run.target, params, prompt=prompt) for prompt in run.prompts]
    product = {(a, b): p * r for a, p in alone[0].items() for b, r in alone[1].items()}
    assert total_variation(joint_law(run), product) <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize(("name", "law"), CASES)
def test_answer_law_of_longer_answers(name: str, law: DraftLaw, controller: str) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=4)
    for seed in range(2):
        target = table_model(2, 2, seed=10 + seed, sharpness=2.0)
        check(setting(name, law, params, controller=CONTROLLERS[controller], target=target))
