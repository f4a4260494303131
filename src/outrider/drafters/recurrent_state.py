"""One sequence's place in a head that drafts token by token.

Shapes: d head width.
"""

from __future__ import annotations

from torch import Tensor

from outrider.drafters.chain_state import HeadState
from outrider.drafters.copies import Text
from outrider.drafters.head_cache import HeadCache


class RecurrentState(HeadState):
    """The cache holds the rows before `settled`, and behind them those of the last draft. `carried_d` is what the last
    row hands to the next, `text` what the sequence says."""

    def __init__(self, window: int) -> None:
        super().__init__(window)
        self.settled = 0
        self.cache = HeadCache(0)
        self.carried_d: Tensor | None = None
        self.text = Text()

    @property
    def unread(self) -> int:
        return self.settled

    def _begin_at(self, start: int) -> None:
        self.cache, self.settled = HeadCache(start), start

    def catch_up(self) -> None:
        """Forgets the last draft; the row of the last position is always run again."""
        self.settled = min(self.settled, self.held - 1)
        self.cache.truncate(self.settled)
        self.cache.keep_last(self.window)

    def settle(self) -> None:
        """All rows before `held` are in the cache."""
        self._hold([self.features(self.held - 1, self.held).clone()])
        self.settled = self.held

    def free(self) -> None:
        super().free()
        self.carried_d, self.text = None, Text()
