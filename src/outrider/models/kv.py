"""Keys and values of one sequence, for the native decoder: one contiguous block that doubles when it is full.

Shapes: L layers, T positions, G key-value heads, D head width, m rows of the latest pass.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from outrider.kernels import Room

FIRST_CHUNK = 256


class DecoderCache:
    """`length` committed positions, then `pending` rows of the latest pass, then spare room.

    A sliding window is a mask, not an eviction: every position stays, so that rolling back across the window's edge is
    as exact as anywhere else. Rows of a tree may reach past `context_length` in storage, never in position.
    """

    def __init__(
        self,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        *,
        context_length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.context_length = context_length
        self.length = 0
        self.pending = 0
        self._freed = False
        self._store = torch.empty((n_layers, 2, 0, n_kv_heads, head_dim), dtype=dtype, device=device)
        self._views()

    def _views(self) -> None:
        """One [T, G, D] view a layer, made when the block moves and not once a pass."""
        self.keys = list(self._store[:, 0].unbind(0))
        self.values = list(self._store[:, 1].unbind(0))

    @property
    def capacity(self) -> int:
        return self._store.shape[2]

    @property
    def store(self) -> Tensor:
        """[L, 2, T, G, D]: keys and values of all layers, spare room included; `reserve` may move it."""
        return self._store

    @property
    def nbytes(self) -> int:
        """Bytes held, spare room included."""
        return self._store.numel() * self._store.element_size()

    def reserve(self, rows: int) -> None:
        """Makes room for `rows` pending rows behind the committed positions, and drops those of the pass before.

        Invalidates `keys` and `values` taken earlier.
        """
        assert not self._freed, "the cache was freed"
        need = self.length + rows
        if need > self.capacity:
            self._grow(max(need, min(max(FIRST_CHUNK, 2 * self.capacity), self.context_length)))
        self.pending = rows

    @torch.inference_mode(False)
    def _grow(self, capacity: int) -> None:
        """Moves to a larger block: an ordinary tensor, even inside a pass, so that it can be written outside one."""
        n_layers, two, _, n_heads, head_dim = self._store.shape
        shape, dtype = (n_layers, two, capacity, n_heads, head_dim), self._store.dtype
        if self._store.device.type == "cpu":  # large pages: a row of a head is short, and rows lie apart
            nbytes = math.prod(shape) * dtype.itemsize
            grown = Room(nbytes).take(nbytes).view(dtype).view(shape)
        else:
            grown = self._store.new_empty(shape)
        grown[:, :, : self.length] = self._store[:, :, : self.length]
        self._store = grown
        self._views()

    def keep(self, rows: Seq[int]) -> None:
        """Commits these pending rows (a path: increasing) in order; a prefix of the rows moves no data."""
        count = len(rows)
        assert all(a < b for a, b in itertools.pairwise(rows)), f"rows {list(rows)} are not increasing"
        assert not count or 0 <= rows[0] <= rows[-1] < self.pending, f"rows {list(rows)} of {self.pending} pending rows"
        start = self.length
        if count and rows[-1] != count - 1:
            source = torch.tensor([start + row for row in rows], device=self._store.device)
            self._store[:, :, start : start + count] = self._store.index_select(2, source)
        self.length += count
        self.pending = 0

    def truncate(self, length: int) -> None:
        """Forgets the committed positions from `length` on; pending rows are dropped."""
        assert 0 <= length <= self.length, f"cannot truncate {self.length} positions to {length}"
        self.length = length
        self.pending = 0

    def free(self) -> None:
        """Gives the memory back; the cache must not be used again."""
        self._store = self._store[:, :, :0].clone()
        self._views()
        self.length = self.pending = 0
        self._freed = True

    def digest(self) -> str:
        """SHA-256 of the committed keys and values, byte for byte."""
        digest = hashlib.sha256(f"{self.length} {self._store.dtype}".encode())
        for layer_2TGD in self._store[:, :, : self.length]:
            digest.update(layer_2TGD.contiguous().cpu().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def check_integrity(self) -> None:
        """Asserts that lengths, storage and views agree."""
        assert 0 <= self.length <= self.context_length, f"{self.length} positions of {self.context_length}"
        assert 0 <= self.length + self.pending <= self.capacity, f"{self.pending} pending rows"
        assert len(self.keys) == len(self.values) == self._store.shape[0]
        assert all(key.data_ptr() == layer.data_ptr() for key, layer in zip(self.keys, self._store, strict=True))
        assert not self._freed or self.capacity == 0
