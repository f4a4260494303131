"""Two result files side by side: lane by lane, what became better, what worse, and what the figures leave open."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from outrider.bench.interval import Interval, median_interval
from outrider.bench.lanes import PLAIN
from outrider.bench.result_file import COMPARED, MODEL_FACTS, ResultFile, Timed
from outrider.bench.summary import ALL
from outrider.errors import ConfigError

COMPARE_SCHEMA = "outrider.compare/1"

FACTS = {
    **{name: ("model", key) for name, key in MODEL_FACTS.items()},
    "draft": ("model", "draft"),
    "processor": ("machine", "cpu"),
    "threads": ("machine", "threads"),
    "commit": ("machine", "git"),
    "torch": ("machine", "versions", "torch"),
}
"""What beside the settings may explain a change; by name, where it stands in a file."""


@dataclass(frozen=True, slots=True)
class Change:
    """A lane over one category, or over all, before (the first file) and after.

    Speed-ups are the files' own. `factor` is the median over the prompts of both files of how their speed-up changed,
    `interval` its interval; None where there is none.
    """

    lane: str
    category: str
    length_before: float | None
    length_after: float | None
    speedup_before: float | None
    speedup_after: float | None
    prompts: int
    factor: float | None
    interval: Interval | None

    @property
    def finding(self) -> str:
        """FASTER or SLOWER only where the interval leaves out 1."""
        if self.factor is None or self.interval is None:
            return "not decided"
        if 1 in self.interval:
            return "no change shown"
        return "faster" if self.interval.low > 1 else "slower"

    def to_json(self) -> dict[str, object]:
        return {
            "lane": self.lane,
            "category": self.category,
            "acceptance_length": {"before": self.length_before, "after": self.length_after},
            "speedup": {"before": self.speedup_before, "after": self.speedup_after},
            "prompts": self.prompts,
            "factor": self.factor,
            "interval": self.interval.to_json() if self.interval else None,
            "finding": self.finding,
        }


def changes(before: ResultFile, after: ResultFile) -> list[Change]:
    """Of the lanes that both files have, in the first one's order: all prompts, then the categories of both.

    Raises ConfigError where there is no such lane.
    """
    lanes = [lane for lane in before.drafting() if lane in after.drafting()]
    if not lanes:
        raise ConfigError(
            f"{before.path} has the lanes {', '.join(before.drafting()) or 'none'}, {after.path} "
            f"{', '.join(after.drafting()) or 'none'}: none of them is in both, so there is nothing to compare"
        )
    found = []
    plain = before.timed(PLAIN), after.timed(PLAIN)
    for lane in lanes:
        factors = _factors((before.timed(lane), after.timed(lane)), plain)
        shared = [category for category in before.categories(lane) if category in after.categories(lane)]
        for category in shared:
            found.append(_change(before, after, lane, category, factors))
    return found


def _factors(
    lane: tuple[dict[str, Timed], dict[str, Timed]], plain: tuple[dict[str, Timed], dict[str, Timed]]
) -> list[tuple[Timed, float]]:
    """How the speed-up of each prompt changed, where both files have it and its answers are plain's."""
    found = []
    for prompt, first in lane[0].items():
        speedups = [_speedup(one.get(prompt), base.get(prompt)) for one, base in zip(lane, plain, strict=True)]
        if speedups[0] is not None and speedups[1] is not None:
            found.append((first, speedups[1] / speedups[0]))
    return found


def _speedup(one: Timed | None, plain: Timed | None) -> float | None:
    if one is None or plain is None or one.differs or min(one.decode_s, plain.decode_s, one.tokens, plain.tokens) <= 0:
        return None
    return (one.tokens / one.decode_s) / (plain.tokens / plain.decode_s)


def _change(
    before: ResultFile, after: ResultFile, lane: str, category: str, factors: list[tuple[Timed, float]]
) -> Change:
    first, second = before.figures(lane, category), after.figures(lane, category)
    mine = [(timed, factor) for timed, factor in factors if category in (ALL, timed.category)]
    values = [factor for _, factor in mine]
    return Change(
        lane,
        category,
        first.acceptance_length,
        second.acceptance_length,
        first.speedup,
        second.speedup,
        len(mine),
        median(values) if values else None,
        median_interval([timed.question for timed, _ in mine], values),
    )


def doubts(before: ResultFile, after: ResultFile) -> list[str]:
    """What may explain a change beside the code: other settings, another machine, other answers."""
    said = []
    for name in COMPARED:
        first, second = before.settings.get(name), after.settings.get(name)
        if first != second and name == "prompts_digest":
            said.append("the prompts are not the same: only those of both files count in the factors")
        elif first != second:
            said.append(f"{name}: {first!r} before, {second!r} after: the answers are not the same")
    for name, where in FACTS.items():
        first, second = before.about(*where), after.about(*where)
        if first != second:
            said.append(f"{name}: {first} before, {second} after")
    plain = before.timed(PLAIN), after.timed(PLAIN)
    both = [prompt for prompt in plain[0] if prompt in plain[1]]
    other = sum(plain[0][prompt].answer != plain[1][prompt].answer for prompt in both)
    if other:
        said.append(f"plain's own answer is another one on {other} of {len(both)} prompts: lengths are of other texts")
    for which, file in (("before", before), ("after", after)):
        lists = file.about("verdict", "doubts")
        said += [f"{which}: {doubt}" for doubt in lists] if isinstance(lists, list) else []
    return said


def changes_json(before: ResultFile, after: ResultFile, found: list[Change], notes: list[str]) -> dict[str, object]:
    return {
        "schema": COMPARE_SCHEMA,
        "before": str(before.path),
        "after": str(after.path),
        "changes": [change.to_json() for change in found],
        "notes": notes,
    }
