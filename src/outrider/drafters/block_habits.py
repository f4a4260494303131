"""What the rounds of one sequence teach its block drafter, without a gradient through the head: biases of pairs of
tokens, and temperatures of confidences.

Where a draft is cut short, the target said b and the draft d behind the same token a: the bias of the pair (a, b) grows
by `rate` and that of (a, d) falls by it. Of drawn drafts b comes from the target's p and d from the draft's q, so the
mean of this step is rate * (p - q), down the cross-entropy of p under q; of greedy ones it is a perceptron's. A pair
that the head already gets right costs nothing, since its steps cancel.

Both are known before the next draw and depend on the past of the sequence alone, so q, to which the biases belong,
stays the very distribution that is drawn from, and answers keep their law.

Shapes: R rows of pairs, W ways, V target vocabulary.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence as Seq

import torch

from outrider.drafters.columns import Columns
from outrider.kernels import Pairs

ROWS, WAYS = 512, 8
"""Tokens whose followers are remembered, those that were last learned from; and followers of each."""
MOST = 8.0
"""No bias is larger: e^8 is a factor of 3000."""
SHARPEST = 4.0
"""A confidence's logit is multiplied by this at most, and by its inverse at least."""
CALIBRATION = 0.05
"""Step of the factors of confidences, in nats."""


class Habits:
    """Of one sequence, from its opening to its closing. `tokens` is how many ids there are, `places` those of a whole
    draft; `rate` is in nats."""

    def __init__(self, columns: Columns, tokens: int, places: int, rate: float) -> None:
        self._columns, self._tokens, self._rate = columns, tokens, rate
        self.factors = [1.0] * places
        """By place in the draft: what the confidence's logit is multiplied by, an inverse temperature."""
        self.pairs: Pairs | None = None
        self._rows: OrderedDict[int, int] = OrderedDict()
        self._before, self._draft, self._logits = 0, list[int](), list[float]()

    def note(self, before: int, draft: Seq[int], logits: Seq[float]) -> None:
        """A draft that is to be verified behind the token `before`, and the logits of its confidences (none: [])."""
        self._before, self._draft, self._logits = before, list(draft), list(logits)

    def learn(self, committed: Seq[int]) -> None:
        """What came instead, whoever drafted it."""
        before, draft, logits = self._before, self._draft, self._logits
        self._draft = []
        for place, (said, drafted) in enumerate(zip(committed, draft, strict=False)):
            if logits:
                self._calibrate(place, logits[place], said == drafted)
            if said != drafted:
                self._step(before, said, self._rate)
                self._step(before, drafted, -self._rate)
                return
            before = said

    def confidence(self, logit: float, place: int) -> float:
        """The probability that a token is accepted."""
        logit *= self.factors[place]
        return 1 / (1 + math.exp(-logit)) if logit > -700 else 0.0

    def _calibrate(self, place: int, logit: float, accepted: bool) -> None:
        """A step down the cross-entropy of what came true."""
        surprise = self.confidence(logit, place) - accepted
        factor = self.factors[place] - CALIBRATION * surprise * max(-SHARPEST, min(SHARPEST, logit))
        self.factors[place] = max(1 / SHARPEST, min(SHARPEST, factor))

    def _step(self, before: int, token: int, change: float) -> None:
        column = self._columns.find(token)
        if column is None:
            return
        pairs, row = self._row(before)
        columns_W, values_W = pairs.columns_RW[row], pairs.values_RW[row]
        known = [way for way in range(WAYS) if int(columns_W[way]) == column and float(values_W[way]) != 0]
        way = known[0] if known else int(values_W.abs().argmin())  # a free one, or that of the smallest bias
        value = (float(values_W[way]) if known else 0.0) + change
        columns_W[way], values_W[way] = column, max(-MOST, min(MOST, value))

    def _row(self, before: int) -> tuple[Pairs, int]:
        """The row of a token, which is now the latest; it may take the place of the one that was longest unused."""
        pairs = self.pairs
        if pairs is None:
            row_of_V = torch.full((self._tokens,), -1, dtype=torch.int32)
            empty = torch.zeros(ROWS, WAYS, dtype=torch.int64), torch.zeros(ROWS, WAYS)
            pairs = self.pairs = Pairs(row_of_V, *empty)
        if before not in self._rows:
            row = len(self._rows)
            if row == ROWS:
                forgotten, row = self._rows.popitem(last=False)
                pairs.row_of_V[forgotten] = -1
                pairs.values_RW[row] = 0
            self._rows[before] = row
            pairs.row_of_V[before] = row
        self._rows.move_to_end(before)
        return pairs, self._rows[before]
