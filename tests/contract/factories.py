"""How to make each registered drafter, in the variants that its options give. A new drafter needs an entry here."""

from __future__ import annotations

from collections.abc import Callable

from outrider.core.protocols import Drafter
from outrider.drafters.cascade import CascadeDrafter
from outrider.drafters.draft_model import DraftModelDrafter
from outrider.drafters.fixed import FixedDrafter
from outrider.drafters.layer_skip import LayerSkipDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.none import NoneDrafter
from outrider.drafters.prediction import PredictionDrafter
from outrider.drafters.suffix import SuffixDrafter
from tests.contract.world import PREDICTION, WatchedModel

Factory = Callable[[WatchedModel], Drafter]
"""Makes a drafter that uses this model, if it needs one."""

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
    "cascade": {
        "": lambda model: CascadeDrafter(drafters=[SuffixDrafter(), DraftModelDrafter(model=model)]),
        "model-free": lambda model: CascadeDrafter(drafters=[PredictionDrafter(), SuffixDrafter(), NgramDrafter()]),
        "model first": lambda model: CascadeDrafter(drafters=[DraftModelDrafter(model=model), NgramDrafter()]),
    },
}

VARIANTS = [(name, variant) for name, variants in FACTORIES.items() for variant in variants]
