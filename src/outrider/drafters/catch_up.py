"""How drafters catch up with text: positions of several sequences, so many a pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

R = TypeVar("R")


def in_passes(missing: Iterable[tuple[R, int, int]], most: int) -> Iterator[list[tuple[R, int, int]]]:
    """The positions start..stop - 1 that each of (whose, start, stop) misses, in order, at most `most` a pass."""
    batch: list[tuple[R, int, int]] = []
    free = most
    for whose, start, last in missing:
        while start < last:
            stop = min(last, start + free)
            batch.append((whose, start, stop))
            free -= stop - start
            start = stop
            if free == 0:
                yield batch
                batch, free = [], most
    if batch:
        yield batch
