"""How to make each registered drafter, in the variants that its options give. A new drafter needs an entry here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from outrider.core.protocols import Drafter
from outrider.drafters.cascade import CascadeDrafter
from outrider.drafters.draft_model import DraftModelDrafter
from outrider.drafters.eagle3 import Eagle3Drafter
from outrider.drafters.fixed import FixedDrafter
from outrider.drafters.layer_skip import LayerSkipDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.none import NoneDrafter
from outrider.drafters.prediction import PredictionDrafter
from outrider.drafters.suffix import SuffixDrafter
from tests.contract.world import PREDICTION, WatchedModel
from tests.tiny_head import random_head

Factory = Callable[[WatchedModel], Drafter]
"""Makes a drafter that uses this model, if it needs one."""


def eagle3(model: WatchedModel, *, method: str = "auto", min_confidence: float = 0.0, **fields: Any) -> Eagle3Drafter:
    """A random head on a table model: 16 wide, with an embedding of its own."""
    vocab = model.vocab_size
    head = random_head(
        vocab=vocab,
        hidden_size=16,
        n_heads=2,
        n_kv_heads=1,
        head_dim=8,
        target_hidden_size=vocab,
        own_embedding=True,
        layer_ids=(0, 1, 2),
        seed=2,
        **fields,
    )
    return Eagle3Drafter(target=model, head=head, draft_sample_method=method, min_confidence=min_confidence)


FACTORIES: dict[str, dict[str, Factory]] = {
    "none": {"": lambda model: NoneDrafter()},
    "fixed": {
        "list": lambda model: FixedDrafter(script=PREDICTION),
        "mapping": lambda model: FixedDrafter(script={0: [1, 2, 3], 4: [5, 6]}),
        "function": lambda model: FixedDrafter(script=lambda seq, budget: [seq.tokens[-1]] * budget),
    },
    "ngram": {
        "": lambda model: NgramDrafter(),
        "1-gram": lambda model: NgramDrafter(prompt_lookup_max=2, prompt_lookup_min=1),
    },
    "suffix": {
        "": lambda model: SuffixDrafter(max_spec_factor=2.0),
        "corpus": lambda model: SuffixDrafter(corpus=[PREDICTION, [3, 3, 1, 2]]),
        "shallow": lambda model: SuffixDrafter(max_depth=3, max_spec_offset=2.0),
    },
    "prediction": {"": lambda model: PredictionDrafter(), "eager": lambda model: PredictionDrafter(min_match=1)},
    "draft_model": {
        "auto": lambda model: DraftModelDrafter(model=model),
        "greedy": lambda model: DraftModelDrafter(model=model, draft_sample_method="greedy"),
        "probabilistic": lambda model: DraftModelDrafter(model=model, draft_sample_method="probabilistic"),
        "coupled": lambda model: DraftModelDrafter(model=model, draft_sample_method="coupled"),
        "subset": lambda model: DraftModelDrafter(model=model, draft_vocab=[6, 1, 3, 4]),
        "stops": lambda model: DraftModelDrafter(model=model, min_confidence=0.4),
    },
    "layer_skip": {"": lambda model: LayerSkipDrafter(target=model, layers=1)},
    "eagle3": {
        "auto": eagle3,
        "greedy": partial(eagle3, method="greedy"),
        "probabilistic": partial(eagle3, method="probabilistic"),
        "coupled": partial(eagle3, method="coupled"),
        "subset": lambda model: eagle3(model, draft_ids=[1] if model.vocab_size == 2 else [1, 3, 4, 6]),
        "window": partial(eagle3, context_length=3),
        "switches": partial(eagle3, fc_norm=True, norm_output=True, norm_before_residual=True),
        "stops": partial(eagle3, min_confidence=0.4),
    },
    "cascade": {
        "": lambda model: CascadeDrafter(drafters=[SuffixDrafter(), DraftModelDrafter(model=model)]),
        "model-free": lambda model: CascadeDrafter(drafters=[PredictionDrafter(), SuffixDrafter(), NgramDrafter()]),
        "model first": lambda model: CascadeDrafter(drafters=[DraftModelDrafter(model=model), NgramDrafter()]),
    },
}

VARIANTS = [(name, variant) for name, variants in FACTORIES.items() for variant in variants]
