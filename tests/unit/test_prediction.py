"""Drafter `prediction`: following a predicted text, losing it, finding it again."""

from __future__ import annotations

import pytest

from outrider.core.rng import CounterRng
from outrider.core.types import SamplingParams, Sequence
from outrider.drafters.prediction import PredictionDrafter
from outrider.errors import ConfigError

TEXT = list(range(10, 40))


def after(answer: list[int], prediction: list[int] | None = None, budget: int = 3, **options: int) -> list[int]:
    """What is drafted after this answer."""
    seq = Sequence(0, [1, 2, 3], SamplingParams(), seed=0, prediction=TEXT if prediction is None else prediction)
    drafter = PredictionDrafter(**options)
    drafter.open(seq)
    seq.tokens += answer
    return drafter.propose([seq], [budget], CounterRng()).seqs[0].tokens


def test_begins_at_the_beginning() -> None:
    assert after([]) == [10, 11, 12]


def test_follows_while_they_agree() -> None:
    assert after(TEXT[:7]) == [17, 18, 19]


def test_ends_with_the_prediction() -> None:
    assert after(TEXT[:-2]) == TEXT[-2:]
    assert after(TEXT) == []


def test_is_lost_at_an_edit() -> None:
    assert after([*TEXT[:7], 99]) == []
    assert after([*TEXT[:7], 99, 18]) == []


@pytest.mark.parametrize(
    "answer",
    [
        [*TEXT[:7], 99, 18, 19],
        [*TEXT[:7], 98, 99, 18, 19],
        [*TEXT[:7], 97, 98, 99, 17, 18, 19],
        [*TEXT[:5], 18, 19],
        [96, 97, 18, 19],
    ],
    ids=["replaced", "longer replacement", "inserted", "deleted", "new beginning"],
)
def test_resumes_after_an_edit(answer: list[int]) -> None:
    assert after(answer) == [20, 21, 22]


def test_prefers_places_past_the_last_agreement() -> None:
    prediction = [1, 2, 50, 60, 61, 1, 2, 51, 70, 71, 1, 2, 52]
    assert after([1, 2, 50, 60, 99, 1, 2], prediction, 1) == [51]
    assert after([1, 2, 50, 60, 61, 1, 2, 51, 70, 99, 1, 2], prediction, 1) == [52]
    assert after([1, 2, 50, 60, 61, 1, 2, 51, 70, 71, 1, 2, 52, 99, 60, 61], prediction, 1) == [1]


def test_prefers_a_longer_match_to_a_nearer_one() -> None:
    prediction = [5, 6, 7, 8, 1, 2, 50, 9, 1, 2, 51]
    assert after([5, 99, 9, 1, 2], prediction, 1) == [51]


def test_one_token_is_enough_when_told_so() -> None:
    assert after([*TEXT[:7], 99, 18], min_match=1) == [19, 20, 21]


def test_step_by_step_equals_all_at_once() -> None:
    answer = [*TEXT[:4], 99, *TEXT[5:9], 98, 97, *TEXT[2:6], *TEXT[20:]]
    seq = Sequence(0, [1], SamplingParams(), seed=0, prediction=TEXT)
    drafter = PredictionDrafter()
    drafter.open(seq)
    for i, token in enumerate(answer):
        assert drafter.propose([seq], [3], CounterRng()).seqs[0].tokens == after(answer[:i])
        seq.tokens.append(token)


def test_a_request_without_a_prediction_is_not_drafted() -> None:
    seq = Sequence(0, [1], SamplingParams(), seed=0)
    drafter = PredictionDrafter()
    drafter.open(seq)
    assert drafter.propose([seq], [3], CounterRng()).seqs[0].tokens == []
    assert after([], []) == []


@pytest.mark.parametrize(
    ("options", "said"), [({"min_match": 0}, "min_match = 0"), ({"max_match": 1}, "max_match = 1")]
)
def test_options_are_checked(options: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        PredictionDrafter(**options)
