"""The verdict on a speculative answer: the same as plain, the same but for ties, or wrong.

In finite precision a pass over several rows may round a logit otherwise than a pass over one, so where two tokens are
as good as equal the two answers may part. Such a tie is no error, and it must not hide one: the comparison is anchored
again at each difference. Plain decoding is asked, on one row, how close the two tokens are. If the gap is within what
rounding can do, plain goes on from the speculative prefix and the comparison with it; if not, the answer has diverged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from outrider.bench.oracle import Gap


class Outcome(StrEnum):
    """What comparing two answers comes to."""

    IDENTICAL = "IDENTICAL"
    TIE = "TIE"
    DIVERGED = "DIVERGED"


class Oracle(Protocol):
    """Plain decoding of one prompt; `PlainOracle` is one."""

    def gap(self, prefix: Seq[int], first: int, second: int) -> Gap: ...

    def resume(self, prefix: Seq[int]) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Difference:
    """A place (output position) where the answers part. A token is None where that answer has ended.

    `gap` is None where there is none to measure: one of the answers ended, or both did for different reasons. In JSON
    it is also null where it is infinite: a token that cannot occur there at all.
    """

    position: int
    plain_token: int | None
    speculative_token: int | None
    gap: float | None
    tolerance: float | None
    reason: str

    def to_json(self) -> dict[str, object]:
        gap = self.gap if self.gap is not None and math.isfinite(self.gap) else None
        return {**{name: getattr(self, name) for name in self.__slots__}, "gap": gap}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The verdict on one answer: every tie on the way, and the difference that is none, where there is one."""

    outcome: Outcome
    compared: int
    ties: list[Difference]
    divergence: Difference | None = None


def compare(plain: Seq[int], speculative: Seq[int], oracle: Oracle) -> Comparison:
    """Compares output tokens, going on behind every tie. Asks the oracle only where the answers differ."""
    reference, ties = list(plain), list[Difference]()
    while True:
        position = _first_difference(reference, speculative)
        if position is None:
            return Comparison(Outcome.TIE if ties else Outcome.IDENTICAL, len(reference), ties)
        if position == min(len(reference), len(speculative)):
            lengths = f"plain has {len(reference)} tokens here, speculative {len(speculative)}"
            at = [tokens[position] if position < len(tokens) else None for tokens in (reference, speculative)]
            return _diverged(position, ties, Difference(position, at[0], at[1], None, None, lengths))
        ours, theirs = reference[position], speculative[position]
        gap = oracle.gap(speculative[:position], ours, theirs)
        if not gap.is_tie:
            reason = "the gap is larger than rounding explains"
            difference = Difference(position, ours, theirs, gap.behind, gap.tolerance, reason)
            return _diverged(position, ties, difference)
        ties.append(Difference(position, ours, theirs, gap.behind, gap.tolerance, "tie"))
        reference = oracle.resume(speculative[: position + 1])


def _first_difference(plain: Seq[int], speculative: Seq[int]) -> int | None:
    if list(plain) == list(speculative):
        return None
    pairs = enumerate(zip(plain, speculative, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(plain), len(speculative)))


def _diverged(position: int, ties: list[Difference], difference: Difference) -> Comparison:
    return Comparison(Outcome.DIVERGED, position, ties, difference)
