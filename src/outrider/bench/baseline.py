"""Whether a bench fell below a stored one: what decides the exit code of `bench --baseline`.

Acceptance lengths are counts, so they are compared as they are. Speeds are compared as ratios to plain, each of its own
run: a slower machine slows both alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.bench.lanes import GOVERNOR
from outrider.bench.result_file import COMPARED, MODEL_FACTS, ResultFile
from outrider.bench.summary import ALL, LaneSummary
from outrider.core.registry import drafter_names
from outrider.engine.opening import needs_of
from outrider.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Allowed:
    """The least that a figure may be of the baseline's."""

    acceptance_ratio: float = 1.0
    speed_ratio: float = 0.9

    def __post_init__(self) -> None:
        limits = {"--min-acceptance-ratio": self.acceptance_ratio, "--min-speed-ratio": self.speed_ratio}
        for option, value in limits.items():
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{option} {value} is not allowed: give a number >= 0, such as 0.95")


@dataclass(frozen=True, slots=True)
class Fall:
    """A figure of a lane that is less than allowed. `sentence` says it for people."""

    lane: str
    figure: str
    now: float | None
    baseline: float
    least_ratio: float
    sentence: str

    def to_json(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__slots__}


def require_same_settings(baseline: ResultFile, settings: Mapping[str, object]) -> None:
    """Raises ConfigError where a setting on which acceptance hangs is another one than the baseline's.

    `settings` may hold some of them only; "draft" is the draft model or head that was named.
    """
    for name in (*COMPARED, "draft"):
        if name in settings and baseline.settings.get(name) != settings[name]:
            what = "other prompts" if name == "prompts_digest" else f"{name} {baseline.settings.get(name)!r}"
            now = "" if name == "prompts_digest" else f", this run has {settings[name]!r}"
            raise ConfigError(
                f"--baseline {baseline.path} was measured with {what}{now}, so acceptance cannot be compared: use the "
                "same options, or write a new baseline with --out"
            )


def draft_counts(baseline: ResultFile, lanes: Seq[str]) -> bool:
    """Whether what was named as draft drafts in a lane that both have."""
    shared = {lane: baseline.lanes[lane] for lane in lanes if lane in baseline.drafting()}
    drafters = [lane.text("drafter") for name, lane in shared.items() if name != GOVERNOR]
    rides = any(needs_of(drafter) & {"model", "head", "drafters"} for drafter in drafters if drafter in drafter_names())
    return rides or GOVERNOR in shared


def require_common_lane(baseline: ResultFile, lanes: Seq[str]) -> None:
    """Raises ConfigError where nothing could be compared."""
    if not set(lanes) & set(baseline.drafting()):
        raise ConfigError(
            f"--baseline {baseline.path} has the lanes {', '.join(baseline.drafting())}, this run {', '.join(lanes)}: "
            "none of them is in both, so there is nothing to compare; use the same --drafter and --k"
        )


def falls(baseline: ResultFile, summaries: Seq[LaneSummary], allowed: Allowed) -> list[Fall]:
    """What fell, over all prompts, in the lanes that both have."""
    found: list[Fall] = []
    for s in _shared(baseline, summaries):
        then = baseline.figures(s.lane)
        if s.diverged:
            said = (
                f"{s.lane}: {s.diverged} of {s.prompts} answers are not plain's; none may differ: run outrider verify"
            )
            found.append(Fall(s.lane, "diverged", float(s.diverged), float(then.diverged), 0.0, said))
        speed = s.speedup.by_prompt.median if s.speedup else None
        figures: list[tuple[str, float | None, float | None, float, str]] = [
            ("acceptance length", s.stats.acceptance_length, then.acceptance_length, allowed.acceptance_ratio, ""),
            ("speed", speed, then.speedup, allowed.speed_ratio, " x plain"),
        ]
        for name, now, before, least, unit in figures:
            if before is not None and (now is None or now < least * before):
                found.append(Fall(s.lane, name, now, before, least, _sentence(s.lane, name, now, before, least, unit)))
    return found


def sentence(baseline: ResultFile, summaries: Seq[LaneSummary], allowed: Allowed) -> str:
    """Of a run in which nothing fell: how near to its limits each lane came."""
    parts = []
    for s in _shared(baseline, summaries):
        then, speed = baseline.figures(s.lane), s.speedup.by_prompt.median if s.speedup else None
        near = []
        if then.acceptance_length:
            near.append(f"acceptance length {s.stats.acceptance_length / then.acceptance_length:.3f}")
        if speed is not None and then.speedup:
            near.append(f"speed {speed / then.speedup:.3f}")
        parts.append(f"{s.lane} has of it {' and '.join(near)}" if near else f"{s.lane} has nothing to compare")
    return (
        f"none of {len(parts)} lane(s) fell: {'; '.join(parts)} (at least {allowed.acceptance_ratio:g} and "
        f"{allowed.speed_ratio:g} are allowed)"
    )


def _shared(baseline: ResultFile, summaries: Seq[LaneSummary]) -> list[LaneSummary]:
    """Of all prompts, the lanes that both have."""
    return [s for s in summaries if s.category == ALL and s.lane in baseline.drafting()]


def _sentence(lane: str, figure: str, now: float | None, before: float, least: float, unit: str) -> str:
    option = "--min-speed-ratio" if figure == "speed" else "--min-acceptance-ratio"
    limit = f"at least {least:g} of it is allowed ({option}), that is {least * before:.3f}{unit}"
    if now is None:
        return f"{lane}: {figure} could not be measured, the baseline has {before:.3f}{unit}: {limit}"
    part = f"{now / before:.3f} of the baseline's {before:.3f}" if before else f"the baseline has {before:.3f}"
    return f"{lane}: {figure} fell to {now:.3f}{unit}, {part}: {limit}"


def unchecked(baseline: ResultFile, lanes: Seq[str], about: Mapping[str, object]) -> list[str]:
    """Sentences on what the comparison leaves out or should make one doubt. `about` holds this run's `model`."""
    notes = [f"{lane}: not in the baseline, so not checked" for lane in lanes if lane not in baseline.drafting()]
    notes += [f"{lane}: in the baseline and not in this run" for lane in baseline.drafting() if lane not in lanes]
    model = about["model"]
    assert isinstance(model, dict)
    for name, key in MODEL_FACTS.items():
        then, now = baseline.about("model", key), model[key]
        if then is not None and then != now:
            notes.append(f"the baseline was measured with {name} {then}, this run with {now}")
    return notes
