"""The EAGLE-3 head as a network, and the loss that trains it (2503.01840, sections 3.1 and 3.2).

Module names are those of the public checkpoints. The switches of EAGLE-3.1 and later exporters change the arithmetic:

    g = fc(cat(features))                   fc_norm: each layer's features normed first; norm_before_fc: all at once
    u = hidden_norm(g), e = input_layernorm(embedding), x = cat(e, u)
    z = g + attention(x)                    norm_before_residual: u + attention(x)
    y = z + mlp(post_attention_layernorm(z))
    logits = lm_head(norm(y)), and y goes on in the place of g        norm_output: norm(y) goes on

Shapes: B sequences, T positions, R = T - 1 rows, M rows, d head width, F target features, E = 2 d, S draft vocabulary,
V target vocabulary, H query heads, G key-value heads, D head width of the attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.drafters.head_fit import TrainedFor
from outrider.drafters.head_layer import Attention, LayerShape, Mlp, RmsNorm
from outrider.drafters.reduced_vocab import ReducedVocab

N_FEATURES = 3


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """What a head is. `layer_ids` are target layers whose *inputs* it reads; None: 2, L // 2 and L - 3 of L layers."""

    layer: LayerShape
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    layer_ids: tuple[int, ...] | None = None
    own_embedding: bool = False
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
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
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
        """(float32 logits [M, S], what goes on in the place of g [M, d])."""
        normed_Md: Tensor = self.norm(y_Md)
        return self.lm_head(normed_Md).float(), normed_Md if self.config.norm_output else y_Md


@dataclass(frozen=True, slots=True)
class StepLosses:
    """`total` is what is minimised; by step, the loss and the share of rows whose likeliest token is the target's."""

    total: Tensor
    loss_by_step: list[float]
    agreement_by_step: list[float]


def training_time_test(
    net: Eagle3Net,
    features_BTF: Tensor,
    tokens_BT: Tensor,
    target_logits_BTV: Tensor,
    *,
    embedding_Vd: Tensor | None = None,
    counted_BT: Tensor | None = None,
    steps: int = 7,
    decay: float = 0.8,
) -> StepLosses:
    """The head drafts `steps` tokens behind every position, as it will when it is used (2503.01840, section 3.2).

    Row t of step i reads token t + 1 + i and its own output of step i - 1 (the target's features at step 0), and learns
    the target's distribution behind position t + 1 + i, restricted to the draft vocabulary: cross-entropy, weight
    decay^i. It sees the rows before t as step 0 made them, and its own of every step. Left out are positions that
    `counted_BT` (bool; None: all) excludes, and those whose likeliest token is outside the draft vocabulary.
    A step's loss is the mean over what is left. `embedding_Vd` is the target's, for heads without their own.
    """
    rows = tokens_BT.shape[1] - 1
    table_Vd = net.embed_tokens.weight if net.embed_tokens is not None else embedding_Vd
    assert table_Vd is not None, "a head without an embedding needs the target's"
    ids_S = net.vocab.ids_S.to(tokens_BT.device)
    likeliest_BT = target_logits_BTV.argmax(-1)
    usable_BT = net.vocab.flags().to(tokens_BT.device)[likeliest_BT]
    usable_BT = usable_BT if counted_BT is None else usable_BT & counted_BT
    aims_BTS = target_logits_BTV[..., ids_S].float().softmax(-1)
    attention = net.midlayer.self_attn
    g_BRd = net.fuse(features_BTF[:, :rows])
    keys: list[Tensor] = []
    values: list[Tensor] = []
    total, losses, agreements = torch.zeros((), device=tokens_BT.device), [], []
    for step in range(min(steps, rows)):
        left = rows - step  # rows whose token and aim exist
        embedded_BRd = F.embedding(F.pad(tokens_BT[:, 1 + step :], (0, step)), table_Vd)
        x_BRE, residual_BRd = net.inputs(embedded_BRd, g_BRd)
        positions_R = torch.arange(step, step + rows)
        k_BRGD, v_BRGD = attention.keys_values(x_BRE, positions_R)
        keys.append(k_BRGD)
        values.append(v_BRGD)
        mixed_BRHD = _see_own_steps(attention.queries(x_BRE, positions_R), keys, values)
        logits_BRS, g_BRd = net.read(net.midlayer.finish(residual_BRd, mixed_BRHD))
        aim_BRS, count_BR = aims_BTS[:, 1 + step :], usable_BT[:, 1 + step :]
        said_BRS = logits_BRS[:, :left]
        loss_BR = -(aim_BRS * said_BRS.log_softmax(-1)).sum(-1)
        n_counted = count_BR.sum().clamp(min=1)
        loss = (loss_BR * count_BR).sum() / n_counted
        total = total + decay**step * loss
        agree_BR = (said_BRS.argmax(-1) == aim_BRS.argmax(-1)) & count_BR
        losses.append(float(loss.detach()))
        agreements.append(float(agree_BR.sum() / n_counted))
    return StepLosses(total, losses, agreements)


def _see_own_steps(q_BRHD: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """[B, R, H, D]: causal attention over the rows of step 0, and each row's own of the later steps."""
    group, rows = q_BRHD.shape[2] // keys[0].shape[2], q_BRHD.shape[1]
    wide_keys = [k_BRGD.repeat_interleave(group, dim=2) for k_BRGD in keys]
    wide_values = [v_BRGD.repeat_interleave(group, dim=2) for v_BRGD in values]
    hidden_RR = torch.ones(rows, rows, dtype=torch.bool, device=q_BRHD.device).triu(1)
    scores_BHRR = torch.einsum("brhd,bshd->bhrs", q_BRHD, wide_keys[0]).masked_fill(hidden_RR, -torch.inf)
    own = [(q_BRHD * k_BRHD).sum(-1).transpose(1, 2)[..., None] for k_BRHD in wide_keys[1:]]
    weights = (torch.cat([scores_BHRR, *own], dim=-1).float() * q_BRHD.shape[-1] ** -0.5).softmax(-1).to(q_BRHD.dtype)
    mixed_BRHD = torch.einsum("bhrs,bshd->brhd", weights[..., :rows], wide_values[0])
    for step, v_BRHD in enumerate(wide_values[1:]):
        mixed_BRHD = mixed_BRHD + weights[..., rows + step].transpose(1, 2)[..., None] * v_BRHD
    return mixed_BRHD
