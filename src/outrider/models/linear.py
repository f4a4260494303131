"""The arithmetic between the matrices and the matrices themselves, in plain torch.

Activations are float32 everywhere; weights are float32 or bfloat16. A bfloat16 product rounds its input to bfloat16
when that is the fast way, and widens the weights instead on a CPU with many rows, where torch has no fast kernel.

Shapes: M rows, K inputs, N outputs, I width of the feed-forward layer.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.nn import functional as F

WIDEN_ROWS = 16
"""On a CPU, from this many rows on, widening bfloat16 weights to float32 is cheaper than torch's bfloat16 product."""


class Linear(Protocol):
    """y = x W^T + b over float32 rows."""

    @property
    def nbytes(self) -> int: ...

    def __call__(self, x_MK: Tensor) -> Tensor: ...


class TorchLinear:
    """A plain [N, K] matrix. Keeps the tensors that it is given."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> None:
        self.weight_NK = weight_NK
        self.bias_N = bias_N
        self._wide = weight_NK.element_size() == 4

    @property
    def nbytes(self) -> int:
        return self.weight_NK.nbytes + (0 if self.bias_N is None else self.bias_N.nbytes)

    def __call__(self, x_MK: Tensor) -> Tensor:
        if self._wide:
            return F.linear(x_MK, self.weight_NK, self.bias_N)
        if x_MK.shape[0] >= WIDEN_ROWS and x_MK.device.type == "cpu":
            return F.linear(x_MK, self.weight_NK.float(), self.bias_N)
        y_MN = F.linear(x_MK.to(self.weight_NK.dtype), self.weight_NK).float()
        return y_MN if self.bias_N is None else y_MN.add_(self.bias_N)


def add_norm(x_MK: Tensor, delta_MK: Tensor | None, weight_K: Tensor, eps: float) -> Tensor:
    """Adds `delta_MK` to `x_MK` in place, then gives x over its root mean square, times the weight (Zhang and Sennrich
    2019, 1910.07467)."""
    if delta_MK is not None:
        x_MK += delta_MK
    return F.rms_norm(x_MK, (x_MK.shape[-1],), weight_K, eps)


def swiglu(gate_up_M2I: Tensor) -> Tensor:
    """[M, I]: silu(gate) * up (Shazeer 2020, 2002.05202)."""
    gate_MI, up_MI = gate_up_M2I.chunk(2, dim=-1)
    return F.silu(gate_MI).mul_(up_MI)
