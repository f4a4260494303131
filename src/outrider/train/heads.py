"""What a head in training is, and what it sees of its target.

A head shares the target's embedding and rows of its head: it does not hold them, and they are not trained.

Shapes: d width, F features, S draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor, nn

from outrider.core.protocols import Drafter
from outrider.core.registry import drafter_class
from outrider.core.types import TargetIdentity
from outrider.drafters.block_files import MOST_LAYERS, MOST_RANK, MOST_ROWS
from outrider.drafters.block_net import MARKOV_HEADS
from outrider.drafters.head_files import MOST_TOKENS
from outrider.drafters.head_layer import LayerShape
from outrider.drafters.head_training import Lesson, Losses
from outrider.drafters.medusa_files import MOST as MOST_HEADS
from outrider.drafters.options import require_number
from outrider.drafters.reduced_vocab import ReducedVocab
from outrider.errors import ConfigError
from outrider.models.decoder import Decoder
from outrider.models.load import LoadedModel
from outrider.train.ranges import require_within
from outrider.train.rounding import four_bits, rounded

MOST_POSITIONS = 4096
"""Positions that a new head looks back, at most."""
RANGES = {
    "draft_vocab": (0, MOST_TOKENS),
    "depth": (1, min(MOST_LAYERS, MOST_HEADS)),
    "block_size": (2, MOST_ROWS - 1),
    "markov_rank": (1, MOST_RANK),
    "anchors": (1, 2**16),
    "steps": (1, MOST_HEADS),
}
"""What is allowed of a new head: no more than its files may say. A block of dflash has a row more than draft tokens."""


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """What can be chosen of a new head.

    draft_vocab   tokens that it can say; 0: all
    layers        target layers whose outputs it reads; (): low, middle and high, and for some kinds the last
    depth         its own layers (dflash, dspark), or those of each head (medusa)
    block_size    rows of a block (dflash, dspark)
    markov_rank   of the Markov head (dspark)
    markov_head_type  "vanilla" or "rnn" (dspark)
    anchors       blocks learned of each sequence at a time (dflash, dspark)
    steps         draft tokens learned behind each position (eagle3, mtp); heads (medusa)
    tv            the share of the L1 distance in the loss, the rest is cross-entropy (eagle3, mtp)
    draft_model   the folder of a model to train on (draft_model)
    start         the folder of a head of these settings to train on, with its draft vocabulary; "": a new one
    """

    draft_vocab: int = 8192
    layers: tuple[int, ...] = ()
    depth: int = 2
    block_size: int = 5
    markov_rank: int = 32
    markov_head_type: str = "vanilla"
    anchors: int = 32
    steps: int = 4
    tv: float = 0.0
    draft_model: str = ""
    start: str = ""

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            require_within(name, getattr(self, name), low, high)
        require_number("train", "tv", self.tv, 0, 1)
        if self.markov_head_type not in MARKOV_HEADS:
            raise ConfigError(
                f"train: markov_head_type = {self.markov_head_type!r} is not allowed: give {' or '.join(MARKOV_HEADS)}"
            )


OF_KINDS = MappingProxyType(
    {
        "depth": ("dflash", "dspark", "medusa"),
        "block_size": ("dflash", "dspark"),
        "markov_rank": ("dspark",),
        "markov_head_type": ("dspark",),
        "anchors": ("dflash", "dspark"),
        "steps": ("eagle3", "mtp", "medusa"),
        "tv": ("eagle3", "mtp"),
    }
)
"""Settings that not all kinds of heads have, and those that do."""


def require_own(kind: str, settings: HeadSettings) -> None:
    """Raises ConfigError for a setting that this kind of head does not have, unless it is the default."""
    default = HeadSettings()
    for name, kinds in OF_KINDS.items():
        value = getattr(settings, name)
        if kind not in kinds and value != getattr(default, name):
            raise ConfigError(
                f"train: {name} = {value!r} is not for {kind}: it is for {', '.join(kinds)}; leave it out"
            )


def steps_at(progress: float, settings: HeadSettings) -> int:
    """Draft tokens that a head which runs on its own output learns behind each position: one at first, all `steps` at
    the end. The first token is most of what there is to learn, and costs least. A head that was trained before would
    forget the later ones meanwhile: it goes on with all."""
    if settings.start:
        return settings.steps
    return min(settings.steps, 1 + int(settings.steps * progress**2))


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
    _head_Sd: Tensor | None = None
    """The target's rows of the draft vocabulary, frozen, where the head shares them."""
    _rounded_Sd: Tensor | None = None

    @property
    @abstractmethod
    def net(self) -> nn.Module: ...

    @property
    def packed(self) -> list[Tensor]:
        """Its weights that are packed in four bits when it is served on a CPU."""
        return [module.weight for module in self.net.modules() if isinstance(module, nn.Linear)]

    @contextmanager
    def rounded(self) -> Iterator[None]:
        """Meanwhile it computes with the weights that a CPU serves, those that it shares included."""
        whole_Sd = self._head_Sd
        if whole_Sd is not None:
            self._rounded_Sd = four_bits(whole_Sd) if self._rounded_Sd is None else self._rounded_Sd
            self._head_Sd = self._rounded_Sd
        try:
            with rounded(self.packed):
                yield
        finally:
            self._head_Sd = whole_Sd

    @abstractmethod
    def loss(self, lesson: Lesson, generator: torch.Generator, progress: float) -> Losses:
        """What it learns from a lesson. `generator` draws whatever is drawn; `progress` is the share of the training
        that is done: a head may begin with what is easy."""

    @abstractmethod
    def write(self, folder: Path, layout: str | None = None) -> None:
        """Writes the head, in bfloat16, in one of its public layouts (None: the one that this project prefers)."""

    def drafter(
        self,
        kind: str,
        target: Decoder,
        identity: TargetIdentity,
        folder: Path | None,
        options: Mapping[str, float],
    ) -> Drafter:
        """A drafter with these options that uses the head as `folder` has it, or as it is now, in float32."""
        return drafter_class(kind)(**self._parts(target, identity, folder), **options)

    def _parts(self, target: Decoder, identity: TargetIdentity, folder: Path | None) -> dict[str, object]:
        """What its drafter must be given."""
        head, dtype = (self.net, "float32") if folder is None else (folder, "auto")
        return {"target": target, "head": head, "identity": identity, "dtype": dtype}


class TargetParts:
    """The target as a head in training sees it: its embedding and head rows, frozen, and its layers to begin from."""

    def __init__(self, opened: LoadedModel, target: Decoder, identity: TargetIdentity, mask_token_id: int) -> None:
        self.opened, self.target, self.identity, self.mask_token_id = opened, target, identity, mask_token_id
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
