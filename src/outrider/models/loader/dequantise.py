"""Blocks of GGML's quantised types to floats, bit for bit as the reference computes them.

Each function takes whole blocks, uint8 [B, bytes of a block], and gives float32 [B, values of a block].

Shapes: B blocks, G groups of a block, n values of a group, N rows, K columns, X bytes of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider import kernels
from outrider.kernels import ggml
from outrider.kernels.ggml import BlockFormat

CHUNK_VALUES = 1 << 15
"""Values converted at a time: temporaries stay in the cache, and torch does not split work this small over threads."""


def _half(bytes_Bn: Tensor) -> Tensor:
    return bytes_Bn.contiguous().view(torch.float16).float()


def _nibbles(bytes_BGn: Tensor) -> Tensor:
    """uint8 [B, G, 2, n]: the low nibbles of a group, then its high ones."""
    return torch.stack([bytes_BGn & 0x0F, bytes_BGn >> 4], dim=2)


def _bits(bytes_Bn: Tensor, step: int) -> Tensor:
    """uint8 [B, 8 // step, n]: the bit fields of `step` bits, lowest first."""
    shifts = torch.arange(0, 8, step, dtype=torch.uint8)[:, None]
    return (bytes_Bn[:, None] >> shifts) & ((1 << step) - 1)


def _f32(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.float32)


def _f16(blocks: Tensor) -> Tensor:
    return _half(blocks)


def _bf16(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.bfloat16).float()


def _q2_k(blocks: Tensor) -> Tensor:
    both_B2 = _half(blocks[:, 80:84])
    packed_BG = blocks[:, :16]
    scale_BG1 = (packed_BG & 0x0F).float().mul_(both_B2[:, :1])[..., None]
    min_BG1 = (packed_BG >> 4).float().mul_(both_B2[:, 1:])[..., None]
    q = torch.stack([_bits(blocks[:, 16:48], 2), _bits(blocks[:, 48:80], 2)], 1)
    return q.view(-1, 16, 16).float().mul_(scale_BG1).sub_(min_BG1).view(-1, 256)


def _q3_k(blocks: Tensor) -> Tensor:
    low_B28 = _nibbles(blocks[:, None, 96:104]).view(-1, 16)
    high_BG = _bits(blocks[:, 104:108], 2).view(-1, 16)
    scale_BG1 = (low_B28 | (high_BG << 4)).float().sub_(32).mul_(_half(blocks[:, 108:]))[..., None]
    q = torch.stack([_bits(blocks[:, 32:64], 2), _bits(blocks[:, 64:96], 2)], 1).view(-1, 8, 32).float()
    q.sub_((1 - _bits(blocks[:, :32], 1).float()).mul_(4))
    return q.view(-1, 16, 16).mul_(scale_BG1).view(-1, 256)


FORMATS: dict[int, BlockFormat] = {
    block.number: block
    for block in (
        BlockFormat("F32", 0, 1, 4, _f32),
        BlockFormat("F16", 1, 1, 2, _f16),
        BlockFormat("Q2_K", 10, 256, 84, _q2_k),
        BlockFormat("Q3_K", 11, 256, 110, _q3_k),
        BlockFormat("BF16", 30, 1, 2, _bf16),
        *ggml.FORMATS.values(),
    )
}
"""All types that are read, those with kernels and the others, by the number that GGUF files use."""
FORMATS_BY_NAME = {block.name: block for block in FORMATS.values()}


def dequantise(
    data: Tensor, kind: BlockFormat, shape: tuple[int, ...], dtype: torch.dtype, row_order: Tensor | None = None
) -> Tensor:
    """`data` (uint8, flat) as a new contiguous tensor of `shape`; row n is stored row `row_order[n]` if that is given.

    Exact in float32, then rounded once. In torch a few rows at a time, so that little more memory than the result's is
    needed; in C++ on all threads.
    """
    if row_order is not None and len(shape) == 1:
        return dequantise(data, kind, shape, dtype)[row_order]
    if row_order is not None:
        # numpy's indexing, because torch's would wake all threads for a few microseconds of work
        data = torch.from_numpy(data.view(shape[0], -1).numpy()[row_order.numpy()]).view(-1)
    if kernels.can_dequantise(kind.name, dtype):
        return kernels.dequantise(data, kind.name, shape, dtype)
    out = torch.empty(shape, dtype=dtype)
    out_NK = out.view(-1, shape[-1])
    rows, columns = out_NK.shape
    data_NX = data.view(rows, -1)
    step = max(1, CHUNK_VALUES // columns)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        values = kind.decode(data_NX[start:stop].reshape(-1, kind.nbytes))
        out_NK[start:stop] = values.view(stop - start, columns)
    return out
