"""Names to classes, loaded when first used. The CLI, the contract tests, the law tests and bench iterate these tables.

Third parties register drafters through the entry-point group `outrider.drafters`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

from outrider.core.protocols import Controller, Drafter, Verifier
from outrider.errors import ConfigError

DRAFTERS: Mapping[str, str] = MappingProxyType(
    {
        "none": "outrider.drafters.none:NoneDrafter",
        "fixed": "outrider.drafters.fixed:FixedDrafter",
        "ngram": "outrider.drafters.ngram:NgramDrafter",
        "suffix": "outrider.drafters.suffix:SuffixDrafter",
        "prediction": "outrider.drafters.prediction:PredictionDrafter",
        "draft_model": "outrider.drafters.draft_model:DraftModelDrafter",
        "layer_skip": "outrider.drafters.layer_skip:LayerSkipDrafter",
        "eagle3": "outrider.drafters.eagle3:Eagle3Drafter",
        "mtp": "outrider.drafters.mtp:MtpDrafter",
        "medusa": "outrider.drafters.medusa:MedusaDrafter",
        "dflash": "outrider.drafters.dflash:DFlashDrafter",
        "dspark": "outrider.drafters.dspark:DSparkDrafter",
        "cascade": "outrider.drafters.cascade:CascadeDrafter",
    }
)

VERIFIERS: Mapping[str, str] = MappingProxyType(
    {
        "greedy": "outrider.verify.greedy:GreedyVerifier",
        "chain": "outrider.verify.chain:ChainVerifier",
        "block": "outrider.verify.block:BlockVerifier",
        "match": "outrider.verify.match:MatchVerifier",
        "coupled": "outrider.verify.coupled:CoupledVerifier",
        "typical": "outrider.verify.lossy:TypicalVerifier",
        "top1": "outrider.verify.lossy:TopOneVerifier",
    }
)

CONTROLLERS: Mapping[str, str] = MappingProxyType(
    {
        "fixed": "outrider.control.fixed:FixedController",
        "governor": "outrider.control.governor:GovernorController",
    }
)


INTERNAL = frozenset({"fixed"})
"""Drafters that need more than a name: a script, for tests and for `LLM.from_parts`."""


def drafter_names() -> list[str]:
    """The drafters that can be asked for by name alone: those built in, then those of installed packages."""
    plugged = (entry.name for entry in entry_points(group="outrider.drafters"))
    return list(dict.fromkeys(name for name in (*DRAFTERS, *plugged) if name not in INTERNAL))


def drafter_class(name: str) -> Callable[..., Drafter]:
    """The class of the drafter `name`, built in or from an entry point."""
    for entry in entry_points(group="outrider.drafters"):
        if entry.name == name and name not in DRAFTERS:
            loaded: Callable[..., Drafter] = entry.load()
            return loaded
    if name not in DRAFTERS:
        raise unknown("drafter", name, drafter_names())
    found: Callable[..., Drafter] = _load("drafter", name, DRAFTERS)
    return found


def verifier_class(name: str) -> Callable[..., Verifier]:
    """The class of the acceptance rule `name`."""
    found: Callable[..., Verifier] = _load("rule", name, VERIFIERS)
    return found


def controller_class(name: str) -> Callable[..., Controller]:
    """The class of the controller `name`: `fixed` takes a K, `governor` costs, drafters and the most draft tokens."""
    found: Callable[..., Controller] = _load("controller", name, CONTROLLERS)
    return found


def _load(kind: str, name: str, table: Mapping[str, str]) -> Any:
    if name not in table:
        raise unknown(kind, name, table)
    module, _, attribute = table[name].partition(":")
    return getattr(import_module(module), attribute)


def unknown(kind: str, name: str, allowed: Iterable[str]) -> ConfigError:
    """What to raise for a name that is not among those allowed."""
    names = list(allowed)
    close = get_close_matches(name, names, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return ConfigError(f"{kind} {name!r} is unknown{hint}: choose one of {', '.join(names)}")
