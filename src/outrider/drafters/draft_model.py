"""Drafter `draft_model`: a smaller model of the same vocabulary runs ahead.

All sequences that draft advance together: one forward pass a draft step. The law of a draft is chosen by
`draft_sample_method`; every row goes through `warp` with the sequence's own parameters and the tokens drafted so far.

Shapes: n sequences in a step, V target vocabulary.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from torch import Tensor

from outrider.core.draft import Draft, DraftLaw, SeqDraft
from outrider.core.protocols import Committed, LanguageModel
from outrider.core.rng import Key, Purpose, Rng
from outrider.core.row import Row
from outrider.core.types import Sequence
from outrider.core.warp import RowContext, Rows, warp
from outrider.drafters.draft_cache import DraftState, advance, prefill
from outrider.drafters.draft_vocab import DraftVocab
from outrider.drafters.options import require_int, require_number
from outrider.errors import ConfigError

log = logging.getLogger("outrider")

SAMPLE_METHOD_LAWS = {
    "auto": frozenset({DraftLaw.POINT, DraftLaw.IID, DraftLaw.SHARED_NOISE}),
    "greedy": frozenset({DraftLaw.POINT}),
    "probabilistic": frozenset({DraftLaw.POINT, DraftLaw.IID}),
    "coupled": frozenset({DraftLaw.POINT, DraftLaw.SHARED_NOISE}),
}
"""The laws of each method's drafts. Greedy parameters give POINT drafts under every method."""

GREEDY_BELOW_TEMPERATURE = 0.3
"""Below it q is so peaked that a draw is nearly always the likeliest token, which needs no row of q to be kept."""


@dataclass(slots=True)
class _Run:
    """One sequence in one round. `view` is the sequence as the draft's rows see it (greedy for POINT drafts)."""

    seq: Sequence
    view: Sequence
    state: DraftState
    law: DraftLaw
    limit: int
    tokens: list[int] = field(default_factory=list)
    q_rows: list[Row] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    done: bool = False

    def draft(self, source: str) -> SeqDraft:
        passes = self.state.take_passes()
        return SeqDraft.chain(
            self.tokens, self.law, self.q_rows, confidence=self.confidence, source=source, passes=passes
        )


class DraftModelDrafter:
    """Drafts chains with `model`.

    vocab_size           the target's vocabulary size; None: the same as the model's
    draft_sample_method  "greedy" (likeliest token, POINT), "probabilistic" (drawn from q, IID), "coupled" (the noise
                         that the target races, SHARED_NOISE), or "auto": greedy at temperature 0, coupled under the
                         rule of that name, else probabilistic where the rule weighs q and the temperature is at
                         least `greedy_below_temperature`, else greedy
    draft_vocab          token ids that drafts may use; None: all. See `DraftVocab`
    min_confidence       a draft ends after a token with less draft probability than this; that token stays in it

    A sequence is no longer drafted, with a reason in its stats, when it outgrows the draft model's context, holds a
    token that the model has no embedding for, or when the model fails on it.
    """

    name = "draft_model"
    needs = frozenset({"model", "vocab_size"})
    trees = False
    wants: tuple[int, ...] = ()

    def __init__(
        self,
        *,
        model: LanguageModel,
        vocab_size: int | None = None,
        draft_sample_method: str = "auto",
        greedy_below_temperature: float = GREEDY_BELOW_TEMPERATURE,
        draft_vocab: Seq[int] | None = None,
        min_confidence: float = 0.0,
    ) -> None:
        if draft_sample_method not in SAMPLE_METHOD_LAWS:
            raise ConfigError(
                f"{self.name}: draft_sample_method = {draft_sample_method!r} is not allowed: "
                f"choose one of {', '.join(SAMPLE_METHOD_LAWS)}"
            )
        size = model.vocab_size if vocab_size is None else require_int(self.name, "vocab_size", vocab_size, 1)
        self.sample_method = draft_sample_method
        self.greedy_below_temperature = require_number(
            self.name, "greedy_below_temperature", greedy_below_temperature, 0
        )
        self.min_confidence = require_number(self.name, "min_confidence", min_confidence, 0, 1)
        self.vocab = DraftVocab(model, size, draft_vocab)
        self._states: dict[int, DraftState] = {}

    @property
    def model(self) -> LanguageModel:
        return self.vocab.model

    @property
    def laws(self) -> frozenset[DraftLaw]:
        return SAMPLE_METHOD_LAWS[self.sample_method]

    def open(self, seq: Sequence) -> None:
        self._states[seq.id] = DraftState()

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int], rng: Rng) -> Draft:
        runs = {seq.id: run for seq, k in zip(seqs, budgets, strict=True) if k and (run := self._begin(seq, k))}
        prefill(self.model, [run.state for run in runs.values()])
        live = self._still_running(list(runs.values()))
        while live:
            self._step(live, rng)
            live = self._still_running(live)
        empty = SeqDraft.empty(self.name)
        return Draft([runs[seq.id].draft(self.name) if seq.id in runs else empty for seq in seqs])

    def commit(self, seq: Sequence, committed: Committed) -> None:
        """Nothing to do: `propose` compares the sequence with what the cache holds."""

    def close(self, seq: Sequence) -> None:
        state = self._states.pop(seq.id, None)
        if state is not None:
            state.free()

    def _begin(self, seq: Sequence, budget: int) -> _Run | None:
        """A caught-up sequence and how far it may draft; None when it is not drafted."""
        state = self._states[seq.id]
        if state.stopped:
            return None
        law = self.law(seq)
        if law not in seq.rule.laws:
            seq.stats.dropped[f"rule {seq.rule.name} cannot judge {law.value} drafts"] += budget
            return None
        state.catch_up(seq.tokens)
        limit = min(budget, self.model.context_length - len(seq.tokens) + 1)
        if limit < 1:
            self._stop(seq, state, "draft context is full")
            return None
        if self.vocab.unknown(state.missing):
            self._stop(seq, state, "draft model does not know a token")
            return None
        return _Run(seq, _greedy_view(seq) if law is DraftLaw.POINT else seq, state, law, limit)

    def law(self, seq: Sequence) -> DraftLaw:
        """How this sequence's drafts come about."""
        if seq.params.greedy or self.sample_method == "greedy":
            return DraftLaw.POINT
        if self.sample_method == "coupled" or (self.sample_method == "auto" and seq.rule.name == "coupled"):
            return DraftLaw.SHARED_NOISE
        weighs_q = seq.rule.weighs_q and seq.params.temperature >= self.greedy_below_temperature
        return DraftLaw.IID if self.sample_method == "probabilistic" or weighs_q else DraftLaw.POINT

    def _step(self, live: list[_Run], rng: Rng) -> None:
        """One draft token for every run."""
        rows = [run.tokens[-1:] or run.state.missing for run in live]
        logits_n = advance(self.model, [run.state for run in live], rows, logits=True)
        live = self._still_running(live)
        if live:
            logits_nV = self.vocab.widen(logits_n)
            p = warp(logits_nV, [RowContext(run.view, tuple(run.tokens)) for run in live])
            for n, run in enumerate(live):
                self._extend(run, p, n, logits_nV[n], rng.of(run.seq.id))

    def _extend(self, run: _Run, p: Rows, n: int, logits_V: Tensor, rng: Rng) -> None:
        """Draws the run's next token, or ends the run. A token may end the draft behind it, never unmake itself."""
        seq = run.seq
        if p.bad_M[n]:
            seq.stats.dropped["draft logits are NaN, or every token is forbidden"] += 1
            run.done = True
            return
        if run.law is DraftLaw.POINT:
            token = p[n].likeliest()
            peak = probability = float((logits_V[token] - logits_V.logsumexp(0)).exp())
        else:
            q = p[n]
            token = self._draw(run, q, rng)
            peak, probability = float(q.weight_S.max()), q[token]
        run.tokens.append(token)
        run.confidence.append(peak * (run.confidence[-1] if run.confidence else 1.0))
        run.done = len(run.tokens) == run.limit or probability < self.min_confidence or token in seq.stop_ids

    def _draw(self, run: _Run, q: Row, rng: Rng) -> int:
        seq, i = run.seq, len(run.tokens)
        if run.law is DraftLaw.SHARED_NOISE:
            return rng.race(q, Key(seq.seed, seq.output_len + i, Purpose.RACE))
        run.q_rows.append(q)
        return rng.categorical(q, Key(seq.seed, seq.output_len, Purpose.DRAFT, i))

    def _still_running(self, runs: list[_Run]) -> list[_Run]:
        """The runs that go on. One that the model failed on ends here, with the tokens that it has."""
        for run in runs:
            if run.state.stopped and not run.done:
                run.done = True
                self._report(run.seq, run.state.stopped)
        return [run for run in runs if not run.done]

    def _stop(self, seq: Sequence, state: DraftState, reason: str) -> None:
        state.stop(reason)
        self._report(seq, reason)

    def _report(self, seq: Sequence, reason: str) -> None:
        seq.stats.dropped[reason] += 1
        log.warning("sequence %d is not drafted by %s any more: %s", seq.id, self.name, reason)


def _greedy_view(seq: Sequence) -> Sequence:
    """The same text under the same processors, but for the likeliest token: shares all of the sequence's state."""
    if seq.params.greedy:
        return seq
    view = copy.copy(seq)
    view.params = replace(seq.params, temperature=0.0)
    return view
