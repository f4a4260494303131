"""Randomness that depends on what a draw is for, never on when or in which batch it happens.

Every draw has a `Key`: the sequence's seed, the output position at which the round began, the purpose, and an offset
within the round. A round always commits at least one token, so no two rounds of a sequence share a start position and
no key is ever used twice. That matters: block verification rejects a position because of what was drawn *after* it,
so noise that a later round reused would no longer be independent of the text already committed.

The exception is RACE noise, which belongs to an absolute output position and is meant to be shared: target and
drafter race the same exponential clocks there (rule `coupled`).

Three generators: `CounterRng` runs, `RecordingRng` runs and remembers its draws for a trace, and `ExhaustiveRng`
branches at each draw, so that a test gets the exact law of whatever a function returns.

Shapes: V vocabulary, S tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from outrider.core.row import Row

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

Outcome = TypeVar("Outcome", bound=Hashable)


class Purpose(IntEnum):
    """What a draw decides."""

    DRAFT = 1
    ACCEPT = 2
    TARGET = 3
    RACE = 4


class Key(NamedTuple):
    """The name of one draw. `position` counts output tokens: the round's start, or for RACE the token's own place."""

    seed: int
    position: int
    purpose: Purpose
    offset: int = 0


class Rng(Protocol):
    """A source of draws."""

    def of(self, seq_id: int) -> Rng:
        """The same source, where draws are noted down for sequence `seq_id`. It changes no draw."""
        ...

    def bernoulli(self, p: float, key: Key) -> bool:
        """True with probability p (clamped to [0, 1])."""
        ...

    def categorical(self, row: Row, key: Key) -> int:
        """A token drawn from the row, whose weights need not sum to 1 but must not all be 0."""
        ...

    def race(self, row: Row, key: Key) -> int:
        """The Gumbel-max draw from the row under noise that `key` alone fixes: equal keys race equal clocks."""
        ...

    def foresee(self, key: Key) -> float | None:
        """The u in (0, 1) with which `categorical` would draw under this key: the first token at which the running sum
        of the weights exceeds u times their sum. None where that is not settled yet. It draws nothing."""
        ...


def _mix(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), on unsigned 64-bit integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _state(key: Key) -> int:
    """A 64-bit state: the key's fields, absorbed one after the other."""
    state = 0
    for field in key:
        state = _mix((state + _GOLDEN + (int(field) & _MASK64)) & _MASK64)
    return state


def fold_seed(seed: int, choice: int) -> int:
    """The seed of a request's choice number `choice` (0 keeps the request's own)."""
    return seed if choice == 0 else _mix((seed + choice * _GOLDEN) & _MASK64)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _shift_right(x_S: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 words, which torch would otherwise shift arithmetically."""
    return (x_S >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def exponential_clocks(key: Key, tokens: int | Tensor) -> Tensor:
    """The clocks of a race: standard exponential variates (float64) that `key` fixes, for the given tokens (int64 [S])
    or for tokens 0 to `tokens` - 1. Each is a hash of key and token: SplitMix64 in counter mode.
    """
    x_S = torch.arange(tokens) if isinstance(tokens, int) else tokens.clone()
    x_S.add_(1).mul_(_signed(_GOLDEN)).add_(_signed(_state(key)))
    x_S.bitwise_xor_(_shift_right(x_S, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    x_S.bitwise_xor_(_shift_right(x_S, 27)).mul_(_signed(0x94D049BB133111EB))
    x_S.bitwise_xor_(_shift_right(x_S, 31))
    uniform_S = _shift_right(x_S, 11).to(torch.float64).add_(0.5).mul_(2.0**-53)
    return uniform_S.log_().neg_()


class CounterRng:
    """Stateless: each draw is a hash of its key."""

    def of(self, seq_id: int) -> Rng:
        return self

    def uniform(self, key: Key) -> float:
        """A float64 in (0, 1)."""
        return ((_mix((_state(key) + _GOLDEN) & _MASK64) >> 11) + 0.5) * 2.0**-53

    def bernoulli(self, p: float, key: Key) -> bool:
        return self.uniform(key) < p

    def categorical(self, row: Row, key: Key) -> int:
        total_S = row.weight_S.cumsum(0)
        threshold = self.uniform(key) * total_S[-1]
        index = int(torch.searchsorted(total_S, threshold, right=True))
        return row.token(index if index < total_S.numel() else int(row.weight_S.nonzero()[-1]))

    def foresee(self, key: Key) -> float | None:
        return self.uniform(key)

    def race(self, row: Row, key: Key) -> int:
        clocks_S = exponential_clocks(key, row.size if row.token_S is None else row.token_S.cpu())
        arrival_S = clocks_S.to(row.weight_S.device).div_(row.weight_S)
        return row.token(int(torch.where(row.weight_S > 0, arrival_S, torch.inf).argmin()))


@dataclass(frozen=True, slots=True)
class Draw:
    """One draw as a trace shows it. `uniform` is None for a race, whose noise is a vector.

    `likeliest` lists (index, probability) of the top of the distribution that a categorical draw came from.
    """

    key: Key
    kind: str
    probability: float
    uniform: float | None
    outcome: int
    likeliest: tuple[tuple[int, float], ...] = ()


class RecordingRng(CounterRng):
    """A `CounterRng` that keeps its draws, by sequence, until they are taken."""

    def __init__(self) -> None:
        self._by_sequence: dict[int, RecordingRng] = {}
        self._draws: list[Draw] = []

    def of(self, seq_id: int) -> RecordingRng:
        return self._by_sequence.setdefault(seq_id, RecordingRng())

    def take(self, seq_id: int) -> list[Draw]:
        """Removes and returns the draws made through `of(seq_id)`, in order."""
        recorder = self._by_sequence.pop(seq_id, None)
        return recorder._draws if recorder else []

    def bernoulli(self, p: float, key: Key) -> bool:
        outcome = super().bernoulli(p, key)
        self._draws.append(Draw(key, "bernoulli", p, self.uniform(key), int(outcome)))
        return outcome

    def categorical(self, row: Row, key: Key) -> int:
        outcome, total = super().categorical(row, key), row.total()
        top = (row.weight_S / total).topk(min(8, row.weight_S.numel()))
        ranked = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        likeliest = tuple((row.token(i), weight) for i, weight in ranked if weight > 0)
        self._draws.append(Draw(key, "categorical", row[outcome] / total, self.uniform(key), outcome, likeliest))
        return outcome

    def race(self, row: Row, key: Key) -> int:
        outcome = super().race(row, key)
        self._draws.append(Draw(key, "race", row[outcome], None, outcome))
        return outcome


class ExhaustiveRng:
    """Walks every branch of a random computation and adds up the exact law of its result.

    `law(fn)` calls `fn(rng)` once for each leaf of the tree of draws. `fn` must be a function of its draws alone. Using
    a key twice is an error: it would mean two draws that are not independent. RACE draws need an answer for *shared*
    noise and are handled for up to two distinct distributions a key, by `joint_race_law`.
    """

    def __init__(self) -> None:
        self._script: list[int] = []
        self._options: list[list[tuple[int, float]]] = []
        self._depth = 0
        self._used: set[Key] = set()
        self._races: dict[Key, list[tuple[Row, int]]] = {}

    def of(self, seq_id: int) -> Rng:
        return self

    def law(self, fn: Callable[[Rng], Outcome]) -> dict[Outcome, float]:
        """The probability (float64, exact up to rounding) of each value that `fn(rng)` can return."""
        law: dict[Outcome, float] = {}
        for outcome, probability in self._leaves(fn):
            law[outcome] = law.get(outcome, 0.0) + probability
        return law

    def _leaves(self, fn: Callable[[Rng], Outcome]) -> Iterator[tuple[Outcome, float]]:
        self._script = []
        while True:
            self._options, self._depth = [], 0
            self._used, self._races = set(), {}
            outcome = fn(self)
            probability = 1.0
            for choice, options in zip(self._script, self._options, strict=True):
                probability *= options[choice][1]
            yield outcome, probability
            while self._script and self._script[-1] + 1 == len(self._options[len(self._script) - 1]):
                self._script.pop()
            if not self._script:
                return
            self._script[-1] += 1

    def _branch(self, options: list[tuple[int, float]]) -> int:
        options = [(value, p) for value, p in options if p > 0.0]
        assert options, "a draw without a possible outcome"
        if self._depth == len(self._script):
            self._script.append(0)
        self._options.append(options)
        value = options[self._script[self._depth]][0]
        self._depth += 1
        return value

    def _claim(self, key: Key) -> None:
        assert key not in self._used, f"{key} was drawn twice: the two draws would not be independent"
        self._used.add(key)

    def bernoulli(self, p: float, key: Key) -> bool:
        self._claim(key)
        p = min(max(p, 0.0), 1.0)
        return bool(self._branch([(1, p), (0, 1.0 - p)]))

    def categorical(self, row: Row, key: Key) -> int:
        self._claim(key)
        return self._branch(_options(row.to_dense()))

    def foresee(self, key: Key) -> float | None:
        return None

    def race(self, row: Row, key: Key) -> int:
        known = self._races.setdefault(key, [])
        for other, winner in known:
            if other == row:
                return winner
        assert len(known) < 2, f"{key}: the joint law of three races is not worked out"
        law_V = row.to_dense()
        if known:
            other, winner = known[0]
            law_V = joint_race_law(other.to_dense(), law_V)[winner]
        outcome = self._branch(_options(law_V))
        known.append((row, outcome))
        return outcome


def _options(weight_V: Tensor) -> list[tuple[int, float]]:
    """(token, probability) of every token."""
    weights = weight_V.tolist()
    total = sum(weights)
    return [(token, weight / total) for token, weight in enumerate(weights)]


def joint_race_law(q_V: Tensor, p_V: Tensor) -> Tensor:
    """P(winner under q = i, winner under p = j) when both race the same exponential clocks; [V, V] float64.

    With clocks E_i = a and E_j = a r, outcome (i, j) needs every other clock x beyond a max(q_x/q_i, r p_x/p_j), so
    P = integral over r in [q_j/q_i, p_j/p_i] of dr / S(r)^2, S(r) = sum of those maxima over all x (1 for i, r for j).
    S is piecewise linear in r and each piece integrates in closed form. On the diagonal a single clock decides:
    P(i, i) = 1 / sum_x max(q_x/q_i, p_x/p_i). (Daliri et al., 2408.07978, give the bounds on that diagonal's sum.)
    """
    q, p = (q_V / q_V.sum()).tolist(), (p_V / p_V.sum()).tolist()
    size = len(q)
    law = torch.zeros(size, size, dtype=torch.float64)
    for i in (i for i in range(size) if q[i] > 0):
        for j in (j for j in range(size) if p[j] > 0):
            if i == j:
                law[i, i] = 1.0 / sum(max(q[x] / q[i], p[x] / p[i]) for x in range(size))
                continue
            low = q[j] / q[i]
            high = p[j] / p[i] if p[i] > 0 else float("inf")
            if low < high:
                law[i, j] = _integral_of_inverse_square(q, p, i, j, low, high)
    return law


def _integral_of_inverse_square(q: list[float], p: list[float], i: int, j: int, low: float, high: float) -> float:
    """The integral of 1/S(r)^2 over [low, high], piece by piece between the points where a maximum changes sides."""
    others = [x for x in range(len(q)) if x not in (i, j)]
    breaks = {q[x] * p[j] / (q[i] * p[x]) for x in others if p[x] > 0}
    points = sorted({low, high, *(r for r in breaks if low < r < high)})
    total = 0.0
    for a, b in pairwise(points):
        inside = a + 1.0 if b == float("inf") else (a + b) / 2
        offset, slope = 1.0, 1.0
        for x in others:
            if p[x] / p[j] * inside > q[x] / q[i]:
                slope += p[x] / p[j]
            else:
                offset += q[x] / q[i]
        upper = 0.0 if b == float("inf") else 1.0 / (offset + slope * b)
        total += (1.0 / (offset + slope * a) - upper) / slope
    return total
