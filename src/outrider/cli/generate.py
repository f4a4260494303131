"""`outrider generate`: one prompt, its answer, and what speculation did for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import common
from outrider.cli.terminal import TokenPrinter, note, summary
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.cli.answer import Streamed
    from outrider.core.types import SamplingParams
    from outrider.engine.llm import LLM, Prompt
    from outrider.engine.request import Result, TokenEvent

EXIT_ERROR = 1
EXIT_INTERRUPTED = 130
SWITCHES_SHOWN = 8
"""Decisions of a governor that are shown, the latest; --json has more."""

File = Annotated[Path | None, typer.Option("--file", "-f", metavar="FILE", help="Read the prompt from a text file.")]
Prediction = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Text that the answer may repeat: drafts are copied from it."),
]
Compare = Annotated[bool, typer.Option("--compare", help="Also run plain: both speeds, and whether the text is equal.")]
Logprobs = Annotated[int | None, typer.Option(metavar="N", help="Log probabilities, and those of N alternatives.")]
Choices = Annotated[int, typer.Option("--n", metavar="N", help="Independent answers.")]
PromptText = Annotated[str | None, typer.Argument(metavar="[PROMPT]", help="The prompt; else --file, else piped in.")]


def generate(
    prompt: PromptText = None,
    file: File = None,
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
    n: Choices = 1,
    logprobs: Logprobs = None,
    json_schema: common.JsonSchema = None,
    prediction: Prediction = None,
    chat: common.Chat = None,
    system: common.System = None,
    dtype: common.Dtype = "auto",
    draft_dtype: common.DraftDtype = "auto",
    threads: common.Threads = None,
    offline: common.Offline = False,
    trace: common.TraceFile = None,
    compare: Compare = False,
    json: common.Json = False,
    quiet: common.Quiet = False,
) -> None:
    """Answer a prompt. Tokens appear as they come, coloured by origin; the last line says what speculation did."""
    text = common.read_prompt(prompt, file)
    predicted = common.read_text(prediction, "--prediction") if prediction is not None else None
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
        n=n,
        logprobs=logprobs,
    )
    if system is not None and chat is False:
        raise ConfigError("--system and --raw exclude each other: a raw prompt has no system message")
    from outrider.cli.answer import ModelChoice

    drafter = drafter or ("prediction" if predicted is not None and draft_model is None else None)
    choice = ModelChoice(
        model, drafter, draft_model, k, min_confidence, rule, dtype, draft_dtype, threads, offline, controller
    )
    with common.TraceWriter.to(trace) as tracing:
        llm = choice.open(quiet=quiet, on_trace=tracing.write if trace is not None else None)
        _Run(llm, params, _prompt(llm, text, chat, system), predicted, tracing, json, quiet).run(compare)


def _prompt(llm: LLM, text: str, chat: bool | None, system: str | None) -> Prompt:
    """The prompt as chat messages or as text."""
    from outrider.cli.answer import has_own_template, messages

    if chat or (chat is None and has_own_template(llm)):
        return messages(text, system)
    if system is not None:
        raise ConfigError("--system needs a chat template and this model has none: leave it out, or add --chat")
    return text


class _Run:
    """One call of `generate`, once the model is there."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        prompt: Prompt,
        prediction: str | None,
        tracing: common.TraceWriter,
        json: bool,
        quiet: bool,
    ) -> None:
        self.llm, self.params, self.prompt = llm, params, prompt
        self.prediction, self.tracing, self.json, self.quiet = prediction, tracing, json, quiet
        self.printer = TokenPrinter(legend=not quiet)

    def run(self, compare: bool) -> None:
        from outrider.cli.answer import Streamed, stream

        try:
            streamed = stream(self.llm, self.prompt, self.params, self._on_token, prediction=self.prediction)
        except KeyboardInterrupt:
            note("interrupted")
            streamed = Streamed()
        self.tracing.active = False
        self.printer.end()
        if streamed.result is None:
            if streamed.events:
                note(f"interrupted | {summary(streamed.stats, streamed.per_second)}")
            if self.json:
                self._print_document(streamed.partial(self.llm, self.prompt, self.params), None)
            raise typer.Exit(EXIT_INTERRUPTED)
        plain = self._plain() if compare else None
        if self.json:
            self._print_document(streamed.result, plain)
        else:
            self._print_answer(streamed, plain)
        if streamed.error is not None:
            note(streamed.error)
            raise typer.Exit(EXIT_ERROR)

    def _print_answer(self, streamed: Streamed, plain: Result | None) -> None:
        """What follows the tokens that were shown as they came."""
        from outrider.cli.answer import judge

        assert streamed.result is not None
        self._print_others(streamed)
        if self.params.logprobs is not None:
            self._print_logprobs(streamed.result)
        if plain is not None:
            note(f"plain: {judge(self.llm, self.params, streamed.result, plain).sentence}")
        if not self.quiet:
            timings = streamed.result.timings
            for switch in streamed.result.completions[0].switches[-SWITCHES_SHOWN:]:
                what = f"{switch.drafter}, K = {switch.k}" if switch.k else "plain steps"
                note(f"governor, from token {switch.position}: {what} ({switch.reason})")
            note(summary(streamed.stats, timings.predicted_per_second, plain.timings if plain else None))

    def _on_token(self, event: TokenEvent) -> None:
        if event.choice == 0 and not self.json:
            self.printer.token(event.text, event.origin.value)

    def _plain(self) -> Result:
        from outrider.engine.request import Speculation

        [plain] = self.llm.generate(self.prompt, self.params, speculation=Speculation(method="none"))
        return plain

    def _print_others(self, streamed: Streamed) -> None:
        """The answers after the first, which was shown as it came."""
        for index in range(1, self.params.n):
            note(f"answer {index + 1} of {self.params.n}")
            for event in streamed.events:
                if event.choice == index:
                    self.printer.token(event.text, event.origin.value)
            self.printer.end()

    def _print_logprobs(self, result: Result) -> None:
        from outrider.engine.report import token_text

        tokenizer = self.llm.tokenizer
        for completion in result.completions:
            for entry in completion.logprobs or []:
                others = ", ".join(f"{token_text(i, tokenizer)!r} {p:.3f}" for i, p in entry.top)
                print(f"{entry.logprob:8.3f}  {token_text(entry.token_id, tokenizer)!r:20}  {others}".rstrip())

    def _print_document(self, result: Result, plain: Result | None) -> None:
        from outrider.cli.answer import judge, preamble
        from outrider.engine.report import result_json

        report = {
            **preamble(self.llm, self.params.seed),
            **result_json(result, self.llm.tokenizer),
        }
        if plain is not None:
            found = judge(self.llm, self.params, result, plain)
            speed = plain.timings.predicted_per_second
            report["compare"] = {
                "outcome": found.outcome.value,
                "equal": result.text == plain.text,
                "reason": found.sentence,
                "plain_timings": plain.timings.to_json(),
                "speedup": result.timings.predicted_per_second / speed if speed else None,
            }
        common.print_json(report)
