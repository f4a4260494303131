"""What goes into the engine and what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.core.stats import SpecStats
from outrider.core.types import SamplingParams, Switch
from outrider.core.verdict import Origin


@dataclass(frozen=True, slots=True)
class Speculation:
    """How one request is to be speculated; changes speed only (unless the rule is a lossy one, by name).

    None keeps the engine's own choice. `method` is a drafter's name ("none" switches speculation off), `k` the largest
    number of draft tokens a round, `rule` an acceptance rule.
    """

    method: str | None = None
    k: int | None = None
    rule: str | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """A tokenised request. `prediction` is text that the answer may largely repeat, as token ids."""

    prompt_ids: Seq[int]
    params: SamplingParams
    speculation: Speculation = Speculation()
    prediction: Seq[int] | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """log p of an emitted token under the target (before sampling processors), and of the likeliest alternatives."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One committed token.

    `text` is what became final with it: text that might still turn into a stop string, or half a character, comes with
    a later token. `finish_reason` is set on the last token of an answer: "stop" or "length". An answer that ends in an
    error has no last token: see `Completion.finish_reason`.
    """

    request: int
    choice: int
    token_id: int
    text: str
    origin: Origin
    source: str
    logprob: TokenLogprob | None = None
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer. `stop_reason` is the stop string or token id that ended it, or None. `switches` are what a governor
    decided on the way, the latest 64."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    origins: list[Origin]
    logprobs: list[TokenLogprob] | None
    seed: int
    rule: str
    lossless: bool
    method: str
    stats: SpecStats
    switches: tuple[Switch, ...] = ()


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds and counts of one request, under llama.cpp's names; `draft_n` counts draft tokens checked."""

    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    draft_n: int
    draft_n_accepted: int

    @property
    def predicted_per_second(self) -> float:
        """Emitted tokens a second, the prompt's time not counted; 0 when nothing was measured."""
        return 1000.0 * self.predicted_n / self.predicted_ms if self.predicted_ms else 0.0

    def to_json(self) -> dict[str, float]:
        return {
            "prompt_n": self.prompt_n,
            "prompt_ms": self.prompt_ms,
            "predicted_n": self.predicted_n,
            "predicted_ms": self.predicted_ms,
            "predicted_per_second": self.predicted_per_second,
            "draft_n": self.draft_n,
            "draft_n_accepted": self.draft_n_accepted,
        }


@dataclass(frozen=True, slots=True)
class Result:
    """A finished request: its answers in order of choice. `request` is its number."""

    request: int
    prompt_ids: list[int]
    completions: list[Completion]
    timings: Timings
    stats: SpecStats

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first answer's tokens."""
        return self.completions[0].token_ids
