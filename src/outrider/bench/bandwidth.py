"""How fast this machine reads memory: the ceiling of a pass that reads every weight once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from outrider import kernels

BLOCK_NBYTES = 256 << 20
"""More than the last-level cache of common machines."""
COLUMNS = 4096


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """`gbps` is 1e9 bytes a second, the best of several reads; `way` is what read so fast."""

    gbps: float
    way: str
    threads: int

    def to_json(self) -> dict[str, object]:
        return {"gbps": self.gbps, "way": self.way, "threads": self.threads}


def read_bandwidth(*, rounds: int = 7) -> Bandwidth:
    """Reads a large block in several ways, with as many threads as do the work, and takes the best.

    Under 2 seconds on an idle machine; holds three quarters of a gigabyte meanwhile. The number of torch's threads is
    put back afterwards.
    """
    threads = kernels.threads() if kernels.available() else torch.get_num_threads()
    with _torch_threads(threads), torch.inference_mode():
        best = max((_gbps(read, nbytes, rounds), way) for way, nbytes, read in _ways())
    return Bandwidth(*best, threads)


def _ways() -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Name, bytes and the read itself, one after the other: the pools of torch and of the kernels never meet."""
    shape = (max(BLOCK_NBYTES // (4 * COLUMNS), 1), COLUMNS)
    if kernels.available():
        packed = kernels.pack_linear(torch.ones((2 * shape[0], COLUMNS), dtype=torch.bfloat16))
        x_MK = torch.ones(1, COLUMNS)
        yield "bfloat16 kernel, one row", packed.nbytes, lambda: packed(x_MK)
    block_NK, x_K = torch.ones(shape), torch.ones(COLUMNS)
    yield "torch sum", block_NK.nbytes, lambda: block_NK.sum()
    yield "torch maximum", block_NK.nbytes, lambda: block_NK.amax()
    yield "torch product with a vector", block_NK.nbytes, lambda: block_NK @ x_K


def _gbps(read: Callable[[], object], nbytes: int, rounds: int) -> float:
    """The best of `rounds`, after one to warm up."""
    best_s = math.inf
    read()
    for _ in range(rounds):
        began = time.perf_counter()
        read()
        best_s = min(best_s, time.perf_counter() - began)
    return nbytes / best_s / 1e9


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
