"""What a block drafter asks of the runs of a round."""

from __future__ import annotations

from itertools import accumulate, pairwise

from outrider.drafters.block_state import BlockState
from outrider.drafters.chain import Run

BlockRun = Run[BlockState]


def last(run: BlockRun) -> int:
    """The token before the next one."""
    return run.tokens[-1] if run.tokens else run.seq.tokens[-1]


def spans(counts: list[int]) -> list[tuple[int, int]]:
    """(first row, row behind the last) of each of so many rows that follow one another."""
    return list(pairwise(accumulate(counts, initial=0)))
