"""What a block drafter keeps of one sequence: features not yet read, and the keys and values of the text in all layers.

Shapes: L layers, T positions, M rows, K draft tokens, S draft vocabulary, r rank of the Markov head,
G key-value heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.drafters.block_habits import Habits
from outrider.drafters.chain_state import HeadState

FIRST_ROWS = 64


class ContextCache:
    """Keys and values of the positions from `start` to `end`, [L, 2, T, G, D]; grows by doubling. Rows behind `length`
    are scratch: those of the block."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.length = 0
        self.store: Tensor | None = None

    @property
    def end(self) -> int:
        return self.start + self.length

    def append(self, kv_L2MGD: Tensor) -> None:
        """Rows of the positions from `end` on."""
        rows = kv_L2MGD.shape[2]
        store = self.reserve(rows, kv_L2MGD)
        store[:, :, self.length : self.length + rows] = kv_L2MGD
        self.length += rows

    def reserve(self, rows: int, like: Tensor | None = None) -> Tensor:
        """The store, with room for so many rows behind `length`. The first rows say what they are `like`."""
        store, need = self.store, self.length + rows
        if store is None or need > store.shape[2]:
            like = store if like is None else like
            assert like is not None, "an empty cache has no shape"
            layers, both, _, heads, width = like.shape
            grown = like.new_empty((layers, both, max(need, 2 * self.length, FIRST_ROWS), heads, width))
            if store is not None:
                grown[:, :, : self.length] = store[:, :, : self.length]
            store = self.store = grown
        return store

    def keep_last(self, count: int) -> None:
        """Forgets all but the last `count` positions; moves memory only when most of it is forgotten."""
        drop = self.length - count
        if drop >= max(count, FIRST_ROWS) and self.store is not None:
            self.store = self.store[:, :, drop : self.length].clone()
            self.start, self.length = self.start + drop, count


NOTHING = torch.empty(0, 0)


@dataclass(slots=True)
class Said:
    """By draft token of a block: its logits without what follows from the token before, the row that they come from,
    and the logits of the confidences (none: []), first without what follows from the token before, then with it, as
    far as the draft got. `markov_1r` is the state of a recurrent Markov head so far, `sure` the confidence of the token
    that is next."""

    logits_KS: Tensor = NOTHING
    h_Kd: Tensor = NOTHING
    sure_K: list[float] = field(default_factory=list)
    said_K: list[float] = field(default_factory=list)
    markov_1r: Tensor | None = None
    sure: float = 1.0


class BlockState(HeadState):
    """One sequence's place in the head.

    The cache holds the positions before `cache.end`. `block` is what the block of the round says, valid until the next.
    `habits` are what verification taught.
    """

    def __init__(self, window: int, habits: Habits) -> None:
        super().__init__(window)
        self.habits = habits
        self.cache = ContextCache(0)
        self.block = Said()

    @property
    def unread(self) -> int:
        return self.cache.end

    def _begin_at(self, start: int) -> None:
        self.cache = ContextCache(start)

    def settle(self) -> None:
        """All positions before `held` are in the cache."""
        self._features = []
        self.cache.keep_last(self.window)

    def free(self) -> None:
        super().free()
        self.block = Said()
