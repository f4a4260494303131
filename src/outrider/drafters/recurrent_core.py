"""The layer of a head that drafts token by token, at work: one call of the kernels where they take it, torch elsewhere.

Shapes: M rows, m rows of one sequence, n sequences in a step, d head width, K inputs of the attention, T positions,
H query heads, G key-value heads, D head width of the attention.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.rope import Rope, inverse_frequencies
from outrider.drafters.head_cache import Span
from outrider.drafters.head_kernels import side_by_side, use_kernels_
from outrider.drafters.head_layer import pack_matrix
from outrider.drafters.recurrent_net import RecurrentNet
from outrider.kernels import CacheRows, Stack, StackLayer, build_stack


class Core(Protocol):
    """Runs rows that `RecurrentNet.inputs` made, which it may change, and writes their keys and values."""

    def fill(self, x_MK: Tensor, residual_Md: Tensor, spans: Seq[Span]) -> None:
        """Rows of which nothing but keys and values is wanted."""
        ...

    def last(self, x_MK: Tensor, residual_Md: Tensor, spans: Seq[Span]) -> tuple[Tensor, Tensor]:
        """Of the last row of each span: (what lm_head reads [n, d], what goes on [n, d])."""
        ...


def make_core(net: RecurrentNet, dtype: str | None) -> Core:
    """`dtype` is that of packed matrices (PACKED_DTYPES), None where no kernels run. Uses up the layer of `net`."""
    if dtype is None:
        return TorchCore(net)
    shape, attention, mlp = net.config.layer, net.midlayer.self_attn, net.midlayer.mlp
    layer = StackLayer(
        torch.ones(shape.hidden_size),
        (pack_matrix(side_by_side(attention.q_proj, attention.k_proj, attention.v_proj), dtype),),
        attention.q_norm.weight.detach().float() if shape.qk_norm else None,
        attention.k_norm.weight.detach().float() if shape.qk_norm else None,
        (pack_matrix(attention.o_proj, dtype),),
        net.midlayer.post_attention_layernorm.weight.detach().float(),
        (pack_matrix(side_by_side(mlp.gate_proj, mlp.up_proj), dtype),),
        (pack_matrix(mlp.down_proj, dtype),),
    )
    heads, norm_d = (shape.n_heads, shape.n_kv_heads, shape.head_dim), net.norm.weight.detach().float()
    width = attention.q_proj.in_features
    stack = build_stack([layer], norm_d, heads=heads, eps=shape.norm_eps, cache_dtype=torch.float32, reads=width)
    if stack is not None:
        del net.midlayer.self_attn, net.midlayer.mlp
    use_kernels_(net, dtype)
    return TorchCore(net) if stack is None else StackCore(net, stack)


class TorchCore:
    """With what torch has, or with packed matrices one by one."""

    def __init__(self, net: RecurrentNet) -> None:
        self.net = net

    def fill(self, x_MK: Tensor, residual_Md: Tensor, spans: Seq[Span]) -> None:
        pair = self.net.midlayer.self_attn.keys_values(x_MK, _positions(spans))
        for span, kv_2mGD in zip(spans, torch.split(torch.stack(pair), [s.rows for s in spans], dim=1), strict=True):
            span.cache.append(kv_2mGD[None])

    def last(self, x_MK: Tensor, residual_Md: Tensor, spans: Seq[Span]) -> tuple[Tensor, Tensor]:
        ends = _last_rows(spans)
        q_nHD = self.net.midlayer.self_attn.queries(x_MK[ends], _positions(spans)[ends])
        self.fill(x_MK, residual_Md, spans)
        mixed_nHD = torch.stack([_mix(q_HD, span) for q_HD, span in zip(q_nHD, spans, strict=True)])
        return self.net.finish(residual_Md[ends], mixed_nHD)


class StackCore:
    """All of the layer and the norm behind it in one call; catching up computes all of it too."""

    def __init__(self, net: RecurrentNet, stack: Stack) -> None:
        shape = net.config.layer
        self._carried, self.stack = net.carried, stack
        self.rope = Rope(inverse_frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling))
        self.like = torch.empty(1, 2, 0, shape.n_kv_heads, shape.head_dim)

    def fill(self, x_MK: Tensor, residual_Md: Tensor, spans: Seq[Span]) -> None:
        self._run(x_MK, residual_Md, spans)

    def last(self, x_MK: Tensor, residual_Md: Tensor, spans: Seq[Span]) -> tuple[Tensor, Tensor]:
        normed_Md = self._run(x_MK, residual_Md, spans)
        if len(normed_Md) == len(spans):
            return normed_Md, self._carried(residual_Md, normed_Md)
        ends = _last_rows(spans)
        normed_nd = normed_Md[ends]
        return normed_nd, self._carried(residual_Md[ends], normed_nd)

    def _run(self, x_MK: Tensor, residual_Md: Tensor, spans: Seq[Span]) -> Tensor:
        positions_M = _positions(spans)
        cos_TR, sin_TR = self.rope.tables(max(span.cache.end + span.rows for span in spans))
        rows = [self._cache_rows(span) for span in spans]
        normed_Md, _ = self.stack.run(residual_Md, positions_M, cos_TR, sin_TR, rows, read_MK=x_MK)
        for span in spans:
            span.cache.length += span.rows
        return normed_Md

    def _cache_rows(self, span: Span) -> CacheRows:
        length = span.cache.length
        store = span.cache.room(span.rows, self.like)
        seen = range(length + 1, length + span.rows + 1)
        starts_m = None
        if length + span.rows > span.window:
            starts_m = torch.tensor([max(0, end - span.window) for end in seen], dtype=torch.int32)
        return CacheRows(span.rows, store, length, torch.tensor(seen, dtype=torch.int32), starts_m, None)


def _positions(spans: Seq[Span]) -> Tensor:
    return torch.tensor([span.cache.end + i for span in spans for i in range(span.rows)])


def _last_rows(spans: Seq[Span]) -> list[int]:
    return [end - 1 for end in accumulate(span.rows for span in spans)]


def _mix(q_HD: Tensor, span: Span) -> Tensor:
    """[H, D]: what the row at the cache's last position reads, itself included."""
    k_GTD, v_GTD = span.cache.last(span.window)[0].transpose(1, 2)
    q_GHD = q_HD.view(len(k_GTD), -1, q_HD.shape[-1])
    return F.scaled_dot_product_attention(q_GHD, k_GTD, v_GTD).reshape(q_HD.shape)
