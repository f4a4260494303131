"""What `tune` would do, and about how long it takes, before anything is loaded: a pass reads the weights once. The
reading of prompts, warming up and a server's answers are not in it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.bench.bandwidth import read_bandwidth
from outrider.bench.memory import file_nbytes
from outrider.engine.opening import needs_of
from outrider.engine.prompt_file import Conversation
from outrider.errors import FetchError, UserError
from outrider.models.loader.sources import resolve
from outrider.tune.budget import Load, fit
from outrider.tune.run import Wanted

DRY_RUN_SCHEMA = "outrider.tune_dry_run/1"


@dataclass(frozen=True, slots=True)
class Estimate:
    """`tokens` and `seconds` are of answers of full length, the seconds by the files' sizes and the memory bandwidth;
    None where a model is not here yet."""

    models: tuple[str, ...]
    candidates: int
    prompts: int
    measured: int
    tokens: int
    seconds: float | None
    notes: tuple[str, ...]

    def sentences(self) -> list[str]:
        """For people."""
        if self.seconds is None:
            took = "how long that takes cannot be told before the models are here (outrider models pull)"
        else:
            took = (
                f"that takes about {self.seconds:.0f} s or more where answers have their full length, by the size of "
                "the files and the memory's speed"
            )
        return [
            f"would load {' and '.join(self.models)}, and measure what passes and drafts cost unless that is known",
            f"would record {self.prompts} prompts, predict {self.candidates} candidates, and measure {self.measured} "
            f"of them beside plain: at most {self.tokens} tokens",
            *self.notes,
            took,
            "nothing was loaded and nothing was written",
        ]

    def to_json(self) -> dict[str, object]:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {"schema": DRY_RUN_SCHEMA, **fields, "models": list(self.models), "notes": list(self.notes)}


def estimate(models: tuple[str, ...], wanted: Wanted, prompts: Seq[Conversation], most_tokens: int) -> Estimate:
    """Of answers of at most `most_tokens` tokens; `models` are the target and perhaps a draft. Nothing is fetched."""
    steps = _steps_s(models)
    load = None if steps is None else _load(steps, wanted, most_tokens)
    share = fit(prompts, wanted.most_measured, load, wanted.time_budget)
    passes = len(wanted.temperatures) + (share.measured + 1 if share.measured else 0) * wanted.repeat
    return Estimate(
        models,
        wanted.candidates,
        len(share.prompts),
        share.measured,
        len(share.prompts) * passes * most_tokens,
        share.seconds,
        share.notes,
    )


def _steps_s(models: Seq[str]) -> list[float] | None:
    """Seconds in which memory can hand over each model's file."""
    try:
        sizes = [file_nbytes(resolve(name, offline=True)) for name in models]
    except (UserError, FetchError):
        return None
    gbps = read_bandwidth(rounds=3).gbps
    return [size / gbps / 1e9 for size in sizes]


def _load(steps_s: Seq[float], wanted: Wanted, tokens: int) -> Load:
    target_s, draft_s = steps_s[0], steps_s[1] if len(steps_s) > 1 else 0.0
    drafting = sum(draft_s * max(wanted.ks) for name in wanted.drafters if needs_of(name) & {"model", "drafters"})
    return Load(len(wanted.temperatures) * tokens * (target_s + drafting), wanted.repeat * tokens * target_s)
