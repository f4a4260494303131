"""What a bench found, in words: which lanes pay on these prompts, which do not, and which the figures leave open."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import StrEnum

from outrider.bench.interval import ENOUGH
from outrider.bench.lanes import PLAIN
from outrider.bench.measure import PEER
from outrider.bench.summary import ALL, LaneSummary, Speedup

MATTERS = 1.02
"""A median speed-up below this is called none: it is no reason to switch anything on."""

AGREE = 1.1
"""Ratios of one speed-up that are further apart than this factor show that it hangs on how one counts."""

TOO_FEW = f"too few to decide, give {ENOUGH} or more"
OPEN = "neither a gain nor a loss is shown; more prompts or --repeat 3 may tell"
BUSY = "the machine was busy: measure again when it is idle"
BUILT_IN = "the built-in prompts favour copying: decide on your own prompts (--prompts)"


class Finding(StrEnum):
    """What the figures say of a lane."""

    FASTER = "faster"
    SLOWER = "slower"
    UNCLEAR = "unclear"
    UNDECIDED = "not decided"
    IDLE = "nothing drafted"
    DIVERGED = "diverged"
    UNMEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Conclusion:
    """The verdict of a bench: for people, and by lane, in the order of the lanes. `doubts`: why no lane is decided."""

    sentence: str
    findings: dict[str, Finding]
    doubts: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        lanes = {lane: found.value for lane, found in self.findings.items()}
        provisional = bool(self.doubts)
        return {"sentence": self.sentence, "provisional": provisional, "doubts": list(self.doubts), "lanes": lanes}


def conclude(summaries: Seq[LaneSummary], *, busy: bool = False, builtin: bool = False) -> Conclusion:
    """The verdict on every lane but plain and the peer, from the spread of its speed-ups over the prompts.

    `busy`: the machine was, and `builtin`: the prompts are; either leaves the speed of every lane undecided.
    """
    doubts = tuple(doubt for doubt, holds in ((BUSY, busy), (BUILT_IN, builtin)) if holds)
    lanes = [s for s in summaries if s.category == ALL and s.lane not in (PLAIN, PEER)]
    findings = {summary.lane: finding(summary, doubted=bool(doubts)) for summary in lanes}
    ranked = sorted(lanes, key=lambda s: (findings[s.lane] is not Finding.FASTER, -_median(s)))
    said = []
    for i, summary in enumerate(ranked):
        kinds = [s for s in summaries if s.lane == summary.lane and s.category != ALL]
        said.append(_said(summary, findings[summary.lane], kinds, first=i == 0, doubted=bool(doubts)))
    if Finding.UNDECIDED in findings.values() and doubts:
        said.append(f"not decided: {', and '.join(doubts)}")
    return Conclusion("; ".join(said) + ".", findings, doubts)


def finding(summary: LaneSummary, *, doubted: bool = False) -> Finding:
    """FASTER or SLOWER only where the middle half of the prompts, of ENOUGH at least, lies on one side of plain, and
    nothing makes the figures doubtful."""
    if summary.diverged:
        return Finding.DIVERGED
    if not summary.stats.drafted:
        return Finding.IDLE
    if summary.speedup is None:
        return Finding.UNMEASURED
    if doubted or why_undecided(summary) is not None:
        return Finding.UNDECIDED
    if summary.speedup.rows < ENOUGH:
        return Finding.UNCLEAR
    return _side(summary.speedup)


def why_undecided(summary: LaneSummary) -> str | None:
    """What of a lane's own figures forbids a verdict; None where nothing does."""
    speedup = summary.speedup
    if speedup is None:
        return None
    if summary.beyond or summary.implausible:
        where = f"on {_some(summary.beyond)}" if summary.beyond else "over all prompts"
        return f"{where} the speed-up is more than the tokens a pass can give (see the notes)"
    ratios = (speedup.by_prompt.median, speedup.of_medians, speedup.of_totals)
    low, high = round(min(ratios), 2), round(max(ratios), 2)
    if high > AGREE * low or low < 1 < high:
        figures = "{:.2f} x by prompt, {:.2f} x of median speeds, {:.2f} x of totals".format(*ratios)
        return f"it hangs on how one counts ({figures})"
    return None


def _side(speedup: Speedup) -> Finding:
    spread = speedup.by_prompt
    if round(spread.q1, 2) > 1 and spread.median >= MATTERS:
        return Finding.FASTER
    return Finding.SLOWER if round(spread.q3, 2) < 1 else Finding.UNCLEAR


def _median(summary: LaneSummary) -> float:
    return summary.speedup.by_prompt.median if summary.speedup else 0.0


def _some(prompts: Seq[str], most: int = 3) -> str:
    """The first of the prompts' names, and how many more there are."""
    more = f" and {len(prompts) - most} more" if len(prompts) > most else ""
    return f"prompt{'s' if len(prompts) > 1 else ''} {', '.join(prompts[:most])}{more}"


def _said(summary: LaneSummary, found: Finding, kinds: Seq[LaneSummary], *, first: bool, doubted: bool) -> str:
    """One clause on a lane; the first one names what the figures are about. `kinds`: the lane by category."""
    lane, speedup = summary.lane, summary.speedup
    if found is Finding.DIVERGED:
        return f"{lane} changed {summary.diverged} of {summary.prompts} answers: do not use it, run outrider verify"
    if found is Finding.IDLE:
        return f"{lane} drafted nothing on these prompts: it is plain decoding"
    if found is Finding.UNMEASURED or speedup is None:
        return f"{lane} could not be measured (see the notes): no advice"
    prompts = f"{speedup.rows} prompts" if speedup.rows > 1 else "one prompt"
    spread = speedup.by_prompt
    figures = f"{lane} is {spread.median:.2f} x plain{f' on {prompts}' if first else ''}"
    if speedup.rows >= ENOUGH:
        figures += f" (IQR {spread.q1:.2f}..{spread.q3:.2f})"
    own = why_undecided(summary)
    if own is not None:
        return f"{figures}: not decided: {own}"
    if doubted:
        return figures
    if speedup.rows < ENOUGH:
        return f"{figures}: {TOO_FEW}"
    return f"{figures}: {_advice(speedup, found)}{_by_kind(kinds)}"


def _advice(speedup: Speedup, found: Finding) -> str:
    if found is Finding.FASTER:
        return "worth it"
    if found is Finding.SLOWER:
        return "leave it off"
    if round(speedup.by_prompt.q1, 2) > 1:
        return "a gain too small to matter"
    return f"the spread includes 1, so {OPEN}"


def _by_kind(kinds: Seq[LaneSummary]) -> str:
    """The categories that gain and those that lose, where there are any."""
    sides = [(s.category, finding(s)) for s in kinds]
    gain = ", ".join(category for category, side in sides if side is Finding.FASTER)
    lose = ", ".join(category for category, side in sides if side is Finding.SLOWER)
    told = [*([f"gains on {gain}"] if gain else []), *([f"loses on {lose}"] if lose else [])]
    return f" ({', '.join(told)})" if told else ""
