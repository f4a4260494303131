"""Memory for packed weights, in few large blocks: nearly all of it lies on the system's large pages."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

LARGE_PAGE = 1 << 21
BLOCK_BYTES = 1 << 27
ALIGNMENT = 64


class Room:
    """Hands out memory for one model's weights. A block is freed when the last tensor in it is.

    A matrix of its own block would lose up to a large page at each end, a third of the weights of a 1.5B model. What a
    block does not use is never touched, so it takes addresses and no memory.
    """

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> Tensor:
        """uint8 [nbytes], uninitialised, at a multiple of 64."""
        rounded = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if rounded > len(self._rest):
            block = _block(max(rounded, self._block_bytes) + LARGE_PAGE)
            self._rest = block[-block.data_ptr() % LARGE_PAGE :]
        taken, self._rest = self._rest[:nbytes], self._rest[rounded:]
        return taken


def _block(nbytes: int) -> Tensor:
    """Asks for large pages as a whole: the system decides when a page is first touched."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(nbytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
