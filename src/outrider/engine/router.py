"""Several drafters behind the face of one: each sequence is drafted by the drafter its request asks for, or by the one
that a governor picks for the round.

A drafter that raises loses the sequence, not the engine: the sequence goes on without it, under a named reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

from outrider.core.draft import Draft, DraftLaw, SeqDraft
from outrider.core.protocols import Committed, Drafter
from outrider.core.rng import Rng
from outrider.core.types import NO_DRAFTER, Sequence

log = logging.getLogger("outrider")


class DrafterRouter:
    """A Drafter over a table of named drafters; `assign` says which of them a sequence uses.

    Of several, `pick` names the one that drafts in a round; all of them hear what was committed. Without it the first
    does.
    """

    name = "router"

    def __init__(self, drafters: Mapping[str, Drafter], pick: Callable[[Sequence], str] | None = None) -> None:
        self.drafters = dict(drafters)
        self.laws: frozenset[DraftLaw] = frozenset().union(*(d.laws for d in self.drafters.values()))
        self.trees = any(d.trees for d in self.drafters.values())
        self.wants = tuple(sorted({layer for d in self.drafters.values() for layer in d.wants}))
        self._pick = pick
        self._methods: dict[int, list[str]] = {}

    def assign(self, seq: Sequence, *methods: str) -> None:
        """Sequence `seq` is drafted by `methods` from now on. Call before `open`."""
        assert methods, "a sequence needs a drafter"
        assert all(method in self.drafters for method in methods), f"no drafter among {methods}"
        self._methods[seq.id] = list(methods)

    def method(self, seq: Sequence) -> str:
        """The first of a sequence's drafters; "none" once all have failed."""
        return next(iter(self._methods.get(seq.id, ())), NO_DRAFTER)

    def open(self, seq: Sequence) -> None:
        for name, drafter in self._drafters(seq):
            try:
                drafter.open(seq)
            except Exception as error:
                self._fail([seq], name, error)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int], rng: Rng) -> Draft:
        drafts = [SeqDraft.empty() for _ in seqs]
        for name, drafter in self.drafters.items():
            mine = [i for i, seq in enumerate(seqs) if self._drafts(seq) == name]
            if not mine:
                continue
            try:
                draft = drafter.propose([seqs[i] for i in mine], [budgets[i] for i in mine], rng)
                offers = dict(zip(mine, draft.seqs, strict=True))
            except Exception as error:
                self._fail([seqs[i] for i in mine], name, error)
                continue
            for i, offer in offers.items():
                drafts[i] = offer
        return Draft(drafts)

    def commit(self, seq: Sequence, committed: Committed) -> None:
        for name, drafter in self._drafters(seq):
            try:
                drafter.commit(seq, committed.for_layers(drafter.wants, self.wants))
            except Exception as error:
                self._fail([seq], name, error)

    def close(self, seq: Sequence) -> None:
        for _, drafter in self._drafters(seq):
            self._close(drafter, seq)
        self._methods.pop(seq.id, None)

    def check_integrity(self) -> None:
        """Asserts that no closed sequence has left anything here."""
        assert not self._methods, f"sequences {sorted(self._methods)} were never closed"

    def _drafters(self, seq: Sequence) -> list[tuple[str, Drafter]]:
        return [(name, self.drafters[name]) for name in self._methods.get(seq.id, ())]

    def _drafts(self, seq: Sequence) -> str:
        """Who drafts for a sequence in this round."""
        if self._pick is None:
            return self.method(seq)
        picked = self._pick(seq)
        return picked if picked in self._methods.get(seq.id, ()) else NO_DRAFTER

    def _fail(self, seqs: Seq[Sequence], name: str, error: Exception) -> None:
        drafter = self.drafters[name]
        reason = f"drafter {drafter.name!r} failed ({type(error).__name__}: {error}); the request goes on without it"
        log.warning("%s", reason, exc_info=error)
        for seq in seqs:
            if name in self._methods.get(seq.id, ()):
                self._methods[seq.id].remove(name)
            self._close(drafter, seq)
            seq.stats.dropped[f"drafter {drafter.name} failed"] += 1

    def _close(self, drafter: Drafter, seq: Sequence) -> None:
        try:
            drafter.close(seq)
        except Exception as error:
            log.warning("drafter %r failed to close a sequence (%s: %s)", drafter.name, type(error).__name__, error)
