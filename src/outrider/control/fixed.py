"""The controller that always asks for the same number of draft tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.core.types import Sequence
from outrider.errors import ConfigError

MAX_K = 64
"""A longer draft costs more to check than any text repays, and a pass over it more memory than a pass should."""


def check_k(k: int) -> None:
    """Raises ConfigError for a number of draft tokens that is not allowed."""
    if not 0 <= k <= MAX_K:
        raise ConfigError(f"K = {k} is not allowed: give an integer from 0 to {MAX_K} (0 switches speculation off)")


class FixedController:
    """K draft tokens a round for every sequence that does not ask for another number."""

    def __init__(self, k: int) -> None:
        check_k(k)
        self.k = k

    def budgets(self, seqs: Seq[Sequence]) -> list[int]:
        return [self.k if seq.k is None else seq.k for seq in seqs]

    def observe(self, seq: Sequence, drafted: int, accepted: int) -> None:
        return
