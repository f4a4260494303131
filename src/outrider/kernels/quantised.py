"""Linear layers over the quantised blocks of GGUF files, repacked without loss.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from outrider.kernels import ggml
from outrider.kernels.dispatch import CALLS, CHOICE, DTYPE_CODE
from outrider.kernels.room import Room

if TYPE_CHECKING:
    from outrider.kernels._kernels import Chain, Level, Stack, Walker

_LEVEL = CHOICE.level

QUANTISED_TYPES = frozenset(ggml.FORMATS)
"""Names of the block types that the kernels compute with."""


class BlockRows(NamedTuple):
    """Rows of blocks as a file has them, uint8 [rows, bytes of a row], and the order in which they are taken (row
    numbers; None: all, as they stand)."""

    blocks: Tensor
    order: Tensor | None = None

    @property
    def rows(self) -> int:
        return len(self.blocks if self.order is None else self.order)

    def addresses(self) -> Tensor:
        """int64 [rows]: where each row begins."""
        if self.order is None:
            numbers = torch.arange(len(self.blocks))
        else:
            numbers = self.order.to(torch.int64)
            assert 0 <= int(numbers.min()) <= int(numbers.max()) < len(self.blocks), "rows that are not there"
        return numbers * self.blocks.stride(0) + self.blocks.data_ptr()

    def copied(self) -> Tensor:
        return self.blocks if self.order is None else self.blocks[self.order]


class QuantisedLinear:
    """y = x W^T + b: codes of the file times activations of 8 bits, quantised by row and group of 32.

    Row-invariant: a row's result is bit-identical whatever the other rows, their number, and the threads. Made by
    `pack_quantised`.
    """

    def __init__(
        self, sources: Seq[BlockRows], kind: str, inputs: int, bias_N: Tensor | None, room: Room | None
    ) -> None:
        self.out_features, self.in_features = sum(source.rows for source in sources), inputs
        self.dtype = kind
        self._bias_N = None if bias_N is None else bias_N.detach().float().contiguous()
        self._bias_at = 0 if self._bias_N is None else self._bias_N.data_ptr()
        self._level = _LEVEL if all(source.blocks.device.type == "cpu" for source in sources) else None
        if self._level is None:
            self._store = (
                torch.cat([source.copied() for source in sources]) if len(sources) > 1 else sources[0].copied()
            )
            return
        self._number = ggml.FORMATS[kind].number
        size = self._level.quant_bytes(self.out_features, self.in_features, self._number)
        self._store = room.take(size) if room else torch.empty(size, dtype=torch.uint8)
        self._store_at = self._store.data_ptr()
        rows_N = torch.cat([source.addresses() for source in sources])
        self._level.quant_pack_rows(
            rows_N.data_ptr(), self._store_at, self.out_features, self.in_features, self._number
        )

    @property
    def nbytes(self) -> int:
        """Bytes held: packed weights (outputs rounded up to a panel) and bias."""
        return self._store.nbytes + (0 if self._bias_N is None else self._bias_N.nbytes)

    @property
    def level(self) -> Level | None:
        """For which the weights are packed; None where torch does the work."""
        return self._level

    def add_to(self, stack: Stack | Walker | Chain, role: str) -> None:
        """Makes this one of the matrices called `role` of the latest layer of `stack` (the one of a chain; the only one
        of a walker), which must not outlive it."""
        stack.quant_linear(role, self._store_at, self._bias_at, self.out_features, self.in_features, self._number)

    def __call__(self, x_MK: Tensor) -> Tensor:
        """[M, N] float32. A row with a number that is not finite gives no finite number."""
        if self._level is None:
            return ggml.linear(x_MK, self._store, self.dtype, self._bias_N)
        rows, width = x_MK.shape
        assert width == self.in_features, f"rows of {width} for {self.in_features} inputs"
        assert x_MK.dtype == torch.float32, f"rows are {x_MK.dtype}"
        x_MK = x_MK.contiguous()
        y_MN = torch.empty((rows, self.out_features), dtype=torch.float32)
        self._level.quant_linear(
            self._store_at,
            self._bias_at,
            x_MK.data_ptr(),
            y_MN.data_ptr(),
            rows,
            self.out_features,
            width,
            self._number,
        )
        CALLS["quantised_linear"] += 1
        return y_MN


def can_encode(inputs: int) -> bool:
    """Whether rows of `inputs` weights are whole blocks of Q4_0 and Q8_0, and kernels can compute with them."""
    return _LEVEL is not None and inputs % ggml.FORMATS["Q4_0"].inputs == 0


def encode_q4_0(x_NK: Tensor) -> Tensor:
    """uint8 [N, bytes of a row]: float32 rows as Q4_0 blocks, 4.5 bits a weight, with some loss."""
    if _LEVEL is None or x_NK.device.type != "cpu":
        return ggml.encode_q4_0(x_NK)
    rows, inputs = x_NK.shape
    assert x_NK.dtype == torch.float32, f"weights are {x_NK.dtype}"
    x_NK = x_NK.contiguous()
    block = ggml.FORMATS["Q4_0"]
    out = torch.empty((rows, block.row_nbytes(inputs)), dtype=torch.uint8)
    _LEVEL.encode_q4_0(x_NK.data_ptr(), out.data_ptr(), x_NK.numel() // block.inputs)
    CALLS["encode_q4_0"] += 1
    return out


def can_dequantise(kind: str, dtype: torch.dtype) -> bool:
    """Whether `dequantise` has a kernel for this type and result."""
    return _LEVEL is not None and kind in ggml.FORMATS and dtype in DTYPE_CODE


def dequantise(raw: Tensor, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """`raw` blocks (uint8) as a new tensor of `shape`, whose rows are whole blocks: exact in float32, rounded once."""
    assert can_dequantise(kind, dtype), f"no kernel turns {kind} into {dtype}"
    assert raw.numel() == math.prod(shape[:-1]) * ggml.FORMATS[kind].row_nbytes(shape[-1]), "blocks of another size"
    raw = raw.contiguous()
    out = torch.empty(shape, dtype=dtype)
    extension = importlib.import_module("outrider.kernels._kernels")
    extension.dequantise(raw.data_ptr(), out.data_ptr(), out.numel(), ggml.FORMATS[kind].number, DTYPE_CODE[dtype])
    CALLS["dequantise"] += 1
    return out


def pack_quantised(raw: Tensor, kind: str, shape_NK: tuple[int, int], bias_N: Tensor | None = None) -> QuantisedLinear:
    """Repacks the blocks of a GGUF tensor, N rows of K inputs; the caller may drop (or unmap) `raw` (uint8).

    `kind` is a name of `ggml.FORMATS`. Without kernels it keeps `raw` and decodes it at each call: exact, and slow.
    """
    outputs, inputs = shape_NK
    assert kind in ggml.FORMATS, f"{kind} has no kernel; these have: {', '.join(ggml.FORMATS)}"
    expected = outputs * ggml.FORMATS[kind].row_nbytes(inputs)
    assert raw.numel() == expected > 0, f"{raw.numel()} bytes for {kind} {shape_NK}, which takes {expected}"
    return pack_quantised_rows([BlockRows(raw.reshape(outputs, -1))], kind, inputs, bias_N)


def pack_quantised_rows(
    sources: Seq[BlockRows], kind: str, inputs: int, bias_N: Tensor | None = None, *, room: Room | None = None
) -> QuantisedLinear:
    """The same for rows of several tensors of one kind, stacked as one matrix. Nothing of them is copied on the way.
    The packed weights lie in `room`, or in memory of their own."""
    assert kind in ggml.FORMATS, f"{kind} has no kernel; these have: {', '.join(ggml.FORMATS)}"
    row_nbytes, outputs = ggml.FORMATS[kind].row_nbytes(inputs), sum(source.rows for source in sources)
    for blocks, _ in sources:
        assert blocks.dtype == torch.uint8, f"raw blocks are {blocks.dtype}"
        assert blocks.shape[1:] == (row_nbytes,), f"rows of {tuple(blocks.shape[1:])} bytes, {kind} has {row_nbytes}"
        assert blocks.stride(1) == 1, "bytes of a row must follow one another"
    assert outputs > 0, "a matrix without rows"
    assert bias_N is None or bias_N.shape == (outputs,), "a bias of another width than the weight"
    return QuantisedLinear(sources, kind, inputs, bias_N, room)
