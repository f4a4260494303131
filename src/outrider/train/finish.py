"""The end of a run: the head is written, tried as it will be served, and gets its card and its plot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from outrider.core.json_file import JsonObject
from outrider.drafters.head_card import CardTest, write_card
from outrider.train.evaluate import Served, held_out_prompts, serve
from outrider.train.run import HEAD, RUN, TrainRun
from outrider.train.shards import read_shards
from outrider.train.trainer import Trainer

PROMPTS = 24
ANSWER = 96
"""Held-out prompts of the evaluation, and the longest answer to one."""
TEST_PROMPTS = 3
TEST_ANSWER = 24
MIN_CONFIDENCE = 0.15
"""What the card recommends: about where a further token costs what it brings, in its own draft step and in the rows of
the check (docs/log.md)."""

OnServed = Callable[[str, Served], None]
"""Told of every evaluation: its name, and what it found."""


def finish(run: TrainRun, trainer: Trainer, on_served: OnServed, layout: str | None = None) -> Path:
    """Writes the head of a trained run and its card; returns the head's folder."""
    folder, settings = run.folder / HEAD, run.settings
    trainer.head.write(folder, layout)
    prompts = held_out_prompts(read_shards(run.data), PROMPTS)

    test_prompts = sorted(prompts, key=len)[:TEST_PROMPTS]

    def tried(name: str, written: Path | None, temperature: float, *, test: bool = False) -> Served:
        served = serve(
            run.target,
            trainer.head.drafter(settings.kind, run.target, run.identity, written),
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
    test = tried("the card's test", folder, 0.0, test=True)
    card = {
        "drafter": settings.kind,
        "target": run.identity.names[0],
        "vocabulary_sha256": run.identity.vocabulary_sha256,
        "k": settings.k,
        "min_confidence": MIN_CONFIDENCE,
        "as_trained": {"greedy": asdict(trained)},
        "as_served": {"greedy": asdict(greedy), "temperature_1": asdict(sampled)},
        "held_out_prompts": len(prompts),
        "harvests": run.harvests(),
        "tokens_per_epoch": trainer.lessons.tokens,
        "run": dict(JsonObject.read(run.folder / RUN).values),
    }
    told = CardTest(tuple(tuple(p) for p in test_prompts), TEST_ANSWER, settings.k, test.acceptance_length)
    write_card(folder, card, told)
    return folder
