"""From runs to figures: medians and spreads by lane and category, and speed-ups over rows whose answers agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from statistics import median, quantiles

from outrider.bench.compare import Outcome
from outrider.bench.interval import LEVEL, Interval, median_interval, ratio_interval
from outrider.bench.lanes import PLAIN
from outrider.bench.measure import Measured, Run
from outrider.core.stats import SpecStats
from outrider.engine.report import conditional_acceptance

ALL = "all"
PLAUSIBLE = 1.1
"""A speed-up may exceed the acceptance length by this factor before it is called implausible: timings vary."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The median and the quartiles around it."""

    median: float
    q1: float
    q3: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Of the values that are there; None when none is."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        q1, middle, q3 = quantiles(known, n=4, method="inclusive") if len(known) > 1 else known * 3
        return cls(middle, q1, q3)

    def to_json(self) -> dict[str, float]:
        return {"median": self.median, "q1": self.q1, "q3": self.q3}


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt in one lane: medians over the repetitions."""

    prompt: str
    question: str
    tokens: float
    decode_s: float
    total_s: float
    ttft_s: float | None
    tpot_s: float | None


@dataclass(frozen=True, slots=True)
class Speedup:
    """Against plain in the same run. Above 1 is faster.

    `by_prompt` is the spread of the per-prompt ratios, `of_medians` the ratio of the median speeds, `of_totals` that of
    all tokens a second; each over `rows` prompts. The intervals are of the median of `by_prompt`, and of `of_totals`.
    """

    by_prompt: Spread
    of_medians: float
    of_totals: float
    rows: int
    median_interval: Interval | None = None
    totals_interval: Interval | None = None

    def to_json(self) -> dict[str, object]:
        ratios = {"of_medians": self.of_medians, "of_totals": self.of_totals}
        intervals = {"level": LEVEL, "median": _json(self.median_interval), "of_totals": _json(self.totals_interval)}
        return {"by_prompt": self.by_prompt.to_json(), **ratios, "rows": self.rows, "interval": intervals}


@dataclass(frozen=True, slots=True)
class LaneSummary:
    """A lane over one category, or over all. Counts (`stats`, passes) are those of the first repetition.

    `differing` counts prompts whose answer is not plain's (None: answers cannot be compared), of which `ties` are
    explained by rounding and `diverged` are not. Speed-ups leave differing prompts out. `beyond` names the
    prompts whose speed-up is more than their acceptance length can give. `draft_steps` is the drafting of a round over
    a plain step.
    """

    lane: str
    category: str
    prompts: int
    tokens: float
    differing: int | None
    ties: int
    diverged: int
    tok_s: Spread | None
    tok_s_total: float | None
    tok_s_with_prefill: Spread | None
    tok_s_with_prefill_total: float | None
    speedup: Speedup | None
    speedup_with_prefill: Speedup | None
    stats: SpecStats
    counts_known: bool
    ttft_s: Spread | None
    tpot_s: Spread | None
    target_share: float | None
    draft_share: float | None
    round_ms: float | None
    beyond: tuple[str, ...] = ()
    draft_steps: float | None = None

    @property
    def implausible(self) -> bool:
        """Whether the speed-up is more than the acceptance length can give: a round costs at least a plain step."""
        ceiling = self.stats.acceptance_length * PLAUSIBLE
        return self.speedup is not None and self.counts_known and self.speedup.of_totals > ceiling

    def to_json(self) -> dict[str, object]:
        measured = {
            "prompts": self.prompts,
            "tokens": self.tokens,
            "answers": {"differing": self.differing, "ties": self.ties, "diverged": self.diverged},
            "tok_s": _json(self.tok_s),
            "tok_s_total": self.tok_s_total,
            "tok_s_with_prefill": _json(self.tok_s_with_prefill),
            "tok_s_with_prefill_total": self.tok_s_with_prefill_total,
            "speedup": _json(self.speedup),
            "speedup_with_prefill": _json(self.speedup_with_prefill),
            "ttft_s": _json(self.ttft_s),
            "tpot_s": _json(self.tpot_s),
            "drafted": self.stats.drafted,
            "accepted": self.stats.accepted,
            "acceptance_rate": self.stats.acceptance_rate if self.stats.drafted else None,
        }
        return {**measured, **(self._round_json() if self.counts_known else {})}

    def _round_json(self) -> dict[str, object]:
        by_position = self.stats.acceptance_by_position()
        return {
            "acceptance_length": self.stats.acceptance_length,
            "acceptance_by_position": by_position,
            "acceptance_by_position_conditional": conditional_acceptance(self.stats),
            "target_passes": self.stats.rounds,
            "draft_passes": self.stats.draft_passes,
            "time": {
                "round_ms": self.round_ms,
                "target_share": self.target_share,
                "draft_share": self.draft_share,
                "draft_in_plain_steps": self.draft_steps,
            },
        }


def summarise(measured: Measured) -> list[LaneSummary]:
    """Lane by lane: over all prompts, then by category where there are several."""
    categories = list(dict.fromkeys(run.category for run in measured.runs))
    groups = [ALL, *(categories if len(categories) > 1 else [])]
    return [_summary(measured, lane, group) for lane in measured.lane_names for group in groups]


def between(measured: Measured, lane: str, other: str) -> Interval | None:
    """Of the speed-up of totals of one lane over another, on the prompts that both answered as plain did."""
    mine, theirs = (
        {row.prompt: row for row in _rows([run for run in measured.runs if run.lane == name]) if row.decode_s > 0}
        for name in (lane, other)
    )
    shared = [
        (row, theirs[prompt])
        for prompt, row in mine.items()
        if prompt in theirs and not {(lane, prompt), (other, prompt)} & measured.differences.keys()
    ]
    parts = [(one.tokens, one.decode_s, two.tokens, two.decode_s) for one, two in shared]
    return ratio_interval([one.question for one, _ in shared], parts)


def lengths(measured: Measured) -> dict[str, object]:
    """How long prompts and plain answers are, in tokens, and the longest context there was."""
    plain = [run for run in measured.runs if run.lane == PLAIN and run.repetition == 0]
    return {
        "prompt_tokens": _json(Spread.of(run.prompt_tokens for run in plain)),
        "answer_tokens": _json(Spread.of(run.tokens for run in plain)),
        "longest_context": max((run.prompt_tokens + run.tokens for run in plain), default=0),
    }


def _summary(measured: Measured, lane: str, category: str) -> LaneSummary:
    runs = [run for run in measured.runs if category in (ALL, run.category)]
    mine = [run for run in runs if run.lane == lane]
    rows, plain = _rows(mine), {row.prompt: row for row in _rows([run for run in runs if run.lane == PLAIN])}
    differing = [row.prompt for row in rows if (lane, row.prompt) in measured.differences]
    outcomes = [measured.differences[lane, prompt].outcome for prompt in differing]
    compares = lane == PLAIN or measured.comparable(lane)
    fair = [row for row in rows if not compares or row.prompt not in differing]
    stats, first = SpecStats(), [run for run in mine if run.repetition == 0]
    for run in first:
        stats.add(run.stats)
    counts_known = all(run.counts_known for run in mine)
    decode_s = sum(run.decode_s for run in first)
    timed = counts_known and decode_s > 0
    lengths = {run.prompt: run.stats.acceptance_length for run in first if run.counts_known}
    return LaneSummary(
        lane=lane,
        category=category,
        prompts=len(rows),
        tokens=sum(row.tokens for row in rows),
        differing=len(differing) if compares else None,
        ties=outcomes.count(Outcome.TIE),
        diverged=outcomes.count(Outcome.DIVERGED),
        tok_s=Spread.of(_per_second(row.tokens, row.decode_s) for row in rows),
        tok_s_total=_total(rows, _decode_s),
        tok_s_with_prefill=Spread.of(_per_second(row.tokens, row.total_s) for row in rows),
        tok_s_with_prefill_total=_total(rows, _total_s),
        speedup=None if lane == PLAIN else _speedup(fair, plain, _decode_s),
        speedup_with_prefill=None if lane == PLAIN else _speedup(fair, plain, _total_s),
        stats=stats,
        counts_known=counts_known,
        ttft_s=Spread.of(row.ttft_s for row in rows),
        tpot_s=Spread.of(row.tpot_s for row in rows),
        target_share=sum(run.target_s for run in first) / decode_s if timed else None,
        draft_share=sum(run.draft_s for run in first) / decode_s if timed else None,
        round_ms=1000 * decode_s / stats.rounds if timed and stats.rounds else None,
        beyond=() if lane == PLAIN else _beyond(fair, plain, lengths),
        draft_steps=_draft_steps(first, [run for run in runs if run.lane == PLAIN and run.repetition == 0]),
    )


def _draft_steps(runs: Seq[Run], plain: Seq[Run]) -> float | None:
    """Drafting time of a round over the time of a plain step; None where rounds are not known."""
    rounds, steps = sum(run.stats.rounds for run in runs), sum(run.stats.rounds for run in plain)
    step_s = sum(run.decode_s for run in plain) / steps if steps else 0.0
    return sum(run.draft_s for run in runs) / rounds / step_s if rounds and step_s > 0 else None


def _rows(runs: Seq[Run]) -> list[Row]:
    by_prompt: dict[str, list[Run]] = {}
    for run in runs:
        by_prompt.setdefault(run.prompt, []).append(run)
    return [_row(prompt, group) for prompt, group in by_prompt.items()]


def _row(prompt: str, runs: Seq[Run]) -> Row:
    ttft, tpot = Spread.of(run.ttft_s for run in runs), Spread.of(run.tpot_s for run in runs)
    return Row(
        prompt,
        runs[0].question,
        median(run.tokens for run in runs),
        median(run.decode_s for run in runs),
        median(run.total_s for run in runs),
        ttft.median if ttft else None,
        tpot.median if tpot else None,
    )


def _decode_s(row: Row) -> float:
    return row.decode_s


def _total_s(row: Row) -> float:
    return row.total_s


def _per_second(tokens: float, seconds: float) -> float | None:
    return tokens / seconds if seconds > 0 else None


def _total(rows: Seq[Row], seconds: Callable[[Row], float]) -> float | None:
    """Tokens a second over all rows together."""
    return _per_second(sum(row.tokens for row in rows), sum(seconds(row) for row in rows))


def _speedup(rows: Seq[Row], plain: dict[str, Row], seconds: Callable[[Row], float]) -> Speedup | None:
    """Tokens a second against plain's on the same prompts; where the answers are equal that is a ratio of times."""
    reference = [plain[row.prompt] for row in rows]
    spread = Spread.of(_ratio(row, plain[row.prompt], seconds) for row in rows)
    mine, base = _total(rows, seconds), _total(reference, seconds)
    middles = [Spread.of(_per_second(row.tokens, seconds(row)) for row in group) for group in (rows, reference)]
    if not (spread and mine and base and middles[0] and middles[1]):
        return None
    parts = [(r.tokens, seconds(r), p.tokens, seconds(p)) for r, p in zip(rows, reference, strict=True)]
    known = [(r.question, ratio) for r in rows if (ratio := _ratio(r, plain[r.prompt], seconds)) is not None]
    return Speedup(
        spread,
        middles[0].median / middles[1].median,
        mine / base,
        len(rows),
        median_interval([question for question, _ in known], [ratio for _, ratio in known]),
        ratio_interval([row.question for row in rows], parts),
    )


def _ratio(ours: Row, theirs: Row, seconds: Callable[[Row], float]) -> float | None:
    mine, base = _per_second(ours.tokens, seconds(ours)), _per_second(theirs.tokens, seconds(theirs))
    return mine / base if mine and base else None


def _beyond(rows: Seq[Row], plain: dict[str, Row], acceptance_length: dict[str, float]) -> tuple[str, ...]:
    """Prompts decoded faster than their tokens a pass allow, which `acceptance_length` gives by prompt."""
    ratios = {row.prompt: _ratio(row, plain[row.prompt], _decode_s) or 0.0 for row in rows}
    return tuple(
        p for p, ratio in ratios.items() if p in acceptance_length and ratio > PLAUSIBLE * acceptance_length[p]
    )


def _json(value: Spread | Speedup | Interval | None) -> dict[str, object] | dict[str, float] | list[float] | None:
    return None if value is None else value.to_json()
