"""Training a head that drafts token by token on its own output.

Every row drafts several tokens, one a step. It sees the rows before it as step 0 made them (from the target's hidden
states), and its own of every step: as when it is used, where the keys and values of committed rows are of step 0.

Shapes: B sequences, T positions, X = B T, d head width, F target features, S draft vocabulary, M rows of step 0, A rows
that draft, N of them that learn, m of them in one sequence, t rows of step 0 in it, H query heads, G key-value heads,
g = H / G, D head width of the attention.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.drafters.head_loss import RowLosses, fused_loss
from outrider.drafters.head_training import Aims, Lesson, Losses, mean
from outrider.drafters.recurrent_net import RecurrentNet


@dataclass(frozen=True, slots=True)
class NeededRows:
    """Rows (sequence, position) of a batch, sequence by sequence: at B x T positions laid flat, and in their sequence.

    Step 0 runs the rows M, up to the last that drafts; those that draft are the rows `active_A` of them. `spans` cuts
    them by sequence: (start in M, stop in M, start in A, stop in A).
    """

    flat_M: Tensor
    position_M: Tensor
    active_A: Tensor
    spans: list[tuple[int, int, int, int]]
    length: int

    @property
    def flat_A(self) -> Tensor:
        return self.flat_M[self.active_A]

    @property
    def position_A(self) -> Tensor:
        return self.position_M[self.active_A]

    def inside_A(self, step: int) -> Tensor:
        """bool [A]: where the position that step `step` draws behind is one of the sequence."""
        return self.position_A + 1 + step < self.length


def needed_rows(counted_BT: Tensor, steps: int) -> NeededRows:
    """The rows that have anything to learn in `steps` steps, and those that they see.

    Row t of step i draws behind position t + 1 + i, which must count.
    """
    length = counted_BT.shape[1]
    drafts_BT = torch.zeros_like(counted_BT)
    for step in range(min(steps, length - 1)):
        drafts_BT[:, : length - 1 - step] |= counted_BT[:, 1 + step :]
    flat, positions, active, spans, m, a = [], [], [], [], 0, 0
    for sequence, drafts_T in enumerate(drafts_BT):
        at_m = drafts_T.nonzero().flatten()
        if not len(at_m):
            continue
        rows = int(at_m[-1]) + 1
        positions.append(torch.arange(rows, device=at_m.device))
        flat.append(positions[-1] + sequence * length)
        active.append(at_m + m)
        spans.append((m, m + rows, a, a + len(at_m)))
        m, a = m + rows, a + len(at_m)
    none = torch.empty(0, dtype=torch.int64, device=counted_BT.device)
    flat_M, position_M, active_A = (torch.cat(parts) if parts else none for parts in (flat, positions, active))
    return NeededRows(flat_M, position_M, active_A, spans, length)


def see_own_steps(
    q_AHD: Tensor, k_MGD: Tensor, v_MGD: Tensor, own: list[tuple[Tensor, Tensor]], rows: NeededRows
) -> Tensor:
    """[A, H, D]: attention of the rows that draft over the rows of step 0 up to themselves, and over their own of the
    later steps (keys and values [A, G, D] of each)."""
    n_kv, width = k_MGD.shape[1:]
    q_AGgD = q_AHD.view(len(q_AHD), n_kv, -1, width) * width**-0.5
    own_AGgJ = [(q_AGgD * k_AGD[:, :, None]).sum(-1, keepdim=True) for k_AGD, _ in own]
    mixed = []
    for start, stop, first, last in rows.spans:
        k_Gt, v_Gt = k_MGD[start:stop].transpose(0, 1), v_MGD[start:stop].transpose(0, 1)
        q_GmgD = q_AGgD[first:last].transpose(0, 1)
        later_mt = torch.arange(stop - start, device=q_AHD.device) > rows.position_A[first:last, None]
        scores = (q_GmgD.flatten(1, 2) @ k_Gt.transpose(1, 2)).view(*q_GmgD.shape[:3], stop - start)
        scores = scores.masked_fill(later_mt[:, None], -torch.inf)
        weights = torch.cat([scores, *(s[first:last].transpose(0, 1) for s in own_AGgJ)], dim=-1).softmax(-1)
        mixed_GmgD = (weights[..., : stop - start].flatten(1, 2) @ v_Gt).view(q_GmgD.shape)
        for j, (_, v_AGD) in enumerate(own, stop - start):
            mixed_GmgD = mixed_GmgD + weights[..., j : j + 1] * v_AGD[first:last].transpose(0, 1)[:, :, None]
        mixed.append(mixed_GmgD.transpose(0, 1).flatten(1, 2))
    return torch.cat(mixed) if mixed else torch.empty_like(q_AHD)


def learn_to_draft(
    net: RecurrentNet,
    lesson: Lesson,
    fuse: Callable[[Tensor], Tensor],
    weights: Seq[float],
    *,
    embedding_Vd: Tensor | None,
    head_Sd: Tensor | None,
    tv: float,
) -> Losses:
    """The head drafts a token for each of `weights` behind every position, as it will when it is used.

    Row t of step i reads token t + 1 + i and its own output of step i - 1 (`fuse` of the target's features at step 0),
    and learns the target's distribution behind position t + 1 + i; a step's mean weighs `weights[i]`. The loss is
    cross-entropy as published, or so far as `tv` says the L1 distance of the two distributions, which is what sampled
    drafts are rejected by (twice over).
    Left out are positions that the lesson does not count, and those whose likeliest token is outside the draft
    vocabulary. `embedding_Vd` and `head_Sd` are the target's, frozen, for heads without their own.
    """
    weight_Sd = net.lm_head.weight if net.lm_head is not None else head_Sd
    table_Vd = net.embed_tokens.weight if net.embed_tokens is not None else embedding_Vd
    assert table_Vd is not None, "a head without an embedding needs the target's"
    assert weight_Sd is not None, "a head without lm_head needs the target's rows"
    aims = Aims(lesson.likeliest_BTC.flatten(0, 1), lesson.logp_BTC.flatten(0, 1), net.vocab)
    rows = needed_rows(lesson.counted_BT, len(weights))
    if not rows.spans:
        none = [0.0] * len(weights)
        return Losses(net.norm.weight.sum() * 0.0, none, none, none)
    tokens_X, counted_X = lesson.tokens_BT.flatten(), lesson.counted_BT.flatten()
    g_Md = fuse(lesson.features_BTF.flatten(0, 1)[rows.flat_M]).float()  # the residual stays wide under autocast
    first: tuple[Tensor, Tensor] | None = None
    own: list[tuple[Tensor, Tensor]] = []
    by_step = []
    for step in range(len(weights)):
        flat_M, positions_M = (rows.flat_A, rows.position_A + step) if first else (rows.flat_M, rows.position_M)
        at_M = (flat_M + 1 + step).clamp(max=len(tokens_X) - 1)
        x_MK, residual_Md = net.inputs(F.embedding(tokens_X[at_M], table_Vd), g_Md)
        pair = net.midlayer.self_attn.keys_values(x_MK, positions_M)
        if first is None:
            first, x_MK, residual_Md, at_M = pair, *(part[rows.active_A] for part in (x_MK, residual_Md, at_M))
        else:
            own.append(pair)
        q_AHD = net.midlayer.self_attn.queries(x_MK, rows.position_A + step)
        normed_Ad, g_Md = net.finish(residual_Md, see_own_steps(q_AHD, *first, own, rows))
        count_A = rows.inside_A(step) & counted_X[at_M]
        at_N = at_M[count_A]
        share_N = aims.usable_X[at_N] / aims.usable_X[at_N].sum().clamp(min=1)
        found = fused_loss(normed_Ad[count_A], weight_Sd, aims, at_N, weight_M=share_N, ce=1 - tv, tv=2 * tv)
        by_step.append(found)
    return _losses(by_step, weights)


def _losses(by_step: list[RowLosses], weights: Seq[float]) -> Losses:
    total = sum((weight * step.loss for weight, step in zip(weights, by_step, strict=True)), torch.zeros(()))
    losses = [float(step.loss.detach()) for step in by_step]
    return Losses(total, losses, [mean(step.agrees_M) for step in by_step], [mean(step.overlap_M) for step in by_step])
