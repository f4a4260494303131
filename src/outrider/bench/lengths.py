"""How many tokens the drafters of a bench draft where no K was asked for: as many as in `generate`."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.core.types import TargetIdentity
from outrider.drafters.head_card import read_card
from outrider.drafters.head_kinds import kind_of_head
from outrider.engine.choosing import choose_k
from outrider.engine.opening import OpenedHead, needs_of
from outrider.engine.shipped import shipped_named
from outrider.errors import FetchError, UserError
from outrider.models.loader.sources import resolve


def usual_ks(drafters: Seq[str], target: str, draft_model: str | None) -> dict[str, list[int]]:
    """By drafter: what the card of its head says, else the engine's own. Before anything is loaded or fetched: a head
    of the package is known by the target's name."""
    heads = _shipped(target) if draft_model is None else _given(drafters, target, draft_model)
    return {name: [choose_k(None, name, heads)[0]] for name in drafters}


def _shipped(target: str) -> dict[str, OpenedHead]:
    return {head.drafter: OpenedHead.of_package(head, _named(target), "auto") for head in shipped_named(target)}


def _given(drafters: Seq[str], target: str, draft_model: str) -> dict[str, OpenedHead]:
    """The head that was named, for the drafters that need one, and as the end of a cascade."""
    riders = [name for name in drafters if "head" in needs_of(name)]
    if (kind := kind_of_head(draft_model)) is not None and kind not in riders:
        riders.append(kind)
    if not riders:
        return {}
    try:
        path = resolve(draft_model, offline=True)
    except (UserError, FetchError):
        return {}  # loading it says why, or fetches it
    head = OpenedHead(draft_model, path, read_card(path), _named(target), "auto", "given")
    return dict.fromkeys(riders, head)


def _named(target: str) -> TargetIdentity:
    """A target of which no more is known; loading compares the rest."""
    return TargetIdentity((target,), "")
