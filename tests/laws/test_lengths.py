"""Expected accepted tokens: the formulas in the rules' docstrings, examples by hand, and the table of the docs page."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.core.registry import verifier_class
from outrider.core.rng import ExhaustiveRng, joint_race_law
from outrider.core.verdict import Origin
from tests.laws.harness import (
    EXACT,
    KINDS,
    Prefix,
    Propose,
    Tables,
    distance,
    one_round,
    propose_iid,
    propose_point,
    propose_race,
    random_tables,
    target_rows,
)
from tests.laws.mutants import RedrawsFromTarget

TOY = Tables.constant([1 / 3, 2 / 3], [2 / 3, 1 / 3], "toy")


def accepted(name: str, tables: Tables, k: int, propose: Propose) -> float:
    return one_round(verifier_class(name)(), tables, k, propose).expected


def chain_formula(tables: Tables, k: int, prefix: Prefix = ()) -> float:
    """The sum over i of P(first i accepted): each token survives with min(p, q)."""
    if k == 0:
        return 0.0
    both_V = torch.minimum(tables.p(prefix), tables.q(prefix))
    return sum(
        float(w) * (1.0 + chain_formula(tables, k - 1, (*prefix, token))) for token, w in enumerate(both_V) if w > 0
    )


def block_formula(tables: Tables, k: int, prefix: Prefix = (), drafted: float = 1.0, weight: float = 1.0) -> float:
    """The sum over drafts of q(draft) P_i(draft)."""
    if k == 0:
        return 0.0
    total = 0.0
    for token, (p, q) in enumerate(zip(tables.p(prefix).tolist(), tables.q(prefix).tolist(), strict=True)):
        if q > 0.0:
            next_weight = min(1.0, weight * p / q)
            total += drafted * q * next_weight
            total += block_formula(tables, k - 1, (*prefix, token), drafted * q, next_weight)
    return total


def match_formula(tables: Tables, k: int, prefix: Prefix = ()) -> float:
    """Each token survives with p q."""
    if k == 0:
        return 0.0
    both_V = tables.p(prefix) * tables.q(prefix)
    return sum(
        float(w) * (1.0 + match_formula(tables, k - 1, (*prefix, token))) for token, w in enumerate(both_V) if w > 0
    )


@pytest.mark.parametrize("kind", KINDS)
def test_formulas(kind: str) -> None:
    for vocab_size, k in [(2, 3), (3, 2)]:
        tables = random_tables(kind, vocab_size, seed=2)
        chain, block = accepted("chain", tables, k, propose_iid), accepted("block", tables, k, propose_iid)
        assert chain == pytest.approx(chain_formula(tables, k), abs=EXACT)
        assert block == pytest.approx(block_formula(tables, k), abs=EXACT)
        assert accepted("match", tables, k, propose_iid) == pytest.approx(match_formula(tables, k), abs=EXACT)
        assert block >= chain - EXACT
        assert chain >= match_formula(tables, k) - EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_point_drafts_are_worth_the_same_to_every_rule(kind: str) -> None:
    tables = random_tables(kind, 3, seed=2)
    chain = accepted("chain", tables, 2, propose_point)
    for name in ("block", "match", "coupled"):
        assert accepted(name, tables, 2, propose_point) == pytest.approx(chain, abs=EXACT)


def test_block_gains_on_the_toy_of_the_paper() -> None:
    """p = (1/3, 2/3), q = (2/3, 1/3), K = 2: chain accepts 10/9 tokens, block 11/9."""
    assert accepted("chain", TOY, 2, propose_iid) == pytest.approx(10 / 9, abs=EXACT)
    assert accepted("block", TOY, 2, propose_iid) == pytest.approx(11 / 9, abs=EXACT)


def test_two_token_example() -> None:
    """p = (0.6, 0.4), q = (0.8, 0.2): accepted mass 0.6 and 0.2, rejected 0.2, and then always B."""
    tables = Tables.constant([0.6, 0.4], [0.8, 0.2])
    round_ = one_round(verifier_class("chain")(), tables, 1, propose_iid)
    assert round_.expected == pytest.approx(0.8, abs=EXACT)
    first = [sum(p for tokens, p in round_.law.items() if tokens[0] == token) for token in (0, 1)]
    assert first == pytest.approx([0.6, 0.4], abs=EXACT)


def test_two_token_example_piece_by_piece() -> None:
    """The same numbers as outcomes of the rule: (A accepted, B accepted, B recovered) = (0.6, 0.2, 0.2)."""
    tables = Tables.constant([0.6, 0.4], [0.8, 0.2])

    def outcomes(name_or_rule: object) -> dict[tuple[int, bool], float]:
        def round_(rng: object) -> tuple[int, bool]:
            draft = propose_iid(tables, 1, rng)
            verdict = name_or_rule.verify(draft, target_rows(tables, draft), rng, 0, 0)
            recovered = verdict.origin is Origin.RECOVERED
            return (verdict.next_token if recovered else draft.tokens[0]), recovered

        return ExhaustiveRng().law(round_)

    assert outcomes(verifier_class("chain")()) == pytest.approx({(0, False): 0.6, (1, False): 0.2, (1, True): 0.2})
    wrong = outcomes(RedrawsFromTarget())
    assert wrong[(0, False)] + wrong[(0, True)] == pytest.approx(0.72, abs=EXACT)
    assert wrong[(1, False)] + wrong[(1, True)] == pytest.approx(0.28, abs=EXACT)


DOCS = Path(__file__).parents[2] / "docs" / "explanation" / "rules.md"
DOC_TABLES = {
    "toy (1/3, 2/3) against (2/3, 1/3)": (TOY, 2),
    "flat, V = 3": (random_tables("flat", 3, seed=0), 3),
    "close, V = 3": (random_tables("close", 3, seed=0), 3),
    "peaked, V = 3": (random_tables("peaked", 3, seed=0), 3),
    "ties, V = 3": (random_tables("ties", 3, seed=0), 3),
    "equal, V = 3": (random_tables("equal", 3, seed=0), 3),
}


def doc_lines() -> list[str]:
    """The rows of the page's table of expected lengths."""
    lines = []
    for label, (tables, k) in DOC_TABLES.items():
        figures = [
            chain_formula(tables, k),
            block_formula(tables, k),
            match_formula(tables, k),
            coupled_formula(tables, k),
            accepted("chain", tables, k, propose_point),
        ]
        lines.append(f"| {label} | {k} | " + " | ".join(f"{figure:.3f}" for figure in figures) + " |")
    return lines


def coupled_formula(tables: Tables, k: int, prefix: Prefix = ()) -> float:
    """Each token survives with the diagonal of the joint race law."""
    if k == 0:
        return 0.0
    both_V = joint_race_law(tables.q(prefix), tables.p(prefix)).diagonal()
    return sum(
        float(w) * (1.0 + coupled_formula(tables, k - 1, (*prefix, token))) for token, w in enumerate(both_V) if w > 0
    )


def test_coupled_formula() -> None:
    for kind in ("flat", "close", "zeros"):
        tables = random_tables(kind, 3, seed=2)
        assert accepted("coupled", tables, 2, propose_race) == pytest.approx(coupled_formula(tables, 2), abs=EXACT)


def test_the_page_shows_these_figures() -> None:
    """docs/explanation/rules.md is not written by hand where it has numbers."""
    text = DOCS.read_text()
    for line in doc_lines():
        assert line in text


def test_all_three_keep_the_law_on_the_page() -> None:
    for tables, k in list(DOC_TABLES.values())[:3]:
        for name in ("chain", "block", "match"):
            assert distance(verifier_class(name)(), tables, k, propose_iid) <= EXACT


if __name__ == "__main__":
    print("\n".join(doc_lines()))
