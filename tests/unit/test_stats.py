"""Counters and the identities between them."""

from __future__ import annotations

import json

import pytest

from outrider.core.stats import SpecStats


def some() -> SpecStats:
    """A full round of three, a rejection at the second, a stop inside an accepted block, a plain step."""
    stats = SpecStats()
    stats.record([0, 1, 2], accepted=3, own_tokens=1, cut=0)
    stats.record([0, 1, 2], accepted=1, own_tokens=1, cut=0)
    stats.record([0, 1], accepted=1, own_tokens=0, cut=2)
    stats.record([], accepted=0, own_tokens=1, cut=0)
    return stats


def test_counts() -> None:
    stats = some()
    stats.check()
    assert (stats.rounds, stats.drafted, stats.accepted) == (4, 8, 5)
    assert (stats.emitted, stats.own_tokens, stats.cut) == (8, 3, 2)
    assert stats.acceptance_rate == 5 / 8
    assert stats.acceptance_length == 2.0
    assert stats.acceptance_by_position() == [3 / 4, 1 / 4, 1 / 4]


def test_tree_nodes_count_by_depth() -> None:
    stats = SpecStats()
    stats.record([0, 0, 1, 1, 1], accepted=2, own_tokens=1, cut=0)
    stats.check()
    assert dict(stats.drafted_at) == {0: 2, 1: 3}
    assert dict(stats.accepted_at) == {0: 1, 1: 1}


def test_sum_of_sequences() -> None:
    total = SpecStats()
    for _ in range(2):
        total.add(some())
    total.check()
    assert (total.rounds, total.accepted, total.emitted) == (8, 10, 16)
    assert total.acceptance_by_position() == some().acceptance_by_position()


def test_adding_leaves_the_other_alone() -> None:
    one, other = some(), some()
    other.dropped["reason"] += 2
    one.add(other)
    one.record([0], accepted=1, own_tokens=1, cut=0)
    assert other.drafted_at == some().drafted_at
    assert one.dropped == {"reason": 2}


def test_nothing_yet() -> None:
    stats = SpecStats()
    stats.check()
    assert (stats.acceptance_rate, stats.acceptance_length, stats.acceptance_by_position()) == (0.0, 0.0, [])


@pytest.mark.parametrize("field", ["emitted", "accepted", "drafted", "own_tokens"])
def test_check_notices_a_counter_that_drifts(field: str) -> None:
    stats = some()
    setattr(stats, field, getattr(stats, field) + 1)
    with pytest.raises(AssertionError):
        stats.check()


def test_json() -> None:
    stats = some()
    stats.dropped["q is not a distribution"] += 1
    data = json.loads(json.dumps(stats.to_json()))
    assert data["acceptance_length"] == 2.0
    assert data["dropped"] == {"q is not a distribution": 1}
