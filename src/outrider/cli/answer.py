"""From options to a running model, one streamed answer, Ctrl-C, and the verdict against plain."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, cast

from outrider.cli.common import check_drafters, one_drafter, split_names
from outrider.cli.terminal import print_loading, print_plan
from outrider.core.registry import controller_class, verifier_class
from outrider.core.stats import SpecStats
from outrider.core.trace import StepTrace
from outrider.core.types import SamplingParams
from outrider.core.verdict import Origin
from outrider.engine.engine import resolve_rule
from outrider.engine.llm import LLM, Prompt
from outrider.engine.report import plan_json
from outrider.engine.request import Completion, Result, Speculation, Timings, TokenEvent
from outrider.models.loader.catalogue import DEFAULT_MODEL

if TYPE_CHECKING:
    from outrider.bench.compare import Comparison

CANCELLED = "cancelled"
"""The finish reason of an answer that Ctrl-C ended."""


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The options that say what to load; None is the default."""

    model: str | None = None
    drafter: str | None = None
    draft_model: str | None = None
    k: int | None = None
    min_confidence: float | None = None
    rule: str = "auto"
    dtype: str = "auto"
    draft_dtype: str = "auto"
    threads: int | None = None
    offline: bool = False
    controller: str = "fixed"

    def open(self, *, quiet: bool, on_trace: Callable[[StepTrace], None] | None = None) -> LLM:
        """Loads it. Unless `quiet`, stderr says so, shows a download, and then the plan."""
        from outrider.cli.progress import download_bar

        controller_class(self.controller)
        names: list[str] | None = None
        if self.drafter is not None:
            names = split_names([self.drafter if self.controller == "governor" else one_drafter(self.drafter)])
            check_drafters(names)
        with download_bar(quiet=quiet) as progress:
            llm = LLM(
                self.model or DEFAULT_MODEL,
                drafter=names,
                draft_model=self.draft_model,
                k=self.k,
                min_confidence=self.min_confidence,
                controller=self.controller,
                rule=self.rule,
                dtype=self.dtype,
                draft_dtype=self.draft_dtype,
                threads=self.threads,
                offline=self.offline,
                on_trace=on_trace,
                progress=progress,
                on_load=None if quiet else print_loading,
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
    prompt_s: float = 0.0
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

    @property
    def error(self) -> str | None:
        """Why an answer could not go on; None where none ended in an error."""
        reasons = [c.finish_reason for c in self.result.completions] if self.result is not None else []
        return next((reason for reason in reasons if reason.startswith("error")), None)

    def partial(self, llm: LLM, prompt: Prompt, params: SamplingParams) -> Result:
        """What there is of an interrupted request, as a result; its unfinished answers are "cancelled"."""
        prompt_ids = llm.encode_prompt(prompt)
        timings = Timings(
            prompt_n=len(prompt_ids),
            prompt_ms=1000 * self.prompt_s,
            predicted_n=len(self.events),
            predicted_ms=1000 * self.seconds,
            draft_n=self.stats.drafted,
            draft_n_accepted=self.stats.accepted,
        )
        answers = [self._partial_answer(llm, params, choice) for choice in range(params.n)]
        return Result(0, prompt_ids, answers, timings, self.stats)

    def _partial_answer(self, llm: LLM, params: SamplingParams, choice: int) -> Completion:
        events = [event for event in self.events if event.choice == choice]
        rule = resolve_rule(llm.engine.rule, greedy=params.greedy)
        wanted = params.logprobs is not None
        return Completion(
            index=choice,
            text="".join(event.text for event in events),
            token_ids=[event.token_id for event in events],
            finish_reason=(events[-1].finish_reason if events else None) or CANCELLED,
            stop_reason=None,
            origins=[event.origin for event in events],
            logprobs=[event.logprob for event in events if event.logprob is not None] if wanted else None,
            seed=params.seed or 0,
            rule=rule,
            lossless=bool(verifier_class(rule)().lossless),
            method=llm.engine.method,
            stats=self.stats,
        )


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
    asked = time.perf_counter()
    before = llm.engine.stats.copy()
    run = llm.generate(prompt, params, stream=True, speculation=speculation, prediction=prediction)
    began = time.perf_counter()
    with StopSignal() as stop, closing(cast("Generator[TokenEvent | Result]", run)) as items:
        for item in items:
            if isinstance(item, Result):
                streamed.result = item
                break
            if not stop.started:
                stop.started, began = True, time.perf_counter()
                streamed.prompt_s = began - asked
            streamed.events.append(item)
            on_token(item)
            if stop.asked and item.origin is not Origin.ACCEPTED:
                break  # the round's last token
    streamed.seconds = time.perf_counter() - began
    streamed.stats = streamed.result.stats if streamed.result else llm.engine.stats.minus(before)
    return streamed


def has_own_template(llm: LLM) -> bool:
    """Whether the model's files bring a chat template (otherwise a general one stands in)."""
    return llm.template is not None and llm.template.is_own


def messages(user: str, system: str | None) -> list[dict[str, object]]:
    first: list[dict[str, object]] = [{"role": "system", "content": system}] if system is not None else []
    return [*first, {"role": "user", "content": user}]


def preamble(llm: LLM, seed: int | None) -> dict[str, object]:
    """What ran: the beginning of every JSON document."""
    return {
        "model": llm.name,
        "draft_model": llm.draft_name,
        "drafter": llm.engine.method,
        "k": llm.k,
        "controller": llm.controller_name,
        "rule": llm.engine.rule,
        "seed": seed,
        "plan": plan_json(llm.plan),
        "warnings": list(llm.warnings),
    }


def judge(llm: LLM, params: SamplingParams, result: Result, plain: Result) -> Comparison:
    """How the answers of a request compare with plain's: the worst verdict among them."""
    from outrider.bench.compare import compare_completions, worst

    found = [
        compare_completions(llm, plain.prompt_ids, params, ours, theirs)
        for ours, theirs in zip(plain.completions, result.completions, strict=True)
    ]
    outcome = worst(comparison.outcome for comparison in found)
    return next(comparison for comparison in found if comparison.outcome is outcome)
