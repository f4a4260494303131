"""What a bench found, in words: which lanes pay on these prompts, which do not, and which the figures leave open."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import StrEnum

from outrider.bench.lanes import PLAIN
from outrider.bench.measure import PEER
from outrider.bench.summary import ALL, LaneSummary

MATTERS = 1.02
"""A median speed-up below this is called none: it is no reason to switch anything on."""

ENOUGH = 4
"""Fewer prompts than this decide nothing: quartiles of three are the extremes."""


class Finding(StrEnum):
    """What the figures say of a lane."""

    FASTER = "faster"
    SLOWER = "slower"
    UNCLEAR = "unclear"
    IDLE = "nothing drafted"
    DIVERGED = "diverged"
    UNMEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Conclusion:
    """The verdict of a bench: for people, and by lane, in the order of the lanes. `provisional`: a busy machine."""

    sentence: str
    findings: dict[str, Finding]
    provisional: bool

    def to_json(self) -> dict[str, object]:
        lanes = {lane: found.value for lane, found in self.findings.items()}
        return {"sentence": self.sentence, "provisional": self.provisional, "lanes": lanes}


def conclude(summaries: Seq[LaneSummary], *, busy: bool = False) -> Conclusion:
    """The verdict on every lane but plain and the peer, from the spread of its speed-ups over the prompts."""
    lanes = [s for s in summaries if s.category == ALL and s.lane not in (PLAIN, PEER)]
    findings = {summary.lane: finding(summary) for summary in lanes}
    ranked = sorted(lanes, key=lambda s: (findings[s.lane] is not Finding.FASTER, -_median(s)))
    said = [_said(summary, findings[summary.lane], first=i == 0) for i, summary in enumerate(ranked)]
    doubt = " The machine was busy: measure again before you decide." if busy else ""
    return Conclusion("; ".join(said) + f".{doubt}", findings, busy)


def finding(summary: LaneSummary) -> Finding:
    """FASTER or SLOWER only where the middle half of the prompts, of ENOUGH at least, lies on one side of plain."""
    if summary.diverged:
        return Finding.DIVERGED
    if not summary.stats.drafted:
        return Finding.IDLE
    if summary.speedup is None or summary.implausible:
        return Finding.UNMEASURED
    spread = summary.speedup.by_prompt
    if summary.speedup.rows < ENOUGH:
        return Finding.UNCLEAR
    if round(spread.q1, 2) > 1 and spread.median >= MATTERS:
        return Finding.FASTER
    return Finding.SLOWER if round(spread.q3, 2) < 1 else Finding.UNCLEAR


def _median(summary: LaneSummary) -> float:
    return summary.speedup.by_prompt.median if summary.speedup else 0.0


def _said(summary: LaneSummary, found: Finding, *, first: bool) -> str:
    """One clause on a lane; the first one names what the figures are about."""
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
    if speedup.rows < ENOUGH:
        return f"{figures}: too few to decide, give {ENOUGH} or more"
    return f"{figures} (IQR {spread.q1:.2f}..{spread.q3:.2f}): {_advice(summary, found)}"


def _advice(summary: LaneSummary, found: Finding) -> str:
    assert summary.speedup is not None
    spread = summary.speedup.by_prompt
    if found is Finding.FASTER:
        return "worth it"
    if found is Finding.SLOWER:
        return "leave it off"
    if round(spread.q1, 2) > 1:
        return "a gain too small to matter"
    return "the spread includes 1, so neither a gain nor a loss is shown; more prompts or --repeat 3 may tell"
