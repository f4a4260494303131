"""What the layers of a head remember of a sequence.

Shapes: L layers, M rows, T positions, G key-value heads, D head width.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

FIRST_ROWS = 64


class Span(NamedTuple):
    """So many rows of one sequence, behind those of its cache; each sees the last `window` positions of that."""

    cache: HeadCache
    rows: int
    window: int


class HeadCache:
    """Keys and values of the positions from `start` to `end`, [L, 2, T, G, D]; grows by doubling. Rows behind `length`
    are scratch."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.length = 0
        self._store: Tensor | None = None

    @property
    def end(self) -> int:
        return self.start + self.length

    def room(self, rows: int, like: Tensor | None = None) -> Tensor:
        """The store, with room for so many rows behind `length`. The first rows say what they are `like`: a tensor of
        any rows [L, 2, M, G, D]."""
        store, need = self._store, self.length + rows
        if store is None or need > store.shape[2]:
            like = store if like is None else like
            assert like is not None, "an empty cache has no shape"
            layers, both, _, heads, width = like.shape
            grown = like.new_empty((layers, both, max(need, 2 * self.length, FIRST_ROWS), heads, width))
            if store is not None:
                grown[:, :, : self.length] = store[:, :, : self.length]
            store = self._store = grown
        return store

    def append(self, kv_L2MGD: Tensor) -> None:
        """Rows of the positions from `end` on."""
        rows = kv_L2MGD.shape[2]
        store = self.room(rows, kv_L2MGD)
        store[:, :, self.length : self.length + rows] = kv_L2MGD
        self.length += rows

    def last(self, count: int) -> Tensor:
        """[L, 2, T, G, D] of the last `count` positions."""
        assert self._store is not None, "an empty cache"
        return self._store[:, :, max(0, self.length - count) : self.length]

    def truncate(self, end: int) -> None:
        """Forgets the positions from `end` on."""
        assert self.start <= end <= self.end, f"cannot cut {self.start}..{self.end} back to {end}"
        self.length = end - self.start

    def keep_last(self, count: int) -> None:
        """Forgets all but the last `count` positions; moves memory only when most of it is forgotten."""
        drop = self.length - count
        if drop >= max(count, FIRST_ROWS) and self._store is not None:
            self._store = self._store[:, :, drop : self.length].clone()
            self.start, self.length = self.start + drop, count
