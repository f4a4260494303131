"""One sequence's place in a head that drafts token by token.

Shapes: T positions, F target features, d head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.drafters.head_cache import HeadCache


class RecurrentState:
    """The target's features are known of the positions before `held`; the cache holds the rows before `settled`, and
    behind them those of the last draft. A head sees the last `window` positions. `carried_d` is what the last row
    hands to the next.
    """

    def __init__(self, window: int) -> None:
        self.stopped = ""
        self.window = window
        self.held = self.settled = 0
        self.cache = HeadCache(0)
        self.carried_d: Tensor | None = None
        self._features: list[Tensor] = []
        self._passes = 0

    def add(self, features_TF: Tensor, end: int) -> None:
        """Features of the positions up to `end`. A gap before them starts the head's window anew."""
        start = end - len(features_TF)
        if start != self.held:
            self._features, self.cache, self.settled = [], HeadCache(start), start
        self._features.append(features_TF)
        self.held = end
        if end - self.settled > self.window:
            self._features = [torch.cat(self._features)[-self.window :]]
            self.settled = end - self.window
            self.cache = HeadCache(self.settled)

    def catch_up(self) -> None:
        """Forgets the last draft; the row of the last position is always run again."""
        self.settled = min(self.settled, self.held - 1)
        self.cache.truncate(self.settled)
        self.cache.keep_last(self.window)

    def features(self, start: int, stop: int) -> Tensor:
        """[stop - start, F] of these positions, from `settled` on."""
        features_TF = self._features[0] if len(self._features) == 1 else torch.cat(self._features)
        self._features = [features_TF]
        base = self.held - len(features_TF)
        return features_TF[start - base : stop - base]

    def settle(self) -> None:
        """All rows before `held` are in the cache."""
        self._features = [self.features(self.held - 1, self.held).clone()]
        self.settled = self.held

    def count_pass(self) -> None:
        self._passes += 1

    def take_passes(self) -> int:
        """Passes since this was last asked."""
        passes, self._passes = self._passes, 0
        return passes

    def stop(self, reason: str) -> None:
        """No more drafts; gives the memory back."""
        self.stopped = reason
        self.free()

    def free(self) -> None:
        """Gives the memory back."""
        self.cache, self._features, self.carried_d = HeadCache(0), [], None
        self.held = self.settled = 0
