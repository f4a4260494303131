"""The costs that a governor decides by, measured: passes by rows and context, judging, overhead, drafts by K and batch.

Passes take turns, as in `profile`, whose figures serve where they are of the same context; drafts are a run for each K
and batch, between plain rounds. A few seconds for a small model.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from torch import Tensor

from outrider.bench.profile import GREEDY, SAMPLED, Profile, Times, fill, judging_times, text_ids, time_passes
from outrider.bench.timing import plain_rounds, timed
from outrider.control.cost_cache import CostKey, Kept, find_costs, keep_costs
from outrider.control.cost_model import SCHEMA, Busy, CostModel, Curve, DraftCost, DraftCurves
from outrider.core.protocols import KVCache, LanguageModel, Segment
from outrider.core.types import SamplingParams, Sequence
from outrider.drafters.chain import full_length
from outrider.engine.engine import Engine
from outrider.engine.kept_costs import cost_key, costs_folder
from outrider.engine.llm import LLM
from outrider.engine.request import Request, Speculation
from outrider.errors import ConfigError

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
CONTEXTS = (64, 512, 2048)
LENGTHS = (1, 2, 4, 8)
"""Draft lengths that are measured."""
BATCH = 4
"""Sequences that are drafted together, for what a sequence costs less among others."""
REPEAT, PLAIN_ROUNDS = 5, 4
"""Rounds that count; and plain ones before and behind those with drafts."""
PROMPT, IDLE = 96, 48
"""Tokens before the first draft, and rounds without drafts before a drafter is asked to catch up."""
PACE_ROUNDS = 32
"""Plain rounds that tell how fast the machine is now."""


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """A target's costs as they are now, and the drafters that were `asked` for: `fresh` were measured, for the reasons
    in `stale`; `path` holds them, unless `unkept` says why it does not."""

    costs: CostModel
    asked: tuple[str, ...]
    path: str
    fresh: tuple[str, ...]
    stale: tuple[str, ...]
    unkept: str | None = None

    def to_json(self) -> dict[str, object]:
        return {
            "path": self.path if self.unkept is None else None,
            "measured": list(self.fresh),
            "stale": list(self.stale),
            "schema": SCHEMA,
            **self.costs.to_json(),
        }

    def sentence(self) -> str:
        """For people."""
        why = f" ({'; '.join(self.stale)})" if self.stale else ""
        where = f"kept in {self.path}" if self.unkept is None else "not kept"
        said = f"costs of {', '.join(self.fresh)} measured{why} and {where}"
        if not self.fresh:
            said = f"costs kept in {self.path} still hold"
        if (busy := self.busy) is not None:
            return f"{said}, but {busy}; --refresh measures them again"
        return said if self.fresh else f"{said}; --refresh measures them again"

    @property
    def of_asked(self) -> CostModel:
        """With the drafters that were asked for alone: what was kept of others may be of another draft model."""
        own = {name: cost for name, cost in self.costs.drafters.items() if name in self.asked}
        return replace(self.costs, drafters=own)

    @property
    def busy(self) -> Busy | None:
        """The busiest hour that the costs of what was asked for are from."""
        return self.costs.busiest(self.asked)

    def require_kept(self) -> None:
        """Raises ConfigError where they could not be written."""
        if self.unkept is not None:
            raise ConfigError(self.unkept)


def update_costs(
    llm: LLM, *, refresh: bool = False, seen: Profile | None = None, busy: Busy | None = None
) -> MeasuredCosts:
    """Measures what is missing or no longer holds of the costs of an idle `llm` and keeps them; `refresh`: all of it,
    but of the drafters only those of `llm`: of the others, what was kept and holds stays. `seen` is what a profile has
    just measured; `busy` is what the machine was before anything was measured.
    """
    key, kept = _kept(llm)
    asked, drafters = tuple(llm.drafter_identities()), _identities(llm)
    held = dict(kept.costs.drafters) if kept.costs is not None else {}
    if refresh:
        held = {name: cost for name, cost in held.items() if name not in drafters}
    target = None if refresh else kept.costs
    missing = [name for name in drafters if name not in held]
    costs = replace(measure_target(llm, seen), busy=busy) if target is None else target
    costs = replace(costs, drafters=held)
    for name in missing:
        found = replace(measure_drafter(llm, name, costs), identity=drafters[name], busy=busy)
        costs = replace(costs, drafters={**costs.drafters, name: found})
    fresh = (*(("the target",) if target is None else ()), *missing)
    unkept = None
    if fresh:
        try:
            keep_costs(costs_folder(), key, costs)
        except ConfigError as error:  # what was measured is still worth showing
            unkept = str(error)
    stale = ("--refresh",) if refresh else kept.stale
    return MeasuredCosts(costs, asked, str(kept.path), fresh, stale if fresh else (), unkept)


def rows_to_share(llm: LLM, context: int, repeat: int, *, refresh: bool = False) -> tuple[int, ...]:
    """The rows that a profile behind `context` tokens has to have for `update_costs` to take its figures; none where
    these would not serve, or nothing of the target is to be measured."""
    if not refresh and _kept(llm)[1].costs is not None:
        return ()
    contexts, rows = _grid(llm.engine.target)
    return tuple(rows) if context in contexts and repeat >= REPEAT else ()


def _kept(llm: LLM) -> tuple[CostKey, Kept]:
    assert llm.opened is not None, "costs are kept for models that were loaded by name"
    key = cost_key(llm.opened)
    return key, find_costs(costs_folder(), key, _identities(llm))


def _identities(llm: LLM) -> dict[str, str]:
    """Of all drafters whose costs are kept."""
    return {**llm.drafter_identities(), "prediction": "as it comes"}


def _grid(model: LanguageModel) -> tuple[list[int], list[int]]:
    """The contexts and the rows that are measured, as far as the model's context reaches."""
    contexts = [context for context in CONTEXTS if context + max(ROWS) <= model.context_length]
    contexts = contexts or [max(1, model.context_length - max(ROWS))]
    return contexts, [count for count in ROWS if contexts[0] + count <= model.context_length]


def measure_target(llm: LLM, seen: Profile | None = None) -> CostModel:
    """Everything but the drafters; what `seen` has of it is not measured again."""
    model = llm.engine.target
    contexts, rows = _grid(model)
    if seen is not None and not _serves(seen, contexts, rows):
        seen = None
    ids = text_ids(llm, contexts[-1] + max(rows) + 1)
    cache, passes = model.new_cache(), {}
    try:
        for context in contexts:
            if seen is not None and context == seen.context:
                passes[context] = _medians(seen.passes)
                continue
            fill(model, cache, ids[cache.length : context])
            found = time_passes(model, cache, ids[context : context + max(rows)], rows, repeat=REPEAT)
            passes[context] = _medians(found)
        if seen is not None and seen.overheads is not None:
            judged = _medians(seen.greedy), _medians(seen.sampled)
            return CostModel.measured(passes, *judged, seen.overheads.median_s - judged[0][1], {})
        logits_MV = _logits(llm, cache, ids[contexts[-1] : contexts[-1] + max(rows)])
    finally:
        cache.free()
    sampled, greedy = judging_times(logits_MV, ids[: contexts[0]], ids[: max(rows)], rows, REPEAT)
    with plain_rounds(llm, ids[: contexts[0]], REPEAT + 1) as plain:
        for _ in range(REPEAT + 1):
            plain.step()
    outside_s = _median(plain.outside_s[1:] or plain.outside_s) - _medians(greedy)[1]
    return CostModel.measured(passes, _medians(greedy), _medians(sampled), outside_s, {})


@dataclass(frozen=True, slots=True)
class Pace:
    """What plain rounds take now over what costs have (`slower`: above 1 the machine is slower than it was), and the
    seconds in which the target reads a token of a prompt."""

    slower: float
    read_s: float


def pace(llm: LLM, costs: CostModel, context: float) -> Pace:
    """Of an idle `llm`, behind about `context` tokens. As the costs have it where its context leaves no room."""
    before = max(1, min(round(context), llm.engine.target.context_length - PACE_ROUNDS - 2))
    with plain_rounds(llm, text_ids(llm, before), PACE_ROUNDS) as plain:
        for _ in range(PACE_ROUNDS):
            plain.step()
    if not plain.seconds:
        return Pace(1.0, costs.pass_s(1, before))
    round_s = _median(plain.seconds)
    return Pace(round_s / costs.round_s(1, before + PACE_ROUNDS / 2, greedy=True), plain.prompt_s / before)


def _serves(seen: Profile, contexts: Seq[int], rows: Seq[int]) -> bool:
    """Whether a profile has what would be measured behind its context."""
    complete = set(rows) <= set(seen.passes) and seen.overheads is not None
    return complete and seen.context in contexts and seen.repeat >= REPEAT


def measure_drafter(llm: LLM, name: str, costs: CostModel) -> DraftCost:
    """Drafting by K, at temperature 0 and drawn, for one sequence and for several. `costs` are the target's."""
    context = llm.engine.target.context_length
    lengths = [k for k in LENGTHS if PROMPT // 2 + 2 * PLAIN_ROUNDS + (k + 1) * (REPEAT + 2) < context] or [1]
    greedy, sampled = (
        DraftCurves(*(_curve(llm, name, lengths, batch, params, costs) for batch in (1, BATCH)))
        for params in (GREEDY, SAMPLED)
    )
    return DraftCost(greedy, sampled, BATCH, _catch_up_s(llm, name))


def _catch_up_s(llm: LLM, name: str) -> float:
    """What each token adds that was committed while the drafter did not draft."""
    found = [one.draft_s for one in _rounds(llm, name, [*[1] * (REPEAT + 1), *[0] * IDLE, 1], 1, GREEDY)]
    if len(found) < REPEAT + IDLE + 2:  # the context ended
        return 0.0
    return max(found[-1] - statistics.median(found[1 : REPEAT + 1]), 0.0) / IDLE


def _curve(llm: LLM, name: str, lengths: Seq[int], batch: int, params: SamplingParams, costs: CostModel) -> Curve:
    """What a sequence's draft adds to a round, by K: what it takes itself, and what becomes slower around it."""
    return Curve.rising({k: _added_s(llm, name, k, batch, params, costs) / batch for k in lengths})


def _added_s(llm: LLM, name: str, k: int, batch: int, params: SamplingParams, costs: CostModel) -> float:
    """What rounds with drafts of K take longer than `costs` has for their rows, but no less than drafting takes.

    Plain rounds before and behind them say how fast the machine is just now.
    """
    found = _rounds(llm, name, [0] * PLAIN_ROUNDS + [k] * (REPEAT + 1) + [0] * PLAIN_ROUNDS, batch, params)
    plain_s = _median(one.whole_s for one in found[1:] if not one.asked)
    drafting = [one for one in found if one.asked][1:]
    draft_s, whole_s, rows = (
        _median(getattr(one, what) for one in drafting) for what in ("draft_s", "whole_s", "rows")
    )
    usual_s, of_rows_s = (costs.round_s(count, PROMPT, greedy=params.greedy) for count in (batch, rows))
    slower = plain_s / usual_s if plain_s else 1.0
    return max(draft_s, whole_s - slower * of_rows_s) / slower


class _Script:
    """A controller that asks for these numbers of draft tokens, round by round."""

    def __init__(self, ks: Seq[int]) -> None:
        self._ks: Iterator[int] = iter(ks)

    def budgets(self, seqs: Seq[Sequence], rooms: Seq[int]) -> list[int]:
        k = next(self._ks, 0)
        return [min(k, room) for room in rooms]

    def observe(self, seq: Sequence, asked: int, drafted: int, accepted: int, source: str) -> None:
        return


@dataclass(frozen=True, slots=True)
class _Round:
    """Seconds of a whole round and of drafting in it; the rows of its pass, and whether drafts were asked for."""

    whole_s: float
    draft_s: float
    rows: int
    asked: bool


def _rounds(llm: LLM, name: str, ks: Seq[int], batch: int, params: SamplingParams) -> list[_Round]:
    """Rounds of `batch` sequences with so many draft tokens each, which end in the usual way; at least one."""
    done: list[_Round] = []
    with timed(llm) as watch:
        outer = llm.engine
        drafters = {**outer.router.drafters, name: full_length(outer.router.drafters[name])}
        engine = Engine(outer.target, drafters, _Script(ks), method=name, max_batch=batch)
        room = outer.target.context_length
        ids = text_ids(llm, min(PROMPT, room // 2) + batch)
        tokens = min((max(ks) + 1) * len(ks) + 1, room - len(ids))
        params = replace(params, max_tokens=tokens, ignore_eos=True, seed=0)
        prediction = ids if getattr(outer.router.drafters[name], "reads_prediction", False) else None
        asked = [
            engine.add(Request(ids[i : len(ids) - batch + i], params, Speculation(name), prediction))
            for i in range(batch)
        ]
        try:
            while len(done) < len(ks) and not engine.idle:
                watch.draft_s, watch.rows, began = 0.0, 0, time.perf_counter()
                engine.step()
                done.append(_Round(time.perf_counter() - began, watch.draft_s, watch.rows, ks[len(done)] > 0))
        finally:
            for request in asked:
                engine.cancel(request)
    return done


def _median(values: Iterable[float]) -> float:
    """0 of none: the context left no room for a round."""
    return statistics.median([*values] or [0.0])


def _medians(found: Mapping[int, Times]) -> dict[int, float]:
    return {rows: times.median_s for rows, times in found.items()}


def _logits(llm: LLM, cache: KVCache, tokens: Seq[int]) -> Tensor:
    logits_MV = llm.engine.target.forward([Segment(cache, tokens)]).logits_MV
    assert logits_MV is not None
    return logits_MV
