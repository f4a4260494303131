"""Draft tokens from rows of logits: a greedy walk in one call, and the distribution that a token is drawn from.

Shapes: M rows, S columns of a row, r rank of the matrix, V tokens, R rows of pairs, W ways.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.kernels import walk_reference
from outrider.kernels.dispatch import CALLS, CHOICE
from outrider.kernels.ops import PackedLinear
from outrider.kernels.quantised import QuantisedLinear
from outrider.kernels.walk_reference import Pairs

if TYPE_CHECKING:
    from outrider.kernels._kernels import Walker

_LEVEL = CHOICE.level


class Walk:
    """Picks the likeliest column of one row after the other, each row changed by the token before it.

    Column c stands for the token `ids_S[c]` (ascending, below `tokens`). Behind token t a row gets `matrix` of the
    row t of `table_Vr` (without them: nothing), and what the sequence's `Pairs` say. In one call of the kernels where
    the matrix is packed for them.
    """

    def __init__(
        self,
        ids_S: Tensor,
        tokens: int,
        table_Vr: Tensor | None = None,
        matrix: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        assert table_Vr is None or len(table_Vr) >= tokens > int(ids_S.max()), "a token without a row of the table"
        self._ids_S, self._tokens, self._table_Vr, self._matrix = ids_S.contiguous(), tokens, table_Vr, matrix
        self._walker = self._make_walker()

    def _make_walker(self) -> Walker | None:
        matrix, table_Vr, at = self._matrix, self._table_Vr, self._ids_S.data_ptr()
        if _LEVEL is None:
            return None
        if matrix is None or table_Vr is None:
            return _LEVEL.walker(len(self._ids_S), self._tokens, at, 0)
        if not isinstance(matrix, (PackedLinear, QuantisedLinear)) or matrix.level is None or not _plain(table_Vr):
            return None
        walker = _LEVEL.walker(len(self._ids_S), self._tokens, at, table_Vr.data_ptr())
        matrix.add_to(walker, "added")
        return walker

    def __call__(
        self,
        logits_MS: Tensor,
        counts: Seq[int],
        before: Seq[int],
        pairs: Seq[Pairs | None] = (),
        *,
        shares: bool = False,
    ) -> tuple[list[int], list[float], list[float]]:
        """Of each row: (likeliest column, the first of equals; its logit, NaN where one of the row is not finite; its
        probability, if `shares`). Sequence i has the next counts[i] rows, the first behind the token before[i]. What
        is added stays in `logits_MS`."""
        assert sum(counts) == len(logits_MS), f"{len(logits_MS)} rows for {list(counts)}"
        if self._walker is None or not _plain(logits_MS):
            own: list[Pairs | None] = list(pairs) or [None] * len(counts)
            ends = (self._table_Vr, self._matrix, self._ids_S)
            return walk_reference.walk_(logits_MS, counts, before, own, *ends, shares=shares)
        columns_M = torch.empty(len(logits_MS), dtype=torch.int64)
        tops_M = torch.empty(len(logits_MS), dtype=torch.float32)
        shares_M = torch.empty(len(logits_MS) if shares else 0, dtype=torch.float32)
        counts_n, before_n = torch.tensor(counts), torch.tensor(before)
        kept = [one for one in pairs if one is not None]
        self._walker.run(
            logits_MS.data_ptr(),
            counts_n.data_ptr(),
            before_n.data_ptr(),
            len(counts),
            [at for one in pairs for at in ((0, 0, 0) if one is None else tuple(part.data_ptr() for part in one))],
            kept[0].columns_RW.shape[1] if kept else 0,
            columns_M.data_ptr(),
            tops_M.data_ptr(),
            shares_M.data_ptr() if shares else 0,
        )
        CALLS["walk"] += 1
        return columns_M.tolist(), tops_M.tolist(), shares_M.tolist()


def softmax(logits_S: Tensor, temperature: float) -> Tensor | None:
    """float64 [S], summing to 1: softmax(logits / temperature), its exponentials float32; None where a logit is not
    finite."""
    if _LEVEL is None or not _plain(logits_S):
        return walk_reference.softmax(logits_S, temperature)
    weight_S = torch.empty(logits_S.shape, dtype=torch.float64)
    extension = importlib.import_module("outrider.kernels._kernels")
    CALLS["softmax"] += 1
    finite = extension.softmax(logits_S.data_ptr(), weight_S.data_ptr(), len(logits_S), temperature)
    return weight_S if finite else None


def _plain(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()
