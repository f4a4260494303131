"""The quantised blocks of GGUF files, in plain torch: the twin of the packed kernels' weights and activations.

A row is a run of blocks of 32 inputs, or 256 for the K types; f16 scales stand beside integer codes (the layouts are
facts of the file format). Shapes: N outputs, K inputs, M rows, B blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """`number` is the type's number in files; a block holds `inputs` weights in `nbytes` bytes."""

    name: str
    number: int
    inputs: int
    nbytes: int
    decode: Callable[[Tensor], Tensor]

    def row_nbytes(self, inputs: int) -> int:
        """Bytes of a row of `inputs` weights, a multiple of the block."""
        assert inputs % self.inputs == 0, f"{inputs} inputs are not whole {self.name} blocks of {self.inputs}"
        return inputs // self.inputs * self.nbytes


def _half(block_BX: Tensor, at: int) -> Tensor:
    """[B, 1] float32: the f16 at byte `at`."""
    return block_BX[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed_BX: Tensor) -> Tensor:
    """[B, 2X]: low nibbles of all bytes, then the high ones."""
    return torch.cat([packed_BX & 15, packed_BX >> 4], dim=1)


def _fifth_bits(packed_B4: Tensor) -> Tensor:
    """[B, 32] of 0 or 16."""
    bit_8 = torch.arange(8, dtype=torch.uint8)
    return ((packed_B4[:, :, None] >> bit_8) & 1).flatten(1) << 4


def _scales_and_minimums(packed_BX: Tensor) -> tuple[Tensor, Tensor]:
    """Two [B, 8, 1] float32 of six-bit numbers, out of twelve bytes."""
    first, second, third = packed_BX.reshape(-1, 3, 4).unbind(1)
    scale = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], dim=1)
    minimum = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], dim=1)
    return scale.float()[..., None], minimum.float()[..., None]


def _k_weights(block_BX: Tensor, codes_B256: Tensor) -> Tensor:
    scale_B81, minimum_B81 = _scales_and_minimums(block_BX[:, 4:16])
    unit_B11, unit_minimum_B11 = _half(block_BX, 0)[..., None], _half(block_BX, 2)[..., None]
    codes_B8X = codes_B256.float().reshape(-1, 8, 32)
    return (unit_B11 * scale_B81 * codes_B8X - unit_minimum_B11 * minimum_B81).flatten(1)


def _k_nibbles(packed_B128: Tensor) -> Tensor:
    packed_B4X = packed_B128.reshape(-1, 4, 32)
    return torch.stack([packed_B4X & 15, packed_B4X >> 4], dim=2).flatten(1)


def _q4_0(block_BX: Tensor) -> Tensor:
    return _half(block_BX, 0) * (_nibbles(block_BX[:, 2:]).float() - 8)


def _q4_1(block_BX: Tensor) -> Tensor:
    return _half(block_BX, 0) * _nibbles(block_BX[:, 4:]).float() + _half(block_BX, 2)


def _q5_0(block_BX: Tensor) -> Tensor:
    codes_B32 = _nibbles(block_BX[:, 6:]) | _fifth_bits(block_BX[:, 2:6])
    return _half(block_BX, 0) * (codes_B32.float() - 16)


def _q5_1(block_BX: Tensor) -> Tensor:
    codes_B32 = _nibbles(block_BX[:, 8:]) | _fifth_bits(block_BX[:, 4:8])
    return _half(block_BX, 0) * codes_B32.float() + _half(block_BX, 2)


def _q8_0(block_BX: Tensor) -> Tensor:
    return _half(block_BX, 0) * block_BX[:, 2:].view(torch.int8).float()


def _q4_k(block_BX: Tensor) -> Tensor:
    return _k_weights(block_BX, _k_nibbles(block_BX[:, 16:]))


def _q5_k(block_BX: Tensor) -> Tensor:
    bit_81 = torch.arange(8, dtype=torch.uint8)[:, None]
    high_B256 = ((block_BX[:, None, 16:48] >> bit_81) & 1).flatten(1) << 4
    return _k_weights(block_BX, _k_nibbles(block_BX[:, 48:]) | high_B256)


def _q6_k(block_BX: Tensor) -> Tensor:
    low_B2X = block_BX[:, :128].reshape(-1, 2, 64)
    high_B2X = block_BX[:, 128:192].reshape(-1, 2, 32)
    shift_41 = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    low_B2X = torch.cat([low_B2X & 15, low_B2X >> 4], dim=2)
    codes_B2X = low_B2X | (((high_B2X[:, :, None] >> shift_41) & 3).flatten(2) << 4)
    scale_BX1 = _half(block_BX, 208)[..., None] * block_BX[:, 192:208].contiguous().view(torch.int8).float()[..., None]
    return (scale_BX1 * (codes_B2X.reshape(-1, 16, 16).float() - 32)).flatten(1)


FORMATS = {
    block.name: block
    for block in (
        BlockFormat("Q4_0", 2, 32, 18, _q4_0),
        BlockFormat("Q4_1", 3, 32, 20, _q4_1),
        BlockFormat("Q5_0", 6, 32, 22, _q5_0),
        BlockFormat("Q5_1", 7, 32, 24, _q5_1),
        BlockFormat("Q8_0", 8, 32, 34, _q8_0),
        BlockFormat("Q4_K", 12, 256, 144, _q4_k),
        BlockFormat("Q5_K", 13, 256, 176, _q5_k),
        BlockFormat("Q6_K", 14, 256, 210, _q6_k),
    )
}
"""The formats that have kernels, by name."""


def dequantise(raw: Tensor, kind: str, inputs: int) -> Tensor:
    """[N, K] float32: the weights of rows of `inputs` (uint8, any shape), as every reader of the format has them."""
    block = FORMATS[kind]
    rows = raw.numel() // block.row_nbytes(inputs)
    return block.decode(raw.reshape(-1, block.nbytes)).reshape(rows, inputs)


def encode_q4_0(x_NK: Tensor) -> Tensor:
    """uint8 [N, K / 32 * 18]: float32 rows as Q4_0 blocks. Of five first guesses at a block's unit, the plain one
    first, the one is kept whose codes explain most of its energy; the unit is then its least-squares fit."""
    x_B32 = x_NK.reshape(-1, 32)
    high_B1, low_B1 = x_B32.amax(1, keepdim=True), (-x_B32).amax(1, keepdim=True)
    largest_B1 = torch.where(high_B1 >= low_B1, high_B1, -low_B1)
    best_B1, unit_B1, codes_B32 = torch.zeros_like(largest_B1), torch.zeros_like(largest_B1), torch.zeros_like(x_B32)
    for steps in (8.0, 7.7, 8.3, 7.4, 8.6):
        tried_B32 = (x_B32 * (torch.full_like(largest_B1, -steps) / largest_B1)).nan_to_num().round().clamp(-8, 7)
        product_B1, energy_B1 = (x_B32 * tried_B32).sum(1, keepdim=True), (tried_B32**2).sum(1, keepdim=True)
        explained_B1 = (product_B1**2 / energy_B1).nan_to_num()
        better_B1 = explained_B1 > best_B1 * 1.00001  # more than rounding
        best_B1 = torch.where(better_B1, explained_B1, best_B1)
        unit_B1 = torch.where(better_B1, product_B1 / energy_B1, unit_B1)
        codes_B32 = torch.where(better_B1, tried_B32, codes_B32)
    sound_B1 = x_B32.isfinite().all(1, keepdim=True)
    unit_B1 = torch.where(sound_B1, unit_B1.clamp(-65504, 65504), torch.full_like(unit_B1, torch.nan))
    low_B16, high_B16 = (codes_B32 + 8).to(torch.uint8).chunk(2, dim=1)
    return torch.cat([unit_B1.half().view(torch.uint8), low_B16 | high_B16 << 4], dim=1).reshape(len(x_NK), -1)


def encode_q8_0(x_NK: Tensor) -> Tensor:
    """uint8 [N, K / 32 * 34]: float32 rows as Q8_0 blocks, codes in -127 .. 127."""
    x_B32 = x_NK.reshape(-1, 32)
    unit_B1 = x_B32.abs().amax(1, keepdim=True) / 127
    codes_B32 = (x_B32 / unit_B1).nan_to_num().round().to(torch.int8)
    unit_B1 = torch.where(x_B32.isfinite().all(1, keepdim=True), unit_B1.clamp(max=65504), torch.nan)
    return torch.cat([unit_B1.half().view(torch.uint8), codes_B32.view(torch.uint8)], dim=1).reshape(len(x_NK), -1)


def quantise_activations(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [M, K] in -127 .. 127 and scales [M, K / 32], float32: x is about code x scale in each group of 32."""
    x_MGX = x_MK.reshape(len(x_MK), -1, 32)
    largest_MG1 = x_MGX.abs().amax(2, keepdim=True)
    # not `127 / x`, which torch computes as a reciprocal and a product
    inverse_MG1 = torch.where(largest_MG1 > 0, torch.full_like(largest_MG1, 127) / largest_MG1, torch.zeros(()))
    return (x_MGX * inverse_MG1).round().flatten(1), (largest_MG1 / 127)[..., 0]


def linear(x_MK: Tensor, raw: Tensor, kind: str, bias_N: Tensor | None = None) -> Tensor:
    """[M, N] float32: activations quantised by row and group, times the weights. Decodes all weights at each call."""
    codes_MK, scales_MG = quantise_activations(x_MK.float())
    x_MK = codes_MK * scales_MG.repeat_interleave(32, dim=1)
    return torch.nn.functional.linear(x_MK, dequantise(raw, kind, x_MK.shape[1]), bias_N)
