"""The controller that always asks for the same number of draft tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.core.types import MAX_K, Sequence
from outrider.errors import ConfigError


def check_k(k: int) -> None:
    """Raises ConfigError for a number of draft tokens that is not allowed."""
    if not isinstance(k, int) or not 0 <= k <= MAX_K:
        raise ConfigError(f"K = {k!r} is not allowed: give an integer from 0 to {MAX_K} (0 switches speculation off)")


class FixedController:
    """K draft tokens a round, or as many as the sequence asks for, if those are fewer."""

    def __init__(self, k: int) -> None:
        check_k(k)
        self.k = k

    def budgets(self, seqs: Seq[Sequence], rooms: Seq[int]) -> list[int]:
        asked = (self.k if seq.k is None else min(self.k, seq.k) for seq in seqs)
        return [min(pair) for pair in zip(asked, rooms, strict=True)]

    def observe(self, seq: Sequence, asked: int, drafted: int, accepted: int, source: str) -> None:
        return
