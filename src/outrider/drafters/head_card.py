"""The card of a head: what it was trained on, how much of its drafts was accepted, and a few prompts to try it on.

A card lies beside a head's weights as card.json. Its test is run when the head is loaded: weights that are damaged, or
belong to another target, are then told apart from text that is hard to draft.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path

from outrider.core.json_file import JsonObject
from outrider.core.types import MAX_K
from outrider.drafters.copies import MOST_COPY
from outrider.errors import ModelFileError

CARD = "card.json"
OPTIONS = {"min_confidence": 1.0, "copy": MOST_COPY}
"""Options of drafters that a card may recommend, with the largest values; the smallest are 0."""
MOST_PROMPTS, MOST_ANSWER = 16, 128
"""Of a card's test, which every loading waits for."""
LEAST_SHARE = 0.6
"""Of the acceptance length above 1 that the card states, what a sound head reaches on its test on any machine."""


@dataclass(frozen=True, slots=True)
class CardTest:
    """Prompts (token ids) that were answered greedily, with the acceptance length that the head reached on them."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    k: int
    acceptance_length: float

    def passes(self, acceptance_length: float) -> bool:
        """Whether a head that reached this is the one that the card speaks of."""
        return acceptance_length - 1 >= LEAST_SHARE * (self.acceptance_length - 1)


@dataclass(frozen=True, slots=True)
class HeadCard:
    """What of a card is read again. None: it does not say; `k` and the drafter's `options` are what it recommends,
    `by_default` whether the head is to draft where no drafter was asked for, `drafter` what kind of head it is."""

    test: CardTest
    target: str | None
    vocabulary_sha256: str | None
    k: int | None
    options: Mapping[str, float] = field(default_factory=dict)
    by_default: bool = True
    drafter: str | None = None


def write_card(folder: Path, card: Mapping[str, object], test: CardTest) -> None:
    """Beside the head's weights in `folder`."""
    fields = {"prompts": test.prompts, "max_tokens": test.max_tokens, "k": test.k}
    whole = {**card, "test": {**fields, "acceptance_length": test.acceptance_length}}
    (folder / CARD).write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def read_card(head: Path) -> HeadCard | None:
    """The card of the head in this folder, or of this file; None where there is none. Raises ModelFileError."""
    path = (head if head.is_dir() else head.parent) / CARD
    if not path.is_file():
        return None
    card = JsonObject.read(path)
    test = card.child("test")
    prompts = test.values.get("prompts")
    if not isinstance(prompts, list) or not prompts or not all(_is_prompt(prompt) for prompt in prompts):
        raise ModelFileError(f"{path}: test.prompts is no list of prompts, each a list of token ids: fetch it again")
    if len(prompts) > MOST_PROMPTS:
        raise ModelFileError(f"{path}: test.prompts are {len(prompts)}, expected at most {MOST_PROMPTS}")
    told = CardTest(
        tuple(tuple(prompt) for prompt in prompts),
        _counted(test, "max_tokens", MOST_ANSWER),
        _counted(test, "k", MAX_K),
        _acceptance_length(test),
    )
    target, hash_, drafter = (card.text(key, "") or None for key in ("target", "vocabulary_sha256", "drafter"))
    k = _counted(card, "k", MAX_K) if "k" in card.values else None
    return HeadCard(told, target, hash_, k, _options(card), card.boolean("by_default", True), drafter)


def _counted(values: JsonObject, key: str, most: int) -> int:
    value = values.whole(key)
    if not 1 <= value <= most:
        raise ModelFileError(f"{values.path}: {key!r} is {value}, expected a whole number from 1 to {most}")
    return value


def _acceptance_length(test: JsonObject) -> float:
    """Of rounds that end with a token of the target's own behind at most k drafted ones."""
    value, most = test.number("acceptance_length"), test.whole("k") + 1
    if not 1 <= value <= most:
        raise ModelFileError(f"{test.path}: 'acceptance_length' is {value}, expected a number from 1 to {most} (k + 1)")
    return value


def _options(card: JsonObject) -> dict[str, float]:
    found = {}
    for name, most in OPTIONS.items():
        if name in card.values:
            if not 0 <= (value := card.number(name)) <= most:
                raise ModelFileError(f"{card.path}: {name!r} is {value}, expected a number from 0 to {most:g}")
            found[name] = value
    return found


def _is_prompt(prompt: object) -> bool:
    return isinstance(prompt, Seq) and len(prompt) > 0 and all(type(token) is int and token >= 0 for token in prompt)
