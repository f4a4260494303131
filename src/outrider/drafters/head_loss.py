"""What a head says of the target's distributions, from its last activations to the loss in one step.

The logits of a draft vocabulary are by far the widest thing in training. They are made some rows at a time, their
exponentials are taken once, and the gradient is made with them: nothing of their size is kept for the way back.

Shapes: M rows, c rows of a block, d head width, C likeliest tokens, S draft vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.drafters.head_training import Aims

BLOCK_NUMBERS = 1 << 20
"""Logits made at a time: what fits a core's cache, of no fewer rows than keep the products busy."""
LEAST_ROWS = 64


class Heard(NamedTuple):
    """The cross-entropy (differentiable), the mean over the rows whose likeliest token is in the draft vocabulary; and
    over all rows agreement and overlap as `Losses` has them."""

    loss: Tensor
    agreement: float
    overlap: float


def hear(x_Md: Tensor, head_Sd: Tensor, aims: Aims, rows_M: Tensor) -> Heard:
    """Of a head with the rows `head_Sd` over `x_Md`, against the positions `rows_M` of `aims`, which has one leading
    dimension. A head that needs no gradient gets none made. Zeros for no rows."""
    if not len(rows_M):
        return Heard(x_Md.sum() * 0.0, 0.0, 0.0)
    columns_MC, p_MC, usable_M = aims.columns_XC[rows_M], aims.p_XC[rows_M].to(x_Md.dtype), aims.usable_X[rows_M]
    loss, agreement, overlap = _Hear.apply(x_Md, head_Sd, columns_MC, p_MC, usable_M)  # type: ignore[no-untyped-call]
    return Heard(loss, float(agreement), float(overlap))


class _Hear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_Md: Tensor, head_Sd: Tensor, columns_MC: Tensor, p_MC: Tensor, usable_M: Tensor
    ) -> tuple[Tensor, ...]:
        rows, wanted = len(x_Md), ctx.needs_input_grad
        weight_M1 = usable_M[:, None].to(x_Md.dtype) / usable_M.sum().clamp(min=1)
        aim_MC = p_MC * (weight_M1 / p_MC.sum(-1, keepdim=True).clamp(min=1e-9))
        loss, agreed, overlap = x_Md.new_zeros(3).unbind()
        grad_x_Md = torch.empty_like(x_Md) if wanted[0] else None
        grad_head_Sd = torch.zeros_like(head_Sd) if wanted[1] else None
        step = max(LEAST_ROWS, BLOCK_NUMBERS // len(head_Sd))
        logits = x_Md.new_empty(min(step, rows), len(head_Sd))
        for start in range(0, rows, step):
            block = slice(start, start + step)
            x_cd, columns_cC, aim_cC = x_Md[block], columns_MC[block], aim_MC[block]
            logits_cS = torch.mm(x_cd, head_Sd.T, out=logits[: len(x_cd)])
            top_c1, likeliest_c1 = logits_cS.max(-1, keepdim=True)
            known_cC = logits_cS.gather(-1, columns_cC) - top_c1
            exp_cS = logits_cS.sub_(top_c1).exp_()
            sum_c1 = exp_cS.sum(-1, keepdim=True)
            logq_cC = known_cC - sum_c1.log()
            loss = loss - (aim_cC * logq_cC).sum()
            agreed = agreed + ((likeliest_c1[:, 0] == columns_cC[:, 0]) & usable_M[block]).sum()
            overlap = overlap + torch.minimum(p_MC[block], logq_cC.exp()).sum()
            if not any(wanted[:2]):
                continue
            d_logits_cS = exp_cS.mul_(weight_M1[block] / sum_c1).scatter_add_(-1, columns_cC, -aim_cC)
            if grad_x_Md is not None:
                torch.mm(d_logits_cS, head_Sd, out=grad_x_Md[block])
            if grad_head_Sd is not None:
                grad_head_Sd.addmm_(d_logits_cS.T, x_cd)
        ctx.gradients = (grad_x_Md, grad_head_Sd)
        shares = agreed / rows, overlap / rows
        ctx.mark_non_differentiable(*shares)
        return loss, *shares

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        made = [None if gradient is None else upstream[0] * gradient for gradient in ctx.gradients]
        return (*made, None, None, None)
