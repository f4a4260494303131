"""What a head says of the target's distributions, from its last activations to the loss in one step.

The logits of a draft vocabulary are by far the widest thing in training. They are made some rows at a time, their
exponentials are taken once, and the gradient is made with them: nothing of their size is kept for the way back.

With A the likely tokens of which q is less than p, the gradient of 1 - overlap by the logits is q (q(A) - [in A]); that
of the cross-entropy is q - p.

Shapes: M rows, c rows of a block, d head width, r rank of a Markov head, C likeliest tokens, S draft vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.drafters.head_training import Aims

BLOCK_NUMBERS = 1 << 20
"""Logits made at a time: what fits a core's cache, of no fewer rows than keep the products busy."""
LEAST_ROWS = 64


def working_dtype(x: Tensor) -> torch.dtype:
    """In which products of `x` are made: that of autocast where it is on, else its own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class RowLosses(NamedTuple):
    """The loss, differentiable; and by row the cross-entropy (0 where the likeliest token is not in the draft
    vocabulary), whether the likeliest tokens agree, and the overlap."""

    loss: Tensor
    cross_entropy_M: Tensor
    agrees_M: Tensor
    overlap_M: Tensor


class Bias(NamedTuple):
    """What a Markov head adds to the logits: `input_Mr` times the transposed `weight_Sr`."""

    input_Mr: Tensor
    weight_Sr: Tensor


def fused_loss(
    x_Md: Tensor,
    head_Sd: Tensor,
    aims: Aims,
    rows_M: Tensor,
    *,
    weight_M: Tensor,
    ce: float = 1.0,
    tv: float = 0.0,
    bias: Bias | None = None,
) -> RowLosses:
    """Of a head with the rows `head_Sd` over `x_Md`, against the positions `rows_M` of `aims`, which has one leading
    dimension. The loss is the sum over rows of weight (ce cross-entropy + tv (1 - overlap)). Weights that need no
    gradient get none made."""
    columns_MC, usable_M = aims.columns_XC[rows_M], aims.usable_X[rows_M]
    p_MC = aims.p_XC[rows_M].to(x_Md.dtype)
    weight_M = weight_M.to(x_Md.dtype)
    input_Mr, weight_Sr = bias if bias is not None else (None, None)
    out = _FusedLoss.apply(x_Md, head_Sd, input_Mr, weight_Sr, columns_MC, p_MC, usable_M, weight_M, ce, tv)  # type: ignore[no-untyped-call]
    return RowLosses(*out)


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_Md: Tensor,
        head_Sd: Tensor,
        input_Mr: Tensor | None,
        weight_Sr: Tensor | None,
        columns_MC: Tensor,
        p_MC: Tensor,
        usable_M: Tensor,
        weight_M: Tensor,
        ce: float,
        tv: float,
    ) -> tuple[Tensor, ...]:
        rows, working = len(x_Md), working_dtype(x_Md)
        pairs = [(x_Md.to(working), head_Sd.to(working))]
        if input_Mr is not None and weight_Sr is not None:
            pairs.append((input_Mr.to(working), weight_Sr.to(working)))
        wanted = ctx.needs_input_grad
        grads = [
            (x_Md.new_empty(x.shape) if wanted[2 * i] else None, x_Md.new_zeros(w.shape) if wanted[2 * i + 1] else None)
            for i, (x, w) in enumerate(pairs)
        ]
        ce_weight_M, tv_weight_M = ce * weight_M * usable_M, tv * weight_M
        aim_MC = p_MC / p_MC.sum(-1, keepdim=True).clamp(min=1e-9)
        cross_entropy_M, agrees_M, overlap_M = x_Md.new_zeros(3, rows).unbind()
        step = max(LEAST_ROWS, BLOCK_NUMBERS // len(head_Sd))
        room = x_Md.new_empty((min(step, rows), len(head_Sd)), dtype=working)
        for start in range(0, rows, step):
            block = slice(start, start + step)
            columns_cC, aim_cC, p_cC = columns_MC[block], aim_MC[block], p_MC[block]
            (x, w), *biases = pairs
            logits_cS = torch.mm(x[block], w.T, out=room[: len(aim_cC)])
            for x, w in biases:
                logits_cS.addmm_(x[block], w.T)
            logits_cS = logits_cS.to(x_Md.dtype)
            top_c1, likeliest_c1 = logits_cS.max(-1, keepdim=True)
            known_cC = logits_cS.gather(-1, columns_cC) - top_c1
            exp_cS = logits_cS.sub_(top_c1).exp_()
            sum_c1 = exp_cS.sum(-1, keepdim=True)
            logq_cC = known_cC - sum_c1.log()
            q_cC = logq_cC.exp()
            cross_entropy_M[block] = -(aim_cC * logq_cC).sum(-1) * usable_M[block]
            agrees_M[block] = ((likeliest_c1[:, 0] == columns_cC[:, 0]) & usable_M[block]).to(x_Md.dtype)
            overlap_M[block] = torch.minimum(p_cC, q_cC).sum(-1)
            if not any(grad is not None for pair in grads for grad in pair):
                continue
            less_cC = q_cC * (q_cC < p_cC)
            of_ce_c1, of_tv_c1 = ce_weight_M[block, None], tv_weight_M[block, None]
            whole_c1 = (of_ce_c1 + of_tv_c1 * less_cC.sum(-1, keepdim=True)) / sum_c1
            known_cC = -(of_ce_c1 * aim_cC + of_tv_c1 * less_cC)
            d_logits_cS = exp_cS.mul_(whole_c1).scatter_add_(-1, columns_cC, known_cC).to(working)
            for (x, w), (grad_x, grad_w) in zip(pairs, grads, strict=True):
                if grad_x is not None:
                    grad_x[block] = d_logits_cS @ w
                if grad_w is not None:
                    grad_w += d_logits_cS.T @ x[block]
        ctx.gradients = [grad for pair in grads for grad in pair]
        ctx.mark_non_differentiable(cross_entropy_M, agrees_M, overlap_M)
        loss = (ce_weight_M * cross_entropy_M + tv_weight_M * (1 - overlap_M)).sum()
        return loss, cross_entropy_M, agrees_M, overlap_M

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        made = [None if gradient is None else upstream[0] * gradient for gradient in ctx.gradients]
        return (*made, *[None] * (10 - len(made)))
