"""A head's modules on the CPU kernels: the same arithmetic and interface as in `head_layer`, for drafting only.

Shapes: as in head_layer.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider import kernels
from outrider.core.rope import Rope, inverse_frequencies
from outrider.drafters.head_cache import HeadCache
from outrider.drafters.head_layer import PACKED_DTYPES, Attention, LayerShape, Mlp, RmsNorm, pack_, pack_matrix
from outrider.errors import ConfigError
from outrider.kernels.ops import HEAD_STEP

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def choose_dtype(drafter: str, dtype: str, device: torch.device, own: torch.dtype) -> tuple[torch.dtype, str | None]:
    """(of the activations, of the packed matrices or None where torch multiplies) for a head's option `dtype`.

    "auto" is int8 where the CPU kernels run, float32 on other CPUs, the file's `own` elsewhere. Raises ConfigError.
    """
    if dtype not in ("auto", *PACKED_DTYPES):
        allowed = ", ".join(("auto", *PACKED_DTYPES))
        raise ConfigError(f"{drafter}: dtype = {dtype!r} is not allowed: choose one of {allowed}")
    if device.type == "cpu" and kernels.available():
        return torch.float32, "int8" if dtype == "auto" else dtype
    if dtype != "auto" and dtype not in TORCH_DTYPES:
        where = f"the target is on {device}" if device.type != "cpu" else kernels.why()
        raise ConfigError(f"{drafter}: dtype = {dtype!r} needs the CPU kernels ({where}): take auto or float32")
    return TORCH_DTYPES.get(dtype, torch.float32 if device.type == "cpu" else own), None


def use_kernels_(net: nn.Module, dtype: str) -> None:
    """Hands the work of `net` to the kernels: it can no longer be trained, and all activations are float32. `dtype` is
    one of PACKED_DTYPES."""
    net.float()
    for module in list(net.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Attention) and child.head_dim % HEAD_STEP == 0:
                setattr(module, name, KernelAttention(child, dtype))
            elif isinstance(child, Mlp):
                setattr(module, name, KernelMlp(child, dtype))
            elif isinstance(child, RmsNorm):
                setattr(module, name, KernelNorm(child))
    pack_(net, dtype)


class KernelNorm(nn.Module):
    """`RmsNorm` of float32 rows."""

    def __init__(self, norm: RmsNorm) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight.detach().clone(), norm.eps

    def forward(self, x_Md: Tensor) -> Tensor:
        if x_Md.dim() == 2:
            return kernels.rms_norm(x_Md, self.weight, self.eps)
        return kernels.rms_norm(x_Md.reshape(-1, x_Md.shape[-1]), self.weight, self.eps).view(x_Md.shape)

    def add(self, x_Md: Tensor, delta_Md: Tensor) -> tuple[Tensor, Tensor]:
        """Adds in place."""
        normed_Md = kernels.add_rms_norm_(x_Md, delta_Md, self.weight, self.eps)
        return x_Md, normed_Md


class KernelMlp(nn.Module):
    """`Mlp` with gate and up as one matrix."""

    def __init__(self, mlp: Mlp, dtype: str) -> None:
        super().__init__()
        self._gate_up = pack_matrix(side_by_side(mlp.gate_proj, mlp.up_proj), dtype)
        self._down = pack_matrix(mlp.down_proj, dtype)

    def forward(self, x_Md: Tensor) -> Tensor:
        return self._down(kernels.swiglu(self._gate_up(x_Md)))


class KernelAttention(nn.Module):
    """`Attention` with queries, keys and values as one matrix."""

    def __init__(self, attention: Attention, dtype: str) -> None:
        super().__init__()
        shape: LayerShape = attention.shape
        self._qkv = pack_matrix(side_by_side(attention.q_proj, attention.k_proj, attention.v_proj), dtype)
        self._output = pack_matrix(attention.o_proj, dtype)
        self._norms = (KernelNorm(attention.q_norm), KernelNorm(attention.k_norm)) if shape.qk_norm else None
        self._split = (shape.n_heads, shape.n_heads + shape.n_kv_heads)
        self._heads = (shape.n_heads + 2 * shape.n_kv_heads, shape.head_dim)
        self._rope = Rope(inverse_frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling))

    def project(self, x_MK: Tensor, positions_M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv_MXD = self._qkv(x_MK).view(len(x_MK), *self._heads)
        q_MHD, k_MGD, v_MGD = torch.tensor_split(qkv_MXD, self._split, dim=1)
        if self._norms is not None:
            for norm, part in zip(self._norms, (q_MHD, k_MGD), strict=True):
                part.copy_(norm(part))
        cos_TR, sin_TR = self._rope.tables(int(positions_M.max()) + 1)
        kernels.rope_(q_MHD, k_MGD, cos_TR, sin_TR, positions_M)
        return q_MHD, k_MGD, v_MGD

    def mix(self, q_HD: Tensor, cache: HeadCache, window: int) -> Tensor:
        keys_TGD, values_TGD = cache.last(window)
        end_1 = torch.tensor([len(keys_TGD)], dtype=torch.int32)
        return kernels.attention(q_HD[None], keys_TGD, values_TGD, end_1)[0]

    def output(self, mixed_MHD: Tensor) -> Tensor:
        return self._output(mixed_MHD.flatten(-2))


def side_by_side(*linears: nn.Linear) -> nn.Linear:
    """One matrix that reads the same rows; its outputs are theirs, one behind the other."""
    first, outputs = linears[0], sum(linear.out_features for linear in linears)
    with torch.device("meta"):
        stacked = nn.Linear(first.in_features, outputs, bias=first.bias is not None)
    stacked.weight = nn.Parameter(torch.cat([linear.weight.detach() for linear in linears]), requires_grad=False)
    if first.bias is not None:
        stacked.bias = nn.Parameter(torch.cat([linear.bias.detach() for linear in linears]), requires_grad=False)
    return stacked
