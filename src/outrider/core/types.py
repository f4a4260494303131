"""The things that every layer talks about: sampling parameters, and one sequence being generated.

Public so that a drafter or a server can be written against them; nothing here knows of a model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TYPE_CHECKING

from outrider.core.rng import fold_seed
from outrider.core.stats import SpecStats
from outrider.errors import RequestError

if TYPE_CHECKING:
    from outrider.core.protocols import Constraint, KVCache, Verifier

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy decoding: dividing logits by them would overflow."""
NO_DRAFTER = "none"
"""The drafter of plain steps."""
MAX_K = 64
"""A longer draft costs more to check than any text repays, and a pass over it more memory than a pass should."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when they end. The defaults are greedy decoding of 256 tokens.

    temperature        0 (or < 1e-5) is greedy
    top_k              keep the k likeliest tokens; 0 keeps all; 1 is greedy
    top_p              keep the smallest likeliest set with at least this mass, in (0, 1]
    min_p              keep tokens with at least this share of the likeliest token's probability, in [0, 1)
    presence_penalty, frequency_penalty   subtracted from the logits of tokens already generated, in [-2, 2]
    repetition_penalty divides positive and multiplies negative logits of tokens in prompt or output, in [0.01, 100];
                       1 is off
    logit_bias         added to the logits of these token ids
    bad_token_ids      never generated
    min_tokens         nothing ends the answer before this many tokens: EOS and stop token ids cannot be drawn, and stop
                       strings are looked for only from there on
    max_tokens         None: until the context is full
    stop               strings that end the answer (not part of it unless include_stop)
    stop_token_ids     token ids that end the answer, beside the model's own
    ignore_eos         do not end at the model's own end-of-sequence tokens
    seed               None: a fresh one is drawn, and reported
    n                  number of independent answers
    logprobs           None, or how many likeliest alternatives to report with each token (0: the token's own only)
    json_schema        None, or a JSON schema (as a dict, or as JSON text) that the answer must satisfy
    skip_special       leave special tokens out of the text

    Raises RequestError, naming the field, its value and what is allowed.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = 256
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    json_schema: str | Mapping[str, object] | None = None
    skip_special: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "bad_token_ids"):
            self._require(name, isinstance(getattr(self, name), Iterable), "a list")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_types()
        finite = math.isfinite
        self._require("temperature", finite(self.temperature) and self.temperature >= 0, "a number >= 0")
        self._require("top_k", self.top_k >= 0, "an integer >= 0 (0 keeps all)")
        self._require("top_p", 0 < self.top_p <= 1, "a number in (0, 1]")
        self._require("min_p", 0 <= self.min_p < 1, "a number in [0, 1)")
        self._require("presence_penalty", -2 <= self.presence_penalty <= 2, "a number in [-2, 2]")
        self._require("frequency_penalty", -2 <= self.frequency_penalty <= 2, "a number in [-2, 2]")
        self._require(
            "repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "a number in [0.01, 100] (1 is off)"
        )
        self._require("logit_bias", all(finite(b) for b in self.logit_bias.values()), "finite numbers by token id")
        self._require("min_tokens", self.min_tokens >= 0, "an integer >= 0")
        max_ok = self.max_tokens is None or self.max_tokens >= 1
        self._require("max_tokens", max_ok, "an integer >= 1, or None for the whole context")
        self._require("stop", all(isinstance(s, str) and s for s in self.stop), "non-empty strings")
        self._require("n", self.n >= 1, "an integer >= 1")
        self._require("logprobs", self.logprobs is None or 0 <= self.logprobs <= 100, "None, or an integer in [0, 100]")
        no_minimum = self.json_schema is None or not self.min_tokens
        self._require("min_tokens", no_minimum, "0 beside json_schema, which says itself when the answer ends")

    def _check_types(self) -> None:
        for name in ("top_k", "min_tokens", "n"):
            self._require(name, _is_int(getattr(self, name)), "an integer")
        for name in ("max_tokens", "seed", "logprobs"):
            self._require(name, getattr(self, name) is None or _is_int(getattr(self, name)), "an integer, or None")
        numbers = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        for name in numbers:
            value = getattr(self, name)
            self._require(name, isinstance(value, Real) and not isinstance(value, bool), "a number")
        for name in ("stop_token_ids", "bad_token_ids"):
            self._require(name, all(_is_int(token) for token in getattr(self, name)), "integers")
        biases_ok = isinstance(self.logit_bias, Mapping) and all(_is_int(token) for token in self.logit_bias)
        self._require("logit_bias", biases_ok, "numbers by token id")
        schema_ok = self.json_schema is None or isinstance(self.json_schema, (str, Mapping))
        self._require("json_schema", schema_ok, "a JSON schema as a dict or as text, or None")

    def _require(self, name: str, ok: bool, allowed: str) -> None:
        if not ok:
            raise RequestError(f"{name} = {getattr(self, name)!r} is not allowed: give {allowed}")

    @property
    def greedy(self) -> bool:
        """Whether every token is the likeliest one, whatever the seed."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def plain_logits(self) -> bool:
        """Whether no processor other than temperature touches the logits."""
        penalties = self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1
        return not (penalties or self.logit_bias or self.bad_token_ids or self.min_tokens)


@dataclass(frozen=True, slots=True)
class Decision:
    """A choice that was made automatically, and why; printed at start and reported."""

    field: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class Switch:
    """From the output token `position` on, `drafter` drafts up to `k` tokens a round (0: plain steps), and why."""

    position: int
    drafter: str
    k: int
    reason: str


@dataclass(frozen=True, slots=True)
class TargetIdentity:
    """Which model a target is, for heads that were trained for one: the names that it goes by, and the hash of what its
    token ids stand for."""

    names: tuple[str, ...]
    vocabulary_sha256: str


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


class Sequence:
    """One answer being generated: addressed by its id, never by its place in a batch.

    `tokens` holds prompt and committed output; only a round's commit function appends to it. Between rounds the
    target's cache holds the keys and values of all tokens but the last. `k` is the draft
    length that the request asked for (0: plain steps; None: whatever the controller says).
    """

    def __init__(
        self,
        seq_id: int,
        prompt: list[int],
        params: SamplingParams,
        *,
        seed: int,
        choice: int = 0,
        stop_ids: frozenset[int] = frozenset(),
        prediction: list[int] | None = None,
        k: int | None = None,
    ) -> None:
        assert prompt, "a sequence needs at least one prompt token"
        self.id = seq_id
        self.prompt_len = len(prompt)
        self.tokens = list(prompt)
        self.params = params
        self.choice = choice
        self.seed = fold_seed(seed, choice)
        self.stop_ids = stop_ids
        self.prediction = prediction
        self.k = k
        self.constraint: Constraint | None = None
        self.finish_reason: str | None = None
        self.stats = SpecStats()
        self.cache: KVCache
        self.rule: Verifier

    @property
    def output_len(self) -> int:
        """Output tokens committed so far; also the output position of the next token, which keys its randomness."""
        return len(self.tokens) - self.prompt_len

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
