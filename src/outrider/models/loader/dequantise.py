"""Blocks of GGML's quantised types to floats, bit for bit as the reference computes them, in plain torch.

Each function takes whole blocks, uint8 [B, bytes of a block], and gives float32 [B, values of a block].

Shapes: B blocks, G groups of a block, n values of a group, N rows, K columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_VALUES = 1 << 15
"""Values converted at a time: temporaries stay in the cache, and torch does not split work this small over threads."""


def _half(bytes_Bn: Tensor) -> Tensor:
    return bytes_Bn.contiguous().view(torch.float16).float()


def _nibbles(bytes_BGn: Tensor) -> Tensor:
    """uint8 [B, G, 2, n]: the low nibbles of a group, then its high ones."""
    out = torch.empty((*bytes_BGn.shape[:2], 2, bytes_BGn.shape[2]), dtype=torch.uint8)
    torch.bitwise_and(bytes_BGn, 0x0F, out=out[:, :, 0])
    torch.bitwise_right_shift(bytes_BGn, 4, out=out[:, :, 1])
    return out


def _bits(bytes_Bn: Tensor, step: int) -> Tensor:
    """uint8 [B, 8 // step, n]: the bit fields of `step` bits, lowest first."""
    shifts = torch.arange(0, 8, step, dtype=torch.uint8)[:, None]
    return (bytes_Bn[:, None] >> shifts).bitwise_and_((1 << step) - 1)


def _f32(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.float32)


def _f16(blocks: Tensor) -> Tensor:
    return _half(blocks)


def _bf16(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.bfloat16).float()


def _q4_0(blocks: Tensor) -> Tensor:
    q_B32 = _nibbles(blocks[:, None, 2:]).view(-1, 32).float()
    return q_B32.sub_(8).mul_(_half(blocks[:, :2]))


def _q4_1(blocks: Tensor) -> Tensor:
    scale_min_B2 = _half(blocks[:, :4])
    q_B32 = _nibbles(blocks[:, None, 4:]).view(-1, 32).float()
    return q_B32.mul_(scale_min_B2[:, :1]).add_(scale_min_B2[:, 1:])


def _fifth_bits(bytes_B4: Tensor) -> Tensor:
    """float32 [B, 32]: 16 where bit i of the little-endian word is set."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (bytes_B4[:, :, None] >> shifts).bitwise_and_(1).view(-1, 32).float().mul_(16)


def _q5_0(blocks: Tensor) -> Tensor:
    q_B32 = _nibbles(blocks[:, None, 6:]).view(-1, 32).float().add_(_fifth_bits(blocks[:, 2:6]))
    return q_B32.sub_(16).mul_(_half(blocks[:, :2]))


def _q5_1(blocks: Tensor) -> Tensor:
    scale_min_B2 = _half(blocks[:, :4])
    q_B32 = _nibbles(blocks[:, None, 8:]).view(-1, 32).float().add_(_fifth_bits(blocks[:, 4:8]))
    return q_B32.mul_(scale_min_B2[:, :1]).add_(scale_min_B2[:, 1:])


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks[:, :2]))


def _scale_min(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum of the eight groups of Q4_K and Q5_K, each float32 [B, 8, 1]: twelve bytes hold 6 bits each."""
    packed_B34 = blocks[:, 4:16].reshape(-1, 3, 4)
    scale, least, rest = packed_B34.unbind(1)
    scales_B8 = torch.cat([scale & 0x3F, (rest & 0x0F) | ((scale >> 2) & 0x30)], 1).float()
    mins_B8 = torch.cat([least & 0x3F, (rest >> 4) | ((least >> 2) & 0x30)], 1).float()
    both_B2 = _half(blocks[:, :4])
    return scales_B8.mul_(both_B2[:, :1])[..., None], mins_B8.mul_(both_B2[:, 1:])[..., None]


def _q4_k(blocks: Tensor) -> Tensor:
    scale_B81, min_B81 = _scale_min(blocks)
    q_B8n = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 8, 32).float()
    return q_B8n.mul_(scale_B81).sub_(min_B81).view(-1, 256)


def _q5_k(blocks: Tensor) -> Tensor:
    scale_B81, min_B81 = _scale_min(blocks)
    q_B8n = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    q_B8n |= _bits(blocks[:, 16:48], 1) << 4
    return q_B8n.float().mul_(scale_B81).sub_(min_B81).view(-1, 256)


def _q6_k(blocks: Tensor) -> Tensor:
    scale_BG1 = blocks[:, 192:208].view(torch.int8).float().mul_(_half(blocks[:, 208:]))[..., None]
    q_B2 = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    for half in range(2):
        q_B2[:, half] |= _bits(blocks[:, 128 + 32 * half : 160 + 32 * half], 2) << 4
    return q_B2.view(-1, 16, 16).float().sub_(32).mul_(scale_BG1).view(-1, 256)


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


@dataclass(frozen=True, slots=True)
class BlockType:
    """A storage type: `block_bytes` bytes hold `block_values` consecutive values of a row."""

    name: str
    block_values: int
    block_bytes: int
    decode: Callable[[Tensor], Tensor]


BLOCK_TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4, _f32),
    1: BlockType("F16", 1, 2, _f16),
    2: BlockType("Q4_0", 32, 18, _q4_0),
    3: BlockType("Q4_1", 32, 20, _q4_1),
    6: BlockType("Q5_0", 32, 22, _q5_0),
    7: BlockType("Q5_1", 32, 24, _q5_1),
    8: BlockType("Q8_0", 32, 34, _q8_0),
    10: BlockType("Q2_K", 256, 84, _q2_k),
    11: BlockType("Q3_K", 256, 110, _q3_k),
    12: BlockType("Q4_K", 256, 144, _q4_k),
    13: BlockType("Q5_K", 256, 176, _q5_k),
    14: BlockType("Q6_K", 256, 210, _q6_k),
    30: BlockType("BF16", 1, 2, _bf16),
}
"""By the number that GGUF files use."""


def dequantise(
    data: Tensor, kind: BlockType, shape: tuple[int, ...], dtype: torch.dtype, row_order: Tensor | None = None
) -> Tensor:
    """`data` (uint8, flat) as a new contiguous tensor of `shape`; row n is stored row `row_order[n]` if that is given.

    A few rows at a time, so that little more memory than the result's is needed. Exact in float32, then rounded once.
    """
    out = torch.empty(shape, dtype=dtype)
    out_NK = out.view(-1, shape[-1]) if row_order is None or len(shape) > 1 else out.view(-1, 1)
    rows, columns = out_NK.shape
    data_NK = data.view(rows, -1)
    step = max(1, CHUNK_VALUES // columns)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        stored = data_NK[start:stop] if row_order is None else data_NK[row_order[start:stop]]
        out_NK[start:stop] = kind.decode(stored.reshape(-1, kind.block_bytes)).view(stop - start, columns)
    return out
