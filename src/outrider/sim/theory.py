"""What speculation gains on paper: expected tokens a round, speed-up, break-even acceptance, the best tree.

The unit of time is a pass of the target over one row. A round checks the draft and the last committed token in one
pass over M rows, which costs v(M), and before that the draft model runs as often as the draft is deep. Acceptance is
given by position, conditional on the positions before; one alpha everywhere is the i.i.d. case of the papers (Leviathan
et al., 2211.17192; Chen et al., 2302.01318).

Shapes: C contexts, V vocabulary.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from outrider.control.cost_model import CostModel, Curve
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

RowCost = Callable[[int], float]
"""v: what a pass of the target over M rows costs, in passes over one row."""

Z_95 = 1.96
MOST_COST = 1e6
"""Passes over one row. What costs more is a mistake, and sums of it must not overflow."""
BREAK_EVEN_TOLERANCE = 1e-9
LEAST_P = 1e-300
"""A probability that is less is taken for it where it divides."""


def flat(rows: int) -> float:
    """The v of the papers: a pass over any number of rows costs one pass."""
    return 1.0


def measured_v(cost_by_rows: Mapping[int, float]) -> RowCost:
    """v from the cost of passes over 1 and other numbers of rows, in any unit: see `Curve` for what lies between."""
    if len(cost_by_rows) < 2 or min(cost_by_rows) != 1:
        raise ConfigError(
            f"passes over {sorted(cost_by_rows)} rows are no cost by rows: give those over 1 row and another"
        )
    first = cost_by_rows[1]
    bad = next((rows for rows, cost in cost_by_rows.items() if not 0 < cost <= MOST_COST * first < math.inf), None)
    if bad is not None:
        raise ConfigError(
            f"a pass over {bad} rows costs {cost_by_rows[bad]} and one over 1 row {first}: give numbers > 0, up to "
            f"{MOST_COST:.0f} times that of 1 row"
        )
    curve = Curve.rising(cost_by_rows)
    return lambda rows: curve(rows) / curve(1)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a round costs, in passes of the target over one row.

    `c` is one pass of the draft model, `once` a draft whatever its depth (a one-pass drafter, a look-up), `overhead`
    what every round takes outside passes and drafting; plain decoding pays it too.
    """

    c: float = 0.0
    v: RowCost = flat
    once: float = 0.0
    overhead: float = 0.0

    def __post_init__(self) -> None:
        for name in ("c", "once", "overhead"):
            value = getattr(self, name)
            if not 0 <= value <= MOST_COST:
                raise ConfigError(
                    f"cost {name} = {value} is not allowed: give passes over 1 row, a number from 0 to {MOST_COST:.0f}"
                )

    @classmethod
    def of_model(cls, model: CostModel, draft_s: float, *, depth: int, context: float, greedy: bool) -> Cost:
        """From measured seconds behind `context` tokens; a draft takes `draft_s`, and has usually this `depth`."""
        unit_s = model.pass_s(1, context)
        fixed_s = model.round_s(1, context, greedy=greedy) - unit_s

        def v(rows: int) -> float:
            return (model.round_s(rows, context, greedy=greedy) - fixed_s) / unit_s

        return cls(draft_s / depth / unit_s, v, overhead=fixed_s / unit_s)

    def draft(self, depth: int) -> float:
        """A draft of this depth; none costs nothing."""
        return self.once + self.c * depth if depth else 0.0

    def check(self, rows: int) -> float:
        """The target's pass over these rows, and what is outside it."""
        return self.v(rows) + self.overhead

    @property
    def plain(self) -> float:
        """A round of plain decoding."""
        return self.check(1)

    def round(self, shape: Shape) -> float:
        """A round with this draft."""
        return self.draft(shape.depth) + self.check(shape.size + 1)


@dataclass(frozen=True)
class Shape:
    """A draft as acceptance sees it.

    Node i continues `parents[i]` (-1: the last committed token); where that one was accepted, node i is accepted with
    probability `chances[i]`. At most one of several siblings is, so their chances add up to 1 or less.
    """

    parents: tuple[int, ...]
    chances: tuple[float, ...]

    def __post_init__(self) -> None:
        mass: dict[int, float] = {}
        for i, (parent, chance) in enumerate(zip(self.parents, self.chances, strict=True)):
            assert -1 <= parent < i, f"node {i} has parent {parent}"
            check_chance(chance)
            mass[parent] = mass.get(parent, 0.0) + chance
        if mass and max(mass.values()) > 1 + 1e-9:
            raise ConfigError(f"siblings are accepted with {max(mass.values()):.3f} in all: at most one of them can be")

    @classmethod
    def chain(cls, chances: Seq[float]) -> Shape:
        """A chain from the conditional acceptance at each position."""
        return cls(tuple(range(-1, len(chances) - 1)), tuple(chances))

    @property
    def size(self) -> int:
        return len(self.parents)

    @cached_property
    def depth(self) -> int:
        level: list[int] = []
        for parent in self.parents:
            level.append(1 + (level[parent] if parent >= 0 else 0))
        return max(level, default=0)

    @cached_property
    def reach(self) -> tuple[float, ...]:
        """The probability that each node is accepted."""
        reach: list[float] = []
        for parent, chance in zip(self.parents, self.chances, strict=True):
            reach.append(chance * (reach[parent] if parent >= 0 else 1.0))
        return tuple(reach)

    @property
    def tokens(self) -> float:
        """Expected tokens a round, the rule's own among them: 1 + the chances of all nodes."""
        return 1.0 + math.fsum(self.reach)


def check_chance(chance: float) -> None:
    """Raises ConfigError for what is no probability."""
    if not 0 <= chance <= 1:
        raise ConfigError(f"acceptance {chance} is not allowed: give a probability from 0 to 1")


def alpha(p_CV: Tensor, q_CV: Tensor, rule: str = "chain") -> float | None:
    """The acceptance of a draft token under the rule, mean over contexts; drafted as `draft_model` does for the rule.

    chain     drawn from q: sum of min(p, q)
    match     the likeliest of q: p of it
    coupled   drawn from q by the race that draws from p: sum over x of 1 / sum over y of max(p(y) / p(x), q(y) / q(x))
    greedy    how often the likeliest tokens agree
    others    None: `block` judges a draft as a whole, and the text of lossy rules is not the target's
    """
    if rule == "chain":
        kept_C = p_CV.minimum(q_CV).sum(-1)
    elif rule == "match":
        kept_C = p_CV.gather(-1, q_CV.argmax(-1, keepdim=True))[:, 0]
    elif rule == "coupled":
        kept_C = (1 / _ratios(p_CV).maximum(_ratios(q_CV)).sum(-1)).sum(-1)
    elif rule == "greedy":
        kept_C = (p_CV.argmax(-1) == q_CV.argmax(-1)).double()
    else:
        return None
    return kept_C.mean().item()


def _ratios(p_CV: Tensor) -> Tensor:
    """[C, V, V]: p(y) / p(x), x before y."""
    p_CV = p_CV.clamp(min=LEAST_P)
    return p_CV[:, None, :] / p_CV[:, :, None]


def speedup(shape: Shape, cost: Cost, drafting: float = 1.0) -> float:
    """Tokens in the time of one plain step. A share `drafting` of the rounds has the draft, the others have none."""
    check_chance(drafting)
    tokens = 1 + drafting * (shape.tokens - 1)
    return tokens * cost.plain / (drafting * cost.round(shape) + (1 - drafting) * cost.plain)


def best_tree(ranks: Seq[float], size: int, depth: int) -> Shape:
    """The tree of `size` nodes and at most `depth` levels with the most expected tokens.

    ranks[r] is the chance that the draft's choice number r is the accepted one, the same at every node. The likeliest
    nodes are taken one after the other; a node is never likelier than its parent, so that they always form a tree.
    """
    parents: list[int] = []
    chances: list[float] = []
    order = sorted(ranks, reverse=True)
    # (-reach, order of arrival, parent, rank, level) of the nodes that could come next
    open_nodes = [(-order[0], 0, -1, 0, 1)] if order and depth else []
    arrivals = 0
    while open_nodes and len(parents) < size:
        minus_reach, _, parent, rank, level = heapq.heappop(open_nodes)
        parents.append(parent)
        chances.append(order[rank])
        minus_above = minus_reach / order[rank] if order[rank] else 0.0
        if rank + 1 < len(order):
            arrivals += 1
            heapq.heappush(open_nodes, (minus_above * order[rank + 1], arrivals, parent, rank + 1, level))
        if level < depth:
            arrivals += 1
            heapq.heappush(open_nodes, (minus_reach * order[0], arrivals, len(parents) - 1, 0, level + 1))
    return Shape(tuple(parents), tuple(chances))


def break_even(shape_at: Callable[[float], Shape], cost: Cost) -> float | None:
    """The alpha from which on the draft `shape_at(alpha)` is no slower than plain decoding; None: not even at 1.

    Its expected tokens must not fall with alpha, and its size and depth must not change.
    """
    if speedup(shape_at(1.0), cost) < 1:
        return None
    low, high = 0.0, 1.0
    while high - low > BREAK_EVEN_TOLERANCE:
        middle = (low + high) / 2
        low, high = (low, middle) if speedup(shape_at(middle), cost) >= 1 else (middle, high)
    return high


def chain_break_even(k: int, cost: Cost) -> float | None:
    """The alpha from which on a chain of K, each token accepted with alpha, is no slower than plain decoding."""
    return break_even(lambda alpha: Shape.chain([alpha] * k), cost)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Rounds that were drawn: counts[j] of them gave j + 1 tokens."""

    counts: tuple[int, ...]

    @property
    def rounds(self) -> int:
        return sum(self.counts)

    @property
    def tokens(self) -> float:
        """Tokens a round, the mean."""
        return sum(count * (kept + 1) for kept, count in enumerate(self.counts)) / self.rounds

    def half_width(self, z: float = Z_95) -> float:
        """Half of the mean's confidence interval; z = 1.96 is 95 %."""
        mean = self.tokens
        spread = sum(count * (kept + 1 - mean) ** 2 for kept, count in enumerate(self.counts))
        return z * math.sqrt(spread) / self.rounds


def pick(nodes: Seq[int], chances: Seq[float], uniform: float) -> int | None:
    """Which of some siblings is accepted, given a uniform number; None: none of them."""
    for node in nodes:
        uniform -= chances[node]
        if uniform < 0:
            return node
    return None
