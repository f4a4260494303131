"""What heads have in common that draft token by token on their own output: EAGLE-3 and next-token modules.

Row t reads what the target says of position t (in later steps: what the head's own row before hands on) and the
embedding of token t + 1, and says what token t + 2 may be.

Shapes: M rows, d head width, F target features, K inputs of the attention, H query heads, D width of one.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outrider.drafters.head_fit import TrainedFor
from outrider.drafters.head_layer import Attention, LayerShape, Mlp, RmsNorm
from outrider.drafters.reduced_vocab import ReducedVocab
from outrider.kernels import ChainInputs


@dataclass(frozen=True, slots=True)
class RecurrentConfig:
    """What a head is. Without an embedding or lm_head of its own it shares the target's."""

    layer: LayerShape
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    own_embedding: bool = False
    own_head: bool = True
    target_name: str | None = None
    vocabulary_sha256: str | None = None

    def trained_for(self, *, by_name: bool) -> TrainedFor:
        """What a target is compared with."""
        name = self.target_name if by_name else None
        return TrainedFor(self.target_hidden_size, self.vocab_size, name, self.vocabulary_sha256)


class DecoderLayer(nn.Module):
    """A decoder layer whose attention reads rows of `in_width`; who sees what is the caller's."""

    def __init__(self, shape: LayerShape, in_width: int) -> None:
        super().__init__()
        self.self_attn = Attention(shape, in_width)
        self.mlp = Mlp(shape)
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.norm_eps)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.norm_eps)


class RecurrentNet(nn.Module):
    """A head's weights and arithmetic; what is remembered is the caller's.

    `midlayer` runs on what `inputs` gives; `finish` takes what its attention read.
    """

    def __init__(self, config: RecurrentConfig, vocab: ReducedVocab | None, midlayer: DecoderLayer) -> None:
        super().__init__()
        self.vocab = vocab or ReducedVocab.whole(config.vocab_size)
        assert len(self.vocab.ids_S) == config.draft_vocab_size, "the vocabulary is not the configuration's"
        width = config.layer.hidden_size
        self.midlayer = midlayer
        self.norm = RmsNorm(width, config.layer.norm_eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False) if config.own_head else None
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if config.own_embedding else None

    @property
    @abstractmethod
    def config(self) -> RecurrentConfig: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations, and of the weights unless they are packed."""
        return self.norm.weight.dtype

    @abstractmethod
    def fuse(self, features_MF: Tensor) -> Tensor:
        """[M, d]: what the target says of a position, as one vector."""

    @abstractmethod
    def inputs(self, embedded_Md: Tensor, g_Md: Tensor) -> tuple[Tensor, Tensor]:
        """(what the attention reads [M, K], what its output is added to [M, d], perhaps in place)."""

    @abstractmethod
    def chain_inputs(self) -> ChainInputs:
        """`inputs` and `carried` as the kernels' chain takes them, of a net whose matrices are packed."""

    def finish(self, residual_Md: Tensor, mixed_MHD: Tensor) -> tuple[Tensor, Tensor]:
        """(what lm_head reads [M, d], what goes on in the place of g [M, d])."""
        layer = self.midlayer
        z_Md, inner_Md = layer.post_attention_layernorm.add(residual_Md, layer.self_attn.output(mixed_MHD))
        y_Md, normed_Md = self.norm.add(z_Md, layer.mlp(inner_Md))
        return normed_Md, self.carried(y_Md, normed_Md)

    @abstractmethod
    def carried(self, y_Md: Tensor, normed_Md: Tensor) -> Tensor:
        """[M, d]: the layer's output or its norm, whichever goes on."""
