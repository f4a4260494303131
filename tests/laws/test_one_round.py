"""One round of every registered rule, under every draft law it declares, has exactly the target's law."""

from __future__ import annotations

import pytest

from outrider.core.registry import verifier_class
from tests.laws.harness import EXACT, KINDS, Propose, distance, judges, proposals, random_tables, rules

CASES = [
    pytest.param(name, propose, tree, id=f"{name}-{label}")
    for name in rules(lossless=True)
    for label, propose, tree in proposals(name)
]
SIZES = [(2, 1), (2, 3), (3, 2), (4, 1)]
TREE_SIZES = [(2, 2), (3, 2), (4, 1)]
DEEP_SIZES = [(2, 4), (3, 3), (4, 2)]


def check(name: str, propose: Propose, kind: str, vocab_size: int, k: int, seed: int) -> None:
    tables = random_tables(kind, vocab_size, seed)
    if judges(name, tables):
        assert distance(verifier_class(name)(), tables, k, propose) <= EXACT, (kind, vocab_size, k, seed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "propose", "tree"), CASES)
def test_exact_law(name: str, propose: Propose, tree: bool, kind: str) -> None:
    for vocab_size, k in TREE_SIZES if tree else SIZES:
        check(name, propose, kind, vocab_size, k, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "propose", "tree"), CASES)
def test_exact_law_of_many_tables(name: str, propose: Propose, tree: bool, kind: str) -> None:
    for seed in range(1, 11):
        for vocab_size, k in TREE_SIZES if tree else SIZES + DEEP_SIZES:
            check(name, propose, kind, vocab_size, k, seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "propose", "tree"), [case for case in CASES if not case.values[2]])
def test_exact_law_at_the_largest_size(name: str, propose: Propose, tree: bool, kind: str) -> None:
    check(name, propose, kind, vocab_size=4, k=4, seed=11)


def test_every_rule_is_covered() -> None:
    """A new rule in the registry gets its law tests without being named here; each declares a law that is tried."""
    assert set(rules(lossless=True)) == {case.values[0] for case in CASES}


@pytest.mark.parametrize("name", rules(lossless=False))
def test_lossy_rules_are_honestly_labelled(name: str) -> None:
    """Under every way of drafting that they take there is a table where they leave the target's law."""
    tables = [random_tables(kind, 3, seed) for kind in ("peaked", "close") for seed in range(3)]
    for label, propose, _ in proposals(name):
        assert max(distance(verifier_class(name)(), some, 2, propose) for some in tables) > 0.05, label


@pytest.mark.parametrize("name", rules(lossless=False))
def test_lossy_rules_are_greedy_at_temperature_0(name: str) -> None:
    for _, propose, _ in proposals(name):
        assert distance(verifier_class(name)(), random_tables("point", 3), 2, propose) == 0.0
