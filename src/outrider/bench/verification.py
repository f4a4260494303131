"""`verify`: plain once a prompt, then every lane against it, token by token."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from outrider.bench.compare import Comparison, Difference, Outcome, compare_completions, default_tolerance, worst
from outrider.bench.lanes import Lane, comparable, plain_lane
from outrider.core.stats import SpecStats
from outrider.core.types import SamplingParams
from outrider.engine.llm import LLM
from outrider.engine.request import Completion
from outrider.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of one prompt in one lane."""

    prompt: str
    comparison: Comparison


@dataclass(slots=True)
class LaneReport:
    """What came of a lane. `notes` say what a clean verdict must not hide: no drafts at all, a drafter that failed."""

    lane: Lane
    findings: list[Finding] = field(default_factory=list)
    stats: SpecStats = field(default_factory=SpecStats)
    notes: list[str] = field(default_factory=list)

    def count(self, outcome: Outcome) -> int:
        return sum(finding.comparison.outcome is outcome for finding in self.findings)

    @property
    def largest_gap(self) -> float | None:
        """The widest gap that was called a tie."""
        gaps = [tie.gap for _, tie in self.ties() if tie.gap is not None]
        return max(gaps, default=None)

    def ties(self) -> list[tuple[str, Difference]]:
        return [(finding.prompt, tie) for finding in self.findings for tie in finding.comparison.ties]

    def divergences(self) -> list[tuple[str, Difference]]:
        found = [(finding.prompt, finding.comparison.divergence) for finding in self.findings]
        return [(prompt, difference) for prompt, difference in found if difference is not None]

    def to_json(self) -> dict[str, object]:
        return {
            "drafter": self.lane.method,
            "k": self.lane.k,
            "rule": self.lane.rule,
            "prompts": len(self.findings),
            "identical": self.count(Outcome.IDENTICAL),
            "ties": self.count(Outcome.TIE),
            "diverged": self.count(Outcome.DIVERGED),
            "largest_gap": self.largest_gap,
            "tie_list": [{"prompt": prompt, **tie.to_json()} for prompt, tie in self.ties()],
            "divergence_list": [{"prompt": prompt, **found.to_json()} for prompt, found in self.divergences()],
            "stats": self.stats.to_json(),
            "notes": self.notes,
        }


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """All lanes, and how wide a gap counted as a tie (share of the largest |logit|)."""

    lanes: list[LaneReport]
    relative_tolerance: float

    @property
    def outcome(self) -> Outcome:
        """The worst verdict of all; UNVERIFIED when no lane drafted a single token."""
        found = [finding.comparison.outcome for lane in self.lanes for finding in lane.findings]
        idle = not any(lane.stats.drafted for lane in self.lanes)
        return worst([*found, Outcome.UNVERIFIED] if idle else found)


def verify(
    llm: LLM,
    prompts: Seq[tuple[str, Seq[int]]],
    params: SamplingParams,
    lanes: Seq[Lane],
    *,
    relative_tolerance: float | None = None,
    on_answer: Callable[[], None] = lambda: None,
) -> VerifyReport:
    """Compares each lane's answers with plain. `prompts` are (id, token ids); `on_answer` is called after each answer.

    `relative_tolerance` None: by the precision of the model's arithmetic, see `default_tolerance`. Above temperature 0
    every lane's rule must be `coupled`. Raises ConfigError, or what the engine says of a prompt.
    """
    unfit = next((lane.rule for lane in lanes if not comparable(lane.rule, params)), None)
    if unfit is not None:
        raise ConfigError(f"answers under rule {unfit!r} at temperature {params.temperature} cannot be compared")
    tolerance = default_tolerance(llm) if relative_tolerance is None else relative_tolerance
    reports = [LaneReport(lane) for lane in lanes]
    for name, prompt_ids in prompts:
        plain = _answer(llm, prompt_ids, params, plain_lane("greedy" if params.greedy else "coupled"))
        on_answer()
        for report in reports:
            answer = _answer(llm, prompt_ids, params, report.lane)
            found = compare_completions(llm, prompt_ids, params, plain, answer, relative_tolerance=tolerance)
            report.findings.append(Finding(name, found))
            report.stats.add(answer.stats)
            if answer.method != report.lane.method:
                report.notes.append(f"prompt {name}: drafter {report.lane.method} failed, the answer went on plain")
            on_answer()
    for report in reports:
        if not report.stats.drafted:
            report.notes.append("nothing was drafted, so nothing was verified")
        report.notes += [f"{n} draft tokens dropped: {reason}" for reason, n in sorted(report.stats.dropped.items())]
    return VerifyReport(reports, tolerance)


def _answer(llm: LLM, prompt_ids: Seq[int], params: SamplingParams, lane: Lane) -> Completion:
    [result] = llm.generate([list(prompt_ids)], params, speculation=lane.speculation)
    return result.completions[0]
