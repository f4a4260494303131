"""The network of drafters that fill a block in one pass: DFlash (Chen et al. 2026, 2602.06036, section 3) and DSpark
(Cheng et al. 2026, 2607.05147, section 3).

A block is the anchor (the last committed token) and masks. Its rows see each other both ways, and the whole text before
the anchor, of which every layer's keys and values are made from the target's hidden states:

    context = hidden_norm(fc(cat(features)))
    every layer: q from the block, k and v from [context ; block], positions absolute; residual, feed-forward
    h = norm(x), U = lm_head(h)

`sample_from_anchor` says which rows speak: all b of them, row j of draft token j + 1 (DSpark), or the masks alone, row
j of draft token j (DFlash: b - 1 tokens). A Markov head adds to the logits of a token what follows from the one before,
and a confidence head says, before the token is known, how probably it will be accepted.

Shapes: M rows, d head width, F target features, r rank of the Markov head, S draft vocabulary, H query heads, G
key-value heads, D head width of the attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outrider.drafters.head_fit import TrainedFor
from outrider.drafters.head_layer import Attention, LayerShape, Mlp, RmsNorm
from outrider.drafters.reduced_vocab import ReducedVocab

MARKOV_HEADS = ("vanilla", "rnn")
SMALL = 0.02
"""Spread of the Markov embedding at the start: its biases begin near 0."""


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """What a block head is. `layer_ids` are target layers whose *outputs* it reads (-1: the embedding).

    `markov_rank` 0 is no Markov head. `own_embedding` and `own_head` say whether the head has them or shares the
    target's.
    """

    layer: LayerShape
    n_layers: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    block_size: int
    mask_token_id: int
    layer_ids: tuple[int, ...]
    sample_from_anchor: bool = True
    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    confidence: bool = False
    confidence_with_markov: bool = True
    own_embedding: bool = False
    own_head: bool = False
    target_name: str | None = None
    vocabulary_sha256: str | None = None

    @property
    def n_drafts(self) -> int:
        """Draft tokens of a whole block."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def confidence_inputs(self) -> int:
        """Numbers that the confidence head reads."""
        return self.layer.hidden_size + (self.markov_rank if self.confidence_with_markov else 0)

    def trained_for(self, *, by_name: bool) -> TrainedFor:
        """What a target is compared with."""
        name = self.target_name if by_name else None
        return TrainedFor(self.target_hidden_size, self.vocab_size, name, self.vocabulary_sha256)


class BlockLayer(nn.Module):
    """One decoder layer; who sees what is the caller's."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape, shape.hidden_size)
        self.mlp = Mlp(shape)
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.norm_eps)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.norm_eps)

    def finish(self, x_Md: Tensor, mixed_MHD: Tensor) -> Tensor:
        """[M, d] from what the rows' attention gave."""
        z_Md = x_Md + self.self_attn.output(mixed_MHD)
        out: Tensor = z_Md + self.mlp(self.post_attention_layernorm(z_Md))
        return out


class MarkovHead(nn.Module):
    """What the token before adds to the logits of a token: W2 W1[token], or, for "rnn", W2 of a state that also reads
    the rows and the tokens before it."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=SMALL)
        self.recurrent = config.markov_head_type == "rnn"
        if self.recurrent:
            self.joint_proj = nn.Linear(2 * rank + config.layer.hidden_size, 3 * rank)

    def step(self, embedded_Mr: Tensor, h_Md: Tensor, state_Mr: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(what `markov_w2` makes the bias of [M, r], the state of the next token). `embedded_Mr` are rows of
        `markov_w1` for the tokens before; the first state is None."""
        if not self.recurrent:
            return embedded_Mr, None
        state_Mr = torch.zeros_like(embedded_Mr) if state_Mr is None else state_Mr
        joint_MJ = self.joint_proj(torch.cat([state_Mr, embedded_Mr, h_Md], dim=-1))
        gate_Mr, new_Mr, out_Mr = joint_MJ.chunk(3, dim=-1)
        gate_Mr = gate_Mr.sigmoid()
        return out_Mr.tanh(), gate_Mr * state_Mr + (1 - gate_Mr) * new_Mr.tanh()


class ConfidenceHead(nn.Module):
    """The logit of the probability that the next draft token is accepted, from its row and the token before it."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_with_markov
        self.proj = nn.Linear(config.confidence_inputs, 1)

    def forward(self, h_Md: Tensor, embedded_Mr: Tensor | None) -> Tensor:
        """[M]"""
        inputs = [h_Md] if embedded_Mr is None or not self.with_markov else [h_Md, embedded_Mr]
        logit_M1: Tensor = self.proj(torch.cat(inputs, dim=-1))
        return logit_M1[..., 0]


class BlockNet(nn.Module):
    """The head's weights and arithmetic; who sees what, and what is remembered, is the caller's."""

    def __init__(self, config: BlockConfig, vocab: ReducedVocab | None = None) -> None:
        super().__init__()
        assert config.markov_head_type in MARKOV_HEADS, f"a Markov head {config.markov_head_type!r}"
        assert config.markov_rank or not (config.confidence and config.confidence_with_markov), "confidence of no rank"
        self.config = config
        self.vocab = vocab or ReducedVocab.whole(config.vocab_size)
        assert len(self.vocab.ids_S) == config.draft_vocab_size, "the vocabulary is not the configuration's"
        shape, width, eps = config.layer, config.layer.hidden_size, config.layer.norm_eps
        self.fc = nn.Linear(len(config.layer_ids) * config.target_hidden_size, width, bias=False)
        self.hidden_norm = RmsNorm(width, eps)
        self.layers = nn.ModuleList(BlockLayer(shape) for _ in range(config.n_layers))
        self.norm = RmsNorm(width, eps)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.confidence else None
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if config.own_embedding else None
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False) if config.own_head else None

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations, and of the weights unless they are packed."""
        return self.norm.weight.dtype

    @property
    def blocks(self) -> list[BlockLayer]:
        """The layers."""
        return [layer for layer in self.layers if isinstance(layer, BlockLayer)]

    def context(self, features_MF: Tensor) -> Tensor:
        """[M, d]: what every layer makes keys and values of the text of."""
        out: Tensor = self.hidden_norm(self.fc(features_MF.to(self.dtype)))
        return out
