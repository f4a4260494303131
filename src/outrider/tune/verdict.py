"""Which candidate to use, or none, and why, in words and with the figures that say so."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from outrider.bench.conclusion import MATTERS, OPEN, TOO_FEW, why_undecided
from outrider.bench.interval import ENOUGH, LEVEL, Interval
from outrider.bench.lanes import PLAIN
from outrider.bench.summary import ALL, LaneSummary
from outrider.tune.predict import Candidate, OnPaper, Predicted, Prediction


@dataclass(frozen=True, slots=True)
class Check:
    """Of what was measured: predicted and measured tokens a second, and ratios to plain. Errors are shares of the
    measured figure; None where there is nothing to compare with. `implausible`: faster than its tokens a round allow.

    The measured ratio is over `prompts` prompts, `interval` its interval; `undecided` says why bench would decide
    nothing on it. `tokens_per_round`, and of a round the shares of target passes and of drafting, as measured;
    whether anything was `drafted`.
    """

    lane: str
    predicted_tok_s: float
    measured_tok_s: float | None
    predicted_ratio: float
    measured_ratio: float | None
    differing: int | None
    diverged: int
    implausible: bool = False
    prompts: int = 0
    interval: Interval | None = None
    undecided: str | None = None
    tokens_per_round: float | None = None
    target_share: float | None = None
    draft_share: float | None = None
    drafted: bool = True

    @property
    def error(self) -> float | None:
        return self.predicted_tok_s / self.measured_tok_s - 1 if self.measured_tok_s else None

    @property
    def ratio_error(self) -> float | None:
        return self.predicted_ratio / self.measured_ratio - 1 if self.measured_ratio else None

    def to_json(self) -> dict[str, object]:
        figures = {name: getattr(self, name) for name in self.__slots__}
        interval = self.interval.to_json() if self.interval else None
        return {**figures, "interval": interval, "error": self.error, "ratio_error": self.ratio_error}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do: `chosen`, or None to leave speculation off. `ratio` is what it rests on, `measured` or predicted.

    `about` is the fastest candidate, whether it is worth it or not; None where there was none to try. `interval` is
    that of the measured ratio; `equal` names the measured candidates that cannot be told apart from it. With `doubts`
    the `answer` is provisional.
    """

    about: Prediction | None
    chosen: Candidate | None
    ratio: float
    measured: bool
    answer: str
    reasons: tuple[str, ...]
    doubts: tuple[str, ...] = ()
    interval: Interval | None = None
    equal: tuple[str, ...] = ()

    @property
    def reserve(self) -> str:
        """Why the answer is provisional; empty where it is not."""
        return f"Provisional: {', and '.join(self.doubts)}." if self.doubts else ""

    @property
    def sentence(self) -> str:
        """The answer, and its reserve."""
        return f"{self.answer} {self.reserve}".rstrip()

    def to_json(self) -> dict[str, object]:
        chosen = self.chosen
        return {
            "speculate": chosen is not None,
            "drafter": chosen.drafter if chosen else "none",
            "k": chosen.k if chosen else 0,
            "ratio": self.ratio,
            "measured": self.measured,
            "interval": self.interval.to_json() if self.interval else None,
            "equal": list(self.equal),
            "sentence": self.sentence,
            "reasons": list(self.reasons),
            "provisional": bool(self.doubts),
            "doubts": list(self.doubts),
        }


def checks(predicted: Predicted, summaries: Seq[LaneSummary]) -> list[Check]:
    """Plain and every measured candidate, over all prompts."""
    found, whole = [], [summary for summary in summaries if summary.category == ALL]
    for summary in whole:
        if summary.lane == PLAIN:
            tok_s, ratio, measured = predicted.plain[ALL].tok_s, 1.0, 1.0 if summary.tok_s_total else None
        else:
            listed = [one for one in predicted.candidates if one.candidate.name == summary.lane]
            if not listed:
                continue
            tok_s, ratio = listed[0].replayed.tok_s, listed[0].ratio
            measured = summary.speedup.of_totals if summary.speedup else None
        told = (summary.tok_s_total, ratio, measured, summary.differing, summary.diverged, summary.implausible)
        over = (summary.speedup.rows, summary.speedup.totals_interval) if summary.speedup else (0, None)
        length = summary.stats.acceptance_length if summary.stats.rounds else None
        shares = (length, summary.target_share, summary.draft_share)
        drafted = summary.stats.drafted > 0
        found.append(Check(summary.lane, tok_s, *told, *over, why_undecided(summary), *shares, drafted))
    return found


def decide(
    predicted: Predicted,
    found: Seq[Check],
    on_paper: Callable[[Prediction], OnPaper],
    between: Callable[[str, str], Interval | None],
    doubts: Seq[str] = (),
) -> Verdict:
    """The fastest of the measured candidates if it is worth switching on; of the predicted ones where none was
    measured soundly, leaving out those that changed answers. `on_paper` gives a candidate in the terms of the formulas,
    `between` the interval of the speed-up of one measured lane over another; `doubts`, and what the figures leave open,
    make the verdict provisional.
    """
    tried = [check for check in found if check.lane != PLAIN and check.measured_ratio]
    sound = [check for check in tried if check.drafted and not check.diverged and not check.implausible]
    if failed := sum(check.diverged for check in found if check.lane == PLAIN):
        answer = f"Leave speculation off: plain decoding itself gave no usable answer to {_prompts(failed)}."
        return Verdict(None, None, 1.0, False, answer, (), tuple(doubts))
    if not predicted.candidates:
        return Verdict(None, None, 1.0, False, "Leave speculation off: no drafter could be tried.", (), tuple(doubts))
    if not sound:
        changed = {check.lane for check in found if check.diverged}
        left = [one for one in predicted.candidates if one.candidate.name not in changed]
        if not left:
            answer = "Leave speculation off: every candidate changed answers."
            return Verdict(None, None, 1.0, False, answer, tuple(_broken(found)), tuple(doubts))
        prediction = left[0]
        how = "predicted, not measured soundly" if tried else "predicted, not measured"
        reasons = [*_why(prediction, None), *_others(predicted, prediction, sound), *_broken(found)]
        made = Verdict(prediction, None, prediction.ratio, False, "", tuple(reasons), tuple(doubts))
        return _said(made, how, predicted.record.temperature, on_paper)
    fastest = max(sound, key=lambda check: check.measured_ratio or 0.0)
    prediction = next(one for one in predicted.candidates if one.candidate.name == fastest.lane)
    reasons = [*_why(prediction, fastest), *_others(predicted, prediction, sound), *_broken(found)]
    equal = [check.lane for check in sound if check is not fastest and _same(between(fastest.lane, check.lane))]
    every = (*doubts, *_left_open(fastest))
    ratio = fastest.measured_ratio or 0.0
    made = Verdict(prediction, None, ratio, True, "", tuple(reasons), every, fastest.interval, tuple(equal))
    return _said(made, _measured(fastest), predicted.record.temperature, on_paper)


def _said(made: Verdict, how: str, temperature: float, on_paper: Callable[[Prediction], OnPaper]) -> Verdict:
    """With what is chosen, and in words; `how` says how its ratio is known, at this temperature."""
    prediction = made.about
    assert prediction is not None
    figure = f"{made.ratio:.2f} x plain ({how}{f', at temperature {temperature:g}' if temperature else ''})"
    if made.ratio >= MATTERS:
        candidate = prediction.candidate
        same = f"; {_listed(made.equal)} {'are' if len(made.equal) > 1 else 'is'} equal here" if made.equal else ""
        answer = f"Use {candidate.drafter} with {_tokens(candidate.k)} a round: {figure}{same}."
        return replace(made, chosen=candidate, answer=answer)
    answer = f"Leave speculation off: the best candidate, {prediction.candidate.name}, is {figure}."
    if made.measured and prediction.ratio >= MATTERS:
        doubt = f"it was predicted at {prediction.ratio:.2f} x: the two disagree, so repeat this on an idle machine"
        return replace(made, answer=answer, reasons=(*made.reasons, doubt))
    missing = _what_would_pay(on_paper(prediction))
    return replace(made, answer=answer, reasons=(*made.reasons, *missing))


def _listed(names: Seq[str]) -> str:
    """ "a, b and c"."""
    return " and ".join([part for part in (", ".join(names[:-1]), names[-1]) if part])


def _measured(check: Check) -> str:
    """How its ratio is known."""
    interval = f", {100 * LEVEL:.0f} % interval {check.interval}" if check.interval else ""
    return f"measured on {_prompts(check.prompts)}{interval}"


def _left_open(check: Check) -> list[str]:
    """Why bench would decide nothing on these figures."""
    said = [check.undecided] if check.undecided is not None else []
    if check.prompts < ENOUGH:
        said.append(f"{_prompts(check.prompts)} {'are' if check.prompts > 1 else 'is'} {TOO_FEW}")
    elif check.interval is not None and round(check.interval.low, 2) <= 1 and check.interval.high >= MATTERS:
        said.append(f"the interval includes 1, so {OPEN}")
    return said


def _same(ratio: Interval | None) -> bool:
    """Whether the speed-up of one lane over another may be none."""
    return ratio is not None and 1 in ratio


def _prompts(count: int) -> str:
    return f"{count} prompts" if count > 1 else "one prompt"


def _tokens(k: int) -> str:
    return f"{k} draft token{'s' if k > 1 else ''}"


def _why(prediction: Prediction, check: Check | None) -> list[str]:
    """The round of a candidate, in words: as measured, where it was."""
    made = prediction.replayed
    round_s = max(made.seconds, 1e-12)
    tokens, ratio, how = made.stats.acceptance_length, prediction.ratio, "predicted"
    target, draft = made.pass_s / round_s, made.draft_s / round_s
    if check is not None and None not in (check.tokens_per_round, check.target_share, check.draft_share):
        tokens, ratio, how = check.tokens_per_round or 0.0, check.measured_ratio or 0.0, "measured"
        target, draft = check.target_share or 0.0, check.draft_share or 0.0
    by = f"{target:.0%} target pass, {draft:.0%} drafting, {max(1 - target - draft, 0.0):.0%} sampling and Python"
    cost = tokens / max(ratio, 1e-9)
    return [
        f"{prediction.candidate.name} gives {tokens:.2f} tokens a round, and its round costs {cost:.2f} plain rounds "
        f"({how}: {by})"
    ]


def _others(predicted: Predicted, chosen: Prediction, sound: Seq[Check]) -> list[str]:
    """The best of each other drafter: of those that were measured, else of the predicted."""
    measured = {check.lane: check.measured_ratio or 0.0 for check in sound}
    by_drafter: dict[str, list[Prediction]] = {}
    for one in predicted.candidates:
        by_drafter.setdefault(one.candidate.drafter, []).append(one)
    said = []
    for drafter, listed in by_drafter.items():
        if drafter == chosen.candidate.drafter:
            continue
        best = max(listed, key=lambda one: measured.get(one.candidate.name, 0.0))  # the first where none was
        name = best.candidate.name
        known = f"was measured at {measured[name]:.2f} x" if name in measured else f"is predicted at {best.ratio:.2f} x"
        said.append(f"{name}, the best of {drafter}, {known}")
    return said


def _broken(found: Seq[Check]) -> list[str]:
    """Measured candidates that are left out of account."""
    said = []
    for check in found:
        if check.diverged:
            said.append(f"{check.lane} changed {check.diverged} answer(s): it is not considered; run outrider verify")
        elif check.implausible:
            said.append(
                f"{check.lane} was measured at {check.measured_ratio or 0:.2f} x, more than its tokens a round can "
                "give: the machine was disturbed, and it is not considered"
            )
    return said


def _what_would_pay(paper: OnPaper) -> list[str]:
    """What would have to be true for speculation to pay."""
    k, alpha, c = paper.size, paper.break_even_alpha, paper.break_even_c
    if alpha is None and c is None:
        v = paper.cost.v(k + 1)
        return [
            f"a draft token costs {paper.cost.c:.2f} passes over one row and checking {k + 1} rows {v:.2f}: neither "
            f"drafts that are always right nor drafts that cost nothing, of which {paper.alpha:.0%} are kept, would do"
        ]
    kept = f"each draft token were kept with probability {alpha or 1:.2f} or more (here {paper.alpha:.2f})"
    cheap = f"a draft token cost {c or 0:.2f} of a pass or less (here {paper.cost.c:.2f})"
    if c is None:
        return [f"it would pay if {kept}; a draft that costs nothing would not be enough"]
    if alpha is None:
        return [f"it would pay if {cheap}; a draft that is always right would not be enough"]
    return [f"it would pay if {kept}, or if {cheap}"]
