"""The end of a run: the head is written, tried as it will be served, and gets its card."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from outrider.core.json_file import JsonObject
from outrider.core.registry import drafter_class
from outrider.drafters.head_card import CardTest, write_card
from outrider.train.evaluate import Served, held_out_prompts, serve
from outrider.train.lessons import HELD_OUT_EVERY
from outrider.train.run import HEAD, RUN, TrainRun
from outrider.train.shards import read_shards
from outrider.train.trainer import Trainer

PROMPTS = 24
ANSWER = 96
"""Held-out prompts of the evaluation, and the longest answer to one."""
TEST_PROMPTS = 3
TEST_ANSWER = 24
LEAST_LENGTH = 1.2
"""Tokens a pass, greedy, below which a head brings next to nothing: 1 is plain decoding."""
ENOUGH_PROMPTS = 4
"""Below so many held-out prompts a few tokens decide."""
MOST_LOSS = 0.03
"""Of the acceptance length, what packing may cost."""

OnServed = Callable[[str, Served], None]
"""Told of every evaluation: its name, and what it found."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The head's folder, and sentences that say what the head is worth and what to do about it."""

    folder: Path
    verdict: list[str]


def verdict(trained: Served, served: Served, prompts: int, *, rounds: bool) -> list[str]:
    """What the head is worth, by the greedy trials on so many held-out prompts; and where packing lost too much, that.
    `rounds`: whether it can learn with rounded weights."""
    now, before = served.acceptance_length, trained.acceptance_length
    told = f"{now:.2f} tokens a pass as served, greedy, on {prompts} held-out prompt(s), where plain decoding has 1"
    if now < LEAST_LENGTH:
        said = [
            f"this head brings next to nothing: {told}. Give it more conversations (--conversations), more epochs "
            "(--epochs) or a higher --lr, in another --out"
        ]
    else:
        said = [f"this head drafts: {told}. Tokens a pass are not yet speed: measure it with outrider bench"]
    if prompts < ENOUGH_PROMPTS:
        said.append(
            f"{prompts} held-out prompt(s) are too few to tell much: one conversation in {HELD_OUT_EVERY} is held out, "
            f"so {ENOUGH_PROMPTS * HELD_OUT_EVERY} (--conversations) give {ENOUGH_PROMPTS}"
        )
    elif now < before * (1 - MOST_LOSS):
        remedy = "train with a larger --rounded, or serve it with --draft-dtype int8"
        if not rounds:
            remedy = "serve it with --draft-dtype bfloat16"
        said.append(
            f"packing the weights for serving lost {1 - now / before:.0%} of the acceptance length ({before:.2f} as "
            f"trained, {now:.2f} as served; up to {MOST_LOSS:.0%} is usual): {remedy}"
        )
    return said


def finish(run: TrainRun, trainer: Trainer, on_served: OnServed, layout: str | None = None) -> Finished:
    """Writes the head of a trained run and its card: what it is worth as trained and as served, alone and with drafts
    of full length, and as it will be served by what the card recommends."""
    folder, settings = run.folder / HEAD, run.settings
    trainer.head.write(folder, layout)
    prompts = held_out_prompts(read_shards(run.data), PROMPTS)

    test_prompts = sorted(prompts, key=len)[:TEST_PROMPTS]
    recommends: Mapping[str, float] = getattr(drafter_class(settings.kind), "recommends", {})

    def tried(
        name: str, written: Path | None, temperature: float, *, test: bool = False, recommended: bool = False
    ) -> Served:
        options = recommends if recommended else {}
        served = serve(
            run.target,
            trainer.head.drafter(settings.kind, run.target, run.identity, written, options),
            test_prompts if test else prompts,
            k=settings.k,
            temperature=temperature,
            max_tokens=TEST_ANSWER if test else ANSWER,
            stop_ids=() if test else run.opened.tokenizer.eos_ids,
        )
        on_served(name, served)
        return served

    trained = tried("as trained, greedy", None, 0.0)
    greedy = tried("as served, greedy", folder, 0.0)
    sampled = tried("as served, temperature 1", folder, 1.0)
    recommended = tried("as recommended, greedy", folder, 0.0, recommended=True)
    test = tried("the card's test", folder, 0.0, test=True)
    card = {
        "drafter": settings.kind,
        "target": run.identity.names[0],
        "vocabulary_sha256": run.identity.vocabulary_sha256,
        "k": settings.k,
        **recommends,
        "as_trained": {"greedy": asdict(trained)},
        "as_served": {"greedy": asdict(greedy), "temperature_1": asdict(sampled)},
        "as_recommended": {"greedy": asdict(recommended)},
        "held_out_prompts": len(prompts),
        "harvests": run.harvests(),
        "tokens_per_epoch": trainer.lessons.tokens,
        "run": dict(JsonObject.read(run.folder / RUN).values),
    }
    told = CardTest(tuple(tuple(p) for p in test_prompts), TEST_ANSWER, settings.k, test.acceptance_length)
    write_card(folder, card, told)
    return Finished(folder, verdict(trained, greedy, len(prompts), rounds=bool(trainer.head.packed)))
