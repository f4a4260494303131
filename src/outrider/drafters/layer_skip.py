"""Drafter `layer_skip`: the target's own first layers run ahead (self-speculation; LayerSkip, 2404.16710).

No second model is loaded and the vocabulary is the target's by construction. Acceptance is good only for models that
were trained to be read early.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol, runtime_checkable

from outrider.core.protocols import EarlyExit, LanguageModel
from outrider.drafters.chain import GREEDY_BELOW_TEMPERATURE
from outrider.drafters.draft_model import DraftModelDrafter
from outrider.drafters.options import require_int
from outrider.errors import ConfigError


@runtime_checkable
class Layered(Protocol):
    """A model that knows how deep it is."""

    @property
    def n_layers(self) -> int: ...


class LayerSkipDrafter(DraftModelDrafter):
    """Drafts with the first `layers` layers of `target` (None: half of them); further options as `draft_model`.

    The draft keeps a cache of its own, as deep as it is.
    """

    name = "layer_skip"
    needs = frozenset({"target"})

    def __init__(
        self,
        *,
        target: LanguageModel,
        layers: int | None = None,
        draft_sample_method: str = "auto",
        greedy_below_temperature: float = GREEDY_BELOW_TEMPERATURE,
        draft_vocab: Seq[int] | None = None,
        min_confidence: float = 0.0,
    ) -> None:
        if not isinstance(target, EarlyExit):
            raise ConfigError(
                f"{self.name}: {target.name} cannot run as its first layers: use a natively loaded model as the "
                "target, or another drafter"
            )
        self.layers = _checked_layers(self.name, target, layers)
        super().__init__(
            model=target.first_layers(self.layers),
            vocab_size=target.vocab_size,
            draft_sample_method=draft_sample_method,
            greedy_below_temperature=greedy_below_temperature,
            draft_vocab=draft_vocab,
            min_confidence=min_confidence,
        )


def _checked_layers(drafter: str, target: LanguageModel, layers: int | None) -> int:
    depth = target.n_layers if isinstance(target, Layered) else None
    if layers is None:
        if depth is None:
            raise ConfigError(f"{drafter}: layers is missing: say how many of the layers of {target.name} draft")
        layers = max(1, depth // 2)
    require_int(drafter, "layers", layers, 1)
    if depth is not None and layers > depth:
        raise ConfigError(f"{drafter}: layers = {layers} is not allowed: {target.name} has {depth}, give 1 to {depth}")
    return layers
