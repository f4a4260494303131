"""`tune`: costs, a recording, predictions of every candidate, the measurement of the best, and a verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from statistics import fmean

from outrider.bench.interval import Interval
from outrider.bench.lanes import Lane
from outrider.bench.measure import Measured, bench
from outrider.bench.measured_costs import pace
from outrider.bench.peer import Peer
from outrider.bench.summary import ALL, LaneSummary, between, summarise
from outrider.bench.tables import summary_notes
from outrider.control.cost_model import CostModel
from outrider.core.types import SamplingParams
from outrider.engine.llm import LLM
from outrider.engine.prompt_file import Conversation
from outrider.tune.budget import Share, fit, load_of
from outrider.tune.predict import OnPaper, Predicted, Prediction, Profile, on_paper, predict, profiles
from outrider.tune.record import Record, record
from outrider.tune.verdict import Check, Verdict, checks, decide

FAR = 0.1
"""A prediction whose tokens a second are further than this share from the measured ones gets a note."""
DRIFTED = 1.3
"""Costs that were kept on a machine this much faster or slower than it is now get a note."""

Bar = Callable[[str, int], AbstractContextManager[Callable[[], None]]]
"""Shows a stage (its name, its steps); what it yields is called after each step."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to try: at the first temperature the candidates are measured and the verdict is made. `rules` go with the
    temperatures."""

    drafters: list[str]
    ks: list[int]
    temperatures: list[float]
    rules: list[str]
    measure: int
    repeat: int
    warm_up: int
    time_budget: float | None

    @property
    def candidates(self) -> int:
        return len(self.drafters) * len(self.ks)

    @property
    def most_measured(self) -> int:
        """No more are measured than there are."""
        return min(self.measure, self.candidates)


@dataclass(frozen=True, slots=True)
class Tuned:
    """What came of it. `predicted` is by temperature, in order; `paper` is of the candidate that the verdict is about,
    behind `context` tokens. `pace` is what a plain round took right before the measurement over what the kept costs
    have; `costs` are those times it."""

    wanted: Wanted
    share: Share
    costs: CostModel
    pace: float
    predicted: list[Predicted]
    profiles: list[list[Profile]]
    measured: Measured | None
    summaries: list[LaneSummary]
    checks: list[Check]
    context: float
    paper: OnPaper | None
    verdict: Verdict

    @property
    def first(self) -> Predicted:
        """What the verdict rests on."""
        return self.predicted[0]

    def notes(self) -> list[str]:
        """What was left out, failed, or is doubtful."""
        said = [*self.share.notes, *_drifted(self.pace), *_far(self.checks)]
        for predicted in self.predicted:
            at = f" at temperature {predicted.record.temperature:g}" if len(self.predicted) > 1 else ""
            failed = predicted.record.failed.items()
            said += [f"drafter {name} failed{at} and was left out: {why}" for name, why in failed]
        for profile in self.profiles[0]:
            if profile.category == ALL and not any(profile.by_position):
                what = "not one draft token would have been kept" if profile.by_position else "nothing was drafted"
                said.append(f"drafter {profile.drafter}: {what}")
        return said + (self.measured.notes if self.measured else []) + summary_notes(self.summaries)


def tune(
    llm: LLM,
    prompts: Seq[Conversation],
    params: SamplingParams,
    wanted: Wanted,
    costs: CostModel,
    *,
    raw: bool,
    bar: Bar,
    peer: Peer | None = None,
    doubts: Seq[str] = (),
) -> Tuned:
    """Everything but the files. The engine of `llm` must be idle and have the drafters loaded. `doubts`: what is known
    to make the figures provisional."""
    share = _share(llm, prompts, params, wanted, costs, raw, peer)
    records = list(_records(llm, share.prompts, params, wanted, raw, bar))
    context = _context(records[0])
    slower = pace(llm, costs, context).slower
    costs = costs.times(slower)
    predicted = [predict(one, wanted.drafters, wanted.ks, costs) for one in records]
    first = predicted[0]
    measured = _measured(llm, share, params, wanted, first, raw, bar, peer)
    summaries = summarise(measured) if measured else []
    found = checks(first, summaries)

    def paper_of(prediction: Prediction) -> OnPaper:
        return on_paper(prediction, costs, context, greedy=first.record.greedy)

    def between_lanes(lane: str, other: str) -> Interval | None:
        return between(measured, lane, other) if measured else None

    verdict = decide(first, found, paper_of, between_lanes, doubts)
    return Tuned(
        wanted,
        share,
        costs,
        slower,
        predicted,
        [profiles(one, wanted.drafters) for one in records],
        measured,
        summaries,
        found,
        context,
        paper_of(verdict.about) if verdict.about else None,
        verdict,
    )


def _share(
    llm: LLM,
    prompts: Seq[Conversation],
    params: SamplingParams,
    wanted: Wanted,
    costs: CostModel,
    raw: bool,
    peer: Peer | None,
) -> Share:
    """What of the work is done: where the time is bounded, what fits by the costs at the pace of now."""
    if wanted.time_budget is None:
        return fit(prompts, wanted.most_measured, None, None)
    length = fmean(len(ids) for _, ids in _encoded(llm, prompts, raw))
    now = pace(llm, costs, length)
    load = load_of(
        costs.times(now.slower),
        wanted.drafters,
        max(wanted.ks),
        params.max_tokens or 256,
        temperatures=wanted.temperatures,
        repeat=wanted.repeat,
        prompt_tokens=length,
        read_s=now.read_s * length,
        beside=1 + (peer is not None),
    )
    return fit(prompts, wanted.most_measured, load, wanted.time_budget)


def _encoded(llm: LLM, prompts: Seq[Conversation], raw: bool) -> list[tuple[Conversation, list[int]]]:
    """With their token ids."""
    texts = [one.turns[0] if raw else [{"role": "user", "content": one.turns[0]}] for one in prompts]
    return [(one, llm.encode_prompt(text)) for one, text in zip(prompts, texts, strict=True)]


def _records(
    llm: LLM, prompts: Seq[Conversation], params: SamplingParams, wanted: Wanted, raw: bool, bar: Bar
) -> Iterator[Record]:
    encoded = _encoded(llm, prompts, raw)
    for temperature, rule in zip(wanted.temperatures, wanted.rules, strict=True):
        own = replace(params, temperature=temperature)
        with bar(f"recording at temperature {temperature:g}", len(encoded)) as step:
            yield record(llm, encoded, own, wanted.drafters, max(wanted.ks), rule, step)


def _measured(
    llm: LLM,
    share: Share,
    params: SamplingParams,
    wanted: Wanted,
    predicted: Predicted,
    raw: bool,
    bar: Bar,
    peer: Peer | None,
) -> Measured | None:
    """Plain and the fastest predicted candidates, in alternating lanes; None where nothing is to be measured."""
    rule = wanted.rules[0]
    lanes = [Lane(p.candidate.drafter, p.candidate.k, rule) for p in predicted.candidates[: share.measured]]
    if not lanes:
        return None
    total = len(share.prompts) * wanted.repeat * (1 + len(lanes) + (peer is not None))
    with bar("measuring", total) as step:
        return bench(
            llm,
            share.prompts,
            replace(params, temperature=wanted.temperatures[0]),
            lanes,
            repeat=wanted.repeat,
            warm_up=wanted.warm_up,
            raw=raw,
            peer=peer,
            on_run=step,
        )


def _context(record: Record) -> float:
    """The mean number of tokens before a token of an answer."""
    tokens = sum(answer.tokens for answer in record.answers)
    before = sum(a.tokens * (a.prompt_tokens + (a.tokens - 1) / 2) for a in record.answers)
    return before / tokens if tokens else 0.0


def _drifted(factor: float) -> list[str]:
    """A note where the kept costs are of a machine that was much faster or slower."""
    if 1 / DRIFTED <= factor <= DRIFTED:
        return []
    return [
        f"a plain round takes {factor:.2f} x what the kept costs have, and predictions are scaled by that: what passes "
        "cost relative to each other may have changed, too (--refresh)"
    ]


def _far(found: Seq[Check]) -> list[str]:
    """A note where predictions are off."""
    far = [check.lane for check in found if check.error is not None and abs(check.error) > FAR]
    if not far:
        return []
    return [
        f"predicted and measured speeds differ by more than {FAR:.0%} for {', '.join(far)}: the machine changed "
        "meanwhile, or what passes and drafts cost relative to each other is another than was kept (--refresh)"
    ]
