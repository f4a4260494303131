"""What drafters keep of one sequence, whatever they draft with.

Shapes: T positions, F target features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class ChainState(ABC):
    """`stopped` says why the sequence is not drafted any more ("": it is)."""

    def __init__(self) -> None:
        self.stopped = ""
        self._passes = 0

    def count_pass(self) -> None:
        """A pass that this sequence takes part in."""
        self._passes += 1

    def take_passes(self) -> int:
        """Passes since this was last asked."""
        passes, self._passes = self._passes, 0
        return passes

    def stop(self, reason: str) -> None:
        """No more drafts; gives the memory back."""
        self.stopped = reason
        self.free()

    @abstractmethod
    def free(self) -> None:
        """Gives the memory back."""


LOOSE = 16
"""Rounds whose features may be views: each holds all rows of its pass, those that were turned down included."""


class HeadState(ChainState):
    """The target's features are known of the positions before `held`; a head sees the last `window` positions."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self.held = 0
        self._features: list[Tensor] = []
        self._loose = 0

    @property
    @abstractmethod
    def unread(self) -> int:
        """The first position whose features the head has not read."""

    @abstractmethod
    def _begin_at(self, start: int) -> None:
        """Forgets what was read: the first position that the head will know is `start`."""

    def add(self, features_TF: Tensor, end: int) -> None:
        """Features of the positions up to `end`. A gap before them starts the head's window anew."""
        start = end - len(features_TF)
        if start != self.held:
            self._hold([])
            self._begin_at(start)
        self._features.append(features_TF)
        self._loose += 1
        self.held = end
        if end - self.unread > self.window:
            self._hold([torch.cat(self._features)[-self.window :].clone()])
            self._begin_at(end - self.window)
        elif self._loose == LOOSE:
            self._hold([*self._features[:-LOOSE], torch.cat(self._features[-LOOSE:])])

    def features(self, start: int, stop: int) -> Tensor:
        """[stop - start, F] of these positions, from `unread` on."""
        if len(self._features) != 1:
            self._hold([torch.cat(self._features)])
        base = self.held - len(self._features[0])
        return self._features[0][start - base : stop - base]

    def free(self) -> None:
        self._hold([])
        self.held = 0
        self._begin_at(0)

    def _hold(self, features: list[Tensor]) -> None:
        """These from now on, none of them a view."""
        self._features, self._loose = features, 0
