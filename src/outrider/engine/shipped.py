"""Heads that come with the package: which there are, for which targets, and what drafts where nothing was asked for.

They lie under HEADS as <catalogue name>/<drafter>/, each a folder as `outrider train` leaves it. The card says which
target a head was trained for; a folder without one is not offered.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from outrider.core.types import Decision, TargetIdentity
from outrider.drafters.head_card import CARD, HeadCard, read_card
from outrider.drafters.head_fit import same_model

HEADS = Path(__file__).parents[1] / "heads"
PREFERRED = ("eagle3", "dspark")
"""Heads that draft by default where the target has them, the first of them that there is: the more is accepted, the
earlier (docs/log.md)."""
DEFAULT_DRAFTER = "suffix"
"""What drafts where there is none of them."""
WITH_HEAD = "cascade"
"""What drafts where there is one: what repeats is copied, and the head drafts the rest."""


class HasCard(Protocol):
    """A head that was found."""

    @property
    def card(self) -> HeadCard | None: ...


@dataclass(frozen=True, slots=True)
class ShippedHead:
    """A head of the package, for the catalogue's `model`."""

    model: str
    drafter: str
    path: Path
    card: HeadCard

    @property
    def name(self) -> str:
        return f"{self.model}/{self.drafter}"

    def fits(self, identity: TargetIdentity) -> bool:
        """Whether it was trained for this target: the same token ids, and one of its names."""
        trained_for = self.card.target
        if trained_for is None or self.card.vocabulary_sha256 != identity.vocabulary_sha256:
            return False
        return any(same_model(trained_for, name) for name in identity.names)


def shipped_heads() -> list[ShippedHead]:
    """All of them, by name. Raises ModelFileError for a damaged card."""
    found = []
    for path in sorted(HEADS.glob(f"*/*/{CARD}")):
        if (card := read_card(path.parent)) is not None:
            found.append(ShippedHead(path.parts[-3], path.parts[-2], path.parent, card))
    return found


def shipped_for(identity: TargetIdentity) -> dict[str, ShippedHead]:
    """The heads of this target, by drafter."""
    return {head.drafter: head for head in shipped_heads() if head.fits(identity)}


def shipped_named(target: str) -> list[ShippedHead]:
    """The heads of a target of this name, before it is loaded: whether its token ids are those is not known yet."""
    return [head for head in shipped_heads() if target == head.model or same_model(head.card.target or "", target)]


def preferred(heads: Container[str]) -> str | None:
    """Of drafters that have heads, the one that drafts by default."""
    return next((name for name in PREFERRED if name in heads), None)


def last_of_cascade(heads: Iterable[str]) -> str | None:
    """Of drafters that have heads, the one at the end of a cascade."""
    names = list(heads)
    return preferred(names) or next(iter(names), None)


def default_drafter(heads: Mapping[str, HasCard], k: int | None) -> Decision:
    """What drafts for a target with these heads when no drafter, perhaps a K, was asked for."""
    head = preferred(heads)
    if k == 0:
        return Decision("drafter", DEFAULT_DRAFTER, "the default; nothing is drafted at K = 0")
    if head is None:
        return Decision("drafter", DEFAULT_DRAFTER, "the default for a target that no head comes with")
    if (card := heads[head].card) is not None and not card.by_default:
        return Decision(
            "drafter", DEFAULT_DRAFTER, f"the default; {head} comes with the package, to be asked for by name"
        )
    return Decision(
        "drafter",
        WITH_HEAD,
        f"the default: {DEFAULT_DRAFTER} copies what repeats, and {head} drafts the rest: a head for this target comes "
        "with the package",
    )
