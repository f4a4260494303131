"""Which drafters are possible for a target, before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.core.types import NO_DRAFTER, Decision
from outrider.drafters.head_kinds import kind_of_head
from outrider.engine.shipped import shipped_named

MODEL_FREE = ("ngram", "suffix")


@dataclass(frozen=True, slots=True)
class Possible:
    """Drafters to try, and why each."""

    names: list[str]
    reasons: list[Decision]


def possible_drafters(target: str, draft_model: str | None, named: Seq[str]) -> Possible:
    """Those that were named; else all that need no more than there is."""
    if named:
        return _of([(name, "asked for") for name in named if name != NO_DRAFTER])
    found = [(name, "needs no model") for name in MODEL_FREE]
    if draft_model is not None:
        head = kind_of_head(draft_model)
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
