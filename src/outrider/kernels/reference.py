"""The kernels' twins in plain torch: what each must compute, and what runs where no kernel does.

Shapes: M rows, K inputs, N outputs, I feed-forward width, H query heads, G key-value heads, D head width, R = D / 2,
T positions of a cache or a table, S slots behind a row's length.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def linear(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """[M, N] float32: float32 products and sums, whatever the type of the weights."""
    return F.linear(x_MK, weight_NK.float(), None if bias_N is None else bias_N.float())


def rms_norm(x_MK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
    """[M, K]: root-mean-square norm (Zhang and Sennrich 2019, 1910.07467)."""
    return F.rms_norm(x_MK, (x_MK.shape[-1],), weight_K, eps)


def add_rms_norm_(x_MK: Tensor, delta_MK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
    """[M, K]: the norm of x + delta. Adds delta to x in place."""
    return rms_norm(x_MK.add_(delta_MK), weight_K, eps)


def swiglu(gate_up_M2I: Tensor) -> Tensor:
    """[M, I]: silu(gate) * up (Shazeer 2020, 2002.05202)."""
    gate_MI, up_MI = gate_up_M2I.chunk(2, dim=-1)
    return F.silu(gate_MI) * up_MI


def rope_(q_MHD: Tensor, k_MGD: Tensor, cos_TR: Tensor, sin_TR: Tensor, positions_M: Tensor) -> None:
    """Rotates q and k in place: pairs (x[r], x[r + R]) (Su et al. 2021, 2104.09864, section 3.4.2)."""
    cos_M1R, sin_M1R = cos_TR[positions_M][:, None], sin_TR[positions_M][:, None]
    for x_MXD in (q_MHD, k_MGD):
        low_MXR, high_MXR = x_MXD.chunk(2, dim=-1)
        turned_MXR = low_MXR * cos_M1R - high_MXR * sin_M1R
        high_MXR.copy_(high_MXR * cos_M1R + low_MXR * sin_M1R)
        low_MXR.copy_(turned_MXR)


def visible(lengths_M: Tensor, ancestors_MS: Tensor | None, starts_M: Tensor | None, positions: int) -> Tensor:
    """[M, T] bool: positions start .. length - 1 of each row, and length + s where ancestors[m, s]."""
    position_T = torch.arange(positions)
    seen_MT = position_T < lengths_M[:, None]
    if starts_M is not None:
        seen_MT &= position_T >= starts_M[:, None]
    if ancestors_MS is not None:
        slot_MS = lengths_M[:, None].long() + torch.arange(ancestors_MS.shape[1])
        seen_MT.scatter_(1, slot_MS, ancestors_MS.bool())
    return seen_MT


def attention(
    q_MHD: Tensor,
    keys_TGD: Tensor,
    values_TGD: Tensor,
    lengths_M: Tensor,
    ancestors_MS: Tensor | None = None,
    starts_M: Tensor | None = None,
) -> Tensor:
    """[M, H, D] float32: softmax(q k / sqrt(D)) v over what each row sees; query head h reads kv head h // (H / G)."""
    _, heads, width = q_MHD.shape
    group = heads // keys_TGD.shape[1]
    keys_THD = keys_TGD.float().repeat_interleave(group, dim=1)
    values_THD = values_TGD.float().repeat_interleave(group, dim=1)
    seen_MT = visible(lengths_M.cpu(), ancestors_MS, starts_M, keys_TGD.shape[0]).to(q_MHD.device)
    scores_MHT = torch.einsum("mhd,thd->mht", q_MHD, keys_THD) / width**0.5
    weights_MHT = scores_MHT.masked_fill(~seen_MT[:, None], -torch.inf).softmax(-1)
    return torch.einsum("mht,thd->mhd", weights_MHT, values_THD)
