"""Weights rounded to the four bits in which a CPU serves them, so that a head learns to live with that.

The gradient is made at the rounded weights and moves the whole ones: the straight-through estimator (Bengio, Léonard
and Courville 2013, 1308.3432, section 4).

Shapes: N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager

import torch
from torch import Tensor

from outrider.kernels import can_encode, dequantise, encode_q4_0


@contextmanager
def rounded(matrices: Seq[Tensor]) -> Iterator[None]:
    """Meanwhile these matrices [N, K] have rounded numbers; gradients that are made then stay."""
    whole = [matrix.data for matrix in matrices]
    round_(matrices)
    try:
        yield
    finally:
        for matrix, weight_NK in zip(matrices, whole, strict=True):
            matrix.data = weight_NK


def round_(matrices: Seq[Tensor]) -> None:
    """Gives these matrices [N, K] rounded numbers."""
    for matrix in matrices:
        matrix.data = four_bits(matrix.data)


@torch.no_grad()
def four_bits(weight_NK: Tensor) -> Tensor:
    """float32: what the kernels would multiply by; the weights themselves where a row is no whole blocks."""
    if not can_encode(weight_NK.shape[1]):
        return weight_NK
    return dequantise(encode_q4_0(weight_NK), "Q4_0", tuple(weight_NK.shape), torch.float32)
