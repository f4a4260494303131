"""How much work fits: prompts taken evenly from the categories, and how many candidates are measured."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.control.cost_model import CostModel
from outrider.engine.prompt_file import Conversation

ENOUGH_PROMPTS = 8
"""Fewer candidates are measured where the budget would hold fewer prompts than this."""


@dataclass(frozen=True, slots=True)
class Load:
    """Seconds for one prompt: to record its answer at every temperature, and to answer it in one lane. `beside` are the
    lanes that are measured beside the candidates: plain, and perhaps a server."""

    record_s: float
    lane_s: float
    beside: int = 1

    def seconds(self, prompts: int, measured: int) -> float:
        """Of the whole work but warming up."""
        lanes = measured + self.beside if measured else 0
        return prompts * (self.record_s + lanes * self.lane_s)


@dataclass(frozen=True, slots=True)
class Share:
    """What is done: these prompts, so many candidates measured, about so long (None: not known). `notes` say what was
    left out."""

    prompts: list[Conversation]
    measured: int
    seconds: float | None
    notes: tuple[str, ...]


def load_of(
    costs: CostModel,
    drafters: Seq[str],
    k: int,
    tokens: int,
    *,
    temperatures: Seq[float],
    repeat: int,
    prompt_tokens: float,
    read_s: float,
    beside: int = 1,
) -> Load:
    """By the cost model, for answers of `tokens` tokens behind prompts of `prompt_tokens`, which the target reads in
    `read_s`, and whoever drafts, too; lanes are measured at the first temperature."""
    reading_s = [costs.catch_up_s(name, round(prompt_tokens)) for name in drafters]

    def plain_s(temperature: float) -> float:
        return tokens * costs.round_s(1, prompt_tokens + tokens / 2, greedy=temperature == 0)

    def record_s(temperature: float) -> float:
        draft_s = sum(costs.draft_s(name, k, greedy=temperature == 0) for name in drafters)
        return read_s + sum(reading_s) + plain_s(temperature) + tokens * draft_s

    lane_s = read_s + max(reading_s, default=0.0) + plain_s(temperatures[0])
    return Load(sum(map(record_s, temperatures)), repeat * lane_s, beside)


def fit(prompts: Seq[Conversation], measured: int, load: Load | None, budget_s: float | None) -> Share:
    """The most prompts that the budget holds, spread over the categories; all of them without one, or where the load is
    not known."""
    if load is None:
        notes = [] if budget_s is None else ["what the time budget holds cannot be told before the models are here"]
        return Share(list(prompts), measured, None, tuple(notes))
    whole = load.seconds(len(prompts), measured)
    if budget_s is None or whole <= budget_s:
        return Share(list(prompts), measured, whole, ())
    assert budget_s > 0, f"a budget of {budget_s} s"
    enough = min(ENOUGH_PROMPTS, len(prompts))
    lanes = next((n for n in range(measured, 1, -1) if load.seconds(enough, n) <= budget_s), min(measured, 1))
    count = max(1, min(len(prompts), int(budget_s / max(load.seconds(1, lanes), 1e-9))))
    seconds = load.seconds(count, lanes)
    notes = [f"the time budget of {budget_s:g} s holds {count} of {len(prompts)} prompts"] * (count < len(prompts))
    if lanes < measured:
        notes.append(f"the time budget holds the measurement of {lanes} candidate(s) instead of {measured}")
    if seconds > budget_s:
        notes.append(f"one prompt alone takes about {seconds:.0f} s, more than the time budget of {budget_s:g} s")
    return Share(spread(prompts, count), lanes, seconds, tuple(notes))


def spread(prompts: Seq[Conversation], count: int) -> list[Conversation]:
    """`count` of them, in their order, taken from the categories in turn."""
    queues: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        queues.setdefault(prompt.category, []).append(index)
    chosen: list[int] = []
    while len(chosen) < min(count, len(prompts)):
        for queue in queues.values():
            if queue and len(chosen) < count:
                chosen.append(queue.pop(0))
    return [prompts[index] for index in sorted(chosen)]
