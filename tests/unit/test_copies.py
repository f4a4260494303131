"""What a text says of its next token, and that heads which draft token by token follow it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from outrider.core.rng import CounterRng
from outrider.drafters.columns import Columns
from outrider.drafters.copies import Text, add_copy_
from outrider.errors import ConfigError
from outrider.kernels import find_copy
from outrider.kernels.copies import MOST_MATCHED, find_copy_reference
from tests.contract.factories import eagle3, mtp
from tests.contract.world import GREEDY, begin, commit_tokens, sequence, watched


def naive(text: list[int]) -> tuple[int, int]:
    """By slices: the longest end that stood before, where it last did."""
    for length in range(min(MOST_MATCHED, len(text) - 1), 0, -1):
        for next_ in range(len(text) - 1, length - 1, -1):
            if text[next_ - length : next_] == text[-length:]:
                return length, text[next_]
    return 0, 0


@pytest.mark.parametrize("letters", [1, 2, 3, 8])
def test_the_longest_and_latest_match_is_found(letters: int) -> None:
    dice = random.Random(letters)
    for size in [*range(9), *(dice.randrange(9, 90) for _ in range(80))]:
        text = [dice.randrange(letters) for _ in range(size)]
        text_T = torch.tensor(text, dtype=torch.int64)
        assert find_copy(text_T) == find_copy_reference(text_T) == naive(text), text


def test_a_text_grows_and_forgets_what_was_drafted() -> None:
    text, tokens, dice = Text(), list[int](), random.Random(0)
    for _ in range(40):
        tokens += [dice.randrange(99) for _ in range(dice.randrange(1, 9))]
        drafted, room = [dice.randrange(99) for _ in range(dice.randrange(4))], dice.randrange(5)
        store_T, known = text.with_room(tokens, drafted, room)
        assert store_T[:known].tolist() == tokens + drafted
        assert len(store_T) >= known + room
        store_T[known : known + room] = -1


@pytest.mark.parametrize("make", [eagle3, mtp])
def test_a_text_that_repeats_itself_is_drafted_on(make: Any) -> None:
    """Where the bias outweighs whatever the head says, also behind tokens that were drafted themselves."""
    drafter, seq = make(watched(1), copy=20.0), sequence(0, [1, 2, 3, 4, 5, 6, 1, 2, 3], GREEDY)
    begin(drafter, seq)
    assert drafter.propose([seq], [5], CounterRng()).seqs[0].tokens == [4, 5, 6, 1, 2]
    commit_tokens(drafter, seq, [4, 6, 5, 3, 4], 1)
    assert drafter.propose([seq], [2], CounterRng()).seqs[0].tokens[0] == 6


@pytest.mark.parametrize(
    ("text", "token", "raised"),
    [
        ([1, 2, 3, 4, 1, 2, 3], 4, 3.0),
        ([5, 6, 7, 1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4], 5, 6.0),
        ([2, 3, 1, 2, 3], 1, 1.5),
        ([1, 2, 1, 3, 1], 3, 0.0),
        ([1, 2, 3, 4], 0, 0.0),
        ([1, 2, 8, 1, 2], 8, 0.0),
        ([1], 0, 0.0),
    ],
)
def test_each_token_matched_but_one_counts(text: list[int], token: int, raised: float) -> None:
    """Five at most; nothing where one token matches or none, or where the head cannot say what followed."""
    for columns in (Columns(torch.arange(8), 9), Columns(torch.tensor([0, 1, 4, 5]), 9)):
        size = 8 if columns.find(2) is not None else 4
        logits_S = torch.zeros(size)
        add_copy_(logits_S, torch.tensor(text), columns, 1.5)
        expected_S = torch.zeros(size)
        if (column := columns.find(token)) is not None:
            expected_S[column] = raised
        assert torch.equal(logits_S, expected_S)


def test_the_head_alone_copies_nothing() -> None:
    drafter = eagle3(watched(1), copy=20.0, min_confidence=0.9)
    alone = drafter.head_alone()
    assert (alone.copy, alone.min_confidence) == (0.0, 0.0)
    assert (drafter.copy, drafter.min_confidence) == (20.0, 0.9)


@pytest.mark.parametrize("copy", [-1.0, 21.0, True, "2"])
def test_other_strengths_are_refused(copy: Any) -> None:
    with pytest.raises(ConfigError, match=r"eagle3: copy = .* is not allowed: give a number from 0 to 20"):
        eagle3(watched(1), copy=copy)
