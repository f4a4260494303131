"""A next-token module as a network (DeepSeek-V3, 2412.19437, section 2.2), and the loss that trains one to draft on.

    x = fc(cat(embed_norm(embedding), hidden_norm(h)))     h: the target's last hidden state, behind its final norm
    y = decoder layer(x), logits = lm_head(norm(y)), and norm(y) goes on in the place of h

One module drafts any number of tokens, on its own output (FastMTP, 2509.18362).

Shapes: M rows, d width of head and target, S draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outrider.drafters.head_layer import PackedMatrix, RmsNorm
from outrider.drafters.head_training import Lesson, Losses
from outrider.drafters.recurrent_net import DecoderLayer, RecurrentConfig, RecurrentNet
from outrider.drafters.recurrent_training import learn_to_draft
from outrider.drafters.reduced_vocab import ReducedVocab
from outrider.kernels import ChainInputs


@dataclass(frozen=True, slots=True)
class MtpConfig(RecurrentConfig):
    """A module is as wide as its target."""


class MtpNet(RecurrentNet):
    """The module's weights and arithmetic."""

    def __init__(self, config: MtpConfig, vocab: ReducedVocab | None = None) -> None:
        width, eps = config.layer.hidden_size, config.layer.norm_eps
        assert width == config.target_hidden_size, "a module is as wide as its target"
        super().__init__(config, vocab, DecoderLayer(config.layer, width))
        self._config = config
        self.embed_norm = RmsNorm(width, eps)
        self.hidden_norm = RmsNorm(width, eps)
        self.fc = nn.Linear(2 * width, width, bias=False)

    @property
    def config(self) -> MtpConfig:
        return self._config

    def fuse(self, features_MF: Tensor) -> Tensor:
        """The target's hidden states, behind its final norm."""
        return features_MF.to(self.dtype)

    def inputs(self, embedded_Md: Tensor, g_Md: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([self.embed_norm(embedded_Md.to(self.dtype)), self.hidden_norm(g_Md)], dim=-1)
        x_Md: Tensor = self.fc(both)
        return self.midlayer.input_layernorm(x_Md), x_Md

    def chain_inputs(self) -> ChainInputs:
        fc = self.get_submodule("fc")
        assert isinstance(fc, PackedMatrix), "matrices that are packed"
        joint, norm_d = fc.packed, self.midlayer.input_layernorm.weight
        return ChainInputs(self.embed_norm.weight, self.hidden_norm.weight, joint, norm_d, hands_norm=True)

    def carried(self, y_Md: Tensor, normed_Md: Tensor) -> Tensor:
        return normed_Md


def mtp_losses(
    net: MtpNet,
    lesson: Lesson,
    *,
    last_norm: Callable[[Tensor], Tensor],
    embedding_Vd: Tensor | None = None,
    head_Sd: Tensor | None = None,
    steps: int = 4,
    beta: float = 0.6,
    tv: float = 0.0,
) -> Losses:
    """The module drafts `steps` tokens behind every position: see `learn_to_draft`. Step i weighs beta^i; all weights
    sum to 1 (2509.18362, section 3.2).

    The lesson's features are the outputs of the target's last layer, and `last_norm` is the target's; `tv` is the share
    of the L1 distance in the loss, published is none. `embedding_Vd` and `head_Sd` are the target's, frozen, for
    modules without their own.
    """
    total = sum(beta**step for step in range(steps))
    weights = [beta**step / total for step in range(steps)]

    def fuse(features_MF: Tensor) -> Tensor:
        return net.fuse(last_norm(features_MF.float()).clone())

    return learn_to_draft(net, lesson, fuse, weights, embedding_Vd=embedding_Vd, head_Sd=head_Sd, tv=tv)
