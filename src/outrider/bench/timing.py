"""Where a round's time goes: proxies around the target and the drafters that keep the time of what passes through."""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass

from outrider.core.draft import Draft, DraftLaw
from outrider.core.protocols import Committed, Drafter, KVCache, LanguageModel, Pass, Segment
from outrider.core.rng import Rng
from outrider.core.types import SamplingParams, Sequence
from outrider.drafters.chain import full_length
from outrider.engine.engine import Engine
from outrider.engine.llm import LLM
from outrider.engine.request import Request, Speculation


@dataclass(slots=True)
class Stopwatch:
    """Seconds spent after the prompt: in target passes, and in drafting (a drafter's bookkeeping included). `rows` are
    those of the passes."""

    target_s: float = 0.0
    draft_s: float = 0.0
    rows: int = 0


class TimedModel:
    """A target whose passes are timed. A pass that asks for no logits is a prompt's and is not."""

    def __init__(self, inner: LanguageModel, watch: Stopwatch) -> None:
        self.inner, self.watch = inner, watch

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    @property
    def context_length(self) -> int:
        return self.inner.context_length

    @property
    def trees(self) -> bool:
        return self.inner.trees

    def new_cache(self) -> KVCache:
        return self.inner.new_cache()

    def forward(self, segments: Seq[Segment], *, logits: bool = True, taps: Seq[int] = ()) -> Pass:
        if not logits:
            return self.inner.forward(segments, logits=False, taps=taps)
        began = time.perf_counter()
        out = self.inner.forward(segments, taps=taps)
        self.watch.target_s += time.perf_counter() - began
        self.watch.rows += sum(len(segment.tokens) for segment in segments)
        return out


class TimedDrafter:
    """A drafter whose work after the prompt is timed."""

    def __init__(self, inner: Drafter, watch: Stopwatch) -> None:
        self.inner, self.watch = inner, watch

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def laws(self) -> frozenset[DraftLaw]:
        return self.inner.laws

    @property
    def trees(self) -> bool:
        return self.inner.trees

    @property
    def wants(self) -> tuple[int, ...]:
        return self.inner.wants

    @property
    def reads_prediction(self) -> bool:
        return bool(getattr(self.inner, "reads_prediction", False))

    def full_length(self) -> TimedDrafter:
        """See `drafters.chain.full_length`."""
        return TimedDrafter(full_length(self.inner), self.watch)

    def open(self, seq: Sequence) -> None:
        self.inner.open(seq)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int], rng: Rng) -> Draft:
        began = time.perf_counter()
        draft = self.inner.propose(seqs, budgets, rng)
        self.watch.draft_s += time.perf_counter() - began
        return draft

    def commit(self, seq: Sequence, committed: Committed) -> None:
        began = time.perf_counter()
        self.inner.commit(seq, committed)
        if seq.output_len:
            self.watch.draft_s += time.perf_counter() - began

    def close(self, seq: Sequence) -> None:
        self.inner.close(seq)


class PlainRounds:
    """Plain decoding of one request, a round a call; `seconds` of each, and those of them `outside_s` the pass.
    `prompt_s` are those of the prompt, the first round included."""

    def __init__(self, engine: Engine, watch: Stopwatch) -> None:
        self.prompt_s = 0.0
        self.seconds: list[float] = []
        self.outside_s: list[float] = []
        self._engine, self._watch = engine, watch

    def step(self) -> None:
        """One round; nothing where the answer has ended."""
        if self._engine.idle:
            return
        self._watch.target_s, began = 0.0, time.perf_counter()
        self._engine.step()
        self.seconds.append(time.perf_counter() - began)
        self.outside_s.append(self.seconds[-1] - self._watch.target_s)


@contextmanager
def plain_rounds(llm: LLM, ids: list[int], count: int) -> Iterator[PlainRounds]:
    """`count` rounds behind `ids`, fewer where the context ends; the engine must be idle, and is so again afterwards.

    The round that takes the prompt has run.
    """
    tokens, engine = min(count + 1, llm.engine.target.context_length - len(ids)), llm.engine
    with timed(llm) as watch:
        rounds = PlainRounds(engine, watch)
        if tokens < 2:
            yield rounds
            return
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        request_id = engine.add(Request(ids, params, Speculation("none", 0)))
        try:
            began = time.perf_counter()
            engine.step()
            rounds.prompt_s = time.perf_counter() - began
            yield rounds
        finally:
            engine.cancel(request_id)


@contextmanager
def timed(llm: LLM) -> Iterator[Stopwatch]:
    """Puts proxies in the place of the engine's target and drafters. The caller may reset the stopwatch's fields.

    On the way out, by an exception too, the engine has the very objects back that it had before.
    """
    watch, engine = Stopwatch(), llm.engine
    target, drafters = engine.target, engine.router.drafters
    try:
        engine.target = TimedModel(target, watch)
        engine.router.drafters = {name: TimedDrafter(drafter, watch) for name, drafter in drafters.items()}
        yield watch
    finally:
        engine.target, engine.router.drafters = target, drafters
