"""What a drafter proposes: a flat forest of nodes, ragged over the batch. A chain is a tree of width one.

Token ids, parents and splits are small host-side lists (at most a few dozen numbers a sequence); only the rows of q
are tensors.

Shapes: B sequences, N draft nodes in all, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate

from outrider.core.row import Row
from outrider.core.tree import is_chain


class DraftLaw(Enum):
    """How a sequence's draft tokens came about, which is what an acceptance rule has to know."""

    POINT = "point"
    """Chosen without randomness: q is one-hot at the proposed token."""
    IID = "iid"
    """Each node drawn independently from its row of q."""
    NO_REPLACEMENT = "no_replacement"
    """Siblings drawn in turn from their shared row of q, each removed before the next."""
    SHARED_NOISE = "shared_noise"
    """The winner of the race that the target will race at that position too (rule `coupled` only)."""


@dataclass(frozen=True, slots=True)
class SeqDraft:
    """One sequence's draft. `parents[i]` is a node before i, or -1 for the last committed token.

    `q_row[i]` names the row of `q_rows` that node i was drawn from (IID and NO_REPLACEMENT; sums to 1: the very row
    that was sampled). `confidence[i]` is for controllers only. `source` is the drafter's name, `passes` the
    draft-model forward passes that this sequence took part in.
    """

    tokens: list[int]
    parents: list[int]
    law: DraftLaw = DraftLaw.POINT
    q_rows: list[Row] = field(default_factory=list)
    q_row: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    source: str = ""
    passes: int = 0

    @classmethod
    def chain(
        cls,
        tokens: Seq[int],
        law: DraftLaw = DraftLaw.POINT,
        q_rows: Seq[Row] = (),
        *,
        confidence: Seq[float] = (),
        source: str = "",
        passes: int = 0,
    ) -> SeqDraft:
        """A chain; with q_rows, node i was drawn from q_rows[i]."""
        rows = list(q_rows)
        parents, q_row = list(range(-1, len(tokens) - 1)), list(range(len(rows)))
        return cls(list(tokens), parents, law, rows, q_row, list(confidence), source, passes)

    @classmethod
    def empty(cls, source: str = "", *, passes: int = 0) -> SeqDraft:
        """No proposal: the round becomes a plain step."""
        return cls([], [], source=source, passes=passes)

    @property
    def size(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return is_chain(self.parents)

    def q(self, node: int) -> Row:
        """The row that `node` was drawn from."""
        return self.q_rows[self.q_row[node]]

    def path(self, node: int) -> list[int]:
        """The nodes from a root child down to `node`, inclusive; [] for -1."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def head(self, size: int) -> SeqDraft:
        """The first `size` nodes (parents come before children, so this is again a forest)."""
        if size >= self.size:
            return self
        return SeqDraft(
            self.tokens[:size],
            self.parents[:size],
            self.law,
            self.q_rows,
            self.q_row[:size],
            self.confidence[:size],
            self.source,
            self.passes,
        )


@dataclass(frozen=True, slots=True)
class Draft:
    """The batch's forest: one SeqDraft a sequence, in the order asked. `split` [B + 1] cuts its N nodes by sequence."""

    seqs: list[SeqDraft]

    @property
    def split(self) -> list[int]:
        return list(accumulate((seq.size for seq in self.seqs), initial=0))


@dataclass(frozen=True, slots=True)
class Dropped:
    """Draft nodes that were thrown away before the target saw them."""

    count: int
    reason: str


def sanitise(draft: SeqDraft, budget: int, vocab_size: int) -> tuple[SeqDraft, Dropped | None]:
    """The longest prefix of `draft` that is well-formed, and what was dropped, with a named reason.

    A prefix is cut only for what no honest drafter can produce (an id outside the vocabulary, a q that is no
    distribution, a token to which its own q gives nothing) or for exceeding the budget, so honest drafts keep
    their law.
    """
    keep, reason = draft.size, ""
    if keep > budget:
        keep, reason = budget, "longer than the budget"
    needs_q = draft.law in (DraftLaw.IID, DraftLaw.NO_REPLACEMENT)
    for node in range(keep):
        problem = _problem(draft, node, vocab_size, needs_q)
        if problem:
            keep, reason = node, problem
            break
    return draft.head(keep), Dropped(draft.size - keep, reason) if reason else None


def _problem(draft: SeqDraft, node: int, vocab_size: int, needs_q: bool) -> str:
    token = draft.tokens[node]
    if not isinstance(token, int):
        return "token id is no integer"
    if not 0 <= token < vocab_size:
        return "token id outside the vocabulary"
    if not -1 <= draft.parents[node] < node:
        return "parent is not an earlier node"
    if not needs_q:
        return ""
    if node >= len(draft.q_row) or not 0 <= draft.q_row[node] < len(draft.q_rows):
        return "no q row"
    q = draft.q(node)
    if not isinstance(q, Row):
        return "q is no Row"
    if q.size != vocab_size:
        return "q has another vocabulary size"
    if not abs(q.total() - 1.0) < 1e-6 or float(q.weight_S.min()) < 0.0:
        return "q is not a distribution"
    if not q[token] > 0.0:
        return "q gives its own token no probability"
    return ""
