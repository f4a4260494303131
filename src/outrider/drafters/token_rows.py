"""Embeddings of tokens for a head: its own table, or rows of the target's, which may lie in a file.

Shapes: T tokens, d head width, R rows that are kept, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

import torch
from torch import Tensor

from outrider.kernels import TokenTable

KEPT = 8192
"""Tokens that a head drafts whose embeddings are kept. Of more than so many the first: they are the frequent ones."""
RECENT = 1024
"""Other tokens whose embeddings are remembered, in the place of the oldest."""


class TokenRows(Protocol):
    """Embeddings by token. `table` is what is at hand without a call."""

    table: TokenTable

    def __call__(self, tokens: Seq[int]) -> Tensor:
        """[T, d]"""
        ...


class OwnRows:
    """Those of the head's own table [V, d]."""

    def __init__(self, rows_Vd: Tensor) -> None:
        self.table = TokenTable(rows_Vd.detach(), None)

    def __call__(self, tokens: Seq[int]) -> Tensor:
        """[T, d]"""
        return self.table.rows_Rd[torch.tensor(tokens, device=self.table.rows_Rd.device)]


class SharedRows:
    """Those that the target looks up, out of `size`; at hand are the tokens `drafted`, and the latest others."""

    def __init__(self, look_up: Callable[[Seq[int]], Tensor], size: int, drafted: Seq[int]) -> None:
        self._look_up = look_up
        kept = drafted[:KEPT]
        kept_Rd = look_up(kept)
        rows_Rd = kept_Rd.new_zeros((min(size, len(kept) + RECENT), kept_Rd.shape[1]))
        rows_Rd[: len(kept)] = kept_Rd
        row_of_V = torch.full((size,), -1, dtype=torch.int32)
        row_of_V[torch.tensor(kept)] = torch.arange(len(kept), dtype=torch.int32)
        self.table = TokenTable(rows_Rd, row_of_V)
        self._row_of_V = row_of_V
        self._kept = {token: row for row, token in enumerate(kept)}
        self._recent: dict[int, int] = {}  # rows of tokens, the oldest first
        self._free = list(range(len(kept), len(rows_Rd)))

    def __call__(self, tokens: Seq[int]) -> Tensor:
        """[T, d]"""
        rows = [self._row(token) for token in tokens]
        if min(rows) >= 0:
            return self.table.rows_Rd[rows]
        rows_Td = self._look_up(tokens)
        for n, token in list(enumerate(tokens))[-RECENT:]:
            if self._row(token) < 0:
                self._remember(token, rows_Td[n])
        return rows_Td

    def _row(self, token: int) -> int:
        """Of the table; negative for a token that is not at hand."""
        return self._kept.get(token, self._recent.get(token, -1))

    def _remember(self, token: int, row_d: Tensor) -> None:
        if self._free:
            row = self._free.pop()
        else:
            oldest = next(iter(self._recent))
            row = self._recent.pop(oldest)
            self._row_of_V[oldest] = -1
        self.table.rows_Rd[row] = row_d
        self._row_of_V[token] = self._recent[token] = row
