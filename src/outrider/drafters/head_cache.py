"""What the attention of a head of one layer remembers of a sequence.

Shapes: M rows, T positions, G key-value heads, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

FIRST_ROWS = 64


class HeadCache:
    """Keys and values of the positions from `start` to `end`, [2, T, G, D]; grows by doubling."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.length = 0
        self._store_2TGD: Tensor | None = None

    @property
    def end(self) -> int:
        return self.start + self.length

    def room(self, rows: int, heads: tuple[int, int], dtype: torch.dtype, device: str | torch.device = "cpu") -> Tensor:
        """[2, T, G, D]: the store, with room for so many rows behind `length`. `heads` are (G, D)."""
        store, need = self._store_2TGD, self.length + rows
        if store is None or need > store.shape[1]:
            grown = torch.empty((2, max(need, 2 * self.length, FIRST_ROWS), *heads), dtype=dtype, device=device)
            if store is not None:
                grown[:, : self.length] = store[:, : self.length]
            store = self._store_2TGD = grown
        return store

    def append(self, kv_2MGD: Tensor) -> None:
        """Rows of the positions from `end` on."""
        rows, groups, width = kv_2MGD.shape[1:]
        store = self.room(rows, (groups, width), kv_2MGD.dtype, kv_2MGD.device)
        store[:, self.length : self.length + rows] = kv_2MGD
        self.length += rows

    def last(self, count: int) -> Tensor:
        """[2, T, G, D] of the last `count` positions."""
        assert self._store_2TGD is not None, "an empty cache"
        return self._store_2TGD[:, max(0, self.length - count) : self.length]

    def truncate(self, end: int) -> None:
        """Forgets the positions from `end` on."""
        assert self.start <= end <= self.end, f"cannot cut {self.start}..{self.end} back to {end}"
        self.length = end - self.start

    def keep_last(self, count: int) -> None:
        """Forgets all but the last `count` positions; moves memory only when most of it is forgotten."""
        drop = self.length - count
        if drop >= max(count, FIRST_ROWS) and self._store_2TGD is not None:
            self._store_2TGD = self._store_2TGD[:, drop : self.length].clone()
            self.start, self.length = self.start + drop, count
