"""Matrices: the kernels' packed form on a CPU that has them, plain torch elsewhere.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider import kernels
from outrider.kernels import PackedLinear, QuantisedLinear, Room
from outrider.models.loader.checkpoint import RawTensor
from outrider.models.loader.dequantise import FORMATS_BY_NAME, dequantise
from outrider.models.loader.stored_rows import StoredRows

WIDEN_ROWS = 16
"""From this many rows on, widening bfloat16 weights to float32 is cheaper than torch's bfloat16 product on a CPU."""


class Linear(Protocol):
    """y = x W^T + b over float32 rows."""

    @property
    def nbytes(self) -> int: ...

    def __call__(self, x_MK: Tensor) -> Tensor: ...


class TorchLinear:
    """Keeps the [N, K] matrix it is given. A bfloat16 matrix rounds its input to bfloat16, unless it is widened."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> None:
        self.weight_NK = weight_NK
        self.bias_N = bias_N
        self._wide = weight_NK.element_size() == 4

    @property
    def nbytes(self) -> int:
        return self.weight_NK.nbytes + (0 if self.bias_N is None else self.bias_N.nbytes)

    def __call__(self, x_MK: Tensor) -> Tensor:
        if self._wide:
            return F.linear(x_MK, self.weight_NK, self.bias_N)
        if x_MK.shape[0] >= WIDEN_ROWS and x_MK.device.type == "cpu":
            return F.linear(x_MK, self.weight_NK.float(), self.bias_N)
        y_MN = F.linear(x_MK.to(self.weight_NK.dtype), self.weight_NK).float()
        return y_MN if self.bias_N is None else y_MN.add_(self.bias_N)


class StackedLinear:
    """Several matrices that read the same rows; their outputs side by side."""

    def __init__(self, parts: Seq[Linear]) -> None:
        self.parts = list(parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def __call__(self, x_MK: Tensor) -> Tensor:
        return torch.cat([part(x_MK) for part in self.parts], dim=1)


def packed_parts(linear: Linear) -> tuple[PackedLinear | QuantisedLinear, ...] | None:
    """The kernels' layers that `linear` is made of; None if there is another among them."""
    parts = linear.parts if isinstance(linear, StackedLinear) else [linear]
    packed = tuple(part for part in parts if isinstance(part, PackedLinear | QuantisedLinear))
    return packed if len(packed) == len(parts) else None


class Embedding(Protocol):
    """Token ids (int64) to float32 rows."""

    @property
    def nbytes(self) -> int: ...

    def __call__(self, tokens_M: Tensor) -> Tensor: ...


class TableEmbedding:
    """A float32 or bfloat16 table [V, K]."""

    def __init__(self, table_VK: Tensor) -> None:
        self.table_VK = table_VK

    @property
    def nbytes(self) -> int:
        return self.table_VK.nbytes

    def __call__(self, tokens_M: Tensor) -> Tensor:
        return self.table_VK[tokens_M].float()


class StoredEmbedding:
    """Rows of a matrix that stay in its file, decoded to `dtype` when looked up. A call raises ModelFileError when
    the file changed meanwhile."""

    def __init__(self, table: RawTensor, dtype: torch.dtype) -> None:
        assert table.row_order is None, "an embedding's rows stand in order"
        self._kind, self._dtype, self._width = FORMATS_BY_NAME[table.type_name], dtype, table.shape[1]
        self._rows = StoredRows(table.place, table.data.nbytes // table.shape[0])

    @property
    def nbytes(self) -> int:
        """Nothing: the rows are in the file."""
        return 0

    def __call__(self, tokens_M: Tensor) -> Tensor:
        blocks = self._rows.read(tokens_M.tolist())
        return dequantise(blocks.view(-1), self._kind, (len(tokens_M), self._width), self._dtype).float()


def make_linear(
    chunks: Iterator[Tensor], shape_NK: tuple[int, int], bias_N: Tensor | None = None, *, room: Room | None = None
) -> Linear:
    """The fastest form of a float32 or bfloat16 matrix where it lies, given some rows at a time: each chunk is dropped
    before the next is made. All chunks but the last of a tensor have a multiple of 32 rows."""
    first_NK = next(chunks)
    rest = chain([first_NK], chunks)
    if kernels.available() and first_NK.device.type == "cpu":
        return kernels.pack_linear_chunks(rest, shape_NK, first_NK.dtype, bias_N, room=room)
    weight_NK, at = first_NK.new_empty(shape_NK), 0
    for chunk_NK in rest:
        weight_NK[at : at + len(chunk_NK)] = chunk_NK
        at += len(chunk_NK)
    assert at == shape_NK[0], f"{at} rows of {shape_NK[0]}"
    return TorchLinear(weight_NK, bias_N)
