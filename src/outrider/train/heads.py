"""Heads that can be trained, each as one small class: how it begins, what it learns from a lesson, how it is written.

A head begins from the target's own weights where it has matrices of the same shapes: its layers as the target's last
ones, its features as those of the highest layer that it reads. A head that shares the target's embedding and head rows
does not hold them, and they are not trained.

Shapes: d width, F features, S draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from outrider.core.registry import unknown
from outrider.core.types import TargetIdentity
from outrider.drafters.block_files import write_block
from outrider.drafters.block_net import MARKOV_HEADS, BlockConfig, BlockNet
from outrider.drafters.block_training import block_loss
from outrider.drafters.eagle3_files import write_eagle3
from outrider.drafters.eagle3_net import Eagle3Config, Eagle3Net, training_time_test
from outrider.drafters.head_layer import LayerShape
from outrider.drafters.head_training import Lesson, Losses
from outrider.drafters.options import require_int
from outrider.drafters.reduced_vocab import ReducedVocab
from outrider.errors import ConfigError
from outrider.models.decoder import Decoder

MOST_POSITIONS = 4096
"""Positions that a new head looks back, at most."""


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """What can be chosen of a new head.

    draft_vocab   tokens that it can say; 0: all
    layers        target layers whose outputs it reads; (): low, middle and high, and for some kinds the last
    depth         its own layers (dflash, dspark)
    block_size    rows of a block (dflash, dspark)
    markov_rank   of the Markov head (dspark)
    markov_head_type  "vanilla" or "rnn" (dspark)
    anchors       blocks learned of each sequence at a time (dflash, dspark)
    steps         draft tokens learned behind each position (eagle3)
    """

    draft_vocab: int = 16384
    layers: tuple[int, ...] = ()
    depth: int = 2
    block_size: int = 7
    markov_rank: int = 32
    markov_head_type: str = "vanilla"
    anchors: int = 32
    steps: int = 5

    def __post_init__(self) -> None:
        lows = {"draft_vocab": 0, "depth": 1, "block_size": 2, "markov_rank": 1, "anchors": 1, "steps": 1}
        for name, low in lows.items():
            require_int("train", name, getattr(self, name), low)
        if self.markov_head_type not in MARKOV_HEADS:
            raise ConfigError(
                f"train: markov_head_type = {self.markov_head_type!r} is not allowed: give {' or '.join(MARKOV_HEADS)}"
            )


def default_layers(n_layers: int) -> tuple[int, ...]:
    """Low, middle and high: the layers behind which EAGLE-3 reads."""
    return tuple(sorted({max(layer, 0) for layer in (1, n_layers // 2 - 1, n_layers - 4)}))


def harvested_layers(n_layers: int, more: tuple[int, ...] = ()) -> tuple[int, ...]:
    """These, the last, and `more`: what any head reads. Raises ConfigError for a layer that there is not."""
    if any(not 0 <= layer < n_layers for layer in more) or sorted(set(more)) != list(more):
        raise ConfigError(f"train: layers = {more} is not allowed: give ascending layers from 0 to {n_layers - 1}")
    return tuple(sorted({*default_layers(n_layers), n_layers - 1, *more}))


class TrainedHead(ABC):
    """A head in training. `wants` are the target layers whose outputs it reads, in the order of its features."""

    wants: tuple[int, ...]
    vocab: ReducedVocab

    @property
    @abstractmethod
    def net(self) -> nn.Module: ...

    @abstractmethod
    def loss(self, lesson: Lesson, generator: torch.Generator) -> Losses:
        """What it learns from a lesson. `generator` draws whatever is drawn."""

    @abstractmethod
    def write(self, folder: Path, layout: str | None = None) -> None:
        """Writes the head, in bfloat16, in one of its public layouts (None: the one that this project prefers)."""


class TargetParts:
    """The target as a head in training sees it: its embedding and head rows, frozen, and its layers to begin from."""

    def __init__(self, target: Decoder, identity: TargetIdentity, mask_token_id: int) -> None:
        self.target, self.identity, self.mask_token_id = target, identity, mask_token_id
        self.embedding_Vd = target.embed(range(target.embedding_rows)).clone()

    def head_Sd(self, vocab: ReducedVocab) -> Tensor:
        """The frozen rows of a draft vocabulary."""
        return self.target.head_weights(vocab.ids_S.tolist()).clone()

    @property
    def shape(self) -> LayerShape:
        """A head's layer as wide as the target's."""
        config = self.target.config
        return LayerShape(
            hidden_size=config.hidden_size,
            ffn_size=config.ffn_size,
            n_heads=config.n_heads,
            n_kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            norm_eps=config.norm_eps,
            context_length=min(config.context_length, MOST_POSITIONS),
            rope_theta=config.rope_theta,
            rope_scaling=config.rope_scaling,
            qk_norm=config.qk_norm,
        )

    def vocabulary(self, vocab: ReducedVocab) -> dict[str, object]:
        """What a configuration says of its target."""
        return {
            "vocab_size": vocab.size,
            "draft_vocab_size": len(vocab.ids_S),
            "target_hidden_size": self.target.hidden_size,
            "target_name": self.identity.names[0],
            "vocabulary_sha256": self.identity.vocabulary_sha256,
        }


class Eagle3InTraining(TrainedHead):
    """EAGLE-3 by the training-time test."""

    def __init__(self, parts: TargetParts, vocab: ReducedVocab, settings: HeadSettings) -> None:
        self.vocab, self._steps = vocab, settings.steps
        self.wants = settings.layers or default_layers(parts.target.n_layers)
        ids = tuple(layer + 1 for layer in self.wants)  # of the layers whose inputs these outputs are
        config = Eagle3Config(layer=parts.shape, layer_ids=ids, own_head=False, **parts.vocabulary(vocab))  # type: ignore[arg-type]
        self._net = Eagle3Net(config, vocab)
        self._embedding_Vd, self._head_Sd = parts.embedding_Vd, parts.head_Sd(vocab)
        self._begin(parts)

    @property
    def net(self) -> Eagle3Net:
        return self._net

    @torch.no_grad()
    def _begin(self, parts: TargetParts) -> None:
        net, last = self._net, parts.target.layer_weights(parts.target.n_layers - 1)
        first = parts.target.layer_weights(0)
        attention, width = net.midlayer.self_attn, net.config.layer.hidden_size
        for name, matrix in (("q", attention.q_proj), ("k", attention.k_proj), ("v", attention.v_proj)):
            matrix.weight.copy_(torch.cat([first[name] / 2, last[name] / 2], dim=1))
        _begin_feed_forward(net.midlayer, last)
        net.midlayer.hidden_norm.weight.copy_(last["attn_norm"])
        net.midlayer.input_layernorm.weight.copy_(first["attn_norm"])
        net.norm.weight.copy_(parts.target.norm_weight)
        _begin_fusion(net.fc.weight, width)

    def loss(self, lesson: Lesson, generator: torch.Generator) -> Losses:
        return training_time_test(
            self._net, lesson, embedding_Vd=self._embedding_Vd, head_Sd=self._head_Sd, steps=self._steps
        )

    def write(self, folder: Path, layout: str | None = None) -> None:
        write_eagle3(copy.deepcopy(self._net).bfloat16(), folder, layout or "specforge")


class BlockInTraining(TrainedHead):
    """DFlash (masks speak, cross-entropy) or DSpark (anchored, with a Markov and a confidence head)."""

    def __init__(self, parts: TargetParts, vocab: ReducedVocab, settings: HeadSettings, *, spark: bool) -> None:
        self.vocab, self._settings, self._spark = vocab, settings, spark
        self.wants = settings.layers or harvested_layers(parts.target.n_layers)
        config = BlockConfig(
            layer=parts.shape,
            n_layers=settings.depth,
            block_size=settings.block_size if spark else settings.block_size + 1,
            mask_token_id=parts.mask_token_id,
            layer_ids=self.wants,
            sample_from_anchor=spark,
            markov_rank=settings.markov_rank if spark else 0,
            markov_head_type=settings.markov_head_type,
            confidence=spark,
            **parts.vocabulary(vocab),  # type: ignore[arg-type]
        )
        self._net = BlockNet(config, vocab)
        self._embedding_Vd, self._head_Sd = parts.embedding_Vd, parts.head_Sd(vocab)
        self._begin(parts)

    @property
    def net(self) -> BlockNet:
        return self._net

    @torch.no_grad()
    def _begin(self, parts: TargetParts) -> None:
        net, depth, n = self._net, self._net.config.n_layers, parts.target.n_layers
        for index, layer in enumerate(net.blocks):
            given = parts.target.layer_weights(max(n - depth, 0) + min(index, n - 1))
            attention = layer.self_attn
            for name, matrix in (("q", attention.q_proj), ("k", attention.k_proj), ("v", attention.v_proj)):
                matrix.weight.copy_(given[name])
            _begin_feed_forward(layer, given)
            layer.input_layernorm.weight.copy_(given["attn_norm"])
        net.norm.weight.copy_(parts.target.norm_weight)
        _begin_fusion(net.fc.weight, net.config.layer.hidden_size)

    def loss(self, lesson: Lesson, generator: torch.Generator) -> Losses:
        settings = self._settings
        ce, tv = (0.1, 0.9) if self._spark else (1.0, 0.0)
        return block_loss(
            self._net,
            lesson,
            embedding_Vd=self._embedding_Vd,
            head_Sd=self._head_Sd,
            anchors_per_sequence=settings.anchors,
            generator=generator,
            ce=ce,
            tv=tv,
        )

    def write(self, folder: Path, layout: str | None = None) -> None:
        write_block(copy.deepcopy(self._net).bfloat16(), folder, layout or ("deepspec" if self._spark else "zlab"))


KINDS = ("eagle3", "dflash", "dspark")


def require_kind(kind: str) -> None:
    """Raises ConfigError for a head that cannot be trained."""
    if kind not in KINDS:
        raise unknown("head", kind, KINDS)


def begin_head(kind: str, parts: TargetParts, vocab: ReducedVocab, settings: HeadSettings) -> TrainedHead:
    """A new head of a kind of KINDS."""
    if kind == "eagle3":
        return Eagle3InTraining(parts, vocab, settings)
    return BlockInTraining(parts, vocab, settings, spark=kind == "dspark")


def _begin_feed_forward(layer: nn.Module, given: dict[str, Tensor]) -> None:
    """Output projection, feed-forward and its norm, from a layer of the target."""
    named = {"self_attn.o_proj": "o", "mlp.gate_proj": "gate", "mlp.up_proj": "up", "mlp.down_proj": "down"}
    for module, name in {**named, "post_attention_layernorm": "ffn_norm"}.items():
        layer.get_parameter(f"{module}.weight").copy_(given[name])


def _begin_fusion(weight_dF: Tensor, width: int) -> None:
    """Of the features, the highest layer's as they are; a little of the others."""
    weight_dF.mul_(0.1)
    weight_dF[:, -width:] += torch.eye(width)
