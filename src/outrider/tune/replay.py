"""The rounds that a drafter with K draft tokens would have run over recorded answers, and what they cost.

Exact, round by round, where the text does not depend on drafts and a draft of K is the beginning of a longer draft at
the same place. Nothing is assumed of how acceptance is distributed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from outrider.control.cost_model import CostModel, draft_steps
from outrider.core.stats import SpecStats
from outrider.tune.record import Answer


@dataclass(frozen=True, slots=True)
class Round:
    """One round: the tokens before it, how many it asked for, drafted, kept, and emitted; whose draft it was."""

    context: int
    asked: int
    drafted: int
    accepted: int
    emitted: int
    source: str = ""

    def maker(self, drafter: str, costs: CostModel) -> str:
        """The drafter that made the draft, where its costs are known."""
        return self.source if self.source in costs.drafters else drafter

    @property
    def steps(self) -> int:
        """Of the draft."""
        return draft_steps(self.asked, self.drafted)


def rounds(answer: Answer, drafter: str, k: int) -> Iterator[Round]:
    """Those of one answer; `drafter` "none" drafts nothing."""
    asked = answer.asked.get(drafter, ())
    at = 0
    while at < answer.tokens:
        budget = max(min(k, answer.most - at - 1), 0) if asked else 0
        drafted = min(asked[at].size, budget) if asked else 0
        accepted = asked[at].kept[drafted] if asked else 0
        emitted = min(accepted + 1, answer.tokens - at)
        source = asked[at].source if asked else ""
        yield Round(answer.prompt_tokens + at, budget, drafted, accepted, emitted, source)
        at += emitted


@dataclass(slots=True)
class Replayed:
    """Rounds over some answers: their counts (`stats`), and the seconds that they take, by kind of work.

    `drafting` rounds had a draft; of their tokens `tried` were reached, all before them being kept, and `kept` were.
    """

    stats: SpecStats = field(default_factory=SpecStats)
    pass_s: float = 0.0
    draft_s: float = 0.0
    other_s: float = 0.0
    drafting: int = 0
    tried: int = 0
    kept: int = 0

    @property
    def alpha(self) -> float:
        """The share of drafted tokens that are kept, of those that were reached; 0 where nothing was drafted."""
        return self.kept / self.tried if self.tried else 0.0

    @property
    def size(self) -> int:
        """The usual length of a draft, where there is one."""
        return max(1, round(self.stats.drafted / self.drafting)) if self.drafting else 1

    @property
    def seconds(self) -> float:
        return self.pass_s + self.draft_s + self.other_s

    @property
    def tok_s(self) -> float:
        """Tokens a second after the prompt; 0 where there was no token."""
        return self.stats.emitted / self.seconds if self.seconds > 0 else 0.0

    def to_json(self) -> dict[str, object]:
        rounds = max(self.stats.rounds, 1)
        return {
            "tok_s": self.tok_s,
            "rounds": self.stats.rounds,
            "tokens": self.stats.emitted,
            "drafted": self.stats.drafted,
            "accepted": self.stats.accepted,
            "drafting_rounds": self.drafting,
            "alpha": self.alpha,
            "acceptance_length": self.stats.acceptance_length,
            "round_seconds": {
                "pass": self.pass_s / rounds,
                "draft": self.draft_s / rounds,
                "other": self.other_s / rounds,
            },
        }


def replay(answers: Iterable[Answer], drafter: str, k: int, costs: CostModel, *, greedy: bool) -> Replayed:
    """All rounds of these answers by the cost model. Whoever makes a draft first reads what was committed since it made
    one: before its first, the prompt."""
    whole = Replayed()
    for answer in answers:
        read: dict[str, int] = {}
        for one in rounds(answer, drafter, k):
            rows = one.drafted + 1
            pass_s = costs.pass_s(rows, one.context)
            whole.pass_s += pass_s
            whole.other_s += costs.round_s(rows, one.context, greedy=greedy) - pass_s
            if one.asked:
                maker = one.maker(drafter, costs)
                whole.draft_s += costs.draft_s(maker, one.steps, greedy=greedy)
                whole.draft_s += costs.catch_up_s(maker, one.context - read.get(maker, 0))
                read[maker] = one.context + one.emitted
            whole.drafting += one.drafted > 0
            whole.tried += one.accepted + (one.accepted < one.drafted)
            whole.kept += one.accepted
            accepted = min(one.accepted, one.emitted)
            whole.stats.record(range(one.drafted), accepted, one.emitted - accepted, one.accepted + 1 - one.emitted)
    return whole
