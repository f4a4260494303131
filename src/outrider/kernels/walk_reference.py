"""The twins of walk.py in plain torch.

Shapes: M rows, S columns of a row, r rank of the matrix, V tokens, R rows of pairs, W ways.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from torch import Tensor


class Pairs(NamedTuple):
    """What is added behind token t: `values_RW[row]` at the columns `columns_RW[row]`, row = `row_of_V[t]`; nothing
    where that is negative. int32, int64 and float32."""

    row_of_V: Tensor
    columns_RW: Tensor
    values_RW: Tensor

    def add_(self, logits_S: Tensor, token: int) -> None:
        """In place; a column may be named more than once."""
        row = int(self.row_of_V[token])
        if row >= 0:
            logits_S.index_add_(0, self.columns_RW[row], self.values_RW[row].to(logits_S))


def walk_(
    logits_MS: Tensor,
    counts: Seq[int],
    before: Seq[int],
    pairs: Seq[Pairs | None],
    table_Vr: Tensor | None,
    matrix: Callable[[Tensor], Tensor] | None,
    ids_S: Tensor,
    *,
    shares: bool,
) -> tuple[list[int], list[float], list[float]]:
    """Of each row: (likeliest column; its logit, NaN where one of the row is not finite; its probability). Each row
    gets what the token before it adds, in place."""
    columns, tops, found, first = [], [], [], 0
    for count, token, own in zip(counts, before, pairs, strict=True):
        for row_S in logits_MS[first : first + count]:
            if own is not None:
                own.add_(row_S, token)
            if table_Vr is not None and matrix is not None:
                row_S += matrix(table_Vr[token : token + 1])[0].to(row_S)
            column = int(row_S.argmax()) if bool(row_S.isfinite().all()) else -1
            columns.append(max(column, 0))
            tops.append(float(row_S[column]) if column >= 0 else math.nan)
            if shares:
                found.append(float(row_S.softmax(0)[column]) if column >= 0 else math.nan)
            token = int(ids_S[columns[-1]])
        first += count
    return columns, tops, found


def softmax(logits_S: Tensor, temperature: float) -> Tensor | None:
    """float64 [S], summing to 1, its exponentials float32; None where a logit is not finite."""
    if not bool(logits_S.isfinite().all()):
        return None
    weight_S = ((logits_S - logits_S.max()) / max(temperature, 1e-30)).clamp_(min=-87).exp_().double()
    return weight_S.div_(weight_S.sum())
