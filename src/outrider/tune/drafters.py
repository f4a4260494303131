"""Which drafters are possible for a target, before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

from outrider.core.json_file import JsonObject
from outrider.core.types import Decision
from outrider.drafters.head_card import CARD
from outrider.drafters.head_fit import same_model
from outrider.engine.opening import needs_of
from outrider.engine.shipped import shipped_heads

MODEL_FREE = ("ngram", "suffix")


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
    shipped = [h for h in shipped_heads() if target == h.model or same_model(h.card.target or "", target)]
    found += [(head.drafter, f"{head.name} comes with the package") for head in shipped]
    if shipped:
        found.append(("cascade", "suffix, and a head where suffix expects too little"))
    return _of(found)


def _of(found: Seq[tuple[str, str]]) -> Possible:
    return Possible([name for name, _ in found], [Decision("drafter", name, why) for name, why in found])


def _head_kind(draft_model: str) -> str | None:
    """The drafter of the head in this folder, by its card; None where it is no head with a card."""
    folder = Path(draft_model)
    card = (folder if folder.is_dir() else folder.parent) / CARD
    kind = JsonObject.read(card, optional=True).text("drafter", "") if card.is_file() else ""
    return kind if kind and "head" in needs_of(kind) else None
