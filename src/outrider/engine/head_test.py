"""A head is tried when it is loaded: on the prompts of its card it must draft about as well as the card says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from outrider.core.protocols import Drafter, LanguageModel
from outrider.core.registry import controller_class
from outrider.core.stats import SpecStats
from outrider.core.types import Decision, SamplingParams
from outrider.drafters.chain import full_length
from outrider.drafters.head_card import CARD
from outrider.engine.engine import Engine
from outrider.engine.opening import OpenedHead
from outrider.engine.request import Request
from outrider.errors import PairingError

MOST_AT_ONCE = 8


def answer_all(
    target: LanguageModel,
    drafter: Drafter,
    prompts: Seq[Seq[int]],
    params: Seq[SamplingParams],
    k: int,
    stop_ids: Iterable[int] = (),
) -> SpecStats:
    """Answers the prompts with the drafter, K draft tokens a round, by the default rule; returns what became of it."""
    engine = Engine(
        target,
        {drafter.name: drafter},
        controller_class("fixed")(k),
        method=drafter.name,
        stop_ids=frozenset(stop_ids),
        max_batch=MOST_AT_ONCE,
    )
    for prompt, own in zip(prompts, params, strict=True):
        engine.add(Request(list(prompt), own))
    while not engine.idle:
        engine.step()
    return engine.stats


def _head_alone(drafter: Drafter) -> Drafter:
    make: Callable[[], Drafter] | None = getattr(drafter, "head_alone", None)
    return full_length(drafter) if make is None else make()


def try_head(head: OpenedHead, target: LanguageModel, drafter: Drafter) -> tuple[Decision, str | None]:
    """What the head's test gave, and a warning where it is not what the card says. Raises PairingError for a card that
    is of another kind of head."""
    if head.card is None:
        return Decision("head test", "none", f"the head {head.name} has no {CARD} to try it on"), None
    if head.card.drafter not in (None, drafter.name):
        raise PairingError(
            f"the {CARD} of the head {head.name} says that it is a head of {head.card.drafter}, and it was asked for "
            f"as one of {drafter.name}: ask for {head.card.drafter}, or take another head"
        )
    test = head.card.test
    longest = target.context_length - test.max_tokens - 1
    usable = [p for p in test.prompts if max(p) < target.vocab_size and len(p) <= longest]
    if not usable:
        why = (
            f"none of the {len(test.prompts)} prompts of its card can be put to {target.name}, which knows "
            f"{target.vocab_size} tokens and has room for {max(longest, 0)} of them and an answer of {test.max_tokens}"
        )
        return Decision("head test", "not tried", f"{drafter.name}: it could not be tried: {why}"), (
            f"the draft head {head.name} could not be tried: {why}. Answers stay right; fetch the head again, or load "
            "the target that it was trained for"
        )
    params = SamplingParams(max_tokens=test.max_tokens)
    stats = answer_all(target, _head_alone(drafter), usable, [params] * len(usable), test.k)
    reached = (
        f"acceptance length {stats.acceptance_length:.2f}{'' if stats.drafted else ' (nothing was drafted)'} on "
        f"{len(usable)} of {len(test.prompts)} prompts of its card, which says {test.acceptance_length:.2f}"
    )
    if test.passes(stats.acceptance_length):
        return Decision("head test", "passed", f"{drafter.name}: {reached}"), None
    return Decision("head test", "FAILED", f"{drafter.name}: {reached}"), (
        f"the draft head {head.name} looks wrong for this target: {reached}, at K = {test.k}. Answers stay right and "
        "drafts are wasted: fetch the head again, or load the target that it was trained for"
    )
