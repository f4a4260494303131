"""What the drafters that draft a chain token by token share: laws, draws, confidences, and who is still running.

All sequences that draft advance together: one forward pass a draft step. The law of a draft is chosen by
`draft_sample_method`; every row is processed by the sequence's own parameters and the tokens drafted so far.

Shapes: n sequences in a step, S columns of the drafter's own.
"""

from __future__ import annotations

import copy
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar, Generic, Self, TypeVar

from torch import Tensor

from outrider.core.draft import Draft, DraftLaw, SeqDraft
from outrider.core.protocols import Committed, Drafter
from outrider.core.rng import Key, Purpose, Rng
from outrider.core.row import Row
from outrider.core.types import Sequence
from outrider.core.warp import RowContext, distribution, warp
from outrider.drafters.chain_state import ChainState
from outrider.drafters.columns import Columns
from outrider.drafters.options import require_number
from outrider.errors import ConfigError
from outrider.kernels import softmax

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


S = TypeVar("S", bound=ChainState)


@dataclass(slots=True)
class Run(Generic[S]):
    """One sequence in one round. `view` is the sequence as the draft's rows see it (greedy for POINT drafts)."""

    seq: Sequence
    view: Sequence
    state: S
    law: DraftLaw
    limit: int
    tokens: list[int] = field(default_factory=list)
    q_rows: list[Row] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    done: bool = False

    @property
    def sure(self) -> float:
        """How probably all of the draft so far is kept, by its confidences."""
        return self.confidence[-1] if self.confidence else 1.0

    @property
    def plain(self) -> bool:
        """Whether nothing but temperature and truncation touches the logits."""
        return self.seq.params.plain_logits and self.seq.constraint is None

    @property
    def plainly_drawn(self) -> bool:
        """Whether its tokens are drawn from the softmax itself."""
        params = self.seq.params
        whole = params.top_k == 0 and params.top_p == 1 and params.min_p == 0
        return self.law is not DraftLaw.POINT and whole and self.plain

    def draw_key(self, i: int) -> Key:
        """Of the draft's token i, where it is drawn for itself."""
        return Key(self.seq.seed, self.seq.output_len, Purpose.DRAFT, i)

    def draft(self, source: str) -> SeqDraft:
        passes = self.state.take_passes()
        return SeqDraft.chain(
            self.tokens, self.law, self.q_rows, confidence=self.confidence, source=source, passes=passes
        )


class ChainDrafter(ABC, Generic[S]):
    """The round of a drafter that drafts chains; what runs, and how a sequence is caught up, is the subclass's.

    The logits that it gives have the columns `columns`.
    `draft_sample_method`, `greedy_below_temperature` and `min_confidence` are as `DraftModelDrafter` explains them;
    `recommends` are options that the card of a trained one recommends: a draft ends about where a further token costs
    what it brings, in its own draft step and in the rows of the check (docs/log.md).
    """

    name = ""
    recommends: ClassVar[Mapping[str, float]] = MappingProxyType({"min_confidence": 0.15})
    trees = False
    wants: tuple[int, ...] = ()
    columns: Columns

    def __init__(self, draft_sample_method: str, greedy_below_temperature: float, min_confidence: float) -> None:
        if draft_sample_method not in SAMPLE_METHOD_LAWS:
            raise ConfigError(
                f"{self.name}: draft_sample_method = {draft_sample_method!r} is not allowed: "
                f"choose one of {', '.join(SAMPLE_METHOD_LAWS)}"
            )
        self.sample_method = draft_sample_method
        self.greedy_below_temperature = require_number(
            self.name, "greedy_below_temperature", greedy_below_temperature, 0
        )
        self.min_confidence = require_number(self.name, "min_confidence", min_confidence, 0, 1)
        self._states: dict[int, S] = {}

    def full_length(self) -> Self:
        """This drafter, at work on nothing yet, whose drafts do not end for want of confidence."""
        other = copy.copy(self)
        other.min_confidence, other._states = 0.0, {}
        return other

    @abstractmethod
    def _new_state(self) -> S:
        """What is kept of a sequence that begins."""

    @abstractmethod
    def _ready(self, seq: Sequence, state: S, budget: int) -> int:
        """Catches the state up with the sequence; returns how many tokens may be drafted (0: none this round)."""

    @abstractmethod
    def _next_logits(self, runs: list[Run[S]]) -> Tensor:
        """[n, S] logits behind the last token of every run that did not stop here: one pass over all of them."""

    def _prepare(self, runs: list[Run[S]], rng: Rng) -> None:
        """Work before the first draft step."""

    @property
    def laws(self) -> frozenset[DraftLaw]:
        return SAMPLE_METHOD_LAWS[self.sample_method]

    def open(self, seq: Sequence) -> None:
        self._states[seq.id] = self._new_state()

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int], rng: Rng) -> Draft:
        runs = {seq.id: run for seq, k in zip(seqs, budgets, strict=True) if k and (run := self._begin(seq, k))}
        self._prepare(list(runs.values()), rng)
        live = self._still_running(list(runs.values()))
        while live:
            self._step(live, rng)
            live = self._still_running(live)
        empty = SeqDraft.empty(self.name)
        return Draft([runs[seq.id].draft(self.name) if seq.id in runs else empty for seq in seqs])

    def commit(self, seq: Sequence, committed: Committed) -> None:
        """Nothing to do: `propose` compares the sequence with what is kept of it."""

    def close(self, seq: Sequence) -> None:
        state = self._states.pop(seq.id, None)
        if state is not None:
            state.free()

    def _begin(self, seq: Sequence, budget: int) -> Run[S] | None:
        """A caught-up sequence and how far it may draft; None when it is not drafted."""
        state = self._states[seq.id]
        if state.stopped:
            return None
        law = self.law(seq)
        if law not in seq.rule.laws:
            seq.stats.dropped[f"rule {seq.rule.name} cannot judge {law.value} drafts"] += budget
            return None
        limit = self._ready(seq, state, budget)
        if limit < 1:
            return None
        return Run(seq, _greedy_view(seq) if law is DraftLaw.POINT else seq, state, law, limit)

    def law(self, seq: Sequence) -> DraftLaw:
        """How this sequence's drafts come about."""
        if seq.params.greedy or self.sample_method == "greedy":
            return DraftLaw.POINT
        if self.sample_method == "coupled" or (self.sample_method == "auto" and seq.rule.name == "coupled"):
            return DraftLaw.SHARED_NOISE
        weighs_q = seq.rule.weighs_q and seq.params.temperature >= self.greedy_below_temperature
        return DraftLaw.IID if self.sample_method == "probabilistic" or weighs_q else DraftLaw.POINT

    def _step(self, live: list[Run[S]], rng: Rng) -> None:
        """One draft token for every run."""
        logits_nS = self._next_logits(live)
        live = self._still_running(live)
        if live:
            rows_nS = logits_nS.numpy()  # whose argmax takes a tenth of the time
            for n, (run, column) in enumerate(zip(live, rows_nS.argmax(1).tolist(), strict=True)):
                self._continue(run, logits_nS[n], float(rows_nS[n, column]), column, rng.of(run.seq.id))

    def _continue(self, run: Run[S], logits_S: Tensor, top: float, column: int, rng: Rng) -> None:
        """The run's next token, or its end. `top` and `column` are the largest logit, NaN where one is, and the first
        column that has it."""
        seq = run.seq
        if not math.isfinite(top):
            return self._lose(run)
        if run.plainly_drawn:
            weight_S = softmax(logits_S, seq.params.temperature)
            return self._lose(run) if weight_S is None else self._draw_from(run, weight_S, rng)
        if run.plain:
            q = None if run.law is DraftLaw.POINT else self.columns.over_tokens(distribution(logits_S, seq.params))
        else:
            p = warp(self.columns.widen(logits_S[None]), [RowContext(run.view, tuple(run.tokens))])
            if p.bad_M[0]:
                return self._lose(run)
            q = p[0]
        if run.law is DraftLaw.POINT:
            column = column if q is None else self.columns.column(q.likeliest())
            peak = math.exp(float(logits_S[column]) - top) / float((logits_S - top).exp_().sum())
            if self._goes_on(run, peak):
                self._take(run, self.columns.token(column), peak)
            return None
        assert q is not None
        return self._draw(run, q, rng)

    def _draw_from(self, run: Run[S], weight_S: Tensor, rng: Rng) -> None:
        """The next token, from the probabilities of the columns. q has float32 exponentials then: it need not be the
        target's, only what is drawn from."""
        self._draw(run, self.columns.over_tokens(Row(len(weight_S), weight_S)), rng)

    def _draw(self, run: Run[S], q: Row, rng: Rng) -> None:
        """The run's next token, from q, or its end."""
        peak = self._peak(q)
        if not self._goes_on(run, peak):
            return
        i = len(run.tokens)
        if run.law is DraftLaw.SHARED_NOISE:
            token = rng.race(q, Key(run.seq.seed, run.seq.output_len + i, Purpose.RACE))
        else:
            run.q_rows.append(q)
            token = rng.categorical(q, run.draw_key(i))
        self._take(run, token, peak)

    def _peak(self, q: Row) -> float:
        return float(q.weight_S.max())

    def _goes_on(self, run: Run[S], peak: float) -> bool:
        """Whether the next token, of whose distribution `peak` is the largest probability, is drafted at all. Which one
        it will be is not asked: to drop it for what it is would bias what is drawn."""
        run.done = run.sure * peak < self.min_confidence
        return not run.done

    def _take(self, run: Run[S], token: int, peak: float) -> None:
        """The run's next token."""
        run.tokens.append(token)
        run.confidence.append(run.sure * peak)
        run.done = len(run.tokens) == run.limit or token in run.seq.stop_ids

    def _lose(self, run: Run[S]) -> None:
        """Ends a draft behind which q is no distribution."""
        run.seq.stats.dropped["draft logits are NaN, or every token is forbidden"] += 1
        run.done = True

    def _still_running(self, runs: list[Run[S]]) -> list[Run[S]]:
        """The runs that go on. One that the model failed on ends here, with the tokens that it has."""
        for run in runs:
            if run.state.stopped and not run.done:
                run.done = True
                self._report(run.seq, run.state.stopped)
        return [run for run in runs if not run.done]

    def _stop(self, seq: Sequence, state: S, reason: str) -> None:
        state.stop(reason)
        self._report(seq, reason)

    def _report(self, seq: Sequence, reason: str) -> None:
        seq.stats.dropped[reason] += 1
        log.warning("sequence %d is not drafted by %s any more: %s", seq.id, self.name, reason)


def full_length(drafter: Drafter) -> Drafter:
    """The same drafter, whose drafts are as long as is asked for: to be tried, or timed."""
    make: Callable[[], Drafter] | None = getattr(drafter, "full_length", None)
    return drafter if make is None else make()


def _greedy_view(seq: Sequence) -> Sequence:
    """The same text under the same processors, but for the likeliest token: shares all of the sequence's state."""
    if seq.params.greedy:
        return seq
    view = copy.copy(seq)
    view.params = replace(seq.params, temperature=0.0)
    return view
