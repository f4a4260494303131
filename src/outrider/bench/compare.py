"""The verdict on a speculative answer: the same as plain, the same but for ties, or wrong.

In finite precision a pass over several rows may round a logit otherwise than a pass over one, so where two tokens are
as good as equal the two answers may part. Such a tie is no error, and it must not hide one: the comparison is anchored
again at each difference. Plain decoding is asked, on one row, how close the two tokens are. If the gap is within what
rounding can do, plain goes on from the speculative prefix and the comparison with it; if not, the answer has diverged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from outrider.bench.lanes import comparable
from outrider.bench.oracle import RELATIVE_TOLERANCE, Ending, Gap, PlainOracle
from outrider.core.types import SamplingParams
from outrider.engine.constraint import ConstraintFactory
from outrider.engine.llm import LLM


class Outcome(StrEnum):
    """What comparing answers comes to, from best to worst. UNVERIFIED: they are equal, and nothing was drafted."""

    IDENTICAL = "IDENTICAL"
    TIE = "TIE"
    UNVERIFIED = "UNVERIFIED"
    NOT_COMPARABLE = "NOT COMPARABLE"
    DIVERGED = "DIVERGED"


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """The worst of them; IDENTICAL when there are none."""
    return max(outcomes, key=list(Outcome).index, default=Outcome.IDENTICAL)


class Ended(Protocol):
    """An answer: its tokens, and why it ended."""

    @property
    def token_ids(self) -> Seq[int]: ...

    @property
    def finish_reason(self) -> str: ...


class Answer(Ended, Protocol):
    """An answer, with the seed and the acceptance rule behind its tokens. A Completion is one."""

    @property
    def seed(self) -> int: ...

    @property
    def rule(self) -> str: ...


class Oracle(Protocol):
    """Plain decoding of one prompt; `PlainOracle` is one."""

    def gap(self, prefix: Seq[int], first: int, second: int) -> Gap: ...

    def resume(self, prefix: Seq[int]) -> Ending: ...


@dataclass(frozen=True, slots=True)
class Difference:
    """A place (output position) where the answers part. A token is None where that answer has ended.

    `gap` is None where there is none to measure: one of the answers ended, or both did for different reasons. In JSON
    it is also null where it is infinite: a token that cannot occur there at all.
    """

    position: int
    plain_token: int | None
    speculative_token: int | None
    gap: float | None
    tolerance: float | None
    reason: str

    def to_json(self) -> dict[str, object]:
        gap = self.gap if self.gap is not None and math.isfinite(self.gap) else None
        return {**{name: getattr(self, name) for name in self.__slots__}, "gap": gap}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The verdict on one answer: every tie on the way, and the difference that is none, where there is one.

    `sentence` says it for people; `compared` counts the tokens up to the difference, or all of them. `error` says which
    answers ended in one; with `plain_failed` the target fails by itself, and speculation is not to blame.
    """

    outcome: Outcome
    compared: int
    ties: list[Difference]
    divergence: Difference | None = None
    sentence: str = ""
    error: str = ""
    plain_failed: bool = False


def compare_completions(
    llm: LLM,
    prompt_ids: Seq[int],
    params: SamplingParams,
    plain: Answer,
    speculative: Answer,
    *,
    relative_tolerance: float | None = None,
) -> Comparison:
    """Whether a speculative answer of `llm` is the plain one: tokens, end and finish reason.

    `relative_tolerance` None: by the precision of the model's arithmetic. An answer that ended in an error is DIVERGED,
    whatever the other one is; equal answers are IDENTICAL whatever the rule; others are NOT_COMPARABLE when the text
    depends on more than prompt and seed.
    """
    if is_error(plain.finish_reason) or is_error(speculative.finish_reason):
        return _failed(plain, speculative)
    if _same(plain, speculative):
        return _identical(len(plain.token_ids))
    unfit = next((answer.rule for answer in (plain, speculative) if not comparable(answer.rule, params)), None)
    if unfit is not None:
        sentence = f"another text: rule {unfit!r} keeps the distribution, not the draw (coupled keeps both)"
        return Comparison(Outcome.NOT_COMPARABLE, 0, [], sentence=sentence)
    tolerance = default_tolerance(llm) if relative_tolerance is None else relative_tolerance
    return compare(plain, speculative, oracle_for(llm, prompt_ids, params, seed=plain.seed, tolerance=tolerance))


def compare(plain: Ended, speculative: Ended, oracle: Oracle) -> Comparison:
    """Compares two answers, going on behind every tie. Asks the oracle only where tokens differ."""
    theirs, ties = list(speculative.token_ids), list[Difference]()
    reference = plain
    while True:
        ours = list(reference.token_ids)
        position = _first_difference(ours, theirs)
        if position is None and reference.finish_reason == speculative.finish_reason:
            return _tied(len(ours), ties) if ties else _identical(len(ours))
        if position is None or position == min(len(ours), len(theirs)):
            return _diverged(ties, _ends(reference, speculative))
        gap = oracle.gap(theirs[:position], ours[position], theirs[position])
        reason = "tie" if gap.is_tie else "the gap is larger than rounding explains"
        found = Difference(position, ours[position], theirs[position], gap.behind, gap.tolerance, reason)
        if not gap.is_tie:
            return _diverged(ties, found)
        ties.append(found)
        reference = oracle.resume(theirs[: position + 1])


def default_tolerance(llm: LLM) -> float:
    """How wide a gap is a tie, as a share of the largest |logit|, by the precision of the model's arithmetic."""
    return RELATIVE_TOLERANCE[precision(llm)]


def precision(llm: LLM) -> str:
    """The precision of the target's arithmetic, a key of RELATIVE_TOLERANCE; float64 for parts that have no plan.

    Our kernels compute each row by itself, in the same order at every width, from float32 activations: whatever the
    weights are stored in, their rows differ no more than float32 sums do.
    """
    plan = {decision.field: decision.value for decision in llm.plan}
    if not plan:
        return "float64"
    if plan.get("kernels", "torch") != "torch":
        return "float32"
    return plan["dtype"] if plan.get("dtype") in RELATIVE_TOLERANCE else "bfloat16"


def oracle_for(llm: LLM, prompt_ids: Seq[int], params: SamplingParams, *, seed: int, tolerance: float) -> PlainOracle:
    """Plain decoding of one prompt with the target and the tokenizer of `llm`."""
    engine, schema = llm.engine, params.json_schema
    factory = None
    if schema is not None:
        assert llm.tokenizer is not None, "the engine takes no schema without a tokenizer"
        factory = ConstraintFactory(llm.tokenizer, engine.target.vocab_size)
    return PlainOracle(
        engine.target,
        prompt_ids,
        params,
        seed=seed,
        stop_ids=engine.stop_ids,
        relative_tolerance=tolerance,
        tokenizer=llm.tokenizer,
        constraint=(lambda: factory.json_schema(schema)) if factory is not None and schema is not None else None,
    )


def is_error(finish_reason: str) -> bool:
    """Whether an answer ended because it could not go on."""
    return finish_reason.startswith("error")


def _failed(plain: Ended, speculative: Ended) -> Comparison:
    ends = {"plain": plain.finish_reason, "speculative": speculative.finish_reason}
    reason = "; ".join(f"{who} ended with {why!r}" for who, why in ends.items() if is_error(why))
    at = Difference(min(len(plain.token_ids), len(speculative.token_ids)), None, None, None, None, reason)
    how = f"nothing to compare from token {at.position} on: {reason}"
    return Comparison(Outcome.DIVERGED, at.position, [], at, how, reason, is_error(plain.finish_reason))


def _same(plain: Ended, speculative: Ended) -> bool:
    same_tokens = list(plain.token_ids) == list(speculative.token_ids)
    return same_tokens and plain.finish_reason == speculative.finish_reason


def _first_difference(plain: Seq[int], speculative: Seq[int]) -> int | None:
    if plain == speculative:
        return None
    pairs = enumerate(zip(plain, speculative, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(plain), len(speculative)))


def _ends(plain: Ended, speculative: Ended) -> Difference:
    """Where one answer goes on and the other does not, or both end for different reasons."""
    both = (plain.token_ids, speculative.token_ids)
    position = min(len(tokens) for tokens in both)
    at = [tokens[position] if position < len(tokens) else None for tokens in both]
    if at == [None, None]:
        reason = f"plain ended with {plain.finish_reason!r}, speculative with {speculative.finish_reason!r}"
    else:
        reason = f"plain has {len(both[0])} tokens here, speculative {len(both[1])}"
    return Difference(position, at[0], at[1], None, None, reason)


def _identical(compared: int) -> Comparison:
    return Comparison(Outcome.IDENTICAL, compared, [], sentence="the same text")


def _tied(compared: int, ties: list[Difference]) -> Comparison:
    how = f"another text, by {len(ties)} tie(s): places where two tokens are equally good up to rounding"
    return Comparison(Outcome.TIE, compared, ties, sentence=how)


def _diverged(ties: list[Difference], at: Difference) -> Comparison:
    sentence = f"ANOTHER TEXT from token {at.position} on: {at.reason}"
    return Comparison(Outcome.DIVERGED, at.position, ties, at, sentence)
