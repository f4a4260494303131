"""`outrider chat`: a conversation, turn by turn; on a terminal or piped, one line a turn."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import typer

from outrider.cli import common
from outrider.cli.terminal import TokenPrinter, note, summary
from outrider.errors import RequestError

if TYPE_CHECKING:
    from outrider.cli.answer import Streamed
    from outrider.core.types import SamplingParams
    from outrider.engine.llm import LLM

EXIT_ERROR = 1

COMMANDS = {
    "/reset": "forget the conversation",
    "/system TEXT": "set the system message (without TEXT: remove it) and forget the conversation",
    "/stats": "what speculation did so far",
    "/help": "this list",
    "/exit": "leave (or Ctrl-D)",
}


def chat(
    config: common.Config = None,
    model: common.Model = None,
    drafter: common.DrafterName = None,
    draft_model: common.DraftModel = None,
    k: common.DraftLength = None,
    min_confidence: common.MinConfidence = None,
    controller: common.ControllerName = "fixed",
    rule: common.Rule = "auto",
    temperature: common.Temperature = 0.0,
    top_k: common.TopK = 0,
    top_p: common.TopP = 1.0,
    min_p: common.MinP = 0.0,
    presence_penalty: common.PresencePenalty = 0.0,
    frequency_penalty: common.FrequencyPenalty = 0.0,
    repetition_penalty: common.RepetitionPenalty = 1.0,
    seed: common.Seed = None,
    max_tokens: common.MaxTokens = 256,
    stop: common.Stop = None,
    json_schema: common.JsonSchema = None,
    system: common.System = None,
    dtype: common.Dtype = "auto",
    draft_dtype: common.DraftDtype = "auto",
    threads: common.Threads = None,
    offline: common.Offline = False,
    trace: common.TraceFile = None,
    json: common.Json = False,
    quiet: common.Quiet = False,
) -> None:
    """Talk with a model. Each line is a turn; /help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves."""
    params = common.sampling_params(
        seed,
        stop,
        json_schema,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        max_tokens=max_tokens,
    )
    from outrider.cli.answer import ModelChoice

    choice = ModelChoice(
        model, drafter, draft_model, k, min_confidence, rule, dtype, draft_dtype, threads, offline, controller
    )
    with common.TraceWriter.to(trace) as tracing:
        llm = choice.open(quiet=quiet, on_trace=tracing.write if trace is not None else None)
        conversation = Conversation(llm, params, system, show=not json, quiet=quiet)
        _talk(conversation)
        if json:
            common.print_json(conversation.document())
        if conversation.failed:
            raise typer.Exit(EXIT_ERROR)


def _talk(conversation: Conversation) -> None:
    """Reads turns until /exit or the end of the input."""
    interactive = sys.stdin.isatty()
    if interactive:
        note("a line is a turn; /help lists the commands")
    for line in _lines(interactive):
        text = line.strip()
        if text == "/exit":
            return
        if not text:
            continue
        try:
            if text.startswith("/"):
                _command(conversation, text)
            else:
                conversation.turn(text)
        except KeyboardInterrupt:
            note("stopped before the answer began")
        except RequestError as error:
            if not interactive:
                raise
            note(str(error))


def _lines(interactive: bool) -> Iterator[str]:
    """The user's lines. Ctrl-C while typing drops the line."""
    if not interactive:
        yield from iter(sys.stdin.readline, "")
        return
    with suppress(ImportError):
        import readline  # noqa: F401  (input() edits lines and keeps a history once this is imported)

    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            note("/exit or Ctrl-D leaves")


def _command(conversation: Conversation, text: str) -> None:
    name, _, rest = text.partition(" ")
    if name == "/reset":
        conversation.reset()
        note("the conversation is forgotten")
    elif name == "/system":
        conversation.system = rest.strip() or None
        conversation.reset()
        note("system message set, conversation forgotten" if conversation.system else "no system message any more")
    elif name == "/stats":
        note(conversation.totals())
    else:
        if name != "/help":
            note(f"{name} is no command; these are:")
        for command, meaning in COMMANDS.items():
            note(f"  {command:13} {meaning}")


class Conversation:
    """The turns so far, and what they cost. A turn that fails leaves no trace in the history, and sets `failed`."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, *, show: bool, quiet: bool) -> None:
        from outrider.core.stats import SpecStats

        self.llm, self.params, self.system = llm, params, system
        self.history: list[tuple[str, str]] = []
        self.turns: list[dict[str, object]] = []
        self.stats = SpecStats()
        self.seconds = 0.0
        self.failed = False
        self._show, self._quiet = show, quiet
        self._printer = TokenPrinter(legend=not quiet)

    def reset(self) -> None:
        self.history.clear()

    def turn(self, text: str) -> None:
        """Answers one turn. Raises RequestError; KeyboardInterrupt when stopped before the first token."""
        from outrider.cli.answer import stream

        prompt = self._fit(text)
        streamed = stream(
            self.llm,
            prompt,
            self.params,
            lambda event: self._printer.token(event.text, event.origin.value) if self._show else None,
        )
        self._printer.end()
        self._account(text, streamed, len(prompt))
        if streamed.error is None:
            self.history.append((text, streamed.text))
        else:
            self.failed = True
            note(streamed.error)
        if not self._quiet:
            mark = "stopped | " if streamed.interrupted else ""
            note(mark + summary(streamed.stats, streamed.per_second))

    def totals(self) -> str:
        per_second = self.stats.emitted / self.seconds if self.seconds else 0.0
        return f"{len(self.turns)} turns | {summary(self.stats, per_second)}"

    def document(self) -> dict[str, object]:
        """The whole conversation, for --json."""
        from outrider.cli.answer import preamble
        from outrider.engine.report import metrics_json, usage_json

        n_prompt = sum(int(str(turn["prompt_tokens"])) for turn in self.turns)
        return {
            **preamble(self.llm, self.params.seed),
            "turns": self.turns,
            "usage": usage_json(n_prompt, self.stats.emitted),
            "metrics": metrics_json(self.stats),
        }

    def _fit(self, text: str) -> list[int]:
        """Token ids of the conversation with this turn; the oldest turns go when the context cannot hold them all."""
        limit = self.llm.engine.target.context_length
        room = min(self.params.max_tokens or limit, limit // 4)
        dropped = 0
        prompt = self.llm.encode_prompt(self._messages(text))
        while self.history and len(prompt) + room > limit:
            self.history.pop(0)
            dropped += 1
            prompt = self.llm.encode_prompt(self._messages(text))
        if dropped:
            note(f"the context of {limit} tokens is full: the {dropped} oldest turn(s) were dropped")
        return prompt

    def _messages(self, text: str) -> list[dict[str, object]]:
        from outrider.cli.answer import messages

        *system, user = messages(text, self.system)
        past: list[dict[str, object]] = []
        for said, answered in self.history:
            past += [{"role": "user", "content": said}, {"role": "assistant", "content": answered}]
        return [*system, *past, user]

    def _account(self, text: str, streamed: Streamed, n_prompt: int) -> None:
        from outrider.cli.answer import CANCELLED

        result = streamed.result
        self.stats.add(streamed.stats)
        self.seconds += result.timings.predicted_ms / 1000 if result is not None else streamed.seconds
        self.turns.append(
            {
                "user": text,
                "text": streamed.text,
                "token_ids": [event.token_id for event in streamed.events],
                "origins": [event.origin.value for event in streamed.events],
                "finish_reason": result.completions[0].finish_reason if result is not None else CANCELLED,
                "prompt_tokens": n_prompt,
                "timings": result.timings.to_json() if result is not None else None,
            }
        )
