"""Who runs: a first-come queue, and a running batch of bounded size."""

from __future__ import annotations

from collections import deque

from outrider.core.types import Sequence
from outrider.errors import ConfigError


class Scheduler:
    """Sequences wait in order of arrival and join the batch as places become free."""

    def __init__(self, max_batch: int) -> None:
        if max_batch < 1:
            raise ConfigError(f"max_batch = {max_batch} is not allowed: give an integer >= 1")
        self.max_batch = max_batch
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def admit(self) -> list[Sequence]:
        """Moves waiting sequences into free places of the batch and returns those moved."""
        free = self.max_batch - len(self.running)
        joined = [self.waiting.popleft() for _ in range(min(free, len(self.waiting)))]
        self.running.extend(joined)
        return joined

    def retire(self) -> list[Sequence]:
        """Takes finished sequences out of the batch and returns them."""
        finished = [seq for seq in self.running if seq.finished]
        self.running = [seq for seq in self.running if not seq.finished]
        return finished

    def remove(self, seq: Sequence) -> None:
        """Takes one sequence out, wherever it is."""
        for queue in (self.running, self.waiting):
            if seq in queue:
                queue.remove(seq)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running
