"""Medusa heads as a network, and the loss that trains them (Cai et al. 2024, 2401.10774, sections 2.1 and 2.2).

Head k reads the target's last hidden state h of position t, behind its final norm, and says what token t + k + 1 may
be, whatever stands between:

    logits_k = lm_head_k(h + silu(linear_k(h)))

Shapes: X = B T positions of a batch, M rows, K heads, d width, S draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.drafters.head_fit import TrainedFor
from outrider.drafters.head_loss import fused_loss
from outrider.drafters.head_training import Aims, Lesson, Losses, mean
from outrider.drafters.reduced_vocab import ReducedVocab


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """`n_heads` heads of `n_layers` blocks. Without lm_heads of their own they share the target's head."""

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    n_heads: int
    n_layers: int = 1
    own_heads: bool = True
    target_name: str | None = None
    vocabulary_sha256: str | None = None

    def trained_for(self, *, by_name: bool) -> TrainedFor:
        """What a target is compared with."""
        name = self.target_name if by_name else None
        return TrainedFor(self.hidden_size, self.vocab_size, name, self.vocabulary_sha256)


class MedusaNet(nn.Module):
    """The heads' weights and arithmetic."""

    def __init__(self, config: MedusaConfig, vocab: ReducedVocab | None = None) -> None:
        super().__init__()
        self.config = config
        self.vocab = vocab or ReducedVocab.whole(config.vocab_size)
        assert len(self.vocab.ids_S) == config.draft_vocab_size, "the vocabulary is not the configuration's"
        width = config.hidden_size
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(width, width) for _ in range(config.n_layers)) for _ in range(config.n_heads)
        )
        self.lm_heads = nn.ModuleList(
            nn.Linear(width, config.draft_vocab_size, bias=False)
            for _ in range(config.n_heads if config.own_heads else 0)
        )

    def reset(self) -> None:
        """Every head starts as the target's own: blocks add nothing."""
        for parameter in self.blocks.parameters():
            nn.init.zeros_(parameter)

    def read(self, h_Md: Tensor, head: int) -> Tensor:
        """[M, d]: what the lm_head of a head, counted from 0, reads."""
        blocks = self.blocks[head]
        assert isinstance(blocks, nn.ModuleList)
        for linear in blocks:
            h_Md = h_Md + F.silu(linear(h_Md))
        return h_Md


def medusa_losses(
    net: MedusaNet,
    lesson: Lesson,
    *,
    last_norm: Callable[[Tensor], Tensor],
    head_Sd: Tensor | None = None,
    decay: float = 0.8,
) -> Losses:
    """The sum over heads of decay^k times the mean cross-entropy of head k = 1..K.

    Row t of head k learns the target's distribution behind position t + k. Left out are positions that the lesson does
    not count, and those whose likeliest token is outside the draft vocabulary. The lesson's features are the outputs of
    the target's last layer, and `last_norm` is the target's. `head_Sd` are rows of the target's head, frozen, for heads
    without their own.
    """
    assert net.config.own_heads or head_Sd is not None, "heads without lm_heads need the target's rows"
    aims = Aims(lesson.likeliest_BTC.flatten(0, 1), lesson.logp_BTC.flatten(0, 1), net.vocab)
    features_XF = lesson.features_BTF.flatten(0, 1)
    total, losses, agreements, overlaps = torch.zeros(()), [], [], []
    for k in range(1, net.config.n_heads + 1):
        at_N = _counted(lesson.counted_BT, k)
        usable_N = aims.usable_X[at_N]
        x_Nd = net.read(last_norm(features_XF[at_N - k].float()).clone(), k - 1)
        weight_Sd = net.lm_heads[k - 1].weight if net.config.own_heads else head_Sd
        assert isinstance(weight_Sd, Tensor)
        found = fused_loss(x_Nd, weight_Sd, aims, at_N, weight_M=usable_N / usable_N.sum().clamp(min=1))
        total = total + decay**k * found.loss
        losses.append(float(found.loss.detach()))
        agreements.append(mean(found.agrees_M))
        overlaps.append(mean(found.overlap_M))
    return Losses(total, losses, agreements, overlaps)


def _counted(counted_BT: Tensor, k: int) -> Tensor:
    """[N]: positions laid flat that count and have a row k before them in their sequence."""
    counted_BT = counted_BT.clone()
    counted_BT[:, :k] = False
    return counted_BT.flatten().nonzero().flatten()
