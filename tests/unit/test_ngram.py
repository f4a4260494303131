"""Drafter `ngram`: what is copied from where, and at what cost."""

from __future__ import annotations

import pytest

from outrider.core.draft import DraftLaw
from outrider.core.rng import CounterRng
from outrider.core.types import SamplingParams, Sequence
from outrider.drafters.ngram import NgramDrafter
from outrider.errors import ConfigError


def draft(drafter: NgramDrafter, tokens: list[int], budget: int = 4, **options: frozenset[int]) -> list[int]:
    seq = Sequence(0, tokens, SamplingParams(), seed=0, **options)
    drafter.open(seq)
    proposed = drafter.propose([seq], [budget], CounterRng()).seqs[0]
    drafter.close(seq)
    assert proposed.law is DraftLaw.POINT
    return proposed.tokens


def test_copies_what_followed_the_match() -> None:
    assert draft(NgramDrafter(), [1, 2, 3, 4, 5, 1, 2], 3) == [3, 4, 5]


def test_the_most_recent_match_wins() -> None:
    assert draft(NgramDrafter(), [1, 2, 7, 1, 2, 8, 9, 1, 2], 2) == [8, 9]


def test_a_longer_match_beats_a_more_recent_one() -> None:
    assert draft(NgramDrafter(), [5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2], 1) == [7]
    assert draft(NgramDrafter(prompt_lookup_max=2), [5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2], 1) == [8]


def test_a_match_shorter_than_the_minimum_is_chance() -> None:
    tokens = [1, 2, 3, 4, 2]
    assert draft(NgramDrafter(), tokens) == []
    assert draft(NgramDrafter(prompt_lookup_min=1), tokens, 2) == [3, 4]


@pytest.mark.parametrize("period", [1, 2, 3, 7])
def test_a_repeating_text_is_drafted_to_any_length(period: int) -> None:
    text = [i % period for i in range(3 * period + 10)]
    assert draft(NgramDrafter(), text, 20) == [i % period for i in range(len(text), len(text) + 20)]


def test_the_end_of_the_text_does_not_match_itself() -> None:
    assert draft(NgramDrafter(), [1, 2, 3, 4]) == []
    assert draft(NgramDrafter(), [1]) == []


def test_nothing_is_drafted_behind_the_end_of_the_answer() -> None:
    assert draft(NgramDrafter(), [1, 2, 3, 9, 5, 1, 2], 4, stop_ids=frozenset({9})) == [3, 9]


def test_a_token_is_indexed_once() -> None:
    drafter = NgramDrafter()
    seq = Sequence(0, [1, 2, 3], SamplingParams(), seed=0)
    drafter.open(seq)
    for step in range(200):
        seq.tokens.append(step % 11)
        drafter.propose([seq], [step % 3], CounterRng())
    index = drafter._indices[0]
    written = 0

    class Counting(dict[tuple[int, ...], int]):
        def __setitem__(self, key: tuple[int, ...], end: int) -> None:
            nonlocal written
            written += 1
            super().__setitem__(key, end)

    index.end = Counting(index.end)
    for step in range(50):
        seq.tokens.append(step % 7)
        drafter.propose([seq], [2], CounterRng())
    assert written <= 3 * 51


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prompt_lookup_min": 0}, "prompt_lookup_min = 0"),
        ({"prompt_lookup_max": 1}, "prompt_lookup_max = 1"),
        ({"prompt_lookup_max": 2.5}, "2.5"),
        ({"prompt_lookup_max": True}, "True"),
    ],
)
def test_options_are_checked(options: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        NgramDrafter(**options)
