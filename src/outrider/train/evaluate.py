"""How much of a head's drafts the target accepts, found by the engine itself on conversations that were
not trained on."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.core.protocols import Drafter, LanguageModel
from outrider.core.stats import SpecStats
from outrider.core.types import SamplingParams
from outrider.engine.head_test import answer_all
from outrider.engine.report import conditional_acceptance
from outrider.train.lessons import is_held_out
from outrider.train.shards import Shard


@dataclass(frozen=True, slots=True)
class Served:
    """What became of the drafts. `conditional` is, by position, the share accepted of those whose prefix was."""

    rounds: int
    emitted: int
    drafted: int
    accepted: int
    acceptance_length: float
    conditional: list[float]

    @classmethod
    def of(cls, stats: SpecStats) -> Served:
        return cls(
            stats.rounds,
            stats.emitted,
            stats.drafted,
            stats.accepted,
            stats.acceptance_length,
            conditional_acceptance(stats),
        )


def held_out_prompts(shards: Seq[Shard], most: int) -> list[list[int]]:
    """Token ids of the first `most` prompts of conversations that are not trained on."""
    prompts: list[list[int]] = []
    for shard in shards:
        for i, conversation in enumerate(shard.conversations):
            if is_held_out(conversation) and shard.turns[i] == 0 and len(prompts) < most:
                prompts.append(shard.prompt(i))
    return prompts


def serve(
    target: LanguageModel,
    drafter: Drafter,
    prompts: Seq[Seq[int]],
    *,
    k: int,
    temperature: float,
    max_tokens: int,
    stop_ids: Iterable[int] = (),
) -> Served:
    """Answers the prompts with the drafter, K draft tokens a round; the default rule judges."""
    params = [SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=i) for i in range(len(prompts))]
    return Served.of(answer_all(target, drafter, prompts, params, k, stop_ids))
