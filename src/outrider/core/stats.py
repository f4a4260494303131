"""Counts of what speculation did, and the identities that they obey."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, fields
from itertools import pairwise


@dataclass(slots=True)
class SpecStats:
    """Counters of one sequence, or the sum of several.

    rounds            rounds run; each is one target pass for the sequence
    drafted           draft tokens that the target checked
    accepted          draft tokens accepted and emitted; those cut by a stop count in `cut` alone
    emitted           tokens that became part of the answer
    own_tokens        emitted tokens that the rule drew itself: recovered or bonus
    cut               tokens that the rule had decided and a stop threw away
    draft_passes      forward passes of a draft model that the sequence took part in (a shared pass counts for each)
    drafted_at, accepted_at   the same by depth in the draft, from 0
    dropped           draft tokens thrown away before verification, by reason
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    own_tokens: int = 0
    cut: int = 0
    draft_passes: int = 0
    drafted_at: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    def record(self, depths: Seq[int], accepted: int, own_tokens: int, cut: int) -> None:
        """One round: nodes checked at these `depths`, draft tokens and the rule's own emitted, decided tokens `cut`."""
        self.rounds += 1
        self.drafted += len(depths)
        self.accepted += accepted
        self.own_tokens += own_tokens
        self.emitted += accepted + own_tokens
        self.cut += cut
        self.drafted_at.update(depths)
        self.accepted_at.update(range(accepted))

    def add(self, other: SpecStats) -> None:
        """Adds another's counts to these."""
        for field_ in fields(self):
            setattr(self, field_.name, getattr(self, field_.name) + getattr(other, field_.name))

    def copy(self) -> SpecStats:
        """These counts as they are now."""
        copied = SpecStats()
        copied.add(self)
        return copied

    def minus(self, earlier: SpecStats) -> SpecStats:
        """What was counted since `earlier`, a copy of these stats."""
        return SpecStats(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted; 0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_length(self) -> float:
        """tau: emitted tokens a round, the rule's own token included."""
        return self.emitted / self.rounds if self.rounds else 0.0

    def acceptance_by_position(self) -> list[float]:
        """Unconditional acceptance at each draft position: accepted there / rounds."""
        return [self.accepted_at[i] / self.rounds for i in range(len(self.drafted_at))]

    def check(self) -> None:
        """Asserts the identities that tie the counters together."""
        assert self.emitted == self.accepted + self.own_tokens
        assert self.accepted <= self.drafted
        assert sum(self.accepted_at.values()) == self.accepted
        assert sum(self.drafted_at.values()) == self.drafted
        by_position = self.acceptance_by_position()
        assert all(a >= b for a, b in pairwise(by_position))

    def to_json(self) -> dict[str, object]:
        return {
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "emitted": self.emitted,
            "cut": self.cut,
            "draft_passes": self.draft_passes,
            "acceptance_rate": self.acceptance_rate,
            "acceptance_length": self.acceptance_length,
            "acceptance_by_position": self.acceptance_by_position(),
            "dropped": dict(self.dropped),
        }
