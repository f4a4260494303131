"""The layers of a block head at work: one call of the kernels where they take them, torch elsewhere.

Shapes: M rows, m rows of a block, L layers, d head width, F target features, T positions, R = D / 2, H query heads, G
key-value heads, D head width of the attention.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider import kernels
from outrider.core.rope import Rope, inverse_frequencies
from outrider.drafters.block_net import BlockLayer, BlockNet
from outrider.drafters.head_cache import Span
from outrider.drafters.head_kernels import side_by_side
from outrider.drafters.head_layer import pack_, pack_matrix
from outrider.kernels import CacheRows, Stack, StackLayer, build_stack


class Backbone(Protocol):
    """Makes the keys and values of the text, and the hidden rows of blocks."""

    def context(self, features_MF: Tensor, positions: Seq[int]) -> Tensor:
        """[L, 2, M, G, D]: every layer's keys and values of these positions."""
        ...

    def rows(self, x_Md: Tensor, spans: Seq[Span]) -> Tensor:
        """[M, d]: the normed rows of the spans' blocks, whose inputs are `x_Md`. The rows of a block see each other and
        the text before them; their keys and values stay behind the text's as scratch. Changes `x_Md`."""
        ...


def make_backbone(net: BlockNet, dtype: str | None) -> Backbone:
    """`dtype` is that of packed matrices (PACKED_DTYPES), None where no kernels run. Uses up the layers of `net`."""
    if dtype is None:
        return TorchBackbone(net)
    shape, layers = net.config.layer, [_stack_layer(layer, dtype) for layer in net.blocks]
    heads, norm_d = (shape.n_heads, shape.n_kv_heads, shape.head_dim), net.norm.weight.detach()
    stack = build_stack(layers, norm_d, heads=heads, eps=shape.norm_eps, cache_dtype=torch.float32)
    if stack is not None:
        return KernelBackbone(net, stack, dtype)
    pack_(net, dtype)
    return TorchBackbone(net)


class TorchBackbone:
    """Layer by layer, with what torch has, or with packed matrices."""

    def __init__(self, net: BlockNet) -> None:
        self.net = net

    def context(self, features_MF: Tensor, positions: Seq[int]) -> Tensor:
        context_Md, positions_M = self.net.context(features_MF), torch.tensor(positions)
        pairs = [layer.self_attn.keys_values(context_Md, positions_M) for layer in self.net.blocks]
        return torch.stack([torch.stack(pair) for pair in pairs])

    def rows(self, x_Md: Tensor, spans: Seq[Span]) -> Tensor:
        positions = [span.cache.end + j for span in spans for j in range(span.rows)]
        x_Md, positions_M = x_Md.to(self.net.dtype), torch.tensor(positions)
        counts = [span.rows for span in spans]
        for index, layer in enumerate(self.net.blocks):
            inner_Md = layer.input_layernorm(x_Md)
            q_MHD = layer.self_attn.queries(inner_Md, positions_M)
            pair = layer.self_attn.keys_values(inner_Md, positions_M)
            parts = zip(spans, *(torch.split(part, counts) for part in (q_MHD, *pair)), strict=True)
            mixed = [_mix(span, index, q_mHD, k_mGD, v_mGD) for span, q_mHD, k_mGD, v_mGD in parts]
            x_Md = layer.finish(x_Md, torch.cat(mixed))
        h_Md: Tensor = self.net.norm(x_Md)
        return h_Md.float()


def _mix(span: Span, index: int, q_mHD: Tensor, k_mGD: Tensor, v_mGD: Tensor) -> Tensor:
    """[m, H, D]: what the rows of one block read in layer `index`."""
    cache, rows, window = span
    store, end = cache.room(rows), cache.length + rows
    store[index, 0, cache.length : end], store[index, 1, cache.length : end] = k_mGD, v_mGD
    seen_2TGD = store[index, :, max(0, cache.length - window) : end]
    group, shape = q_mHD.shape[1] // k_mGD.shape[1], (rows, k_mGD.shape[1], -1, q_mHD.shape[2])
    k_GTD, v_GTD = seen_2TGD.transpose(1, 2)
    q_GsD = q_mHD.view(shape).transpose(0, 1).reshape(shape[1], rows * group, shape[3])
    mixed_GsD = F.scaled_dot_product_attention(q_GsD, k_GTD, v_GTD)
    return mixed_GsD.view(shape[1], rows, group, shape[3]).transpose(0, 1).reshape(q_mHD.shape)


class KernelBackbone:
    """All layers of all blocks in one call, and one matrix for the keys and values of the text in all layers."""

    def __init__(self, net: BlockNet, stack: Stack, dtype: str) -> None:
        shape = net.config.layer
        self._stack, self._eps = stack, shape.norm_eps
        self._sizes = net.config.n_layers, shape.n_kv_heads, shape.head_dim
        self._rope = Rope(inverse_frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling))
        self._fc = pack_matrix(net.fc, dtype)
        self._hidden_norm_d = net.hidden_norm.weight.detach()
        attentions = [layer.self_attn for layer in net.blocks]
        keys, values = ([getattr(part, name) for part in attentions] for name in ("k_proj", "v_proj"))
        self._keys_values = pack_matrix(side_by_side(*keys, *values), dtype)
        self._k_norms = [attention.k_norm.weight.detach() for attention in attentions if shape.qk_norm]
        self._everything: dict[int, Tensor] = {}

    def context(self, features_MF: Tensor, positions: Seq[int]) -> Tensor:
        layers, heads, width = self._sizes
        context_Md = kernels.rms_norm(self._fc(features_MF.float()), self._hidden_norm_d, self._eps)
        both_MHD = self._keys_values(context_Md).view(len(positions), 2 * layers * heads, width)
        k_MHD = both_MHD[:, : layers * heads]
        for layer, norm_D in enumerate(self._k_norms):
            own_MGD = k_MHD[:, layer * heads : (layer + 1) * heads]
            own_MGD.copy_(kernels.rms_norm(own_MGD.reshape(-1, width), norm_D, self._eps).view(own_MGD.shape))
        cos_TR, sin_TR = self._rope.tables(max(positions) + 1)
        nobody_M1D = k_MHD[:, :1].clone()  # stands where a decoder's layer has its keys
        kernels.rope_(k_MHD, nobody_M1D, cos_TR, sin_TR, torch.tensor(positions))
        return both_MHD.view(-1, 2, layers, heads, width).permute(2, 1, 0, 3, 4)

    def rows(self, x_Md: Tensor, spans: Seq[Span]) -> Tensor:
        positions = [span.cache.end + j for span in spans for j in range(span.rows)]
        cos_TR, sin_TR = self._rope.tables(max(positions) + 1)
        seen = [self._cache_rows(span) for span in spans]
        h_Md, _ = self._stack.run(x_Md, torch.tensor(positions), cos_TR, sin_TR, seen)
        return h_Md

    def _cache_rows(self, span: Span) -> CacheRows:
        cache, rows, window = span
        length, store = cache.length, cache.room(rows)
        everything_mm = self._everything.get(rows)
        if everything_mm is None:
            everything_mm = self._everything[rows] = torch.ones(rows, rows, dtype=torch.bool)
        lengths_m = torch.full((rows,), length, dtype=torch.int32)
        starts_m = torch.full((rows,), length - window, dtype=torch.int32) if length > window else None
        return CacheRows(rows, store, length, lengths_m, starts_m, everything_mm)


def _stack_layer(layer: BlockLayer, dtype: str) -> StackLayer:
    attention, mlp, qk_norm = layer.self_attn, layer.mlp, hasattr(layer.self_attn, "q_norm")
    return StackLayer(
        layer.input_layernorm.weight.detach(),
        tuple(pack_matrix(part, dtype) for part in (attention.q_proj, attention.k_proj, attention.v_proj)),
        attention.q_norm.weight.detach() if qk_norm else None,
        attention.k_norm.weight.detach() if qk_norm else None,
        (pack_matrix(attention.o_proj, dtype),),
        layer.post_attention_layernorm.weight.detach(),
        (pack_matrix(mlp.gate_proj, dtype), pack_matrix(mlp.up_proj, dtype)),
        (pack_matrix(mlp.down_proj, dtype),),
    )
