"""How to make each registered drafter, in the variants that its options give. A new drafter needs an entry here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from outrider.core.protocols import Drafter
from outrider.drafters.cascade import CascadeDrafter
from outrider.drafters.dflash import DFlashDrafter
from outrider.drafters.draft_model import DraftModelDrafter
from outrider.drafters.dspark import DSparkDrafter
from outrider.drafters.eagle3 import Eagle3Drafter
from outrider.drafters.fixed import FixedDrafter
from outrider.drafters.layer_skip import LayerSkipDrafter
from outrider.drafters.medusa import MedusaDrafter
from outrider.drafters.mtp import MtpDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.none import NoneDrafter
from outrider.drafters.prediction import PredictionDrafter
from outrider.drafters.suffix import SuffixDrafter
from tests.contract.world import PREDICTION, WatchedModel
from tests.tiny_block import DFLASH, DSPARK, random_block
from tests.tiny_head import random_head, random_medusa, random_module

Factory = Callable[[WatchedModel], Drafter]
"""Makes a drafter that uses this model, if it needs one."""


def eagle3(
    model: WatchedModel, *, method: str = "auto", min_confidence: float = 0.0, copy: float = 0.0, **fields: Any
) -> Eagle3Drafter:
    """A random head on a table model: 16 wide, with an embedding of its own."""
    vocab = model.vocab_size
    sizes: dict[str, Any] = {"hidden_size": 16, "n_heads": 2, "n_kv_heads": 1, "head_dim": 8, "layer_ids": (0, 1, 2)}
    head = random_head(vocab=vocab, target_hidden_size=vocab, own_embedding=True, seed=2, **(sizes | fields))
    options: dict[str, Any] = {"min_confidence": min_confidence, "copy": copy}
    return Eagle3Drafter(target=model, head=head, draft_sample_method=method, **options)


def block(
    model: WatchedModel,
    kind: type[DFlashDrafter | DSparkDrafter],
    *,
    method: str = "auto",
    dtype: str = "auto",
    min_confidence: float = 0.0,
    adapt: float = 0.0,
    **fields: Any,
) -> DFlashDrafter | DSparkDrafter:
    """A random block head on a table model: 32 wide, with an embedding and a head of its own."""
    sizes: dict[str, Any] = {"hidden_size": 32, "ffn_size": 32, "n_heads": 2, "n_kv_heads": 1, "layer_ids": (-1, 0, 1)}
    sizes |= {"own_embedding": True, "own_head": True, "seed": 2, "target_hidden_size": model.vocab_size}
    head = random_block(vocab=model.vocab_size, **(sizes | (DSPARK if kind is DSparkDrafter else DFLASH) | fields))
    options: dict[str, Any] = {"dtype": dtype, "min_confidence": min_confidence, "adapt": adapt}
    return kind(target=model, head=head, draft_sample_method=method, **options)


def some(model: WatchedModel) -> list[int]:
    """A part of the vocabulary."""
    return [1] if model.vocab_size == 2 else [1, 3, 4, 6]


dflash, dspark = partial(block, kind=DFlashDrafter), partial(block, kind=DSparkDrafter)


def mtp(
    model: WatchedModel, *, method: str = "auto", min_confidence: float = 0.0, copy: float = 0.0, **fields: Any
) -> MtpDrafter:
    """A random next-token module on a table model, as wide as its vocabulary; shares embedding and head."""
    vocab = model.vocab_size
    sizes = {"hidden_size": vocab, "n_heads": 2, "n_kv_heads": 1, "head_dim": 16, "own_head": False}
    head = random_module(vocab=vocab, seed=2, **(sizes | fields))
    options: dict[str, Any] = {"min_confidence": min_confidence, "copy": copy}
    return MtpDrafter(target=model, head=head, draft_sample_method=method, **options)


def medusa(model: WatchedModel, *, method: str = "auto", min_confidence: float = 0.0, **fields: Any) -> MedusaDrafter:
    """Random Medusa heads on a table model, as wide as its vocabulary."""
    vocab = model.vocab_size
    head = random_medusa(vocab=vocab, hidden_size=vocab, n_heads=4, seed=2, **fields)
    return MedusaDrafter(target=model, head=head, draft_sample_method=method, min_confidence=min_confidence)


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
        "subset": lambda model: eagle3(model, draft_ids=some(model)),
        "window": partial(eagle3, context_length=3),
        "one call": partial(eagle3, head_dim=16),
        "switches": partial(eagle3, fc_norm=True, norm_output=True, norm_before_residual=True),
        "stops": partial(eagle3, min_confidence=0.4),
        "copies": partial(eagle3, copy=2.0, min_confidence=0.3),
        "copies all": lambda model: eagle3(model, method="probabilistic", copy=1.0, draft_ids=some(model)),
        "copies one call": partial(eagle3, head_dim=16, copy=3.0),
    },
    "mtp": {
        "auto": mtp,
        "greedy": partial(mtp, method="greedy"),
        "probabilistic": partial(mtp, method="probabilistic"),
        "coupled": partial(mtp, method="coupled"),
        "subset": lambda model: mtp(model, draft_ids=some(model)),
        "own": partial(mtp, own_head=True, own_embedding=True),
        "window": partial(mtp, context_length=3),
        "torch": partial(mtp, head_dim=8),
        "stops": partial(mtp, min_confidence=0.4),
        "copies": partial(mtp, copy=2.0),
    },
    "medusa": {
        "auto": medusa,
        "greedy": partial(medusa, method="greedy"),
        "probabilistic": partial(medusa, method="probabilistic"),
        "coupled": partial(medusa, method="coupled"),
        "subset": lambda model: medusa(model, draft_ids=some(model)),
        "shared": partial(medusa, own_heads=False),
        "stops": partial(medusa, min_confidence=0.4),
    },
    "dflash": {
        "auto": dflash,
        "greedy": partial(dflash, method="greedy"),
        "probabilistic": partial(dflash, method="probabilistic"),
        "coupled": partial(dflash, method="coupled"),
        "subset": lambda model: dflash(model, draft_ids=some(model)),
        "window": partial(dflash, context_length=3),
        "torch": partial(dflash, head_dim=8),
        "anchored": partial(dflash, sample_from_anchor=True),
        "stops": partial(dflash, min_confidence=0.3),
    },
    "dspark": {
        "auto": dspark,
        "greedy": partial(dspark, method="greedy"),
        "probabilistic": partial(dspark, method="probabilistic"),
        "coupled": partial(dspark, method="coupled"),
        "subset": lambda model: dspark(model, draft_ids=some(model)),
        "window": partial(dspark, context_length=3),
        "torch": partial(dspark, head_dim=8, dtype="float32"),
        "recurrent": partial(dspark, markov_head_type="rnn", dtype="int4", qk_norm=True),
        "stops": partial(dspark, min_confidence=0.5),
        "stops unsure": partial(dspark, min_confidence=0.3, confidence=False),
        "adapts": partial(dspark, adapt=1.0, min_confidence=0.3),
        "adapts all": lambda model: dspark(model, method="probabilistic", adapt=2.0, draft_ids=some(model)),
    },
    "cascade": {
        "": lambda model: CascadeDrafter(drafters=[SuffixDrafter(), DraftModelDrafter(model=model)]),
        "model-free": lambda model: CascadeDrafter(drafters=[PredictionDrafter(), SuffixDrafter(), NgramDrafter()]),
        "model first": lambda model: CascadeDrafter(drafters=[DraftModelDrafter(model=model), NgramDrafter()]),
    },
}

LEARNING = {("dspark", "adapts"), ("dspark", "adapts all")}
"""Variants whose drafts depend on what became of earlier drafts, not on the text alone."""

VARIANTS = [(name, variant) for name, variants in FACTORIES.items() for variant in variants]
