"""Drafter `none`: plain decoding as a drafter. Its drafts are empty."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.core.draft import Draft, DraftLaw, SeqDraft
from outrider.core.protocols import Committed
from outrider.core.rng import Rng
from outrider.core.types import Sequence


class NoneDrafter:
    """Proposes nothing."""

    name = "none"
    laws = frozenset({DraftLaw.POINT})
    trees = False
    wants: tuple[int, ...] = ()

    def open(self, seq: Sequence) -> None:
        return

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int], rng: Rng) -> Draft:
        return Draft([SeqDraft.empty(self.name) for _ in seqs])

    def commit(self, seq: Sequence, committed: Committed) -> None:
        return

    def close(self, seq: Sequence) -> None:
        return
