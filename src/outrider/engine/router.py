"""Several drafters behind the face of one: each sequence is drafted by the drafter its request asks for.

A drafter that raises loses the sequence, not the engine: the sequence goes on without drafts, under a named reason.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from outrider.core.draft import Draft, DraftLaw, SeqDraft
from outrider.core.protocols import Committed, Drafter
from outrider.core.rng import Rng
from outrider.core.types import Sequence

log = logging.getLogger("outrider")


class DrafterRouter:
    """A Drafter over a table of named drafters; `assign` says which one a sequence uses."""

    name = "router"

    def __init__(self, drafters: Mapping[str, Drafter]) -> None:
        self.drafters = dict(drafters)
        self.laws: frozenset[DraftLaw] = frozenset().union(*(d.laws for d in self.drafters.values()))
        self.trees = any(d.trees for d in self.drafters.values())
        self.wants = tuple(sorted({layer for d in self.drafters.values() for layer in d.wants}))
        self._method: dict[int, str] = {}

    def assign(self, seq: Sequence, method: str) -> None:
        """Sequence `seq` is drafted by `method` from now on. Call before `open`."""
        assert method in self.drafters, f"no drafter {method!r}"
        self._method[seq.id] = method

    def method(self, seq: Sequence) -> str:
        """The drafter's name of a sequence; "none" once its drafter has failed."""
        return self._method.get(seq.id, "none")

    def open(self, seq: Sequence) -> None:
        drafter = self._drafter(seq)
        if drafter is not None:
            try:
                drafter.open(seq)
            except Exception as error:
                self._fail([seq], drafter, error)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int], rng: Rng) -> Draft:
        drafts = [SeqDraft.empty() for _ in seqs]
        for name, drafter in self.drafters.items():
            mine = [i for i, seq in enumerate(seqs) if self.method(seq) == name]
            if not mine:
                continue
            try:
                draft = drafter.propose([seqs[i] for i in mine], [budgets[i] for i in mine], rng)
                offers = dict(zip(mine, draft.seqs, strict=True))
            except Exception as error:
                self._fail([seqs[i] for i in mine], drafter, error)
                continue
            for i, offer in offers.items():
                drafts[i] = offer
        return Draft(drafts)

    def commit(self, seq: Sequence, committed: Committed) -> None:
        drafter = self._drafter(seq)
        if drafter is not None:
            try:
                drafter.commit(seq, committed.for_layers(drafter.wants, self.wants))
            except Exception as error:
                self._fail([seq], drafter, error)

    def close(self, seq: Sequence) -> None:
        drafter = self._drafter(seq)
        self._method.pop(seq.id, None)
        if drafter is not None:
            self._close(drafter, seq)

    def check_integrity(self) -> None:
        """Asserts that no closed sequence has left anything here."""
        assert not self._method, f"sequences {sorted(self._method)} were never closed"

    def _drafter(self, seq: Sequence) -> Drafter | None:
        return self.drafters.get(self.method(seq))

    def _fail(self, seqs: Seq[Sequence], drafter: Drafter, error: Exception) -> None:
        reason = f"drafter {drafter.name!r} failed ({type(error).__name__}: {error}); the request goes on plain"
        log.warning("%s", reason, exc_info=error)
        for seq in seqs:
            self._method.pop(seq.id, None)
            self._close(drafter, seq)
            seq.stats.dropped[f"drafter {drafter.name} failed"] += 1

    def _close(self, drafter: Drafter, seq: Sequence) -> None:
        try:
            drafter.close(seq)
        except Exception as error:
            log.warning("drafter %r failed to close a sequence (%s: %s)", drafter.name, type(error).__name__, error)
