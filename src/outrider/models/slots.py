"""Static keys and values: a block allocated once, in which every sequence has a slot of its own.

Shapes: L layers, S slots, T positions of a slot, G key-value heads, D head width.
"""

from __future__ import annotations

import heapq
import weakref

import torch
from torch import Tensor

from outrider.models.kv import DecoderCache


class Arena:
    """`slots` runs of `length` positions at addresses that never change, each with a spare position behind it.

    The spare position takes what rows of padding write; nothing reads it. Numbers are finite from the start, since a
    masked position still takes part in the products. `store` is [S, L, 2, T + 1, G, D].
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        *,
        slots: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (slots, n_layers, 2, length + 1, n_kv_heads, head_dim)
        self.slots, self.length = slots, length
        self.store = torch.zeros(shape, dtype=dtype, device=device)
        self._free = list(range(slots))

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """The lowest free slot; None when all are taken."""
        return heapq.heappop(self._free) if self._free else None

    def give_back(self, slot: int) -> None:
        assert slot not in self._free, f"slot {slot} is free already"
        heapq.heappush(self._free, slot)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(keys, values) of one layer, each [S, T + 1, G, D]."""
        return self.store[:, index, 0], self.store[:, index, 1]


class SlotCache(DecoderCache):
    """A sequence's cache in a slot of an arena, as long as it fits; then, or without a free slot, an ordinary one."""

    def __init__(self, arena: Arena, *, context_length: int) -> None:
        _, n_layers, _, _, n_kv_heads, head_dim = arena.store.shape
        super().__init__(
            n_layers,
            n_kv_heads,
            head_dim,
            context_length=context_length,
            dtype=arena.store.dtype,
            device=arena.store.device,
        )
        self.arena = arena
        self.slot = arena.take()
        if self.slot is not None:
            self._release = weakref.finalize(self, arena.give_back, self.slot)
            self._store = arena.store[self.slot]
            self._views()

    @property
    def capacity(self) -> int:
        return super().capacity if self.slot is None else self.arena.length

    def _grow(self, capacity: int) -> None:
        super()._grow(capacity)
        self._leave()

    def free(self) -> None:
        super().free()
        self._leave()

    def _leave(self) -> None:
        """Gives the slot back; its content was moved or is no longer wanted."""
        if self.slot is not None:
            self.slot = None
            self._release()
