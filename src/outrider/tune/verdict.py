"""Which candidate to use, or none, and why, in words and with the figures that say so."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.bench.conclusion import MATTERS
from outrider.bench.lanes import PLAIN
from outrider.bench.summary import ALL, LaneSummary
from outrider.tune.predict import Candidate, OnPaper, Predicted, Prediction


@dataclass(frozen=True, slots=True)
class Check:
    """Of what was measured: predicted and measured tokens a second, and ratios to plain. Errors are shares of the
    measured figure; None where there is nothing to compare with. `implausible`: faster than its tokens a round allow.
    """

    lane: str
    predicted_tok_s: float
    measured_tok_s: float | None
    predicted_ratio: float
    measured_ratio: float | None
    differing: int | None
    diverged: int
    implausible: bool = False

    @property
    def error(self) -> float | None:
        return self.predicted_tok_s / self.measured_tok_s - 1 if self.measured_tok_s else None

    @property
    def ratio_error(self) -> float | None:
        return self.predicted_ratio / self.measured_ratio - 1 if self.measured_ratio else None

    def to_json(self) -> dict[str, object]:
        figures = {name: getattr(self, name) for name in self.__slots__}
        return {**figures, "error": self.error, "ratio_error": self.ratio_error}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do: `chosen`, or None to leave speculation off. `ratio` is what it rests on, `measured` or predicted.

    `about` is the fastest candidate, whether it is worth it or not; None where there was none to try. With `doubts` the
    verdict is provisional.
    """

    about: Prediction | None
    chosen: Candidate | None
    ratio: float
    measured: bool
    sentence: str
    reasons: tuple[str, ...]
    doubts: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        chosen = self.chosen
        return {
            "speculate": chosen is not None,
            "drafter": chosen.drafter if chosen else "none",
            "k": chosen.k if chosen else 0,
            "ratio": self.ratio,
            "measured": self.measured,
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
        told = (summary.tok_s_total, ratio, measured, summary.differing, summary.diverged)
        found.append(Check(summary.lane, tok_s, *told, implausible=summary.implausible))
    return found


def decide(
    predicted: Predicted,
    found: Seq[Check],
    on_paper: Callable[[Prediction], OnPaper],
    doubts: Seq[str] = (),
) -> Verdict:
    """The fastest of the measured candidates if it is worth switching on; of the predicted ones where none was
    measured soundly. `on_paper` gives a candidate in the terms of the formulas; `doubts` make the verdict provisional.
    """
    tried = [check for check in found if check.lane != PLAIN and check.measured_ratio]
    sound = [check for check in tried if not check.diverged and not check.implausible]
    if not predicted.candidates:
        return Verdict(None, None, 1.0, False, "Leave speculation off: no drafter could be tried.", (), tuple(doubts))
    if sound:
        fastest = max(sound, key=lambda check: check.measured_ratio or 0.0)
        prediction = next(one for one in predicted.candidates if one.candidate.name == fastest.lane)
        ratio, measured = fastest.measured_ratio or 0.0, True
    else:
        prediction = predicted.candidates[0]
        ratio, measured = prediction.ratio, False
    how = "measured" if measured else "predicted, not measured soundly" if tried else "predicted, not measured"
    later = f" Provisional: {', and '.join(doubts)}." if doubts else ""
    reasons = [*_why(prediction), *_others(predicted, prediction), *_broken(found)]
    if ratio >= MATTERS:
        candidate = prediction.candidate
        sentence = f"Use {candidate.drafter} with {_tokens(candidate.k)} a round: {ratio:.2f} x plain ({how}).{later}"
        return Verdict(prediction, candidate, ratio, measured, sentence, tuple(reasons), tuple(doubts))
    best = f"the best candidate, {prediction.candidate.name}"
    sentence = f"Leave speculation off: {best}, is {ratio:.2f} x plain ({how}).{later}"
    if measured and prediction.ratio >= MATTERS:
        doubt = f"it was predicted at {prediction.ratio:.2f} x: the two disagree, so repeat this on an idle machine"
        return Verdict(prediction, None, ratio, measured, sentence, (*reasons, doubt), tuple(doubts))
    missing = _what_would_pay(on_paper(prediction))
    return Verdict(prediction, None, ratio, measured, sentence, (*reasons, *missing), tuple(doubts))


def _tokens(k: int) -> str:
    return f"{k} draft token{'s' if k > 1 else ''}"


def _why(prediction: Prediction) -> list[str]:
    """The round of a candidate, in words."""
    made = prediction.replayed
    round_s = max(made.seconds, 1e-12)
    shares = {"target": made.pass_s / round_s, "draft": made.draft_s / round_s, "rest": made.other_s / round_s}
    by = f"{shares['target']:.0%} target pass, {shares['draft']:.0%} drafting, {shares['rest']:.0%} sampling and Python"
    tokens = made.stats.acceptance_length
    return [
        f"{prediction.candidate.name} gives {tokens:.2f} tokens a round, and its round costs "
        f"{tokens / max(prediction.ratio, 1e-9):.2f} plain rounds ({by})",
    ]


def _others(predicted: Predicted, chosen: Prediction) -> list[str]:
    """The best of each other drafter."""
    seen, said = {chosen.candidate.drafter}, []
    for one in predicted.candidates:
        if one.candidate.drafter not in seen:
            seen.add(one.candidate.drafter)
            said.append(f"{one.candidate.name}, the best of {one.candidate.drafter}, is predicted at {one.ratio:.2f} x")
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
            f"checking {k + 1} rows costs {v:.2f} passes over one, which neither drafts that are always right nor "
            "drafts that cost nothing would repay"
        ]
    kept = f"each draft token were kept with probability {alpha or 1:.2f} or more (here {paper.alpha:.2f})"
    cheap = f"a draft token cost {c or 0:.2f} of a pass or less (here {paper.cost.c:.2f})"
    if c is None:
        return [f"it would pay if {kept}; a draft that costs nothing would not be enough"]
    if alpha is None:
        return [f"it would pay if {cheap}; a draft that is always right would not be enough"]
    return [f"it would pay if {kept}, or if {cheap}"]
