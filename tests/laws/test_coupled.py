"""Rule `coupled`: one text a seed whatever the drafter, K and batch; the target's law; the match probability."""

from __future__ import annotations

import pytest
import torch

from outrider.control.fixed import FixedController
from outrider.core.draft import DraftLaw
from outrider.core.rng import CounterRng, ExhaustiveRng, Key, Purpose, exponential_clocks, joint_race_law
from outrider.core.row import Row
from outrider.core.types import SamplingParams
from outrider.verify.coupled import CoupledVerifier
from tests.laws.harness import EXACT, one_round, propose_race, random_tables
from tests.laws.rounds import BudgetController, Setting, TableDrafter, generate, plain_law, table_model

PARAMS = SamplingParams(temperature=1.0, max_tokens=16)
TARGET = table_model(8, 1, seed=1)
PROMPTS = [[0], [3, 1], [7]]
SEEDS = [11, 12, 13]


def texts(
    law: DraftLaw, k: int, *, draft_seed: int = 2, prompts: list[list[int]] = PROMPTS, seeds: list[int] = SEEDS
) -> list[list[int]]:
    drafter = TableDrafter(table_model(8, 1, seed=draft_seed), SamplingParams(temperature=0.7), law)
    setting = Setting(TARGET, CoupledVerifier(), lambda: drafter, lambda: FixedController(k), PARAMS, prompts=prompts)
    return generate(setting, CounterRng(), seeds)


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """The texts with no drafting at all."""
    return texts(DraftLaw.POINT, 0)


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("draft_seed", [1, 2])
@pytest.mark.parametrize("law", [DraftLaw.POINT, DraftLaw.IID, DraftLaw.SHARED_NOISE])
def test_text_is_a_function_of_prompt_and_seed(law: DraftLaw, draft_seed: int, k: int, plain: list[list[int]]) -> None:
    """Drafts as good as the target (seed 1) and bad ones, long and short: the text of plain decoding."""
    assert texts(law, k, draft_seed=draft_seed) == plain


@pytest.mark.parametrize("i", range(len(PROMPTS)))
def test_text_does_not_depend_on_the_batch(i: int, plain: list[list[int]]) -> None:
    assert texts(DraftLaw.SHARED_NOISE, 3, prompts=[PROMPTS[i]], seeds=[SEEDS[i]]) == [plain[i]]


def test_another_seed_is_another_text(plain: list[list[int]]) -> None:
    assert texts(DraftLaw.SHARED_NOISE, 3, seeds=[21, 22, 23]) != plain


def test_ragged_batch(plain: list[list[int]]) -> None:
    drafter = TableDrafter(table_model(8, 1, seed=2), PARAMS, DraftLaw.SHARED_NOISE)
    controller = BudgetController(4, 0, 1)
    setting = Setting(TARGET, CoupledVerifier(), lambda: drafter, lambda: controller, PARAMS, prompts=PROMPTS)
    assert generate(setting, CounterRng(), SEEDS) == plain


@pytest.mark.parametrize("kind", ["peaked", "flat", "close", "zeros", "ties", "equal"])
def test_match_probability(kind: str) -> None:
    """Between (1 - TV) / (1 + TV) and 1 - TV, and what one round of the rule accepts on average."""
    for seed in range(20):
        tables = random_tables(kind, 4, seed)
        p_V, q_V = tables.p(()), tables.q(())
        joint = joint_race_law(q_V, p_V)
        match = float(joint.diagonal().sum())
        distance = 0.5 * float((p_V - q_V).abs().sum())
        assert torch.allclose(joint.sum(1), q_V, atol=EXACT)
        assert torch.allclose(joint.sum(0), p_V, atol=EXACT)
        assert (1 - distance) / (1 + distance) - EXACT <= match <= 1 - distance + EXACT
        assert one_round(CoupledVerifier(), tables, 1, propose_race).expected == pytest.approx(match, abs=EXACT)


def test_identical_rows_always_match() -> None:
    tables = random_tables("equal", 3, seed=1)
    assert one_round(CoupledVerifier(), tables, 3, propose_race).expected == pytest.approx(3.0, abs=EXACT)


def test_the_generator_that_runs_has_the_law_of_the_proof() -> None:
    """20,000 positions of real noise, raced by q and by p: chi-square of the pair of winners over its 16 outcomes.

    Ten can happen; 27.9 is the 0.1 % point with 9 degrees of freedom.
    """
    tables = random_tables("flat", 4, seed=1)
    q_V, p_V = tables.q(()), tables.p(())
    clocks_NV = torch.stack([exponential_clocks(Key(7, position, Purpose.RACE), 4) for position in range(20_000)])
    pairs_N = (clocks_NV / q_V).argmin(1) * 4 + (clocks_NV / p_V).argmin(1)
    counts = torch.bincount(pairs_N, minlength=16).to(torch.float64)
    expected = joint_race_law(q_V, p_V).flatten() * counts.sum()
    possible = expected > 0
    assert int(possible.sum()) == 10
    assert not counts[~possible].any()
    assert float(((counts - expected)[possible] ** 2 / expected[possible]).sum()) < 27.9


def test_sampled_texts_have_the_law() -> None:
    """300 seeds, answers of two tokens, drafted by races on the same clocks; 16.3 is the 0.1 % point, 3 degrees."""
    params = SamplingParams(temperature=1.0, max_tokens=2, bad_token_ids=(2,))
    target = table_model(3, 1, seed=6)
    drafter = TableDrafter(table_model(3, 1, seed=7), params, DraftLaw.SHARED_NOISE)
    run = Setting(target, CoupledVerifier(), lambda: drafter, lambda: FixedController(1), params)
    plain = plain_law(target, params)
    counts = dict.fromkeys(plain, 0)
    for seed in range(300):
        counts[tuple(generate(run, CounterRng(), [seed])[0])] += 1
    chi_square = sum((counts[text] - 300 * p) ** 2 / (300 * p) for text, p in plain.items())
    assert len(plain) == 4
    assert chi_square < 16.3


def test_races_are_not_keys_drawn_twice() -> None:
    """Racing one row twice on the same clocks gives the same winner, in the exhaustive generator too."""
    p = Row.dense(torch.tensor([0.2, 0.8], dtype=torch.float64))
    key = Key(0, 0, Purpose.RACE)
    law = ExhaustiveRng().law(lambda rng: (rng.race(p, key), rng.race(p, key)))
    assert law == pytest.approx({(0, 0): 0.2, (1, 1): 0.8})
