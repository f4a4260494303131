"""What the attention of a head of one layer remembers of a sequence.

Shapes: M rows, T cached positions, G key-value heads, D head width.
"""

from __future__ import annotations

from torch import Tensor

FIRST_ROWS = 64


class HeadCache:
    """Keys and values of one sequence in one layer, of the positions from `start` to `end`; grows by doubling."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.length = 0
        self._keys_TGD: Tensor | None = None
        self._values_TGD: Tensor | None = None

    @property
    def end(self) -> int:
        return self.start + self.length

    def append(self, k_MGD: Tensor, v_MGD: Tensor) -> None:
        """Rows of the positions from `end` on."""
        need = self.length + len(k_MGD)
        keys, values = self._keys_TGD, self._values_TGD
        if keys is None or values is None or need > len(keys):
            room = (max(need, 2 * self.length, FIRST_ROWS), *k_MGD.shape[1:])
            grown_keys, grown_values = k_MGD.new_empty(room), v_MGD.new_empty(room)
            if keys is not None and values is not None:
                grown_keys[: self.length], grown_values[: self.length] = keys[: self.length], values[: self.length]
            keys, values = self._keys_TGD, self._values_TGD = grown_keys, grown_values
        keys[self.length : need], values[self.length : need] = k_MGD, v_MGD
        self.length = need

    def truncate(self, end: int) -> None:
        """Forgets the positions from `end` on."""
        assert self.start <= end <= self.end, f"cannot cut {self.start}..{self.end} back to {end}"
        self.length = end - self.start

    def keep_last(self, count: int) -> None:
        """Forgets all but the last `count` positions; moves memory only when most of it is forgotten."""
        drop = self.length - count
        if drop >= max(count, FIRST_ROWS) and self._keys_TGD is not None and self._values_TGD is not None:
            self._keys_TGD = self._keys_TGD[drop : self.length].clone()
            self._values_TGD = self._values_TGD[drop : self.length].clone()
            self.start, self.length = self.start + drop, count

    def last(self, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the last `count` positions, [T, G, D] each."""
        assert self._keys_TGD is not None
        assert self._values_TGD is not None
        rows = slice(max(0, self.length - count), self.length)
        return self._keys_TGD[rows], self._values_TGD[rows]
