"""`CostModel`: seconds of a round by its rows, of a draft by its length; measured, interpolated, forced monotone.

Whatever decides how much to draft, and whatever predicts a speed, asks it. It knows nothing of clocks or models:
`outrider profile` measures the tables, `cost_cache` keeps them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from outrider.core.json_file import JsonObject
from outrider.errors import ConfigError, ModelFileError

SCHEMA = "outrider.costs/3"
MOST_BATCH = 10**9 - 1
MOST_SECONDS = 1e6
"""What nothing in a file of costs may take."""


@dataclass(frozen=True, slots=True)
class Busy:
    """Of a measurement while others used the machine: the load average before it, and the machine's cores."""

    load: float
    cores: int

    def __str__(self) -> str:
        return f"measured while the machine was busy (load {self.load:.1f} on {self.cores} cores)"

    def to_json(self) -> dict[str, object]:
        return {"load_1min": self.load, "cores": self.cores}

    @classmethod
    def of(cls, values: JsonObject) -> Busy | None:
        """What stands under "busy"; None where nothing does: the machine was not busy, or the file is older."""
        told = values.child("busy")
        if not told.values:
            return None
        if (cores := told.whole("cores")) < 1:
            raise ModelFileError(f"{values.path}: 'cores' is {cores}, expected a whole number >= 1")
        return cls(told.number("load_1min"), cores)


@dataclass(frozen=True, slots=True)
class Curve:
    """A rising function given at some points: a straight line between them, flat before the first, and behind the last
    on along the last two."""

    at: tuple[float, ...]
    values: tuple[float, ...]

    @classmethod
    def rising(cls, points: Mapping[int, float]) -> Curve:
        """Through measured points. Neighbours that fall, as noise makes them, become their mean."""
        at = sorted(points)
        blocks: list[tuple[float, int]] = []
        for x in at:
            blocks.append((points[x], 1))
            while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
                (b, n), (a, m) = blocks.pop(), blocks.pop()
                blocks.append(((a * m + b * n) / (m + n), m + n))
        return cls(tuple(map(float, at)), tuple(value for value, count in blocks for _ in range(count)))

    def times(self, factor: float) -> Curve:
        """With values that are `factor` as large."""
        return Curve(self.at, tuple(factor * value for value in self.values))

    def __call__(self, x: float) -> float:
        at, values = self.at, self.values
        if x <= at[0] or len(at) == 1:
            return values[0]
        i = min(bisect_right(at, x), len(at) - 1)
        return values[i - 1] + (values[i] - values[i - 1]) * (x - at[i - 1]) / (at[i] - at[i - 1])

    def to_json(self) -> dict[str, float]:
        return {f"{x:g}": value for x, value in zip(self.at, self.values, strict=True)}

    @classmethod
    def from_json(cls, values: JsonObject) -> Curve:
        """Raises ModelFileError for anything but seconds, none negative, that do not fall."""
        points = {key: _seconds(values, str(key)) for key in values.whole_keys()}
        made = cls.rising(points)
        if [points[int(x)] for x in made.at] != list(made.values):
            raise ModelFileError(f"{values.path}: a table of costs has values that fall")
        return made


@dataclass(frozen=True, slots=True)
class DraftCurves:
    """Seconds of drafting for one sequence, by K: `alone`, and as its share of a batch."""

    alone: Curve
    shared: Curve

    def times(self, factor: float) -> DraftCurves:
        return DraftCurves(self.alone.times(factor), self.shared.times(factor))

    def to_json(self) -> dict[str, object]:
        return {"alone_seconds": self.alone.to_json(), "shared_seconds": self.shared.to_json()}

    @classmethod
    def from_json(cls, values: JsonObject) -> DraftCurves:
        return cls(*(Curve.from_json(values.child(f"{name}_seconds")) for name in ("alone", "shared")))


@dataclass(frozen=True, slots=True)
class DraftCost:
    """What a drafter costs: at temperature 0 (`greedy`) and above (`sampled`), the shares those of `batch` sequences.

    `catch_up_s` is what each token adds that was committed while this drafter did not draft. `identity` says what was
    measured, `busy` when: None, while the machine was not.
    """

    greedy: DraftCurves
    sampled: DraftCurves
    batch: int
    catch_up_s: float = 0.0
    identity: str = ""
    busy: Busy | None = None

    def share_s(self, k: int, batch: int, *, greedy: bool) -> float:
        """Of one sequence among `batch` that are drafted together; 0 for no draft."""
        if k == 0:
            return 0.0
        curves = self.greedy if greedy else self.sampled
        alone, shared = curves.alone(k), curves.shared(k)
        if self.batch == 1 or batch == 1:
            return alone
        whole = alone + (shared * self.batch - alone) * (batch - 1) / (self.batch - 1)
        return max(whole, alone) / batch

    def times(self, factor: float) -> DraftCost:
        """On a machine that takes `factor` as long."""
        greedy, sampled = self.greedy.times(factor), self.sampled.times(factor)
        return replace(self, greedy=greedy, sampled=sampled, catch_up_s=factor * self.catch_up_s)

    def to_json(self) -> dict[str, object]:
        return {
            "identity": self.identity,
            "greedy": self.greedy.to_json(),
            "sampled": self.sampled.to_json(),
            "batch": self.batch,
            "catch_up_seconds": self.catch_up_s,
            "busy": _busy_json(self.busy),
        }

    @classmethod
    def from_json(cls, values: JsonObject) -> DraftCost:
        if not 1 <= (batch := values.whole("batch")) <= MOST_BATCH:
            raise ModelFileError(f"{values.path}: 'batch' is no number of sequences that are drafted together")
        greedy, sampled = (DraftCurves.from_json(values.child(name)) for name in ("greedy", "sampled"))
        catch_up_s, identity = _seconds(values, "catch_up_seconds"), values.text("identity")
        return cls(greedy, sampled, batch, catch_up_s, identity, Busy.of(values))


@dataclass(frozen=True, slots=True)
class CostModel:
    """What a round costs, in seconds.

    `passes` by context, then by rows; `greedy` and `sampled` from logits to verdict, by rows; `overhead_s` is the rest
    of a round: Python, commit, text. `drafters` by name. `busy` is of all but the drafters, which have their own.
    """

    passes: tuple[tuple[int, Curve], ...]
    greedy: Curve
    sampled: Curve
    overhead_s: float
    drafters: Mapping[str, DraftCost]
    busy: Busy | None = None

    @classmethod
    def measured(
        cls,
        passes: Mapping[int, Mapping[int, float]],
        greedy: Mapping[int, float],
        sampled: Mapping[int, float],
        overhead_s: float,
        drafters: Mapping[str, DraftCost],
    ) -> CostModel:
        """From raw figures, `passes` by context and rows: what falls with more rows or a longer context is noise."""
        curves: list[tuple[int, Curve]] = []
        for context in sorted(passes):
            curve = Curve.rising(passes[context])
            if curves:
                longer = {int(x): max(curve(x), curves[-1][1](x)) for x in curve.at}
                curve = Curve.rising(longer)
            curves.append((context, curve))
        return cls(tuple(curves), Curve.rising(greedy), Curve.rising(sampled), max(overhead_s, 0.0), dict(drafters))

    def times(self, factor: float) -> CostModel:
        """On a machine that takes `factor` as long for everything."""
        return CostModel(
            tuple((context, curve.times(factor)) for context, curve in self.passes),
            self.greedy.times(factor),
            self.sampled.times(factor),
            factor * self.overhead_s,
            {name: cost.times(factor) for name, cost in self.drafters.items()},
            self.busy,
        )

    def pass_s(self, rows: float, context: float) -> float:
        """A target pass over `rows` rows behind `context` tokens each."""
        first = self.passes[0]
        if context <= first[0] or len(self.passes) == 1:
            return first[1](rows)
        below, above = next((pair for pair in pairwise(self.passes) if context < pair[1][0]), self.passes[-2:])
        low, high = below[1](rows), above[1](rows)
        return low + (high - low) * (context - below[0]) / (above[0] - below[0])

    def round_s(self, rows: float, context: float, *, greedy: bool) -> float:
        """A whole round over `rows` rows, what drafting costs not included."""
        judged = self.greedy if greedy else self.sampled
        return self.pass_s(rows, context) + judged(rows) + self.overhead_s

    def draft_s(self, drafter: str, k: int, batch: int = 1, *, greedy: bool) -> float:
        """One sequence's share of drafting K tokens for `batch` sequences; `greedy`: at temperature 0."""
        return self._draft(drafter).share_s(k, batch, greedy=greedy)

    def catch_up_s(self, drafter: str, tokens: int) -> float:
        """What a drafter needs on top when `tokens` tokens were committed since it drafted last."""
        return self._draft(drafter).catch_up_s * max(tokens, 0)

    def v(self, rows: float, context: float) -> float:
        """A pass over `rows` rows relative to one row."""
        return self.pass_s(rows, context) / self.pass_s(1, context)

    def busiest(self, drafters: Iterable[str]) -> Busy | None:
        """The busiest hour that costs of a round with these drafters are from; None: the machine was not busy."""
        found = [self.busy, *(self.drafters[name].busy for name in drafters if name in self.drafters)]
        return max((one for one in found if one is not None), key=lambda one: one.load / one.cores, default=None)

    def _draft(self, drafter: str) -> DraftCost:
        if drafter not in self.drafters:
            known = ", ".join(self.drafters) or "none"
            raise ConfigError(f"what drafter {drafter!r} costs is not known: known are {known}; run outrider profile")
        return self.drafters[drafter]

    def to_json(self) -> dict[str, object]:
        return {
            "target_seconds": {str(context): curve.to_json() for context, curve in self.passes},
            "greedy_seconds": self.greedy.to_json(),
            "sampled_seconds": self.sampled.to_json(),
            "overhead_seconds": self.overhead_s,
            "busy": _busy_json(self.busy),
            "drafters": {name: cost.to_json() for name, cost in self.drafters.items()},
        }

    @classmethod
    def from_json(cls, values: JsonObject) -> CostModel:
        """Raises ModelFileError, one line, for what is missing or no cost."""
        target, drafters = values.child("target_seconds"), values.child("drafters")
        passes = [(context, Curve.from_json(target.child(str(context)))) for context in sorted(target.whole_keys())]
        if not all(curve.values[0] > 0 for _, curve in passes):
            raise ModelFileError(f"{values.path}: target_seconds has a pass that takes no time")
        return cls(
            tuple(passes),
            Curve.from_json(values.child("greedy_seconds")),
            Curve.from_json(values.child("sampled_seconds")),
            _seconds(values, "overhead_seconds"),
            {name: DraftCost.from_json(drafters.child(name)) for name in drafters.values},
            Busy.of(values),
        )


def draft_steps(asked: int, drafted: int) -> int:
    """Of a draft. One that is shorter than was asked for ended at a step more, which was not sure enough."""
    return min(asked, drafted + 1)


def _busy_json(busy: Busy | None) -> dict[str, object] | None:
    return None if busy is None else busy.to_json()


def _seconds(values: JsonObject, key: str) -> float:
    if not 0 <= (number := values.number(key)) < MOST_SECONDS:
        raise ModelFileError(f"{values.path}: {key!r} is {number}, expected seconds, from 0 to {MOST_SECONDS:g}")
    return number
