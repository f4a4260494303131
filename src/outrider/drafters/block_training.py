"""The loss that trains block heads: blocks at random anchors of the target's own text, all of them in one pass.

An anchor at position a is what a round starts from: its block sees the features of the positions before a and not that
of a itself, which the target has not computed by then, and draft token k stands at position a + k.

Shapes: B sequences, T positions, N blocks, b rows of a block, K draft tokens of a block, P context rows, R = N b rows,
M draft tokens that count, d head width, r rank of the Markov head, S draft vocabulary, V target vocabulary, H query
heads, G key-value heads, g = H / G, D head width of the attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.drafters.block_net import BlockNet
from outrider.drafters.head_loss import Bias, fused_loss
from outrider.drafters.head_training import Aims, Lesson, Losses


@dataclass(frozen=True, slots=True)
class Blocks:
    """Where the blocks of a lesson stand: by sequence of it, the anchors (ascending). `at_NK` is the position behind
    which draft token k is said, `counts_NK` whether it has an aim that is to be learned."""

    anchors: list[Tensor]
    sequence_N: Tensor
    anchor_N: Tensor
    at_NK: Tensor
    counts_NK: Tensor


class Weights(NamedTuple):
    """How much each loss weighs, and how fast the weight falls along a block."""

    decay: float
    ce: float
    tv: float
    confidence: float


class Judged(NamedTuple):
    """The loss of the lesson; and by draft token that counts its place in the block, its loss, agreement, overlap."""

    total: Tensor
    place_M: Tensor
    loss_M: Tensor
    agrees_M: Tensor
    overlap_M: Tensor


def block_loss(
    net: BlockNet,
    lesson: Lesson,
    *,
    embedding_Vd: Tensor | None,
    head_Sd: Tensor | None,
    anchors_per_sequence: int,
    generator: torch.Generator | None = None,
    decay: float = 4.0,
    ce: float,
    tv: float,
    confidence: float = 1.0,
) -> Losses:
    """The loss of the blocks at up to `anchors_per_sequence` random counted positions of every sequence.

    Draft token k weighs exp(-(k - 1) / decay) and costs ce * cross-entropy + tv * (1 - overlap) + confidence * the
    binary cross-entropy of its confidence against the overlap of q and p. The Markov head reads the text's own tokens.
    `embedding_Vd` and `head_Sd` (rows of the draft vocabulary) are the target's, for heads without their own, and not
    trained. The published L1 distance is twice 1 - overlap. By position: draft tokens 1 to K.
    """
    blocks = pick_blocks(lesson.counted_BT, net.config.n_drafts, anchors_per_sequence, generator)
    places = net.config.n_drafts
    if not len(blocks.anchor_N):
        nothing = [0.0] * places
        return Losses(net.norm.weight.sum() * 0, nothing, nothing, nothing)
    h_NKd = _hidden(net, lesson, blocks, embedding_Vd)
    judged = _judge(net, lesson, blocks, h_NKd, head_Sd, Weights(decay, ce, tv, confidence))
    return Losses(
        judged.total,
        *(_by_place(v, judged.place_M, places) for v in (judged.loss_M, judged.agrees_M, judged.overlap_M)),
    )


def pick_blocks(counted_BT: Tensor, drafts: int, most: int, generator: torch.Generator | None) -> Blocks:
    """Up to `most` anchors a sequence. A block's tokens count up to the first whose aim does not."""
    length = counted_BT.shape[1]
    anchors = []
    for counted_T in counted_BT.cpu():
        possible_A = counted_T[1:].nonzero().flatten() + 1
        chosen_A = torch.randperm(len(possible_A), generator=generator)[:most]
        anchors.append(possible_A[chosen_A].sort().values)
    anchor_N = torch.cat(anchors)
    sequence_N = torch.repeat_interleave(torch.arange(len(anchors)), torch.tensor([len(a) for a in anchors]))
    at_NK = anchor_N[:, None] + torch.arange(drafts)
    inside_NK = at_NK < length
    at_NK = at_NK.clamp(max=length - 1)
    counts_NK = (inside_NK & counted_BT.cpu()[sequence_N[:, None], at_NK]).cumprod(1).bool()
    device = counted_BT.device
    return Blocks(anchors, sequence_N.to(device), anchor_N.to(device), at_NK.to(device), counts_NK.to(device))


def _hidden(net: BlockNet, lesson: Lesson, blocks: Blocks, embedding_Vd: Tensor | None) -> Tensor:
    """[N, K, d]: the normed rows that speak."""
    config, device = net.config, lesson.tokens_BT.device
    table_Vd = net.embed_tokens.weight if net.embed_tokens is not None else embedding_Vd
    assert table_Vd is not None, "a head without an embedding needs the target's"
    b, count = config.block_size, len(blocks.anchor_N)
    tokens_Nb = torch.full((count, b), config.mask_token_id, device=device)
    tokens_Nb[:, 0] = lesson.tokens_BT[blocks.sequence_N, blocks.anchor_N]
    x_Rd = F.embedding(tokens_Nb.flatten(), table_Vd).to(net.dtype)
    positions_R = (blocks.anchor_N[:, None] + torch.arange(b, device=device)).flatten()
    ends = [int(anchors_A[-1]) if len(anchors_A) else 0 for anchors_A in blocks.anchors]
    context_Pd = net.context(torch.cat([lesson.features_BTF[i, :end] for i, end in enumerate(ends)]))
    positions_P = torch.cat([torch.arange(end, device=device) for end in ends])
    for layer in net.blocks:
        attention, inner_Rd = layer.self_attn, layer.input_layernorm(x_Rd)
        text = attention.keys_values(context_Pd, positions_P)
        own = attention.keys_values(inner_Rd, positions_R)
        q_RHD = attention.queries(inner_Rd, positions_R)
        x_Rd = layer.finish(x_Rd, _mix(q_RHD, text, own, blocks, ends, b))
    h_Nbd = net.norm(x_Rd).view(count, b, -1)
    speaking_NKd: Tensor = h_Nbd if config.sample_from_anchor else h_Nbd[:, 1:]
    return speaking_NKd


def _mix(
    q_RHD: Tensor, text: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], blocks: Blocks, ends: list[int], b: int
) -> Tensor:
    """[R, H, D]: every row sees the text before its anchor and all of its block."""
    counts = [len(anchors_A) for anchors_A in blocks.anchors]
    texts = zip(torch.split(text[0], ends), torch.split(text[1], ends), strict=True)
    rows = zip(*(torch.split(part.view(-1, b, *part.shape[1:]), counts) for part in (q_RHD, *own)), strict=True)
    mixed = []
    for (k_TGD, v_TGD), (q, k, v), anchors_A in zip(texts, rows, blocks.anchors, strict=True):
        if len(anchors_A):
            mixed.append(_mix_one(q, k_TGD, v_TGD, k, v, anchors_A.to(q.device)))
    return torch.cat(mixed).flatten(0, 1)


def _mix_one(q_NbHD: Tensor, k_TGD: Tensor, v_TGD: Tensor, k_NbGD: Tensor, v_NbGD: Tensor, anchor_N: Tensor) -> Tensor:
    """[N, b, H, D] of one sequence."""
    count, b, heads, width = q_NbHD.shape
    length, groups = k_TGD.shape[:2]
    rows = b * heads // groups
    q_GNRD = (
        (q_NbHD * width**-0.5)
        .view(count, b, groups, -1, width)
        .permute(2, 0, 1, 3, 4)
        .reshape(groups, count, rows, width)
    )
    k_GTD, v_GTD = k_TGD.transpose(0, 1), v_TGD.transpose(0, 1)
    k_GNbD, v_GNbD = k_NbGD.permute(2, 0, 1, 3), v_NbGD.permute(2, 0, 1, 3)
    text_GNRT = (q_GNRD.flatten(1, 2) @ k_GTD.transpose(1, 2)).view(groups, count, rows, length)
    hidden_NT = torch.arange(length, device=q_NbHD.device) >= anchor_N[:, None]
    text_GNRT = text_GNRT.masked_fill(hidden_NT[None, :, None], -torch.inf)
    own_GNRb = q_GNRD @ k_GNbD.transpose(2, 3)
    weight_GNRS = torch.cat([text_GNRT, own_GNRb], dim=-1).float().softmax(-1).to(q_NbHD.dtype)
    text_GNRT, own_GNRb = torch.split(weight_GNRS, [length, b], dim=-1)
    mixed_GNRD: Tensor = (text_GNRT.flatten(1, 2) @ v_GTD).view(q_GNRD.shape) + own_GNRb @ v_GNbD
    return mixed_GNRD.view(groups, count, b, -1, width).permute(1, 2, 0, 3, 4).reshape(count, b, heads, width)


def _judge(
    net: BlockNet, lesson: Lesson, blocks: Blocks, h_NKd: Tensor, head_Sd: Tensor | None, weights: Weights
) -> Judged:
    """What the rows say against the target's distributions."""
    counts_NK, sequence_N1 = blocks.counts_NK, blocks.sequence_N[:, None]
    weight_Sd = net.lm_head.weight if net.lm_head is not None else head_Sd
    assert weight_Sd is not None, "a head without output rows needs the target's"
    place_M = counts_NK.nonzero()[:, 1]
    weight_M = torch.exp(-place_M / weights.decay)
    weight_M = weight_M / weight_M.sum()
    flat_NK = sequence_N1 * lesson.tokens_BT.shape[1] + blocks.at_NK
    aims = Aims(lesson.likeliest_BTC.flatten(0, 1), lesson.logp_BTC.flatten(0, 1), net.vocab)
    h_Md, embedded_Mr, bias = h_NKd[counts_NK], None, None
    if net.markov_head is not None:
        embedded_NKr = net.markov_head.markov_w1(lesson.tokens_BT.flatten()[flat_NK])
        embedded_Mr = embedded_NKr[counts_NK]
        bias = Bias(_markov_inputs(net, embedded_NKr, h_NKd)[counts_NK], net.markov_head.markov_w2.weight)
    found = fused_loss(
        h_Md,
        weight_Sd.to(net.dtype),
        aims,
        flat_NK[counts_NK],
        weight_M=weight_M,
        ce=weights.ce,
        tv=weights.tv,
        bias=bias,
    )
    total, loss_M = found.loss, weights.ce * found.cross_entropy_M + weights.tv * (1 - found.overlap_M)
    if net.confidence_head is not None:
        logit_M, goal_M = net.confidence_head(h_Md, embedded_Mr).float(), found.overlap_M.clamp(0, 1)
        confidence_M = F.binary_cross_entropy_with_logits(logit_M, goal_M, reduction="none")
        total = total + weights.confidence * (weight_M * confidence_M).sum()
        loss_M = loss_M + weights.confidence * confidence_M.detach()
    return Judged(total, place_M, loss_M, found.agrees_M, found.overlap_M)


def _markov_inputs(net: BlockNet, embedded_NKr: Tensor, h_NKd: Tensor) -> Tensor:
    """[N, K, r]: what the biases are made of, along the text."""
    assert net.markov_head is not None
    if not net.markov_head.recurrent:
        return embedded_NKr
    state_Nr, inputs = None, []
    for embedded_Nr, h_Nd in zip(embedded_NKr.unbind(1), h_NKd.unbind(1), strict=True):
        input_Nr, state_Nr = net.markov_head.step(embedded_Nr, h_Nd, state_Nr)
        inputs.append(input_Nr)
    return torch.stack(inputs, dim=1)


def _by_place(value_M: Tensor, place_M: Tensor, places: int) -> list[float]:
    """The mean by place in the block."""
    number_K = torch.bincount(place_M, minlength=places).clamp(min=1)
    sum_K = value_M.new_zeros(places).index_add(0, place_M, value_M.detach())
    mean: list[float] = (sum_K / number_K).tolist()
    return mean
