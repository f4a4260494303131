"""What a block drafter keeps of one sequence: features not yet read, and the keys and values of the text in all layers.

Shapes: K draft tokens, d head width, S draft vocabulary, r rank of the Markov head.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.drafters.block_habits import Habits
from outrider.drafters.chain_state import HeadState
from outrider.drafters.head_cache import HeadCache

NOTHING = torch.empty(0, 0)


@dataclass(slots=True)
class Said:
    """By draft token of a block: its logits without what follows from the token before, the row that they come from,
    and the logits of the confidences (none: []), first without what follows from the token before, then with it, as
    far as the draft got. `markov_1r` is the state of a recurrent Markov head so far, `confidence` that of the next
    token."""

    logits_KS: Tensor = NOTHING
    h_Kd: Tensor = NOTHING
    confidence_K: list[float] = field(default_factory=list)
    said_K: list[float] = field(default_factory=list)
    markov_1r: Tensor | None = None
    confidence: float = 1.0


class BlockState(HeadState):
    """One sequence's place in the head.

    The cache holds the positions before `cache.end`. `block` is what the block of the round says, valid until the next.
    `habits` are what verification taught.
    """

    def __init__(self, window: int, habits: Habits) -> None:
        super().__init__(window)
        self.habits = habits
        self.cache = HeadCache(0)
        self.block = Said()

    @property
    def unread(self) -> int:
        return self.cache.end

    def _begin_at(self, start: int) -> None:
        self.cache = HeadCache(start)

    def settle(self) -> None:
        """All positions before `held` are in the cache."""
        self._hold([])
        self.cache.keep_last(self.window)

    def free(self) -> None:
        super().free()
        self.block = Said()
