"""The EAGLE-3 head as a network, and the loss that trains it (2503.01840, sections 3.1 and 3.2).

Module names are those of the public checkpoints. The switches of EAGLE-3.1 and later exporters change the arithmetic:

    g = fc(cat(features))                   fc_norm: each layer's features normed first; norm_before_fc: all at once
    u = hidden_norm(g), e = input_layernorm(embedding), x = cat(e, u)
    z = g + attention(x)                    norm_before_residual: u + attention(x)
    y = z + mlp(post_attention_layernorm(z))
    logits = lm_head(norm(y)), and y goes on in the place of g        norm_output: norm(y) goes on

Shapes: M rows, d head width, F target features, E = 2 d, S draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outrider.drafters.head_layer import LayerShape, RmsNorm
from outrider.drafters.head_training import Lesson, Losses
from outrider.drafters.recurrent_net import DecoderLayer, RecurrentConfig, RecurrentNet
from outrider.drafters.recurrent_training import learn_to_draft
from outrider.drafters.reduced_vocab import ReducedVocab
from outrider.kernels import ChainInputs

N_FEATURES = 3


@dataclass(frozen=True, slots=True)
class Eagle3Config(RecurrentConfig):
    """`layer_ids` are target layers whose *inputs* the head reads; None: 2, L // 2 and L - 3 of L layers."""

    layer_ids: tuple[int, ...] | None = None
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False

    @property
    def n_features(self) -> int:
        """Target layers read."""
        return N_FEATURES if self.layer_ids is None else len(self.layer_ids)


class Midlayer(DecoderLayer):
    """The head's decoder layer: its attention reads embedding and features side by side."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape, 2 * shape.hidden_size)
        self.hidden_norm = RmsNorm(shape.hidden_size, shape.norm_eps)


class Eagle3Net(RecurrentNet):
    """The head's weights and arithmetic."""

    midlayer: Midlayer

    def __init__(self, config: Eagle3Config, vocab: ReducedVocab | None = None) -> None:
        super().__init__(config, vocab, Midlayer(config.layer))
        assert not (config.fc_norm and config.norm_before_fc), "two norms before fc"
        self._config = config
        width, eps = config.layer.hidden_size, config.layer.norm_eps
        features = config.n_features * config.target_hidden_size
        self.fc = nn.Linear(features, width, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RmsNorm(config.target_hidden_size, eps) for _ in range(config.n_features))
        if config.norm_before_fc:
            self.input_norm = RmsNorm(features, eps)

    @property
    def config(self) -> Eagle3Config:
        return self._config

    def fuse(self, features_MF: Tensor) -> Tensor:
        """[M, d]: the target's features as one vector a position."""
        x_MF = features_MF.to(self.dtype)
        if self.config.fc_norm:
            blocks = x_MF.chunk(self.config.n_features, dim=-1)
            x_MF = torch.cat([norm(block) for norm, block in zip(self.fc_norm, blocks, strict=True)], dim=-1)
        elif self.config.norm_before_fc:
            x_MF = self.input_norm(x_MF)
        g_Md: Tensor = self.fc(x_MF)
        return g_Md

    def inputs(self, embedded_Md: Tensor, g_Md: Tensor) -> tuple[Tensor, Tensor]:
        """(what the attention reads [M, E], what its output is added to [M, d])."""
        u_Md: Tensor = self.midlayer.hidden_norm(g_Md)
        e_Md: Tensor = self.midlayer.input_layernorm(embedded_Md.to(self.dtype))
        return torch.cat([e_Md, u_Md], dim=-1), u_Md if self.config.norm_before_residual else g_Md

    def chain_inputs(self) -> ChainInputs:
        layer, config = self.midlayer, self.config
        return ChainInputs(
            layer.input_layernorm.weight,
            layer.hidden_norm.weight,
            adds_to_norm=config.norm_before_residual,
            hands_norm=config.norm_output,
        )

    def carried(self, y_Md: Tensor, normed_Md: Tensor) -> Tensor:
        return normed_Md if self.config.norm_output else y_Md


def training_time_test(
    net: Eagle3Net,
    lesson: Lesson,
    *,
    embedding_Vd: Tensor | None = None,
    head_Sd: Tensor | None = None,
    steps: int = 7,
    decay: float = 0.8,
    tv: float = 0.0,
) -> Losses:
    """The head drafts `steps` tokens behind every position (section 3.2): see `learn_to_draft`; step i weighs decay^i.

    The target's distribution is restricted to the draft vocabulary; `tv` is the share of the L1 distance in the loss,
    published is none. `embedding_Vd` and `head_Sd` are the target's, frozen, for heads without their own.
    """
    weights = [decay**step for step in range(steps)]
    return learn_to_draft(net, lesson, net.fuse, weights, embedding_Vd=embedding_Vd, head_Sd=head_Sd, tv=tv)
