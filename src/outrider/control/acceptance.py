"""Running estimates of what a drafter's tokens are worth: from past rounds only, the near ones counting more.

A *position* is a place in a draft, from 0. Two things are estimated at each, of rounds in which so many tokens were
asked for: whether a token was drafted there, where all before were; and whether one was kept there, where all before
were.
"""

from __future__ import annotations

import math

SLOW, FAST = 0.97, 0.6
"""What a round's weight becomes with every later one: memories of about 30 rounds and of two or three."""
SHARED = 0.995
"""The same for what all requests together have shown."""
PRIOR_LEAST, PRIOR_MOST = 1.5, 8.0
"""Rounds that the prior of a request counts for: where it is a guess, and where it is known."""
KNOWN_AFTER = 65
"""What the decaying count of all requests' rounds has reached, after about 80, when it is known. A card is worth as
much."""
SHARED_WEIGHT, CARD_WEIGHT = 4.0, 12.0
"""Rounds that what is known before the first request counts for: a guess, and a card."""
UNKNOWN = 0.6
"""Chance that a token is kept, of a drafter of which nothing is known."""
DRIFT, ALARM = 0.5, 4.0
"""A change is noticed when outcomes stray on one side by ALARM standard deviations in sum, DRIFT a round forgiven."""
LEAST_SD = 0.3
MOST_UNIT = 1e100
"""From here on counts are brought back to the size of rounds."""


class Counts:
    """Decaying counts of rounds, by position: all in `unit`s, what the latest round counts for. That grows, instead of
    all else shrinking.

    `tried` had kept all tokens before, `kept` one more; `reached` had drafted all before, `drafted` one more.
    """

    def __init__(self, size: int, decay: float) -> None:
        self.size, self.decay, self.unit = size, decay, 1.0
        self.tried, self.kept, self.reached, self.drafted = ([0.0] * size for _ in range(4))

    def add(self, asked: int, drafted: int, accepted: int) -> None:
        """A round in which `asked` tokens were allowed, `drafted` came and the first `accepted` were kept."""
        self.unit /= self.decay
        if self.unit > MOST_UNIT:
            for counts in (self.tried, self.kept, self.reached, self.drafted):
                counts[:] = [count / self.unit for count in counts]
            self.unit = 1.0
        for i in range(min(asked, drafted + 1, self.size)):
            self.reached[i] += self.unit
            self.drafted[i] += self.unit * (drafted > i)
            self.tried[i] += self.unit * (accepted >= i)
            self.kept[i] += self.unit * (accepted > i)

    def take(self, other: Counts) -> None:
        """Forgets everything but what `other` knows."""
        self.unit = other.unit
        self.tried, self.kept = other.tried[:], other.kept[:]
        self.reached, self.drafted = other.reached[:], other.drafted[:]


class Makers:
    """Who made the drafts that a drafter gave: for one that hands on what its members draft, mostly one of these.
    Decaying counts of rounds, in which what `shared` has counted of all requests weighs as SHARED_WEIGHT rounds."""

    def __init__(self, decay: float, shared: Makers | None = None) -> None:
        self.decay, self.shared = decay, shared
        self.counts: dict[str, float] = {}

    def add(self, source: str) -> None:
        for name in self.counts:
            self.counts[name] *= self.decay
        self.counts[source] = self.counts.get(source, 0.0) + 1.0
        if self.shared is not None:
            self.shared.add(source)

    def shares(self) -> dict[str, float]:
        """They add up to 1; empty where nothing was drafted yet."""
        whole = dict(self.counts)
        before = {} if self.shared is None else self.shared.shares()
        for name, share in before.items():
            whole[name] = whole.get(name, 0.0) + SHARED_WEIGHT * share
        total = sum(whole.values())
        return {name: count / total for name, count in whole.items()}


class SharedAcceptance:
    """What all requests have shown of a drafter; where each of them starts from. `alpha` is what its card says, if it
    has one."""

    def __init__(self, size: int, alpha: float | None = None) -> None:
        self.alpha = UNKNOWN if alpha is None else alpha
        self.carded = alpha is not None
        self.counts = Counts(size, SHARED)
        self.makers = Makers(SHARED)
        self._rates: tuple[list[float], list[float]] | None = None

    def add(self, asked: int, drafted: int, accepted: int) -> None:
        self.counts.add(asked, drafted, accepted)
        self._rates = None

    @property
    def weight(self) -> float:
        """Rounds that it counts for where a request starts."""
        known = 1.0 if self.carded else min(self.counts.reached[0] / self.counts.unit / KNOWN_AFTER, 1.0)
        return PRIOR_LEAST + (PRIOR_MOST - PRIOR_LEAST) * known

    def gains(self) -> tuple[list[float], list[float]]:
        """As `Acceptance.gains`, of all requests."""
        kept, drafted = (_sums(rates) for rates in self.rates())
        return kept, [max(pair) for pair in zip(kept, drafted, strict=True)]

    def rates(self) -> tuple[list[float], list[float]]:
        """By position: (kept, drafted). Where little was seen, as at the position before."""
        if self._rates is None:
            self._rates = self._estimated()
        return self._rates

    def _estimated(self) -> tuple[list[float], list[float]]:
        guess = SHARED_WEIGHT * self.counts.unit
        weight = CARD_WEIGHT * self.counts.unit if self.carded else guess
        kept, drafted, before = [], [], (self.alpha, 1.0)
        for i in range(self.counts.size):
            kept.append(_rate(self.counts.kept[i], self.counts.tried[i], before[0], weight))
            drafted.append(_rate(self.counts.drafted[i], self.counts.reached[i], before[1], guess))
            before = kept[-1], drafted[-1]
        return kept, drafted


class Acceptance:
    """What one request has shown of a drafter.

    When outcomes stray from the estimates for a few rounds on one side, the text has changed: what was before is
    forgotten, and what others have shown is a guess.
    """

    def __init__(self, shared: SharedAcceptance) -> None:
        self.shared = shared
        size = shared.counts.size
        self.slow, self.fast = Counts(size, SLOW), Counts(size, FAST)
        self.makers = Makers(SLOW, shared.makers)
        self._high = self._low = 0.0
        self._changed = False
        self._gains: tuple[list[float], list[float]] | None = None

    def add(self, asked: int, drafted: int, accepted: int) -> bool:
        """Takes in a round; whether it was the one that gave a change of the text away."""
        kept = self.gains()[0]
        mean = kept[asked]
        square = sum((2 * i + 1) * (kept[i + 1] - kept[i]) for i in range(asked))
        stray = (accepted - mean) / max(math.sqrt(max(square - mean * mean, 0.0)), LEAST_SD)
        self._high = max(0.0, self._high + stray - DRIFT)
        self._low = max(0.0, self._low - stray - DRIFT)
        for counts in (self.slow, self.fast, self.shared):
            counts.add(asked, drafted, accepted)
        changed = max(self._high, self._low) > ALARM
        if changed:
            self.slow.take(self.fast)
            self._high = self._low = 0.0
            self._changed = True
        self._gains = None
        return changed

    def gains(self) -> tuple[list[float], list[float]]:
        """Entry K: tokens of a draft of up to K that are kept, and that are drafted, as expected now."""
        if self._gains is None:
            self._gains = self._expected()
        return self._gains

    @property
    def seen(self) -> bool:
        """Whether it rests on a round, of this request or of another."""
        return self.shared.counts.reached[0] > 0

    def first(self) -> float:
        """Chance that the first token is drafted and kept."""
        return self.gains()[0][1]

    def _expected(self) -> tuple[list[float], list[float]]:
        shared_kept, shared_drafted = self.shared.rates()
        slow, weight = self.slow, self.slow.unit * (PRIOR_LEAST if self._changed else self.shared.weight)
        kept = _sums(_rates(slow.kept, slow.tried, shared_kept, weight))
        drafted = _sums(_rates(slow.drafted, slow.reached, shared_drafted, weight))
        return kept, [max(pair) for pair in zip(kept, drafted, strict=True)]


def alpha_of(acceptance_length: float, k: int) -> float:
    """The chance of each token at which drafts of K tokens have this acceptance length."""
    low, high = 0.0, 0.999
    for _ in range(40):
        alpha = (low + high) / 2
        if sum(alpha**i for i in range(k + 1)) < acceptance_length:
            low = alpha
        else:
            high = alpha
    return low


def _rates(hits: list[float], chances: list[float], shared: list[float], weight: float) -> list[float]:
    """By position; the prior, of so much weight, is the shape of the shared estimates, at the level that this request
    has shown before."""
    rates: list[float] = []
    for i, prior in enumerate(shared):
        if rates:
            prior = min(rates[-1] * prior / max(shared[i - 1], 1e-3), 1.0)
        rates.append(_rate(hits[i], chances[i], prior, weight))
    return rates


def _sums(rates: list[float]) -> list[float]:
    """Entry K: the expected number of tokens up to the first of K that fails."""
    sums, alive = [0.0], 1.0
    for rate in rates:
        alive *= rate
        sums.append(sums[-1] + alive)
    return sums


def _rate(hits: float, chances: float, prior: float, weight: float) -> float:
    return (hits + weight * prior) / (chances + weight)
