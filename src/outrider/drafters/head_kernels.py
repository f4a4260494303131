"""A head on the CPU kernels, for drafting only: in which precision, and its matrices and norms one by one.

Shapes: M rows, d width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider import kernels
from outrider.drafters.head_layer import PACKED_DTYPES, RmsNorm, pack_
from outrider.errors import ConfigError

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def choose_dtype(drafter: str, dtype: str, device: torch.device, own: torch.dtype) -> tuple[torch.dtype, str | None]:
    """(of the activations, of the packed matrices or None where torch multiplies) for a head's option `dtype`.

    "auto" is int4 where the CPU kernels run (more bits cost more time than the drafts they win), float32 on other CPUs,
    the file's `own` elsewhere. Raises ConfigError.
    """
    if dtype not in ("auto", *PACKED_DTYPES):
        allowed = ", ".join(("auto", *PACKED_DTYPES))
        raise ConfigError(f"{drafter}: dtype = {dtype!r} is not allowed: choose one of {allowed}")
    if device.type == "cpu" and kernels.available():
        return torch.float32, "int4" if dtype == "auto" else dtype
    if dtype != "auto" and dtype not in TORCH_DTYPES:
        where = f"the target is on {device}" if device.type != "cpu" else kernels.why()
        raise ConfigError(f"{drafter}: dtype = {dtype!r} needs the CPU kernels ({where}): take auto or float32")
    return TORCH_DTYPES.get(dtype, torch.float32 if device.type == "cpu" else own), None


def use_kernels_(net: nn.Module, dtype: str) -> None:
    """Hands matrices and norms of `net` to the kernels: it can no longer be trained, and all activations are float32.
    `dtype` is one of PACKED_DTYPES."""
    net.float()
    for module in list(net.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, RmsNorm):
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


def as_linear(weight_NK: Tensor, bias_N: Tensor | None = None) -> nn.Linear:
    """A matrix that is not trained."""
    with torch.device("meta"):
        linear = nn.Linear(weight_NK.shape[1], weight_NK.shape[0], bias=bias_N is not None)
    linear.weight = nn.Parameter(weight_NK.detach(), requires_grad=False)
    if bias_N is not None:
        linear.bias = nn.Parameter(bias_N.detach(), requires_grad=False)
    return linear


def side_by_side(*linears: nn.Linear) -> nn.Linear:
    """One matrix that reads the same rows; its outputs are theirs, one behind the other."""
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    return as_linear(torch.cat([linear.weight for linear in linears]), torch.cat(biases) if biases else None)
