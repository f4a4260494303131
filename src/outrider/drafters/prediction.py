"""Drafter `prediction`: the request says what the answer will look like (OpenAI's predicted outputs).

The answer is followed through the predicted text as long as they agree. After an edit the longest recent suffix of the
answer that occurs in the prediction says where to resume: at or after the last place of agreement if possible.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq

from outrider.core.draft import Draft, DraftLaw, SeqDraft
from outrider.core.protocols import Committed
from outrider.core.rng import Rng
from outrider.core.types import Sequence
from outrider.drafters.options import require_int, until_stop


class _Alignment:
    """Where the answer is in the prediction: `at` is the predicted index of the next token, None when lost."""

    def __init__(self, prediction: list[int], sizes: range) -> None:
        self.prediction = prediction
        self.at: int | None = 0
        self._agreed = 0
        self._followed = 0
        self._sizes = sizes
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def follow(self, answer: list[int]) -> None:
        """Follows the answer's new tokens, one by one: the alignment is a function of the answer alone."""
        for token in answer[self._followed :]:
            self._followed += 1
            if self.at is not None and self.at < len(self.prediction) and self.prediction[self.at] == token:
                self.at += 1
            else:
                self.at = self._find(answer[max(self._followed - self._sizes.start, 0) : self._followed])
            if self.at is not None:
                self._agreed = self.at

    def _find(self, answer: list[int]) -> int | None:
        """Where the longest suffix of the answer ends in the prediction: preferably past the last agreement."""
        if not self._ends:
            self._index()
        for size in self._sizes:
            ends = self._ends.get(tuple(answer[-size:])) if size <= len(answer) else None
            if ends:
                after = bisect_left(ends, self._agreed)
                return ends[after] if after < len(ends) else ends[-1]
        return None

    def _index(self) -> None:
        """The ends (exclusive, ascending) of all n-grams of the prediction; made only once agreement was lost."""
        for end in range(1, len(self.prediction) + 1):
            for size in self._sizes:
                if size <= end:
                    self._ends.setdefault(tuple(self.prediction[end - size : end]), []).append(end)


class PredictionDrafter:
    """Copies from `seq.prediction`; a sequence without one is not drafted.

    After an edit, `min_match` to `max_match` tokens of the answer must agree with the prediction before it is resumed.
    """

    name = "prediction"
    reads_prediction = True
    laws = frozenset({DraftLaw.POINT})
    trees = False
    wants: tuple[int, ...] = ()

    def __init__(self, *, max_match: int = 8, min_match: int = 2) -> None:
        low = require_int(self.name, "min_match", min_match, 1)
        high = require_int(self.name, "max_match", max_match, low, f" (min_match is {low})")
        self._sizes = range(high, low - 1, -1)
        self._alignments: dict[int, _Alignment] = {}

    def open(self, seq: Sequence) -> None:
        if seq.prediction:
            self._alignments[seq.id] = _Alignment(seq.prediction, self._sizes)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int], rng: Rng) -> Draft:
        return Draft([self._draft(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)])

    def _draft(self, seq: Sequence, budget: int) -> SeqDraft:
        alignment = self._alignments.get(seq.id)
        if not budget or alignment is None:
            return SeqDraft.empty(self.name)
        alignment.follow(seq.tokens[seq.prompt_len :])
        if alignment.at is None:
            return SeqDraft.empty(self.name)
        ahead = alignment.prediction[alignment.at : alignment.at + budget]
        return SeqDraft.chain(until_stop(ahead, budget, seq), source=self.name)

    def commit(self, seq: Sequence, committed: Committed) -> None:
        """Nothing to do: `propose` reads the sequence itself."""

    def close(self, seq: Sequence) -> None:
        self._alignments.pop(seq.id, None)
