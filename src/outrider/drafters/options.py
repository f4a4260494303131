"""Checks of constructor options, and what several drafters share about a chain of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from outrider.core.types import Sequence
from outrider.errors import ConfigError


def require_int(drafter: str, name: str, value: int, low: int, why: str = "") -> int:
    """`value`, if it is an integer >= low; ConfigError otherwise. `why` completes the message."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{drafter}: {name} = {value!r} is not allowed: give an integer >= {low}{why}")
    return value


def require_number(drafter: str, name: str, value: float, low: float, high: float = float("inf")) -> float:
    """`value`, if it is a number in [low, high]; ConfigError otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        allowed = f">= {low:g}" if high == float("inf") else f"from {low:g} to {high:g}"
        raise ConfigError(f"{drafter}: {name} = {value!r} is not allowed: give a number {allowed}")
    return float(value)


def until_stop(tokens: Iterable[int], budget: int, seq: Sequence) -> list[int]:
    """The first `budget` tokens, none behind one that would end the answer."""
    draft: list[int] = []
    for token in islice(tokens, budget):
        draft.append(token)
        if token in seq.stop_ids:
            break
    return draft
