"""The EAGLE-3 head as a network, and the loss that trains it (2503.01840, sections 3.1 and 3.2).

Module names are those of the public checkpoints. The switches of EAGLE-3.1 and later exporters change the arithmetic:

    g = fc(cat(features))                   fc_norm: each layer's features normed first; norm_before_fc: all at once
    u = hidden_norm(g), e = input_layernorm(embedding), x = cat(e, u)
    z = g + attention(x)                    norm_before_residual: u + attention(x)
    y = z + mlp(post_attention_layernorm(z))
    logits = lm_head(norm(y)), and y goes on in the place of g        norm_output: norm(y) goes on

Shapes: B sequences, T positions, X = B T, M rows, A rows that draft, d head width, F target features, E = 2 d, S draft
vocabulary, V target vocabulary, H query heads, G key-value heads, D head width of the attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.drafters.head_fit import TrainedFor
from outrider.drafters.head_layer import Attention, LayerShape, Mlp, RmsNorm
from outrider.drafters.head_loss import hear
from outrider.drafters.head_training import Aims, Lesson, Losses
from outrider.drafters.own_steps import needed_rows, see_own_steps
from outrider.drafters.reduced_vocab import ReducedVocab

N_FEATURES = 3


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """What a head is. `layer_ids` are target layers whose *inputs* it reads; None: 2, L // 2 and L - 3 of L layers.
    Without an embedding or lm_head of its own it shares the target's."""

    layer: LayerShape
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    layer_ids: tuple[int, ...] | None = None
    own_embedding: bool = False
    own_head: bool = True
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    target_name: str | None = None
    vocabulary_sha256: str | None = None

    @property
    def n_features(self) -> int:
        """Target layers read."""
        return N_FEATURES if self.layer_ids is None else len(self.layer_ids)

    def trained_for(self, *, by_name: bool) -> TrainedFor:
        """What a target is compared with."""
        name = self.target_name if by_name else None
        return TrainedFor(self.target_hidden_size, self.vocab_size, name, self.vocabulary_sha256)


class Midlayer(nn.Module):
    """The head's decoder layer: its attention reads embedding and features side by side."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.norm_eps
        self.self_attn = Attention(shape, 2 * width)
        self.mlp = Mlp(shape)
        self.input_layernorm = RmsNorm(width, eps)
        self.hidden_norm = RmsNorm(width, eps)
        self.post_attention_layernorm = RmsNorm(width, eps)

    def finish(self, residual_Md: Tensor, mixed_MHD: Tensor) -> Tensor:
        """[M, d] from what the rows' attention gave."""
        z_Md = residual_Md + self.self_attn.output(mixed_MHD)
        out: Tensor = z_Md + self.mlp(self.post_attention_layernorm(z_Md))
        return out


class Eagle3Net(nn.Module):
    """The head's weights and arithmetic; who sees what, and what is remembered, is the caller's."""

    def __init__(self, config: Eagle3Config, vocab: ReducedVocab | None = None) -> None:
        super().__init__()
        assert not (config.fc_norm and config.norm_before_fc), "two norms before fc"
        self.config = config
        self.vocab = vocab or ReducedVocab.whole(config.vocab_size)
        assert len(self.vocab.ids_S) == config.draft_vocab_size, "the vocabulary is not the configuration's"
        shape, width, eps = config.layer, config.layer.hidden_size, config.layer.norm_eps
        features = config.n_features * config.target_hidden_size
        self.fc = nn.Linear(features, width, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RmsNorm(config.target_hidden_size, eps) for _ in range(config.n_features))
        if config.norm_before_fc:
            self.input_norm = RmsNorm(features, eps)
        self.midlayer = Midlayer(shape)
        self.norm = RmsNorm(width, eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False) if config.own_head else None
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if config.own_embedding else None

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations, and of the weights unless they are packed."""
        return self.norm.weight.dtype

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

    def read(self, y_Md: Tensor) -> tuple[Tensor, Tensor]:
        """(what lm_head reads [M, d], what goes on in the place of g [M, d])."""
        normed_Md: Tensor = self.norm(y_Md)
        return normed_Md, normed_Md if self.config.norm_output else y_Md


def training_time_test(
    net: Eagle3Net,
    lesson: Lesson,
    *,
    embedding_Vd: Tensor | None = None,
    head_Sd: Tensor | None = None,
    steps: int = 7,
    decay: float = 0.8,
) -> Losses:
    """The head drafts `steps` tokens behind every position, as it will when it is used (2503.01840, section 3.2).

    Row t of step i reads token t + 1 + i and its own output of step i - 1 (the target's features at step 0), and learns
    the target's distribution behind position t + 1 + i, restricted to the draft vocabulary: cross-entropy, weight
    decay^i. It sees the rows before t as step 0 made them, and its own of every step. Left out are positions that the
    lesson does not count, and those whose likeliest token is outside the draft vocabulary: a step's loss is the mean
    over the others. `embedding_Vd` and `head_Sd` are the target's, frozen, for heads without their own.
    """
    table_Vd = net.embed_tokens.weight if net.embed_tokens is not None else embedding_Vd
    weight_Sd = net.lm_head.weight if net.lm_head is not None else head_Sd
    assert table_Vd is not None, "a head without an embedding needs the target's"
    assert weight_Sd is not None, "a head without lm_head needs the target's rows"
    aims = Aims(lesson.likeliest_BTC.flatten(0, 1), lesson.logp_BTC.flatten(0, 1), net.vocab)
    rows = needed_rows(lesson.counted_BT, steps)
    if not rows.spans:
        return Losses(net.norm.weight.sum() * 0.0, [0.0] * steps, [0.0] * steps, [0.0] * steps)
    tokens_X, counted_X = lesson.tokens_BT.flatten(), lesson.counted_BT.flatten()
    attention = net.midlayer.self_attn
    g_Md = net.fuse(lesson.features_BTF.flatten(0, 1)[rows.flat_M])
    own: list[tuple[Tensor, Tensor]] = []
    total, heard = g_Md.new_zeros(()), []
    for step in range(steps):
        flat_M, positions_M = (rows.flat_M, rows.position_M) if step == 0 else (rows.flat_A, rows.position_A + step)
        embedded_Md = F.embedding(tokens_X[(flat_M + 1 + step).clamp(max=len(tokens_X) - 1)], table_Vd)
        x_ME, residual_Md = net.inputs(embedded_Md, g_Md)
        k_MGD, v_MGD = attention.keys_values(x_ME, positions_M)
        if step == 0:
            first = k_MGD, v_MGD
            x_ME, residual_Md = x_ME[rows.active_A], residual_Md[rows.active_A]
        else:
            own.append((k_MGD, v_MGD))
        mixed_AHD = see_own_steps(attention.queries(x_ME, rows.position_A + step), *first, own, rows)
        normed_Ad, g_Md = net.read(net.midlayer.finish(residual_Md, mixed_AHD))
        count_A = rows.inside_A(step) & counted_X[(rows.flat_A + 1 + step).clamp(max=len(counted_X) - 1)]
        heard.append(hear(normed_Ad[count_A], weight_Sd, aims, rows.flat_A[count_A] + 1 + step))
        total = total + decay**step * heard[-1].loss
    return Losses(
        total, [float(h.loss.detach()) for h in heard], [h.agreement for h in heard], [h.overlap for h in heard]
    )
