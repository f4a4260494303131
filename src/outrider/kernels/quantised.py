"""Linear layers over the quantised blocks of GGUF files, repacked without loss.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import importlib
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.kernels import ggml
from outrider.kernels.dispatch import CALLS, CHOICE, DTYPE_CODE

if TYPE_CHECKING:
    from outrider.kernels._kernels import Level, Stack

_LEVEL = CHOICE.level

QUANTISED_TYPES = frozenset(ggml.FORMATS)
"""Names of the block types that the kernels compute with."""


class QuantisedLinear:
    """y = x W^T + b: codes of the file times activations of 8 bits, quantised by row and group of 32.

    Row-invariant: a row's result is bit-identical whatever the other rows, their number, and the threads. Made by
    `pack_quantised`.
    """

    def __init__(self, raw: Tensor, kind: str, shape_NK: tuple[int, int], bias_N: Tensor | None) -> None:
        self.out_features, self.in_features = shape_NK
        self.dtype = kind
        self._bias_N = None if bias_N is None else bias_N.detach().float().contiguous()
        self._bias_at = 0 if self._bias_N is None else self._bias_N.data_ptr()
        self._level = _LEVEL if raw.device.type == "cpu" else None
        if self._level is None:
            self._store = raw
            return
        self._number = ggml.FORMATS[kind].number
        size = self._level.quant_bytes(self.out_features, self.in_features, self._number)
        self._store = torch.empty(size, dtype=torch.uint8)
        self._store_at = self._store.data_ptr()
        self._level.quant_pack(raw.data_ptr(), self._store_at, self.out_features, self.in_features, self._number)

    @property
    def nbytes(self) -> int:
        """Bytes held: packed weights (outputs rounded up to a panel) and bias."""
        return self._store.nbytes + (0 if self._bias_N is None else self._bias_N.nbytes)

    @property
    def level(self) -> Level | None:
        """For which the weights are packed; None where torch does the work."""
        return self._level

    def add_to(self, stack: Stack, role: str) -> None:
        """Makes this one of the matrices called `role` of the latest layer of `stack`, which must not outlive it."""
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
    assert kind in ggml.FORMATS, f"{kind} has no kernel; these have: {', '.join(ggml.FORMATS)}"
    outputs, inputs = shape_NK
    expected = outputs * ggml.FORMATS[kind].row_nbytes(inputs)
    assert raw.dtype == torch.uint8, f"raw blocks are {raw.dtype}"
    assert raw.numel() == expected > 0, f"{raw.numel()} bytes for {kind} {shape_NK}, which takes {expected}"
    assert bias_N is None or bias_N.shape == (outputs,), "a bias of another width than the weight"
    return QuantisedLinear(raw.contiguous(), kind, shape_NK, bias_N)
