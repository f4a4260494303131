"""Bootstrap intervals: right where the answer is known, over questions and not over turns, the same every time."""

from __future__ import annotations

from math import comb

import pytest

from outrider.bench.interval import LEVEL, median_interval, ratio_interval


def chance_of_median_up_to(k: int, n: int) -> float:
    """That the median of n draws from n different values (n odd) is at most the k-th smallest."""
    share = k / n
    return sum(comb(n, i) * share**i * (1 - share) ** (n - i) for i in range(n // 2 + 1, n + 1))


@pytest.mark.parametrize("n", [5, 7, 13])
def test_the_median_is_where_the_binomial_law_says(n):
    found = median_interval([str(i) for i in range(n)], [float(i) for i in reversed(range(1, n + 1))])
    tail = (1 - LEVEL) / 2
    low = next(k for k in range(1, n + 1) if chance_of_median_up_to(k, n) > tail)
    assert (found.low, found.high) == (low, n + 1 - low)


def test_the_turns_of_a_question_come_together():
    """Every turn twice over says nothing new: were turns drawn by themselves, the interval would be narrower."""
    questions, values = [str(i) for i in range(7)], [1.0, 1.1, 1.3, 1.4, 1.7, 2.0, 2.5]
    parts = [(10.0, 1.0 / value, 10.0, 1.0) for value in values]
    assert median_interval(questions * 2, values * 2) == median_interval(questions, values)
    assert ratio_interval(questions * 2, parts * 2).to_json() == pytest.approx(
        ratio_interval(questions, parts).to_json()
    )
    alone = [f"{question} again" for question in questions]
    assert median_interval(questions + alone, values * 2) != median_interval(questions, values)


def test_totals_that_agree_leave_no_room():
    found = ratio_interval(list("abcde"), [(10.0 * n, n / 2.0, 10.0 * n, float(n)) for n in range(1, 6)])
    assert found.low == pytest.approx(2.0)
    assert found.high == pytest.approx(2.0)


def test_totals_weigh_long_answers_more():
    """One long answer that gains nothing, and many short ones that double."""
    parts = [(1000.0, 10.0, 1000.0, 10.0), *[(10.0, 0.05, 10.0, 0.1)] * 9]
    found = ratio_interval([str(i) for i in range(10)], parts)
    assert found.low < 1.02
    assert found.high == pytest.approx(2.0), "the long one stays away in a third of the draws"


def test_an_even_number_of_prompts_has_its_median_in_the_middle():
    assert median_interval(list("abcd"), [1.0, 1.0, 3.0, 3.0]).high == 3.0
    assert median_interval(list("abcd"), [2.0] * 4).to_json() == [2.0, 2.0]


def test_three_questions_have_no_interval():
    assert median_interval(list("aabbcc"), [1.0] * 6) is None
    assert ratio_interval(list("abc"), [(1.0, 1.0, 1.0, 1.0)] * 3) is None
