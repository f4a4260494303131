"""Drafter `cascade`: several drafters in order; the first whose draft looks worth its rows is taken.

Sequence by sequence: a cheap drafter (suffix, n-gram) speaks first, and a model drafts only for the sequences for which
the cheap draft expects too little.

A sampled draft is taken as it is. To drop one for what it contains would tie a token's admission to the token itself
and bias the output; a draft made without randomness (POINT), or one that is only compared with the target's own draw
(SHARED_NOISE), may be chosen by any criterion.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

from outrider.core.draft import Draft, DraftLaw, SeqDraft
from outrider.core.protocols import Committed, Drafter
from outrider.core.rng import Rng
from outrider.core.types import Sequence
from outrider.drafters.chain import full_length
from outrider.drafters.options import require_number
from outrider.errors import ConfigError

SAMPLED = (DraftLaw.IID, DraftLaw.NO_REPLACEMENT)
SURE = 0.75
"""A draft also passes the gate when it expects this share of the whole budget, so that small budgets can be met."""


class CascadeDrafter:
    """Asks `drafters` in order. Each keeps its name as the source of its drafts.

    A draft that was not sampled is taken when it expects at least `min_expected` tokens to be accepted (the sum of its
    confidences; its length when it states none), or `SURE` of the budget. The last drafter's is taken anyway, and when
    that is empty, the best that was turned down.
    """

    name = "cascade"
    needs = frozenset({"drafters"})

    def __init__(self, *, drafters: Seq[Drafter], min_expected: float = 2.0) -> None:
        if not drafters:
            raise ConfigError("cascade: drafters is empty: give at least one drafter")
        self.drafters = list(drafters)
        self.min_expected = require_number(self.name, "min_expected", min_expected, 0)
        self.laws: frozenset[DraftLaw] = frozenset().union(*(d.laws for d in self.drafters))
        self.trees = any(d.trees for d in self.drafters)
        self.reads_prediction = any(getattr(d, "reads_prediction", False) for d in self.drafters)
        self.wants = tuple(sorted({layer for d in self.drafters for layer in d.wants}))

    @property
    def members(self) -> tuple[str, ...]:
        """The names of its drafters."""
        return tuple(drafter.name for drafter in self.drafters)

    def full_length(self) -> CascadeDrafter:
        """See `chain.full_length`. The last drafter makes all drafts, as where the others find nothing."""
        return CascadeDrafter(drafters=[full_length(self.drafters[-1])])

    def open(self, seq: Sequence) -> None:
        for drafter in self.drafters:
            drafter.open(seq)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int], rng: Rng) -> Draft:
        taken = [SeqDraft.empty(self.name) for _ in seqs]
        waiting = [i for i, budget in enumerate(budgets) if budget]
        passes = [0] * len(seqs)
        for drafter in self.drafters:
            if not waiting:
                break
            draft = drafter.propose([seqs[i] for i in waiting], [budgets[i] for i in waiting], rng)
            last, turned_down = drafter is self.drafters[-1], []
            for i, offer in zip(waiting, draft.seqs, strict=True):
                passes[i] += offer.passes
                passed = last or offer.law in SAMPLED or self._worth(offer, budgets[i])
                if offer.size and (passed or expected(offer) > expected(taken[i])):
                    taken[i] = offer
                if not (offer.size and passed):
                    turned_down.append(i)
            waiting = turned_down
        return Draft([replace(draft, passes=count) for draft, count in zip(taken, passes, strict=True)])

    def _worth(self, offer: SeqDraft, budget: int) -> bool:
        return expected(offer) >= min(self.min_expected, SURE * budget)

    def commit(self, seq: Sequence, committed: Committed) -> None:
        for drafter in self.drafters:
            drafter.commit(seq, committed.for_layers(drafter.wants, self.wants))

    def close(self, seq: Sequence) -> None:
        for drafter in self.drafters:
            drafter.close(seq)


def expected(draft: SeqDraft) -> float:
    """Accepted tokens that the drafter expects; all of them when it does not say."""
    return sum(draft.confidence) if draft.confidence else float(draft.size)
