"""From options to a running model, one streamed answer, and the JSON document that reports it."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field, replace
from types import FrameType, TracebackType
from typing import cast

from outrider.cli.common import check_drafters
from outrider.cli.terminal import print_plan
from outrider.core.stats import SpecStats
from outrider.core.trace import StepTrace
from outrider.core.types import SamplingParams
from outrider.core.verdict import Origin
from outrider.engine.llm import DEFAULT_K, LLM, Prompt
from outrider.engine.request import Completion, Result, Speculation, TokenEvent, TokenLogprob
from outrider.models.chat_template import CHATML
from outrider.models.loader.catalogue import DEFAULT_MODEL


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The options that say what to load; None is the default."""

    model: str | None = None
    drafter: str | None = None
    draft_model: str | None = None
    k: int | None = None
    rule: str = "auto"
    dtype: str = "auto"
    threads: int | None = None
    offline: bool = False

    def open(self, *, quiet: bool, on_trace: Callable[[StepTrace], None] | None = None) -> LLM:
        """Loads it, with a progress bar for a download and the plan on stderr unless `quiet`."""
        from outrider.cli.progress import download_bar

        check_drafters([self.drafter] if self.drafter is not None else [])
        with download_bar(quiet=quiet) as progress:
            llm = LLM(
                self.model or DEFAULT_MODEL,
                drafter=self.drafter,
                draft_model=self.draft_model,
                k=DEFAULT_K if self.k is None else self.k,
                rule=self.rule,
                dtype=self.dtype,
                threads=self.threads,
                offline=self.offline,
                on_trace=on_trace,
                progress=progress,
            )
        if not quiet:
            print_plan(llm.plan)
        return llm


class StopSignal:
    """While entered, Ctrl-C sets `asked` once `started` is set, so that no round is torn; earlier, it interrupts."""

    def __init__(self) -> None:
        self.asked = False
        self.started = False
        self._before: object = None
        self._installed = False

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)
            self._installed = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, cast(signal.Handlers, self._before))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked or not self.started:
            raise KeyboardInterrupt
        self.asked = True


@dataclass(slots=True)
class Streamed:
    """What came of a streamed request. `result` is None when Ctrl-C ended it; the rest is what there was by then."""

    result: Result | None = None
    events: list[TokenEvent] = field(default_factory=list)
    stats: SpecStats = field(default_factory=SpecStats)
    seconds: float = 0.0

    @property
    def interrupted(self) -> bool:
        return self.result is None

    @property
    def text(self) -> str:
        """The first answer, as far as it got."""
        return "".join(event.text for event in self.events if event.choice == 0)

    @property
    def per_second(self) -> float:
        if self.result is not None:
            return self.result.timings.predicted_per_second
        return self.stats.emitted / self.seconds if self.seconds else 0.0


def stream(
    llm: LLM,
    prompt: Prompt,
    params: SamplingParams,
    on_token: Callable[[TokenEvent], None],
    *,
    speculation: Speculation | None = None,
    prediction: str | None = None,
) -> Streamed:
    """Answers one prompt, calling `on_token` as tokens become final. The first Ctrl-C after that ends the answer."""
    streamed = Streamed()
    before = replace(llm.engine.stats)
    run = llm.generate(prompt, params, stream=True, speculation=speculation, prediction=prediction)
    began = time.perf_counter()
    with StopSignal() as stop, closing(cast("Generator[TokenEvent | Result]", run)) as items:
        for item in items:
            if isinstance(item, Result):
                streamed.result = item
                break
            if not stop.started:
                stop.started, began = True, time.perf_counter()
            streamed.events.append(item)
            on_token(item)
            if stop.asked and item.origin is not Origin.ACCEPTED:
                break  # the round's last token
    streamed.seconds = time.perf_counter() - began
    streamed.stats = streamed.result.stats if streamed.result else _since(before, llm.engine.stats)
    return streamed


def _since(before: SpecStats, now: SpecStats) -> SpecStats:
    """What was counted in between, as far as a summary needs it."""
    return SpecStats(
        rounds=now.rounds - before.rounds,
        drafted=now.drafted - before.drafted,
        accepted=now.accepted - before.accepted,
        emitted=now.emitted - before.emitted,
        own_tokens=now.own_tokens - before.own_tokens,
    )


def has_own_template(llm: LLM) -> bool:
    """Whether the model's files bring a chat template (otherwise a general one stands in)."""
    return llm.template is not None and llm.template.source is not CHATML


def messages(user: str, system: str | None) -> list[dict[str, object]]:
    first: list[dict[str, object]] = [{"role": "system", "content": system}] if system is not None else []
    return [*first, {"role": "user", "content": user}]


def document(llm: LLM, choice: ModelChoice, result: Result, seed: int | None) -> dict[str, object]:
    """The answer of `--json`. Names of the field: usage (OpenAI), timings (llama.cpp), metrics (vLLM)."""
    first = result.completions[0]
    n_prompt, n_answer = len(result.prompt_ids), sum(len(c.token_ids) for c in result.completions)
    return {
        **preamble(llm, choice, seed),
        "drafter": first.method,
        "rule": first.rule,
        "lossless": first.lossless,
        **_answer(llm, first),
        "choices": [{"index": c.index, **_answer(llm, c)} for c in result.completions],
        "usage": {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_answer,
            "total_tokens": n_prompt + n_answer,
        },
        "timings": result.timings.to_json(),
        "metrics": {"speculative_decoding": speculation_metrics(result.stats)},
    }


def preamble(llm: LLM, choice: ModelChoice, seed: int | None) -> dict[str, object]:
    """What ran: the beginning of every JSON document."""
    return {
        "model": llm.opened.name,
        "draft_model": llm.opened_draft.name if llm.opened_draft else None,
        "drafter": llm.engine.method,
        "k": DEFAULT_K if choice.k is None else choice.k,
        "rule": llm.engine.rule,
        "seed": seed,
        "plan": [{"field": d.field, "value": d.value, "reason": d.reason} for d in llm.plan],
        "warnings": list(llm.warnings),
    }


def speculation_metrics(stats: SpecStats) -> dict[str, object]:
    """vLLM's names. `acceptance_histogram[j]` is the number of rounds that kept exactly j draft tokens."""
    at_least = [stats.rounds, *(stats.accepted_at[i] for i in range(len(stats.drafted_at)))]
    return {
        "mean_acceptance_length": stats.acceptance_length,
        "draft_acceptance_rate": stats.acceptance_rate,
        "acceptance_histogram": [n - after for n, after in zip(at_least, [*at_least[1:], 0], strict=True)],
        "num_spec_steps": stats.rounds,
        "num_accepted_draft_tokens": stats.accepted,
        "num_draft_tokens": stats.drafted,
    }


def _answer(llm: LLM, completion: Completion) -> dict[str, object]:
    answer: dict[str, object] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "origins": [origin.value for origin in completion.origins],
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        answer["logprobs"] = [_logprob(llm, logprob) for logprob in completion.logprobs]
    return answer


def _logprob(llm: LLM, entry: TokenLogprob) -> dict[str, object]:
    likeliest = [(entry.token_id, entry.logprob), *entry.top]
    own, *top = [
        {"token_id": i, "token": token_text(llm, i), "logprob": p if math.isfinite(p) else None} for i, p in likeliest
    ]
    return {**own, "top": top}


def token_text(llm: LLM, token_id: int) -> str:
    assert llm.tokenizer is not None, "an LLM that was opened by name has a tokenizer"
    return llm.tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def judge(llm: LLM, params: SamplingParams, result: Result, plain: Result) -> tuple[str, str]:
    """How the answers compare with plain's: IDENTICAL, TIE, DIVERGED or NOT COMPARABLE, and a sentence that says it."""
    from outrider.bench.compare import Outcome, compare
    from outrider.bench.lanes import comparable
    from outrider.bench.oracle import RELATIVE_TOLERANCE
    from outrider.bench.verification import oracle_for, precision

    pairs = list(zip(plain.completions, result.completions, strict=True))
    if all(p.token_ids == s.token_ids for p, s in pairs):
        return Outcome.IDENTICAL.value, "the same text"
    if not comparable(pairs[0][1].rule, params):
        rule = pairs[0][1].rule
        return (
            "NOT COMPARABLE",
            f"another text: rule {rule!r} keeps the distribution, not the draw (coupled keeps both)",
        )
    ties = 0
    tolerance = RELATIVE_TOLERANCE[precision(llm)]
    for ours, theirs in pairs:
        oracle = oracle_for(llm, plain.prompt_ids, params, seed=ours.seed, relative_tolerance=tolerance)
        found = compare(ours.token_ids, theirs.token_ids, oracle)
        if found.divergence is not None:
            at = found.divergence
            return found.outcome.value, f"ANOTHER TEXT from token {at.position} on: {at.reason}"
        ties += len(found.ties)
    return Outcome.TIE.value, f"another text, by {ties} tie(s): places where two tokens are equally good up to rounding"
