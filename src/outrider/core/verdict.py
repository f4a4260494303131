"""What an acceptance rule decides."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Origin(StrEnum):
    """Where an emitted token came from."""

    ACCEPTED = "accepted"
    RECOVERED = "recovered"
    BONUS = "bonus"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One sequence's result: the accepted nodes from the root down, and exactly one token drawn by the rule after them.

    `origin` of that token is BONUS when the path ends at a leaf of the draft (or the draft was empty), RECOVERED when
    at least one child of the path's end was turned down.
    """

    path: list[int]
    next_token: int
    origin: Origin

    @property
    def n_accept(self) -> int:
        return len(self.path)
