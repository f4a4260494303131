"""One sequence's place in a draft model: what the model's cache holds, and catching up with what was committed.

The cache holds committed tokens and, behind them, the draft tokens that the last round fed. Before the next draft it
is cut back to the longest prefix that it shares with the sequence, and the missing committed tokens are fed along with
the first draft step. One rule covers rejections, full acceptance (the last draft token was never fed), rounds without
a draft, and rounds that another drafter drafted.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from outrider.core.protocols import KVCache, LanguageModel, Segment
from outrider.core.step import PREFILL_CHUNK
from outrider.drafters.chain_state import ChainState

ROWS_WITH_LOGITS = 16
"""Longer catch-ups first run without the head, whose logits nobody would read."""


class DraftState(ChainState):
    """The draft cache of one sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: KVCache | None = None
        self.fed: list[int] = []
        self.missing: list[int] = []
        self._settled = 0

    def catch_up(self, tokens: list[int]) -> None:
        """Cuts the cache back to what it shares with `tokens`; `missing` is then what to feed, at least one token."""
        same, limit = self._settled, min(len(self.fed), len(tokens) - 1)
        while same < limit and self.fed[same] == tokens[same]:
            same += 1
        if same < len(self.fed):
            assert self.cache is not None
            self.cache.truncate(same)
            del self.fed[same:]
        self._settled = same
        self.missing = tokens[same:]

    def keep(self, tokens: Seq[int]) -> None:
        """Commits the rows of the latest pass."""
        assert self.cache is not None
        self.cache.keep(range(len(tokens)))
        self.fed.extend(tokens)

    def free(self) -> None:
        """Gives the cache back."""
        if self.cache is not None:
            self.cache.free()
            self.cache = None
        self.fed, self.missing, self._settled = [], [], 0


def advance(model: LanguageModel, states: Seq[DraftState], rows: Seq[Seq[int]], *, logits: bool) -> Tensor:
    """One pass over `rows[i]` of each state, kept. Returns the logits after each state's last row.

    When the pass fails, each state is tried alone and those that fail again are stopped, so that `logits_nV` has a row
    for each state that still runs, in order ([0, 0] without logits).
    """
    try:
        return _pass(model, states, rows, logits=logits)
    except Exception as error:
        if len(states) == 1:
            states[0].stop(f"draft model failed ({type(error).__name__})")
            return torch.empty(0, 0)
    parts = []
    for state, own in zip(states, rows, strict=True):
        logits_1V = advance(model, [state], [own], logits=logits)
        if logits_1V.numel():
            parts.append(logits_1V)
    return torch.cat(parts) if parts else torch.empty(0, 0)


def _pass(model: LanguageModel, states: Seq[DraftState], rows: Seq[Seq[int]], *, logits: bool) -> Tensor:
    segments = []
    for state, own in zip(states, rows, strict=True):
        state.count_pass()
        if state.cache is None:
            state.cache = model.new_cache()
        segments.append(Segment(state.cache, own))
    out = model.forward(segments, logits=logits)
    last, row = [], -1
    for state, own in zip(states, rows, strict=True):
        state.keep(own)
        row += len(own)
        last.append(row)
    if out.logits_MV is None:
        return torch.empty(0, 0)
    return out.logits_MV if len(last) == out.logits_MV.shape[0] else out.logits_MV[last]


def prefill(model: LanguageModel, states: Seq[DraftState]) -> None:
    """Feeds all but the last of the missing tokens of states that miss many."""
    while behind := [s for s in states if not s.stopped and len(s.missing) > ROWS_WITH_LOGITS]:
        chunks = [state.missing[: min(PREFILL_CHUNK, len(state.missing) - 1)] for state in behind]
        advance(model, behind, chunks, logits=False)
        for state, chunk in zip(behind, chunks, strict=True):
            del state.missing[: len(chunk)]
