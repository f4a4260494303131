"""What every candidate would give: replayed rounds by the cost model, and what the formulas say of the best."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.bench.summary import ALL
from outrider.control.cost_model import CostModel
from outrider.core.types import NO_DRAFTER
from outrider.sim.theory import Cost, chain_break_even
from outrider.tune.record import Record
from outrider.tune.replay import Replayed, Round, replay, rounds


@dataclass(frozen=True, slots=True)
class Candidate:
    """A drafter and its draft length."""

    drafter: str
    k: int

    @property
    def name(self) -> str:
        """As bench names its lane."""
        return f"{self.drafter} K={self.k}"


@dataclass(frozen=True, slots=True)
class Prediction:
    """A candidate over one category, or over all; `ratio` is its speed over plain's, both predicted."""

    candidate: Candidate
    category: str
    replayed: Replayed
    ratio: float

    def to_json(self) -> dict[str, object]:
        told = {"drafter": self.candidate.drafter, "k": self.candidate.k, "category": self.category}
        return {**told, "ratio": self.ratio, **self.replayed.to_json()}


@dataclass(frozen=True, slots=True)
class Predicted:
    """Of one record: plain by category, and every candidate by category, the fastest over all first."""

    record: Record
    plain: dict[str, Replayed]
    candidates: list[Prediction]
    by_category: dict[str, list[Prediction]]

    def of(self, candidate: Candidate, category: str = ALL) -> Prediction:
        listed = self.candidates if category == ALL else self.by_category[category]
        return next(one for one in listed if one.candidate == candidate)


@dataclass(frozen=True, slots=True)
class Profile:
    """Acceptance of a drafter's longest draft over one category: by position, of all rounds and given the prefix."""

    drafter: str
    category: str
    rounds: int
    by_position: list[float]
    conditional: list[float]
    acceptance_length: float

    def to_json(self) -> dict[str, object]:
        return {
            "drafter": self.drafter,
            "category": self.category,
            "rounds": self.rounds,
            "acceptance_length": self.acceptance_length,
            "acceptance_by_position": self.by_position,
            "acceptance_by_position_conditional": self.conditional,
        }


def categories(record: Record) -> list[str]:
    """ALL, then those of the prompts where there are several."""
    found = list(dict.fromkeys(answer.category for answer in record.answers))
    return [ALL, *(found if len(found) > 1 else [])]


def predict(record: Record, drafters: Seq[str], ks: Seq[int], costs: CostModel) -> Predicted:
    """Every drafter that did not fail, with every K."""
    wanted = [Candidate(name, k) for name in drafters if name not in record.failed for k in ks if k]
    plain, found = dict[str, Replayed](), dict[str, list[Prediction]]()
    for category in categories(record):
        answers = [answer for answer in record.answers if category in (ALL, answer.category)]
        base = replay(answers, NO_DRAFTER, 0, costs, greedy=record.greedy)
        plain[category] = base
        found[category] = []
        for candidate in wanted:
            made = replay(answers, candidate.drafter, candidate.k, costs, greedy=record.greedy)
            ratio = made.tok_s / base.tok_s if base.tok_s else 0.0
            found[category].append(Prediction(candidate, category, made, ratio))
    ranked = sorted(found.pop(ALL), key=lambda one: (-one.ratio, one.candidate.k))
    return Predicted(record, plain, ranked, found)


def profiles(record: Record, drafters: Seq[str]) -> list[Profile]:
    """Acceptance by drafter and category."""
    made = []
    for name in drafters:
        for category in categories(record) if name not in record.failed else []:
            answers = [answer for answer in record.answers if category in (ALL, answer.category)]
            made.append(_profile(name, category, [r for a in answers for r in rounds(a, name, record.k)]))
    return made


def _profile(drafter: str, category: str, run: Seq[Round]) -> Profile:
    """Of these rounds."""
    longest = max((one.drafted for one in run), default=0)
    by_position, conditional = [], []
    for at in range(longest):
        tried = sum(one.drafted > at and one.accepted >= at for one in run)
        kept = sum(one.accepted > at for one in run)
        by_position.append(kept / len(run))
        conditional.append(kept / tried if tried else 0.0)
    length = sum(one.emitted for one in run) / len(run) if run else 0.0
    return Profile(drafter, category, len(run), by_position, conditional, length)


@dataclass(frozen=True, slots=True)
class OnPaper:
    """A candidate in the terms of the formulas, in passes over one row, for the rounds that have a draft.

    Drafts have `size` tokens, and of those that are reached the share `alpha` is kept: `tokens` a round.
    `break_even_alpha` and `break_even_c` are from where it would pay, all else staying as it is. None: not even at 1,
    and not even for nothing.
    """

    alpha: float
    size: int
    cost: Cost
    tokens: float
    break_even_alpha: float | None
    break_even_c: float | None

    def to_json(self) -> dict[str, object]:
        return {
            "alpha": self.alpha,
            "size": self.size,
            "c": self.cost.c,
            "v": self.cost.v(self.size + 1),
            "tokens_per_drafting_round": self.tokens,
            "break_even_alpha": self.break_even_alpha,
            "break_even_c": self.break_even_c,
        }


def on_paper(prediction: Prediction, costs: CostModel, context: float, *, greedy: bool) -> OnPaper:
    """A candidate's prediction as the formulas see it. Rounds without a draft change no sign: they are plain ones."""
    made = prediction.replayed
    tokens = 1.0 + (made.kept / made.drafting if made.drafting else 0.0)
    draft_s = made.draft_s / made.drafting if made.drafting else 0.0
    cost = Cost.of_model(costs, draft_s, depth=made.size, context=context, greedy=greedy)
    free = (tokens * cost.plain - cost.check(made.size + 1)) / made.size
    return OnPaper(made.alpha, made.size, cost, tokens, chain_break_even(made.size, cost), free if free > 0 else None)
