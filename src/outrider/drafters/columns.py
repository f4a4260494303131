"""What the columns of a drafter's logits stand for, where they are fewer than the target's tokens.

Processors that look at single tokens (penalties, biases, bans, grammars) work in the target's columns; everything else
works in the drafter's own, with the same result, since q is 0 at every other token.

Shapes: n rows, S own columns, V target vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.core.row import Row


class Columns:
    """The tokens `ids_S` (ascending), out of `size`; None: the first tokens, one a column."""

    def __init__(self, ids_S: Tensor | None, size: int) -> None:
        self.size = size
        self._ids_S = ids_S
        self._ids: list[int] | None = None if ids_S is None else ids_S.tolist()

    def token(self, column: int) -> int:
        return column if self._ids is None else self._ids[column]

    def column(self, token: int) -> int:
        """Of a token that has one."""
        return token if self._ids_S is None else int(torch.searchsorted(self._ids_S, token))

    def find(self, token: int) -> int | None:
        """The column of a token; None where `ids_S` does not name it."""
        column = self.column(token)
        if self._ids is None:
            return column
        return column if column < len(self._ids) and self._ids[column] == token else None

    def widen(self, logits_nS: Tensor) -> Tensor:
        """[n, V]: -inf at tokens that no column stands for."""
        if logits_nS.shape[1] == self.size:
            return logits_nS
        wide_nV = logits_nS.new_full((len(logits_nS), self.size), -torch.inf)
        wide_nV[:, slice(logits_nS.shape[1]) if self._ids_S is None else self._ids_S] = logits_nS
        return wide_nV

    def over_tokens(self, q: Row) -> Row:
        """A row over the columns as one over the target's tokens."""
        if self._ids_S is None:
            token_S = torch.arange(q.size) if q.token_S is None and q.size < self.size else q.token_S
        else:
            token_S = self._ids_S if q.token_S is None else self._ids_S[q.token_S]
        return Row(self.size, q.weight_S, token_S)
