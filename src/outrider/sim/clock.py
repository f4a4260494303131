"""A virtual clock, and what moves it: a target and a drafter that charge their work to clocks and take no time.

The unit is a pass of the target over one row. One run can be charged to several clocks, each with costs of its own.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.core.draft import Draft, DraftLaw
from outrider.core.protocols import Committed, Drafter, KVCache, LanguageModel, Pass, Segment
from outrider.core.rng import Rng
from outrider.core.types import Sequence
from outrider.sim.theory import Cost


class VirtualClock:
    """Adds up what a run costs."""

    def __init__(self, cost: Cost) -> None:
        self.cost = cost
        self.now = 0.0

    def draft(self, depth: int) -> None:
        """A draft of this many passes of the draft model."""
        self.now += self.cost.draft(depth)

    def check(self, rows: int) -> None:
        """A pass of the target over these rows, and a round's overhead."""
        self.now += self.cost.check(rows)


class ClockedModel:
    """A target whose passes are charged to clocks. It computes what `model` computes."""

    def __init__(self, model: LanguageModel, clocks: Seq[VirtualClock]) -> None:
        self.model = model
        self.clocks = clocks
        self.name = model.name
        self.vocab_size = model.vocab_size
        self.context_length = model.context_length
        self.trees = model.trees

    def new_cache(self) -> KVCache:
        return self.model.new_cache()

    def forward(self, segments: Seq[Segment], *, logits: bool = True, taps: Seq[int] = ()) -> Pass:
        rows = sum(len(segment.tokens) for segment in segments)
        for clock in self.clocks:
            clock.check(rows)
        return self.model.forward(segments, logits=logits, taps=taps)


class ClockedDrafter:
    """A drafter whose passes are charged to clocks. Sequences drafted together share their passes."""

    def __init__(self, drafter: Drafter, clocks: Seq[VirtualClock]) -> None:
        self.drafter = drafter
        self.clocks = clocks
        self.name = drafter.name
        self.laws: frozenset[DraftLaw] = drafter.laws
        self.trees = drafter.trees
        self.wants = drafter.wants

    def open(self, seq: Sequence) -> None:
        self.drafter.open(seq)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int], rng: Rng) -> Draft:
        draft = self.drafter.propose(seqs, budgets, rng)
        depth = max((seq.passes for seq in draft.seqs), default=0)
        for clock in self.clocks:
            clock.draft(depth)
        return draft

    def commit(self, seq: Sequence, committed: Committed) -> None:
        self.drafter.commit(seq, committed)

    def close(self, seq: Sequence) -> None:
        self.drafter.close(seq)
