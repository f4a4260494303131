"""Which drafters are possible for a target, before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

from outrider.core.json_file import JsonObject
from outrider.core.registry import drafter_names
from outrider.core.types import Decision
from outrider.drafters.head_card import CARD
from outrider.drafters.head_files import CONFIG
from outrider.engine.opening import needs_of
from outrider.engine.shipped import shipped_named

MODEL_FREE = ("ngram", "suffix")
ARCHITECTURES = {"Eagle3": "eagle3", "DSpark": "dspark", "DFlash": "dflash"}
"""Kinds of heads by what the names of their architectures hold."""


@dataclass(frozen=True, slots=True)
class Possible:
    """Drafters to try, and why each."""

    names: list[str]
    reasons: list[Decision]


def possible_drafters(target: str, draft_model: str | None, named: Seq[str]) -> Possible:
    """Those that were named; else all that need no more than there is."""
    if named:
        return _of([(name, "asked for") for name in named if name != "none"])
    found = [(name, "needs no model") for name in MODEL_FREE]
    if draft_model is not None:
        head = _head_kind(draft_model)
        found.append((head or "draft_model", f"{draft_model} was given"))
        found.append(("cascade", f"suffix, and {head or 'draft_model'} where suffix expects too little"))
        return _of(found)
    shipped = shipped_named(target)
    found += [(head.drafter, f"{head.name} comes with the package") for head in shipped]
    if shipped:
        found.append(("cascade", "suffix, and a head where suffix expects too little"))
    return _of(found)


def _of(found: Seq[tuple[str, str]]) -> Possible:
    return Possible([name for name, _ in found], [Decision("drafter", name, why) for name, why in found])


def _head_kind(draft_model: str) -> str | None:
    """The drafter of the head in this folder or file, by its card, else by its configuration; None where it is no head,
    or not on this machine."""
    path = Path(draft_model).expanduser()
    if not path.exists():
        return None
    folder = path if path.is_dir() else path.parent
    card, config = (JsonObject.read(folder / name, optional=True) for name in (CARD, CONFIG))
    kind = card.text("drafter", "") or _stated_kind(config)
    return kind if kind in drafter_names() and "head" in needs_of(kind) else None


def _stated_kind(config: JsonObject) -> str:
    """What kind of head a configuration in one of the public layouts is of; empty: of none. A vocabulary of its own is
    stated by heads alone: flat ones of EAGLE-3 and of next-token modules call themselves what their layer is."""
    if kind := config.text("speculators_model_type", ""):
        return kind
    if "medusa_num_heads" in config.values:
        return "medusa"
    if config.child("dflash_config").text("projector_type", "") == "dspark":
        return "dspark"
    architectures = str(config.values.get("architectures"))
    named = next((kind for name, kind in ARCHITECTURES.items() if name in architectures), "")
    if named or "draft_vocab_size" not in config.values:
        return named
    return "mtp" if "mtp_num_hidden_layers" in config.values else "eagle3"
