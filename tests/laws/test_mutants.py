"""Every mutant is caught by the harness that the real rules pass."""

from __future__ import annotations

import pytest
import torch

from outrider.control.fixed import FixedController
from outrider.core.protocols import Verifier
from outrider.core.registry import verifier_class
from outrider.core.rng import ExhaustiveRng, Rng
from outrider.core.types import SamplingParams, Sequence
from outrider.verify.block import BlockVerifier
from outrider.verify.chain import ChainVerifier
from outrider.verify.match import MatchVerifier
from tests.given_costs import one_context
from tests.laws import mutants
from tests.laws.harness import (
    EXACT,
    Propose,
    Tables,
    distance,
    one_round,
    propose_iid,
    propose_point,
    propose_race,
    random_tables,
    total_variation,
)
from tests.laws.rounds import Setting, TableDrafter, answer_law, generate, plain_law, table_model

TABLES = random_tables("flat", 4, seed=0)
CLOSE = random_tables("close", 3, seed=3)
COSTS = one_context({1: 1.0, 9: 1.2}, {"table": [0.2, 0.3, 0.4]})
WRONG_RULES: dict[str, tuple[Verifier, Propose]] = {
    "residual replaced by p": (mutants.RedrawsFromTarget(), propose_iid),
    "point residual without removing x": (mutants.RedrawsFromTarget(), propose_point),
    "bonus from unprocessed logits": (mutants.UnwarpedBonus(), propose_iid),
    "logits behind a rejection reused": (mutants.GoesOnBehindRejection(), propose_iid),
    "residual raced on the draft's clocks": (mutants.RacesResidualOnSharedClocks(TABLES), propose_race),
    "block with the residual of chain": (mutants.BlockWithChainResidual(), propose_iid),
    "block with an uncapped last acceptance": (mutants.UncappedBlock(), propose_iid),
}
WRONG_DRAFTS: dict[str, Propose] = {
    "drawn token dropped for its own probability": mutants.drops_unlikely,
    "controller that peeks at p": mutants.peeks_at_target,
    "q in bfloat16": mutants.rounds_q(torch.bfloat16),
    "q in float32": mutants.rounds_q(torch.float32),
}


def test_the_undamaged_mutant_is_right() -> None:
    """So that what is caught below is the damage."""
    for propose in (propose_iid, propose_point):
        assert distance(mutants.Mutant(), TABLES, 2, propose) <= EXACT


@pytest.mark.parametrize("label", WRONG_RULES)
def test_wrong_rule_is_caught(label: str) -> None:
    rule, propose = WRONG_RULES[label]
    assert distance(rule, TABLES, 2, propose) > 1e-3


@pytest.mark.parametrize("label", WRONG_DRAFTS)
@pytest.mark.parametrize("rule", [ChainVerifier(), BlockVerifier()], ids=lambda rule: rule.name)
def test_wrong_draft_is_caught(rule: Verifier, label: str) -> None:
    assert distance(rule, CLOSE, 2, WRONG_DRAFTS[label]) > 1e3 * EXACT


class GlimpsedDrafter(TableDrafter):
    """Draws its first token before the budget is known; `glimpse` shows it."""

    def glimpse(self, seq: Sequence) -> int:
        self.drawn = super().choose(self.q(seq, []), seq, 0, self.rng)
        return self.drawn

    def choose(self, q_V: torch.Tensor, seq: Sequence, i: int, rng: Rng) -> int:
        return self.drawn if i == 0 else super().choose(q_V, seq, i, rng)


@pytest.mark.parametrize("peeks", [True, False])
def test_a_governor_that_sees_its_draft_is_caught(peeks: bool) -> None:
    """And the same governor and drafter are right where the glimpse decides nothing."""
    params, model = SamplingParams(temperature=1.0, max_tokens=2), table_model(2, 1, seed=5)
    target = table_model(2, 1, seed=4)

    def law(rng: Rng) -> tuple[int, ...]:
        drafter = GlimpsedDrafter(model, params)
        drafter.rng = rng

        def glimpse(seq: Sequence) -> int:
            seen = drafter.glimpse(seq)
            return seen if peeks else 0

        return tuple(
            generate(
                Setting(
                    target=target,
                    rule=ChainVerifier(),
                    drafter=lambda: drafter,
                    controller=lambda: mutants.PeekingGovernor(COSTS, glimpse),
                    params=params,
                ),
                rng,
            )[0]
        )

    distance = total_variation(ExhaustiveRng().law(law), plain_law(target, params))
    assert (distance > 1e-3) is peeks


def test_dropping_a_drawn_token_by_hand() -> None:
    """p = (0.7, 0.3), q = (0.5, 0.5), B is never checked: A comes out with 0.5 + 0.5 x 0.7 = 0.85."""
    tables = Tables.constant([0.7, 0.3], [0.5, 0.5])

    def only_a(tables: Tables, k: int, rng: object) -> object:
        draft = propose_iid(tables, k, rng)
        return draft if draft.tokens == [0] else draft.head(0)

    law = one_round(ChainVerifier(), tables, 1, only_a).law
    first = sum(probability for tokens, probability in law.items() if tokens[0] == 0)
    assert first == pytest.approx(0.85, abs=EXACT)


def test_uncapped_block_by_hand() -> None:
    """Looks better than block (12/9 against 11/9) and is wrong by 1/9."""
    tables = Tables.constant([1 / 3, 2 / 3], [2 / 3, 1 / 3])
    assert one_round(mutants.UncappedBlock(), tables, 2, propose_iid).expected == pytest.approx(12 / 9, abs=EXACT)
    assert distance(mutants.UncappedBlock(), tables, 2, propose_iid) == pytest.approx(1 / 9, abs=EXACT)


def test_match_does_not_mind_drafts_from_shared_noise() -> None:
    """Its own draws are fresh, so noise that the draft shares with anything else cannot reach the text."""
    assert distance(MatchVerifier(), TABLES, 2, propose_race) <= EXACT


def noise_distance(name: str, drafter: type[TableDrafter]) -> float:
    params = SamplingParams(temperature=1.0, max_tokens=3)
    model = table_model(2, 1, seed=4)
    setting = Setting(
        target=model,
        rule=verifier_class(name)(),
        drafter=lambda: drafter(model, params),
        controller=lambda: FixedController(2),
        params=params,
    )
    return total_variation(answer_law(setting), plain_law(model, params))


def test_draft_noise_by_absolute_position_breaks_block() -> None:
    """Block turns a position down because of what was drafted behind it; a later round must not draw that again."""
    assert noise_distance("block", mutants.AbsoluteNoiseDrafter) > 1e-3


@pytest.mark.parametrize(
    ("name", "drafter"),
    [
        ("block", mutants.FreshNoiseDrafter),
        ("chain", mutants.AbsoluteNoiseDrafter),
        ("match", mutants.AbsoluteNoiseDrafter),
        ("coupled", mutants.AbsoluteNoiseDrafter),
    ],
)
def test_draft_noise_that_is_harmless(name: str, drafter: type[TableDrafter]) -> None:
    """Fresh noise for block; and rules that stop at the first miss never look at what lies behind it."""
    assert noise_distance(name, drafter) <= EXACT


def test_a_key_drawn_twice_is_noticed() -> None:
    """The generator of the law tests refuses two draws under one name."""

    def reuses(tables: Tables, k: int, rng: object) -> object:
        propose_iid(tables, 1, rng)
        return propose_iid(tables, k, rng)

    with pytest.raises(AssertionError, match="drawn twice"):
        distance(ChainVerifier(), TABLES, 2, reuses)
