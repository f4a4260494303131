"""The loop: admit, prefill, one round for the whole batch, retire. Works on token ids; `LLM` puts text around it."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.control.fixed import check_k
from outrider.core.protocols import Controller, Drafter, Governor, LanguageModel, Verifier
from outrider.core.registry import VERIFIERS, verifier_class
from outrider.core.rng import CounterRng, RecordingRng
from outrider.core.stats import SpecStats
from outrider.core.step import Decided, SeqRound, prefill, spec_step
from outrider.core.trace import StepTrace, trace_of
from outrider.core.types import NO_DRAFTER, Sequence, Switch
from outrider.engine.commit import Transcript
from outrider.engine.constraint import ConstraintFactory
from outrider.engine.request import Request, Result, Timings, TokenEvent
from outrider.engine.router import DrafterRouter
from outrider.engine.scheduler import Scheduler
from outrider.errors import ConfigError, RequestError
from outrider.models.tokenizer import Tokenizer


@dataclass(slots=True)
class _Job:
    """A request under way."""

    id: int
    request: Request
    transcripts: list[Transcript]
    prompt_s: float = 0.0
    decode_s: float = 0.0
    methods: dict[int, str] = field(default_factory=dict)
    switches: dict[int, list[Switch]] = field(default_factory=dict)


class Engine:
    """Runs requests in one continuous batch. Not thread-safe: one caller drives `add`, `step` and `cancel`.

    `drafters` maps method names to drafters; `method` and `rule` are what a request gets that asks for nothing.
    A governor may switch between them unless the request names one. `stop_ids` are the model's own end-of-sequence
    tokens. `on_trace` receives every round's StepTrace.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafters: dict[str, Drafter],
        controller: Controller,
        *,
        method: str = NO_DRAFTER,
        rule: str = "auto",
        tokenizer: Tokenizer | None = None,
        stop_ids: frozenset[int] = frozenset(),
        max_batch: int = 8,
        on_trace: Callable[[StepTrace], None] | None = None,
    ) -> None:
        self.target = target
        self.controller = controller
        self.router = DrafterRouter(drafters, self._governor.drafter if self._governor else None)
        self.method = method
        self.rule = rule
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids
        self.scheduler = Scheduler(max_batch)
        self.stats = SpecStats()
        self.target_passes = 0
        self._on_trace = on_trace
        self._rng = RecordingRng() if on_trace else CounterRng()
        self._jobs: dict[int, _Job] = {}
        self._transcripts: dict[int, tuple[_Job, Transcript]] = {}
        self._ids = itertools.count()
        self._events: list[TokenEvent] = []
        self._constraints: ConstraintFactory | None = None
        self._members: dict[str, tuple[str, ...]] = {n: getattr(d, "members", ()) for n, d in drafters.items()}

    def add(self, request: Request) -> int:
        """Queues a request and returns its id. Raises UserError, changing nothing, if it cannot run."""
        method = request.speculation.method or ("prediction" if request.prediction is not None else self.method)
        self._check(request, method)
        seqs = self._sequences(request)
        job = _Job(next(self._ids), request, [])
        for seq in seqs:
            transcript = Transcript(job.id, seq, self.target.context_length, self.tokenizer)
            job.transcripts.append(transcript)
            job.methods[seq.id] = method
            self._transcripts[seq.id] = (job, transcript)
            names = self._may_draft(request, method, seq.rule)
            self.router.assign(seq, *names)
            if self._governor is not None:
                self._governor.open(seq, names, self._members)
            self.scheduler.add(seq)
        self._jobs[job.id] = job
        return job.id

    def step(self) -> tuple[list[TokenEvent], dict[int, Result]]:
        """One round for every running sequence. Returns the tokens that became final and the requests that ended."""
        self._events = []
        joined = self.scheduler.admit()
        for seq in joined:
            self._prefill(seq)
        began = time.perf_counter()
        running = self.scheduler.running
        if running:
            self.target_passes += 1
            rounds = spec_step(running, self.target, self.router, self.controller, self._rng, self._commit)
            self._report(rounds)
        elapsed = time.perf_counter() - began
        for job in {id(job): job for job, _ in (self._transcripts[seq.id] for seq in running)}.values():
            job.decode_s += elapsed
        for seq in self.scheduler.retire():
            self._close(seq)
        return self._events, self._finished()

    def cancel(self, request_id: int) -> None:
        """Drops a request and frees what it held; unknown ids are ignored."""
        job = self._jobs.pop(request_id, None)
        for transcript in job.transcripts if job else []:
            seq = transcript.seq
            self.scheduler.remove(seq)
            if not seq.finished:
                self._close(seq)
            self._transcripts.pop(seq.id, None)

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    def check_integrity(self) -> None:
        """Asserts, when idle, that no sequence has left anything behind."""
        self.stats.check()
        if self.idle:
            assert not self._jobs, f"requests {sorted(self._jobs)} are left in an idle engine"
            assert not self._transcripts
            self.router.check_integrity()
            if self._governor is not None:
                self._governor.check_integrity()

    @property
    def _governor(self) -> Governor | None:
        """The controller, where it also says who drafts."""
        return self.controller if isinstance(self.controller, Governor) else None

    def _check(self, request: Request, method: str) -> None:
        prompt, limit, vocab = request.prompt_ids, self.target.context_length, self.target.vocab_size
        if not prompt:
            raise RequestError("the prompt is empty: give at least one token")
        if len(prompt) >= limit:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens and the context of {self.target.name} holds {limit}, of which "
                f"the answer needs at least 1: shorten the prompt to {limit - 1} tokens or fewer"
            )
        bad = next((token for token in prompt if not 0 <= token < vocab), None)
        if bad is not None:
            raise RequestError(f"prompt token id {bad} is not allowed: ids run from 0 to {vocab - 1}")
        params = request.params
        for name in ("logit_bias", "bad_token_ids", "stop_token_ids"):
            ids = getattr(params, name)
            bad = next((token for token in ids if not 0 <= token < vocab), None)
            if bad is not None:
                raise RequestError(f"{name} names token id {bad}: ids run from 0 to {vocab - 1}")
        if method not in self.router.drafters:
            known = ", ".join(self.router.drafters)
            raise ConfigError(f"drafter {method!r} is not loaded in this engine: choose one of {known}")
        require_judgeable(method, self.router.drafters[method], self._rule(request), self.target)
        if request.speculation.k is not None:
            check_k(request.speculation.k)
        if request.prediction is not None and not getattr(self.router.drafters[method], "reads_prediction", False):
            raise RequestError(f"drafter {method!r} does not read a prediction: name none, or 'prediction'")
        if (params.stop or params.json_schema is not None) and self.tokenizer is None:
            raise RequestError("stop strings and json_schema need a tokenizer: this engine was given none")

    def _may_draft(self, request: Request, method: str, rule: Verifier) -> list[str]:
        """The request's drafter, and behind it those that a governor may switch to."""
        if self._governor is None or request.speculation.method is not None:
            return [method]
        passed_over = {method, NO_DRAFTER} | (set() if request.prediction is not None else {"prediction"})
        others = {name: drafter for name, drafter in self.router.drafters.items() if name not in passed_over}
        return [method, *(n for n, other in others.items() if not unjudgeable(n, other, rule, self.target))]

    def _sequences(self, request: Request) -> list[Sequence]:
        params = request.params
        rule = self._rule(request)
        own_stops = frozenset(token for token in self.stop_ids if token < self.target.vocab_size)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else own_stops)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        seqs = []
        for choice in range(params.n):
            seq = Sequence(
                next(self._ids),
                list(request.prompt_ids),
                params,
                seed=seed,
                choice=choice,
                stop_ids=stop_ids,
                prediction=list(request.prediction) if request.prediction is not None else None,
                k=request.speculation.k,
            )
            seq.rule = rule
            seq.cache = self.target.new_cache()
            if params.json_schema is not None:
                seq.constraint = self._constraint_factory().json_schema(params.json_schema)
            seqs.append(seq)
        return seqs

    def _rule(self, request: Request) -> Verifier:
        name = request.speculation.rule or self.rule
        return verifier_class(resolve_rule(name, greedy=request.params.greedy))()

    def _constraint_factory(self) -> ConstraintFactory:
        if self._constraints is None:
            assert self.tokenizer is not None
            self._constraints = ConstraintFactory(self.tokenizer, self.target.vocab_size)
        return self._constraints

    def _prefill(self, seq: Sequence) -> None:
        began = time.perf_counter()
        self.router.open(seq)
        for committed in prefill(self.target, seq, self.router.wants):
            self.router.commit(seq, committed)
        self._transcripts[seq.id][0].prompt_s += time.perf_counter() - began

    def _report(self, rounds: list[SeqRound]) -> None:
        """Traces the rounds, where somebody listens."""
        if self._on_trace is not None:
            assert isinstance(self._rng, RecordingRng)
            for done in rounds:
                self._on_trace(trace_of(done, self._rng.take(done.seq.id)))

    def _commit(self, seq: Sequence, decided: list[Decided]) -> int:
        events = self._transcripts[seq.id][1].commit(decided)
        self._events.extend(events)
        return len(events)

    def _close(self, seq: Sequence) -> None:
        job, _ = self._transcripts[seq.id]
        job.methods[seq.id] = self.router.method(seq)
        if self._governor is not None:
            job.switches[seq.id] = self._governor.close(seq)
        self.router.close(seq)
        seq.cache.free()
        self.stats.add(seq.stats)

    def _finished(self) -> dict[int, Result]:
        results = {}
        for job in [job for job in self._jobs.values() if all(t.seq.finished for t in job.transcripts)]:
            del self._jobs[job.id]
            for transcript in job.transcripts:
                del self._transcripts[transcript.seq.id]
            results[job.id] = _result(job)
        return results


def require_judgeable(name: str, drafter: Drafter, rule: Verifier, target: LanguageModel) -> None:
    """Raises ConfigError when the drafter can make no draft that the rule judges and the target takes."""
    if (reason := unjudgeable(name, drafter, rule, target)) is not None:
        raise ConfigError(reason)


def unjudgeable(name: str, drafter: Drafter, rule: Verifier, target: LanguageModel) -> str | None:
    """Why the drafter can make no draft that the rule judges and the target takes, and what to do; None if it can."""
    if not drafter.laws & rule.laws:
        made, judged = (", ".join(sorted(law.value for law in laws)) for laws in (drafter.laws, rule.laws))
        return f"drafter {name!r} makes {made} drafts and rule {rule.name!r} judges {judged}: change one"
    if drafter.trees and not (rule.trees and target.trees):
        who = f"model {target.name!r}" if rule.trees else f"rule {rule.name!r}"
        return f"drafter {name!r} makes trees and {who} takes chains only: choose another drafter or rule"
    return None


def resolve_rule(name: str, *, greedy: bool) -> str:
    """The rule that runs: at temperature 0 always `greedy`; above, "auto" is `block` and `greedy` is refused."""
    if name != "auto":
        verifier_class(name)
    if greedy:
        return "greedy"
    if name == "greedy":
        others = ", ".join(rule for rule in VERIFIERS if rule != name)
        raise ConfigError(f"rule 'greedy' takes temperature 0 only: above it give auto, {others}")
    return "block" if name == "auto" else name


def _result(job: _Job) -> Result:
    completions = [t.completion(job.methods[t.seq.id], tuple(job.switches.get(t.seq.id, ()))) for t in job.transcripts]
    stats = SpecStats()
    for completion in completions:
        stats.add(completion.stats)
    timings = Timings(
        prompt_n=len(job.request.prompt_ids),
        prompt_ms=1000 * job.prompt_s,
        predicted_n=stats.emitted,
        predicted_ms=1000 * job.decode_s,
        draft_n=stats.drafted,
        draft_n_accepted=stats.accepted,
    )
    return Result(job.id, list(job.request.prompt_ids), completions, timings, stats)
