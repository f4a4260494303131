"""Rotary positions, what each row of a pass may see, and attention of one sequence's rows over its own cache.

Shapes: m rows of one segment, M rows of a pass, T cached positions (pending rows included), H query heads, G key-value
heads, D head width, R = D / 2 rotation pairs.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider import kernels
from outrider.core.protocols import Segment
from outrider.core.rope import Rope
from outrider.core.tree import depths, visible
from outrider.kernels import reference
from outrider.kernels.ops import HEAD_STEP
from outrider.models.kv import DecoderCache


def why_not_kernels(head_dim: int, device: torch.device) -> str | None:
    """Why attention runs in torch, for people; None where the kernel runs it."""
    if device.type != "cpu":
        return f"the model is on {device}"
    if not kernels.available():
        return kernels.why()
    if head_dim % HEAD_STEP:
        return f"heads of {head_dim} numbers, and the kernel takes multiples of {HEAD_STEP}"
    return None


@dataclass(frozen=True, slots=True)
class Span:
    """One segment's place in a pass: rows [start, stop), the first `end` positions of `cache`, and who sees what.

    Row m sees positions starts[m] (0) .. lengths[m] - 1, and lengths[m] + s where ancestors[m, s]. `mask_mT` says the
    same as numbers to add to the scores, where no kernel runs; None when every row sees every position.
    """

    cache: DecoderCache
    start: int
    stop: int
    length: int
    end: int
    lengths_m: Tensor
    ancestors_mm: Tensor | None
    starts_m: Tensor | None
    mask_mT: Tensor | None


class PassRows(Protocol):
    """What all layers of a pass share: tokens and positions, the rotations, and how a row reads what came before."""

    @property
    def tokens_M(self) -> Tensor: ...

    @property
    def positions_M(self) -> Tensor: ...

    @property
    def cos_TR(self) -> Tensor: ...

    @property
    def sin_TR(self) -> Tensor: ...

    def mix(self, index: int, q_MHD: Tensor, k_MGD: Tensor, v_MGD: Tensor) -> Tensor:
        """[M, H, D] float32: attention of layer `index`; writes the rows' keys and values into the caches."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """`PassRows` of several sequences, each with its own cache. `fast`: the attention kernel runs."""

    spans: list[Span]
    tokens_M: Tensor
    positions_M: Tensor
    cos_TR: Tensor
    sin_TR: Tensor
    fast: bool

    def mix(self, index: int, q_MHD: Tensor, k_MGD: Tensor, v_MGD: Tensor) -> Tensor:
        parts: list[Tensor] = []
        for span in self.spans:
            keys, values = span.cache.keys[index], span.cache.values[index]
            keys[span.length : span.end] = k_MGD[span.start : span.stop]
            values[span.length : span.end] = v_MGD[span.start : span.stop]
            parts.append(attend(q_MHD, span, keys, values, fast=self.fast))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def plan_pass(segments: Seq[Segment], rope: Rope, *, context_length: int, window: int | None, fast: bool) -> Plan:
    """Reserves the pending rows of every segment's cache, and lays the rows out flat, in order."""
    spans: list[Span] = []
    tokens: list[int] = []
    positions: list[int] = []
    device = rope.inv_freq_R.device
    for segment in segments:
        cache, rows = segment.cache, len(segment.tokens)
        assert isinstance(cache, DecoderCache), f"a {type(cache).__name__} is not a cache of this model"
        assert rows, "a segment needs at least one row"
        length = cache.length
        depth = range(rows) if segment.parents is None else depths(segment.parents)
        assert len(depth) == rows, f"{len(depth)} parents for {rows} rows"
        assert length + max(depth) < context_length, f"position {length + max(depth)} of {context_length}"
        cache.reserve(rows)
        start = len(tokens)
        tokens.extend(segment.tokens)
        positions.extend([length + d for d in depth])
        sight = _sight(segment.parents, positions[start:], length, window)
        mask = None if fast else _mask(sight, length + rows, device)
        spans.append(Span(cache, start, start + rows, length, length + rows, *sight, mask))
    cos_TR, sin_TR = rope.tables(max(positions) + 1)
    tokens_M, positions_M = _int64(tokens).to(device), _int64(positions).to(device)
    return Plan(spans, tokens_M, positions_M, cos_TR, sin_TR, fast)


def _int64(numbers: list[int]) -> Tensor:
    """`torch.tensor(numbers)` in a third of its time, which counts in a pass of one row."""
    return torch.frombuffer(array("q", numbers), dtype=torch.int64)


def _int32(numbers: list[int]) -> Tensor:
    return torch.frombuffer(array("i", numbers), dtype=torch.int32)


Sight = tuple[Tensor, Tensor | None, Tensor | None]


def _sight(parents: Seq[int] | None, positions: list[int], length: int, window: int | None) -> Sight:
    """(lengths, ancestors, starts) of the rows, as in `Span`."""
    starts_m = None
    if window is not None and max(positions) >= window:
        starts_m = _int32([max(position - window + 1, 0) for position in positions])
    if parents is None:
        return _int32([position + 1 for position in positions]), None, starts_m
    ancestors_mm = visible(parents)
    if starts_m is not None:
        ancestors_mm &= _int32(positions) >= starts_m[:, None]
    return _int32([length] * len(positions)), ancestors_mm, starts_m


def _mask(sight: Sight, end: int, device: torch.device) -> Tensor | None:
    seen_mT = reference.visible(*sight, end)
    if bool(seen_mT.all()):
        return None
    return torch.zeros(seen_mT.shape).masked_fill_(~seen_mT, -math.inf).to(device)


def attend(q_MHD: Tensor, span: Span, keys_TGD: Tensor, values_TGD: Tensor, *, fast: bool) -> Tensor:
    """[m, H, D] float32: what the span's rows read from the cache (keys and values of the layer, all capacity)."""
    q_mHD = q_MHD[span.start : span.stop]
    if fast:
        return kernels.attention(q_mHD, keys_TGD, values_TGD, span.lengths_m, span.ancestors_mm, span.starts_m)
    rows, n_heads, head_dim = q_mHD.shape
    n_kv, dtype = keys_TGD.shape[1], keys_TGD.dtype
    shape = (n_kv, n_heads // n_kv, span.end, head_dim)
    out_GHmD = F.scaled_dot_product_attention(
        q_mHD.to(dtype).view(rows, n_kv, -1, head_dim).permute(1, 2, 0, 3),
        keys_TGD[: span.end].transpose(0, 1)[:, None].expand(shape),
        values_TGD[: span.end].transpose(0, 1)[:, None].expand(shape),
        attn_mask=None if span.mask_mT is None else span.mask_mT.to(dtype),
    )
    return out_GHmD.permute(2, 0, 1, 3).reshape(rows, n_heads, head_dim).float()
