"""Ranges of what can be chosen of a training, checked before hours are spent on it."""

from __future__ import annotations

from outrider.errors import ConfigError

MOST_SEED = 2**63 - 1
"""What every generator takes."""


def require_within(name: str, value: int, low: int, high: int) -> None:
    """Raises ConfigError unless `value` is an integer from low to high."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"train: {name} = {value!r} is not allowed: give an integer from {low} to {high}")
