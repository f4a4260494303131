"""How each kind of head begins, learns and is written.

A head begins from the target's own weights where it has matrices of the same shapes: its layers as the target's last
ones, its features as those of the highest layer that it reads.

Shapes: d width, F features.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from outrider.core.registry import unknown
from outrider.drafters import eagle3_files, mtp_files
from outrider.drafters.block_files import write_block
from outrider.drafters.block_net import MARKOV_HEADS, BlockConfig, BlockNet
from outrider.drafters.block_training import block_loss
from outrider.drafters.eagle3_files import write_eagle3
from outrider.drafters.eagle3_net import Eagle3Config, Eagle3Net, training_time_test
from outrider.drafters.head_fit import require_fit
from outrider.drafters.head_kinds import READERS
from outrider.drafters.head_layer import LayerShape
from outrider.drafters.head_training import Lesson, Losses
from outrider.drafters.medusa_files import write_medusa
from outrider.drafters.medusa_net import MedusaConfig, MedusaNet, medusa_losses
from outrider.drafters.mtp_files import write_mtp
from outrider.drafters.mtp_net import MtpConfig, MtpNet, mtp_losses
from outrider.drafters.reduced_vocab import ReducedVocab
from outrider.errors import ConfigError
from outrider.train.distil import DraftInTraining
from outrider.train.heads import HeadSettings, TargetParts, TrainedHead, default_layers, harvested_layers, steps_at

SPARK_WEIGHTS, FLASH_WEIGHTS = (0.1, 1.8), (1.0, 0.0)
"""Of the cross-entropy and of 1 - overlap, which is half of the published L1 distance."""
OF_TARGET = ("target_name", "vocabulary_sha256")
"""Fields of a head's configuration that say whose it is, which `require_fit` compares."""


def _begin_attention(layer: nn.Module, given: dict[str, Tensor]) -> None:
    """Queries, keys and values, from a layer of the target."""
    for name in ("q", "k", "v"):
        layer.get_parameter(f"self_attn.{name}_proj.weight").copy_(given[name])


def _begin_feed_forward(layer: nn.Module, given: dict[str, Tensor]) -> None:
    """Output projection, feed-forward and its norm, from a layer of the target."""
    named = {"self_attn.o_proj": "o", "mlp.gate_proj": "gate", "mlp.up_proj": "up", "mlp.down_proj": "down"}
    for module, name in {**named, "post_attention_layernorm": "ffn_norm"}.items():
        layer.get_parameter(f"{module}.weight").copy_(given[name])


def _begin_fusion(weight_dF: Tensor, width: int) -> None:
    """Of the features, the highest layer's as they are; a little of the others."""
    weight_dF.mul_(0.1)
    weight_dF[:, -width:] += torch.eye(width)


class Eagle3InTraining(TrainedHead):
    """EAGLE-3 by the training-time test."""

    def __init__(self, parts: TargetParts, vocab: ReducedVocab, settings: HeadSettings) -> None:
        self.vocab, self._settings = vocab, settings
        self.wants = settings.layers or default_layers(parts.target.n_layers)
        ids = _inputs(self.wants)
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

    def loss(self, lesson: Lesson, generator: torch.Generator, progress: float) -> Losses:
        return training_time_test(
            self._net,
            lesson,
            embedding_Vd=self._embedding_Vd,
            head_Sd=self._head_Sd,
            steps=steps_at(progress, self._settings),
            tv=self._settings.tv,
        )

    def write(self, folder: Path, layout: str | None = None) -> None:
        write_eagle3(copy.deepcopy(self._net).bfloat16(), folder, layout or "specforge")


class MtpInTraining(TrainedHead):
    """A next-token module that drafts on its own output."""

    def __init__(self, parts: TargetParts, vocab: ReducedVocab, settings: HeadSettings) -> None:
        self.vocab, self._settings, self._last_norm = vocab, settings, parts.target.last_norm
        self.wants = (parts.target.n_layers - 1,)
        self._net = MtpNet(MtpConfig(layer=parts.shape, own_head=False, **parts.vocabulary(vocab)), vocab)  # type: ignore[arg-type]
        self._embedding_Vd, self._head_Sd = parts.embedding_Vd, parts.head_Sd(vocab)
        self._begin(parts)

    @property
    def net(self) -> MtpNet:
        return self._net

    @torch.no_grad()
    def _begin(self, parts: TargetParts) -> None:
        net, last = self._net, parts.target.layer_weights(parts.target.n_layers - 1)
        _begin_attention(net.midlayer, last)
        _begin_feed_forward(net.midlayer, last)
        net.midlayer.input_layernorm.weight.copy_(last["attn_norm"])
        net.norm.weight.copy_(parts.target.norm_weight)
        _begin_fusion(net.fc.weight, net.config.layer.hidden_size)

    def loss(self, lesson: Lesson, generator: torch.Generator, progress: float) -> Losses:
        return mtp_losses(
            self._net,
            lesson,
            last_norm=self._last_norm,
            embedding_Vd=self._embedding_Vd,
            head_Sd=self._head_Sd,
            steps=steps_at(progress, self._settings),
            tv=self._settings.tv,
        )

    def write(self, folder: Path, layout: str | None = None) -> None:
        write_mtp(copy.deepcopy(self._net).bfloat16(), folder, layout or "speculators")


class MedusaInTraining(TrainedHead):
    """Independent heads, which begin as the target's own."""

    def __init__(self, parts: TargetParts, vocab: ReducedVocab, settings: HeadSettings) -> None:
        self.vocab, self._last_norm = vocab, parts.target.last_norm
        self.wants = (parts.target.n_layers - 1,)
        said = parts.vocabulary(vocab)
        said["hidden_size"] = said.pop("target_hidden_size")
        config = MedusaConfig(n_heads=settings.steps, n_layers=settings.depth, own_heads=False, **said)  # type: ignore[arg-type]
        self._net = MedusaNet(config, vocab)
        self._net.reset()
        self._head_Sd = parts.head_Sd(vocab)

    @property
    def net(self) -> MedusaNet:
        return self._net

    def loss(self, lesson: Lesson, generator: torch.Generator, progress: float) -> Losses:
        return medusa_losses(self._net, lesson, last_norm=self._last_norm, head_Sd=self._head_Sd)

    def write(self, folder: Path, layout: str | None = None) -> None:
        write_medusa(copy.deepcopy(self._net).bfloat16(), folder)


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
            markov_head_type=settings.markov_head_type if spark else MARKOV_HEADS[0],
            confidence=spark,
            confidence_with_markov=spark,
            **parts.vocabulary(vocab),  # type: ignore[arg-type]
        )
        self._net = BlockNet(config, vocab)
        self._embedding_Vd, self._head_Sd = parts.embedding_Vd, parts.head_Sd(vocab)
        self._begin(parts)

    @property
    def net(self) -> BlockNet:
        return self._net

    @property
    def packed(self) -> list[Tensor]:
        """Without the Markov and the confidence head, which are served in more bits."""
        own = [head for head in (self._net.markov_head, self._net.confidence_head) if head is not None]
        finer = {id(weight) for head in own for weight in head.parameters()}
        return [weight for weight in super().packed if id(weight) not in finer]

    @torch.no_grad()
    def _begin(self, parts: TargetParts) -> None:
        net, depth, n = self._net, self._net.config.n_layers, parts.target.n_layers
        for index, layer in enumerate(net.blocks):
            given = parts.target.layer_weights(max(n - depth, 0) + min(index, n - 1))
            _begin_attention(layer, given)
            _begin_feed_forward(layer, given)
            layer.input_layernorm.weight.copy_(given["attn_norm"])
        net.norm.weight.copy_(parts.target.norm_weight)
        _begin_fusion(net.fc.weight, net.config.layer.hidden_size)

    def loss(self, lesson: Lesson, generator: torch.Generator, progress: float) -> Losses:
        settings = self._settings
        ce, tv = SPARK_WEIGHTS if self._spark else FLASH_WEIGHTS
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


RECIPES: Mapping[str, Callable[[TargetParts, ReducedVocab, HeadSettings], TrainedHead]] = MappingProxyType(
    {
        "eagle3": Eagle3InTraining,
        "mtp": MtpInTraining,
        "medusa": MedusaInTraining,
        "dflash": partial(BlockInTraining, spark=False),
        "dspark": partial(BlockInTraining, spark=True),
        "draft_model": DraftInTraining,
    }
)


def start_from(kind: str, folder: str, parts: TargetParts, settings: HeadSettings) -> TrainedHead:
    """A head that begins as the one in `folder`, whose draft vocabulary it keeps. Raises ConfigError where the settings
    are others than that was trained with, PairingError where it is another target's."""
    if kind not in READERS:
        raise ConfigError(f"train: {kind} cannot start from a head: name the model to train on with --draft-model")
    given = READERS[kind](folder).float()
    require_fit(
        f"the head {folder}", given.config.trained_for(by_name=True), parts.target, parts.target, parts.identity
    )
    head = RECIPES[kind](parts, given.vocab, settings)
    asked: Any = head.net
    for name, was, value in _differing(_stated(given.config, parts), asked.config):
        raise ConfigError(
            f"train: the head {folder} was trained with {name} = {was!r} and is asked to go on with {value!r}: give "
            "the settings that it was trained with, or begin a new head"
        )
    asked.load_state_dict(given.state_dict())
    return head


def _stated(config: Any, parts: TargetParts) -> Any:
    """The configuration with the layers that it reads, where it leaves them to the reader."""
    if isinstance(config, Eagle3Config) and config.layer_ids is None:
        return replace(config, layer_ids=_inputs(default_layers(parts.target.n_layers)))
    return config


def _inputs(layers: tuple[int, ...]) -> tuple[int, ...]:
    """The layers whose inputs these layers' outputs are."""
    return tuple(layer + 1 for layer in layers)


def _differing(given: Any, asked: Any, within: str = "") -> Iterator[tuple[str, object, object]]:
    """(dotted name, the given head's value, the one asked for) of all fields that change what a head computes."""
    for field in fields(asked):
        was, value = getattr(given, field.name), getattr(asked, field.name)
        if isinstance(value, LayerShape):
            yield from _differing(was, value, f"{within}{field.name}.")
        elif was != value and field.name not in OF_TARGET:
            yield f"{within}{field.name}", was, value


LAYOUTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "eagle3": eagle3_files.LAYOUTS,
        "mtp": mtp_files.LAYOUTS,
        "dflash": ("zlab", "speculators"),
        "dspark": ("deepspec", "speculators"),
    }
)
"""Those in which a kind can be written; the others have one layout."""


def require_kind(kind: str, layout: str | None) -> None:
    """Raises ConfigError for a head that cannot be trained, or cannot be written in this layout."""
    if kind not in RECIPES:
        raise unknown("head", kind, RECIPES)
    allowed = LAYOUTS.get(kind, ())
    if layout is not None and layout not in allowed:
        choice = f"choose one of {', '.join(allowed)}" if allowed else "it has one layout, so give none"
        raise ConfigError(f"layout {layout!r} is not allowed for {kind}: {choice}")
