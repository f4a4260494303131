"""`verify`: plain once a prompt, then every lane against it, token by token."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from outrider.bench.compare import Comparison, Difference, Outcome, compare
from outrider.bench.lanes import Lane, comparable, plain_lane
from outrider.bench.oracle import RELATIVE_TOLERANCE, PlainOracle
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
        """The worst verdict of all."""
        order = (Outcome.DIVERGED, Outcome.TIE)
        return next((o for o in order if any(lane.count(o) for lane in self.lanes)), Outcome.IDENTICAL)


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

    `relative_tolerance` None: by the precision of the model's arithmetic, see RELATIVE_TOLERANCE. Above temperature 0
    every lane's rule must be `coupled`. Raises ConfigError, or what the engine says of a prompt.
    """
    unfit = next((lane.rule for lane in lanes if not comparable(lane.rule, params)), None)
    if unfit is not None:
        raise ConfigError(f"answers under rule {unfit!r} at temperature {params.temperature} cannot be compared")
    tolerance = RELATIVE_TOLERANCE[precision(llm)] if relative_tolerance is None else relative_tolerance
    reports = [LaneReport(lane) for lane in lanes]
    for name, prompt_ids in prompts:
        plain = _answer(llm, prompt_ids, params, plain_lane("greedy" if params.greedy else "coupled"))
        on_answer()
        for report in reports:
            answer = _answer(llm, prompt_ids, params, report.lane)
            oracle = oracle_for(llm, prompt_ids, params, seed=plain.seed, relative_tolerance=tolerance)
            report.findings.append(Finding(name, _judge(plain, answer, oracle)))
            report.stats.add(answer.stats)
            if answer.method != report.lane.method:
                report.notes.append(f"prompt {name}: drafter {report.lane.method} failed, the answer went on plain")
            on_answer()
    for report in reports:
        if not report.stats.drafted:
            report.notes.append("nothing was drafted, so nothing was verified")
        report.notes += [f"{n} draft tokens dropped: {reason}" for reason, n in sorted(report.stats.dropped.items())]
    return VerifyReport(reports, tolerance)


def oracle_for(
    llm: LLM, prompt_ids: Seq[int], params: SamplingParams, *, seed: int, relative_tolerance: float
) -> PlainOracle:
    """Plain decoding of one prompt with the target of `llm`."""
    engine = llm.engine
    return PlainOracle(
        engine.target,
        prompt_ids,
        params,
        seed=seed,
        stop_ids=engine.stop_ids,
        relative_tolerance=relative_tolerance,
    )


def precision(llm: LLM) -> str:
    """The precision of the target's arithmetic, a key of RELATIVE_TOLERANCE; float64 for parts that have no plan.

    Our kernels compute each row by itself, in the same order at every width, from float32 activations: whatever the
    weights are stored in, their rows differ no more than float32 sums do.
    """
    plan = {decision.field: decision.value for decision in llm.plan}
    if not plan:
        return "float64"
    if plan.get("kernels", "torch") != "torch":
        return "float32"
    return plan["dtype"] if plan.get("dtype") in RELATIVE_TOLERANCE else "bfloat16"


def _answer(llm: LLM, prompt_ids: Seq[int], params: SamplingParams, lane: Lane) -> Completion:
    [result] = llm.generate([list(prompt_ids)], params, speculation=lane.speculation)
    return result.completions[0]


def _judge(plain: Completion, answer: Completion, oracle: PlainOracle) -> Comparison:
    comparison = compare(plain.token_ids, answer.token_ids, oracle)
    if comparison.outcome is Outcome.IDENTICAL and plain.finish_reason != answer.finish_reason:
        end = len(plain.token_ids)
        reason = f"plain ended with {plain.finish_reason!r}, speculative with {answer.finish_reason!r}"
        return Comparison(Outcome.DIVERGED, end, [], Difference(end, None, None, None, None, reason))
    return comparison
