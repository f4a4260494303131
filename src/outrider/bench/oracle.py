"""Plain decoding that can be taken up anywhere: the reference that a speculative answer is held against.

It shares no state with the run that is under suspicion: every question starts from a fresh cache, prefilled with the
prompt and the tokens before the question, and is answered by a pass over one row. Tokens become final through the
engine's own commit, one by one, so that stop strings, schemas and lengths end an answer as they end plain's.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.core.protocols import Constraint, Drafter, LanguageModel, Segment
from outrider.core.registry import controller_class, drafter_class, verifier_class
from outrider.core.rng import CounterRng, Key, Purpose, exponential_clocks
from outrider.core.step import PREFILL_CHUNK, Decided, spec_step
from outrider.core.types import SamplingParams, Sequence
from outrider.core.verdict import Origin
from outrider.core.warp import RowContext, warp
from outrider.engine.commit import Transcript
from outrider.models.tokenizer import Tokenizer

RELATIVE_TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 2.0**-6}
"""How far rounding may move a logit, as a share of the row's largest |logit|, by the precision of the arithmetic.

float64   2^-53 a step: 1e-9 leaves six digits for thousands of steps.
float32   2^-24 a step; sums of a thousand terms in another order, over tens of layers, stay below 1e-5.
bfloat16  activations are rounded to 8 bits before every matrix: one unit in the last place is 2^-8 to 2^-7 of a logit,
          and another order of summation moves some of them; 2 to 4 units are allowed.
"""


@dataclass(frozen=True, slots=True)
class Gap:
    """How close two tokens are to winning a position.

    `behind` is how far the worse of the two is behind the best token there is (in logits; in perturbed log
    probabilities when sampling), `tolerance` how far rounding may move that.
    """

    behind: float
    tolerance: float

    @property
    def is_tie(self) -> bool:
        return self.behind <= self.tolerance


@dataclass(frozen=True, slots=True)
class Ending:
    """An answer's output tokens, and why it ended."""

    token_ids: list[int]
    finish_reason: str


class PlainOracle:
    """Answers for one prompt under one set of parameters: greedy, or rule `coupled` when the temperature is above 0.

    `seed` is what the compared answers report (Completion.seed). `tokenizer` is needed for stop strings, `constraint`
    (makes the grammar of one answer) for a JSON schema.
    """

    def __init__(
        self,
        target: LanguageModel,
        prompt: Seq[int],
        params: SamplingParams,
        *,
        seed: int = 0,
        stop_ids: frozenset[int] = frozenset(),
        relative_tolerance: float = RELATIVE_TOLERANCE["float32"],
        tokenizer: Tokenizer | None = None,
        constraint: Callable[[], Constraint] | None = None,
    ) -> None:
        self.target = target
        self.prompt = list(prompt)
        self.params = replace(params, logprobs=None)
        self.seed = seed
        self.stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else stop_ids)
        self.relative_tolerance = relative_tolerance
        self._tokenizer, self._constraint = tokenizer, constraint

    def gap(self, prefix: Seq[int], first: int, second: int) -> Gap:
        """How close tokens `first` and `second` are to being the one that follows prompt + `prefix`."""
        seq = self._transcript(prefix).seq
        out = self.target.forward([Segment(seq.cache, [seq.tokens[-1]])])
        assert out.logits_MV is not None
        value_V, scale = self._values(seq, out.logits_MV)
        seq.cache.free()
        behind = float(value_V.max() - torch.minimum(value_V[first], value_V[second]))
        return Gap(behind, self.relative_tolerance * scale)

    def _values(self, seq: Sequence, logits_1V: Tensor) -> tuple[Tensor, float]:
        """What decides the position: the token with the largest value wins. And the scale of rounding errors in it."""
        largest = max(float(logits_1V[logits_1V.isfinite()].abs().max()), 1.0)
        if self.params.greedy:
            seq.params = replace(self.params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
            return warp(logits_1V, [RowContext(seq)])[0].to_dense().log(), largest
        p_V = warp(logits_1V, [RowContext(seq)])[0].to_dense()
        clocks_V = exponential_clocks(Key(seq.seed, seq.output_len, Purpose.RACE), p_V.numel())
        return p_V.log() - clocks_V.log(), largest / self.params.temperature

    def resume(self, prefix: Seq[int]) -> Ending:
        """The plain answer that begins with the output tokens `prefix`, up to its end, prefix included."""
        transcript = self._transcript(prefix)
        seq = transcript.seq
        drafter: Drafter = drafter_class("none")()
        controller = controller_class("fixed")(0)
        rng = CounterRng()
        drafter.open(seq)
        while not seq.finished:
            spec_step([seq], self.target, drafter, controller, rng, lambda _, decided: len(transcript.commit(decided)))
        drafter.close(seq)
        seq.cache.free()
        assert seq.finish_reason is not None
        return Ending(seq.tokens[seq.prompt_len :], seq.finish_reason)

    def _transcript(self, prefix: Seq[int]) -> Transcript:
        """The answer after `prefix`, its sequence with a fresh cache that holds all its tokens but the last."""
        seq = Sequence(0, self.prompt, self.params, seed=self.seed, stop_ids=self.stop_ids)
        seq.rule = verifier_class("greedy" if self.params.greedy else "coupled")()
        seq.constraint = self._constraint() if self._constraint is not None else None
        transcript = Transcript(0, seq, self.target.context_length, self._tokenizer)
        transcript.commit([Decided(token, Origin.BONUS, "", torch.empty(0)) for token in prefix])
        seq.cache = self.target.new_cache()
        for start in range(0, len(seq.tokens) - 1, PREFILL_CHUNK):
            chunk = seq.tokens[start : min(start + PREFILL_CHUNK, len(seq.tokens) - 1)]
            self.target.forward([Segment(seq.cache, chunk)], logits=False)
            seq.cache.keep(range(len(chunk)))
        return transcript
