"""The price of tokens: money by the hour of a machine, energy by its power."""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.errors import ConfigError

MILLION = 1e6
S_PER_HOUR = 3600.0
J_PER_KWH = 3.6e6


@dataclass(frozen=True, slots=True)
class Price:
    """Of the machine: `per_hour` in any currency, `watts` while it decodes; None: not given."""

    per_hour: float | None = None
    watts: float | None = None

    def __post_init__(self) -> None:
        for option, value in (("--price-per-hour", self.per_hour), ("--watts", self.watts)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{option} {value} is not allowed: give a number above 0, such as 1.5")

    @property
    def given(self) -> bool:
        return self.per_hour is not None or self.watts is not None

    def money(self, tok_s: float) -> float | None:
        """Of a million tokens."""
        return None if self.per_hour is None else self.per_hour / S_PER_HOUR / tok_s * MILLION

    def kwh(self, tok_s: float) -> float | None:
        """Of a million tokens."""
        return None if self.watts is None else self.watts / tok_s * MILLION / J_PER_KWH

    def of(self, tok_s: float | None) -> dict[str, float | None] | None:
        """Of a million tokens at this speed, as JSON; None where the speed is not known."""
        return None if not tok_s else {"money_per_million": self.money(tok_s), "kwh_per_million": self.kwh(tok_s)}

    def to_json(self) -> dict[str, float | None]:
        return {"per_hour": self.per_hour, "watts": self.watts}
