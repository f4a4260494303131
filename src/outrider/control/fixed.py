"""The controller that always asks for the same number of draft tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.core.types import Sequence
from outrider.errors import ConfigError


class FixedController:
    """K draft tokens a round for every sequence that does not ask for another number."""

    def __init__(self, k: int) -> None:
        if k < 0:
            raise ConfigError(f"K = {k} is not allowed: give an integer >= 0 (0 switches speculation off)")
        self.k = k

    def budgets(self, seqs: Seq[Sequence]) -> list[int]:
        return [self.k if seq.k is None else seq.k for seq in seqs]

    def observe(self, seq: Sequence, drafted: int, accepted: int) -> None:
        return
