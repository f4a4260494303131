"""The tokens of a sequence as a drafter's kernels read them, and what they say of the next token.

A text that repeats itself, or quotes what stands in its context, goes on as it went on there. A small head that reads
one row of features hardly sees that; the text itself says it, so the head's logit of that token is raised: a copy
mechanism without weights (with learned ones: See et al. 2017, 1704.04368, section 2.2). The longer the match, the more.

What is raised depends on the tokens before alone, so q, to which it belongs, stays the very distribution that is drawn
from.

Shapes: T tokens, S columns of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from outrider.drafters.columns import Columns
from outrider.kernels import find_copy

MOST_COPY = 20.0
"""Nats for each token matched but one: the largest `copy`."""


class Text:
    """The tokens of one sequence, int64, with room behind them for a draft's; grows by doubling."""

    def __init__(self) -> None:
        self._store_T = torch.empty(0, dtype=torch.int64)
        self._known = 0

    def with_room(self, tokens: Seq[int], drafted: Seq[int], room: int) -> tuple[Tensor, int]:
        """(a tensor that begins with the sequence's tokens and those drafted, and is `room` longer; how many they
        are). The sequence only grows from call to call."""
        known, size = len(tokens), len(tokens) + len(drafted)
        if size + room > len(self._store_T):
            grown_T = self._store_T.new_empty(2 * (size + room))
            grown_T[: self._known] = self._store_T[: self._known]
            self._store_T = grown_T
        self._store_T[self._known : known] = torch.tensor(tokens[self._known :], dtype=torch.int64)
        self._store_T[known:size] = torch.tensor(drafted, dtype=torch.int64)
        self._known = known
        return self._store_T, size


def add_copy_(logits_S: Tensor, text_T: Tensor, columns: Columns, copy: float) -> None:
    """Raises the logit of the token that came the last time, in place."""
    matched, token = find_copy(text_T)
    if matched > 1 and (column := columns.find(token)) is not None:
        logits_S[column] += copy * (matched - 1)
