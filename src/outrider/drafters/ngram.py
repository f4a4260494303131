"""Drafter `ngram`: what followed the last time these words were said (prompt lookup).

The last n tokens, for the longest n that occurs earlier in prompt or output, predict what followed the most recent
earlier occurrence. When the copy reaches the end of the text it goes on with its own beginning, so that a repeating
text is drafted to any length.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from outrider.core.draft import Draft, DraftLaw, SeqDraft
from outrider.core.protocols import Committed
from outrider.core.rng import Rng
from outrider.core.types import Sequence
from outrider.drafters.options import require_int, until_stop


@dataclass(slots=True)
class _Index:
    """Where the latest occurrence of each n-gram ends (exclusive), among the first `indexed` tokens."""

    end: dict[tuple[int, ...], int] = field(default_factory=dict)
    indexed: int = 0


class NgramDrafter:
    """Copies from the sequence's own past.

    A match of a single token is mostly chance, and every wrong draft token costs target rows: `prompt_lookup_min` is
    2. Past four tokens a longer match seldom names another place: `prompt_lookup_max` is 4. Time and memory are
    constant a token: at most `prompt_lookup_max - prompt_lookup_min + 1` index entries, and no text is scanned again.
    """

    name = "ngram"
    laws = frozenset({DraftLaw.POINT})
    trees = False
    wants: tuple[int, ...] = ()

    def __init__(self, *, prompt_lookup_max: int = 4, prompt_lookup_min: int = 2) -> None:
        self.min_n = require_int(self.name, "prompt_lookup_min", prompt_lookup_min, 1)
        self.max_n = require_int(
            self.name, "prompt_lookup_max", prompt_lookup_max, self.min_n, f" (prompt_lookup_min is {self.min_n})"
        )
        self._indices: dict[int, _Index] = {}

    def open(self, seq: Sequence) -> None:
        self._indices[seq.id] = _Index()

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int], rng: Rng) -> Draft:
        return Draft([self._draft(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)])

    def _draft(self, seq: Sequence, budget: int) -> SeqDraft:
        if not budget:
            return SeqDraft.empty(self.name)
        index = self._indices[seq.id]
        self._catch_up(index, seq.tokens)
        start = self._match(index, seq.tokens)
        if start is None:
            return SeqDraft.empty(self.name)
        return SeqDraft.chain(until_stop(_copy(seq.tokens, start), budget, seq), source=self.name)

    def _catch_up(self, index: _Index, tokens: list[int]) -> None:
        """Indexes the n-grams that some token follows: the text's own end must not match itself."""
        for end in range(index.indexed + 1, len(tokens)):
            for n in range(self.min_n, min(self.max_n, end) + 1):
                index.end[tuple(tokens[end - n : end])] = end
        index.indexed = max(index.indexed, len(tokens) - 1)

    def _match(self, index: _Index, tokens: list[int]) -> int | None:
        """Where the continuation of the longest match starts."""
        for n in range(min(self.max_n, len(tokens)), self.min_n - 1, -1):
            end = index.end.get(tuple(tokens[-n:]))
            if end is not None:
                return end
        return None

    def commit(self, seq: Sequence, committed: Committed) -> None:
        """Nothing to do: `propose` reads the sequence itself."""

    def close(self, seq: Sequence) -> None:
        self._indices.pop(seq.id, None)


def _copy(tokens: list[int], start: int) -> Iterator[int]:
    """tokens[start:], for ever: past the end the copy reads what it has written."""
    period = len(tokens) - start
    i = 0
    while True:
        yield tokens[start + i % period]
        i += 1
