"""How far a figure may be chance: bootstrap intervals over the questions of a run.

What is drawn again, with replacement, are whole questions: all turns of a conversation come or stay away together, for
they are not independent, and a prompt's repetitions are one median before. So an interval tells how much a figure hangs
on which questions were asked. It does not tell what another machine, or another hour, would give.

Shapes: R draws, Q questions, N prompts (a question has one a turn).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

ENOUGH = 4
"""Fewer than this decide nothing: quartiles of three are the extremes, and draws of three are few."""
LEVEL = 0.95
DRAWS = 2000
SEED = 0


@dataclass(frozen=True, slots=True)
class Interval:
    """From the 2.5th to the 97.5th percentile of the draws. Every call draws the same, so lanes can be compared."""

    low: float
    high: float

    @classmethod
    def of(cls, value_R: Tensor) -> Interval:
        tail = (1 - LEVEL) / 2
        low, high = torch.quantile(value_R, torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
        return cls(low, high)

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{self.low:.2f}..{self.high:.2f}"

    def to_json(self) -> list[float]:
        return [self.low, self.high]


def median_interval(questions: Seq[str], values: Seq[float]) -> Interval | None:
    """Of the median of `values`, one a prompt, `questions` being theirs; None for fewer than ENOUGH questions."""
    times_RN = _draws(questions)
    if times_RN is None:
        return None
    value_N, order_N = torch.tensor(values, dtype=torch.float64).sort()
    upto_RN = times_RN[:, order_N].cumsum(1)
    drawn_R1 = upto_RN[:, -1:]
    middle_R2 = torch.cat([(drawn_R1 - 1) // 2, drawn_R1 // 2], dim=1)
    return Interval.of(value_N[torch.searchsorted(upto_RN, middle_R2, right=True)].mean(1))


def ratio_interval(questions: Seq[str], parts: Seq[tuple[float, float, float, float]]) -> Interval | None:
    """Of the speed-up of totals; a prompt's parts are (tokens, seconds, plain's tokens, plain's seconds)."""
    times_RN = _draws(questions)
    if times_RN is None:
        return None
    tokens_R, s_R, plain_R, plain_s_R = (times_RN.double() @ torch.tensor(parts, dtype=torch.float64)).unbind(1)
    return Interval.of((tokens_R / s_R) / (plain_R / plain_s_R))


def _draws(questions: Seq[str]) -> Tensor | None:
    """int64 [R, N]: how often each prompt comes in each draw; None for fewer than ENOUGH questions."""
    numbers = {question: number for number, question in enumerate(dict.fromkeys(questions))}
    if len(numbers) < ENOUGH:
        return None
    drawn_RQ = torch.randint(len(numbers), (DRAWS, len(numbers)), generator=torch.Generator().manual_seed(SEED))
    times_RQ = torch.zeros_like(drawn_RQ).scatter_add_(1, drawn_RQ, torch.ones_like(drawn_RQ))
    return times_RQ[:, torch.tensor([numbers[question] for question in questions])]
