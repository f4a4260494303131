"""`outrider demo`: three prompts, each answered twice, plain and speculative: the same text, and the speed of both."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import typer

from outrider.cli import common
from outrider.cli.terminal import TokenPrinter, aside, heading, summary

if TYPE_CHECKING:
    from outrider.bench.compare import Comparison
    from outrider.cli.answer import Streamed
    from outrider.core.types import SamplingParams
    from outrider.engine.llm import LLM, Prompt
    from outrider.engine.request import Result

EXIT_DIFFERENT = 1
WARM_UP_TOKENS = 8
REPEAT_WITHIN_S = 6.0
"""A prompt whose two lanes took less than this runs twice more, alternating, and the median of each lane counts."""

LETTER = (
    "Dear Ms. Moreau,\nthank you for your letter of the third of May. The workshop on mountain weather takes place on "
    "Friday at nine o'clock in the small hall of the town library. Please bring warm clothes, a notebook and a map of "
    "the northern valley. Lunch is provided. We look forward to seeing you.\nYours sincerely,\nThe Organisers"
)
PROMPTS = {
    "prose": "Write a short paragraph about why the sea is salty.",
    "code": "Write a Python class Stack with the methods push, pop, peek, is_empty and size.",
    "edit": f"Copy this letter word for word.\n\n{LETTER}",
}


@dataclass(frozen=True, slots=True)
class _Lanes:
    """One prompt in both lanes, and how their answers compare (the worst of `runs` runs)."""

    name: str
    speculative: Result
    plain: Result
    runs: int
    comparison: Comparison

    @property
    def diverged(self) -> bool:
        from outrider.bench.compare import Outcome

        return self.comparison.outcome is Outcome.DIVERGED

    @property
    def ratio(self) -> float:
        base = self.plain.timings.predicted_per_second
        return self.speculative.timings.predicted_per_second / base if base else 0.0

    @property
    def plausible(self) -> bool:
        """Whether the ratio can be true: a round costs at least a plain step."""
        from outrider.bench.summary import PLAUSIBLE

        return self.ratio <= PLAUSIBLE * self.speculative.stats.acceptance_length

    def to_json(self) -> dict[str, object]:
        return {
            "prompt": self.name,
            "text": self.speculative.text,
            "outcome": self.comparison.outcome.value,
            "runs": self.runs,
            "speculative": self.speculative.timings.to_json(),
            "plain": self.plain.timings.to_json(),
            "speedup": self.ratio if self.plausible else None,
            "stats": self.speculative.stats.to_json(),
        }


def demo(
    model: common.Model = None,
    drafter: common.DrafterName = None,
    draft_model: common.DraftModel = None,
    k: common.DraftLength = None,
    max_tokens: common.MaxTokens = 64,
    dtype: common.Dtype = "auto",
    draft_dtype: common.DraftDtype = "auto",
    threads: common.Threads = None,
    offline: common.Offline = False,
    json: common.Json = False,
    quiet: common.Quiet = False,
) -> None:
    """Plain and speculative, side by side, on a small model. Exit code 1 if the texts differ by more than a tie."""
    from outrider.bench.machine import machine_facts
    from outrider.cli.answer import ModelChoice, preamble
    from outrider.core.types import SamplingParams

    params = SamplingParams(max_tokens=max_tokens)
    machine = machine_facts()
    choice = ModelChoice(model, drafter, draft_model, k, None, "auto", dtype, draft_dtype, threads, offline)
    llm = choice.open(quiet=quiet)
    machine["threads"] = machine_facts()["threads"]
    _warm_up(llm, params)
    shown = not json
    lanes = [_run(llm, name, prompt, params, shown=shown) for name, prompt in PROMPTS.items()]
    if shown:
        _conclude(lanes, machine)
    else:
        report = {**preamble(llm, None), "machine": machine, "prompts": [lane.to_json() for lane in lanes]}
        common.print_json(report)
    if any(lane.diverged for lane in lanes):
        raise typer.Exit(EXIT_DIFFERENT)


def _warm_up(llm: LLM, params: SamplingParams) -> None:
    """The first passes pay for things that later ones do not; neither lane shall carry that."""
    for method in (None, "none"):
        _answer(llm, "one two one two one two", replace(params, max_tokens=WARM_UP_TOKENS), method)


def _run(llm: LLM, name: str, text: str, params: SamplingParams, *, shown: bool) -> _Lanes:
    from outrider.bench.compare import worst
    from outrider.cli.answer import judge, messages, stream

    printer = TokenPrinter(legend=name == next(iter(PROMPTS)))
    if shown:
        heading(f"\n{name}: {text.splitlines()[0]}")
    prompt = messages(text, None)
    streamed = stream(
        llm, prompt, params, lambda event: printer.token(event.text, event.origin.value) if shown else None
    )
    printer.end()
    pairs = [(_finished(streamed), _answer(llm, prompt, params, "none"))]
    took_s = sum(lane.timings.prompt_ms + lane.timings.predicted_ms for lane in pairs[0]) / 1000
    if took_s < REPEAT_WITHIN_S:
        pairs += [(_answer(llm, prompt, params, None), _answer(llm, prompt, params, "none")) for _ in range(2)]
    found = [judge(llm, params, *pair) for pair in pairs]
    outcome = worst(comparison.outcome for comparison in found)
    comparison = next(one for one in found if one.outcome is outcome)
    speculative, plain = (_median(lane) for lane in zip(*pairs, strict=True))
    lanes = _Lanes(name, speculative, plain, len(pairs), comparison)
    if shown:
        measured = plain.timings if lanes.plausible else None
        figures = summary(speculative.stats, speculative.timings.predicted_per_second, measured)
        aside(f"plain gives {comparison.sentence} | {figures}")
    return lanes


def _median(results: Seq[Result]) -> Result:
    """The result of median speed."""
    return sorted(results, key=lambda result: result.timings.predicted_per_second)[len(results) // 2]


def _answer(llm: LLM, prompt: Prompt, params: SamplingParams, method: str | None) -> Result:
    from outrider.engine.request import Speculation

    [result] = llm.generate(prompt, params, speculation=Speculation(method))
    return result


def _finished(streamed: Streamed) -> Result:
    if streamed.result is None:
        raise KeyboardInterrupt
    return streamed.result


def _conclude(lanes: list[_Lanes], machine: Mapping[str, object]) -> None:
    """The table, and the plain truth about it."""
    from outrider.bench.machine import busy_warning
    from outrider.cli.terminal import table

    print()
    header = ("prompt", "plain tok/s", "speculative tok/s", "ratio", "rounds", "acceptance", "text")
    print(table((_row(lane) for lane in lanes), header))
    print(f"\n{_conditions(machine, lanes)}")
    busy = busy_warning(machine)
    if busy is not None:
        print(f"warning: {busy}")
    if not all(lane.plausible for lane in lanes):
        print("A ratio beyond the tokens a pass is noise: other work on this machine slowed one lane. Run it again.")
    slower = [lane.name for lane in lanes if lane.ratio < 1]
    if slower:
        print(f"Speculation was slower than plain on: {', '.join(slower)}. Too few draft tokens were kept there.")
    failed = sorted({lane.comparison.error for lane in lanes if lane.comparison.error})
    if failed:
        print(f"An answer ended in an error: {'; '.join(failed)}.")
    if any(lane.diverged and not lane.comparison.plain_failed for lane in lanes):
        print("A text differs by more than a tie. That is a bug: please report it.")


def _conditions(machine: Mapping[str, object], lanes: list[_Lanes]) -> str:
    """What the speeds depend on."""
    runs = min(lane.runs for lane in lanes)
    how = "one run each" if runs == 1 else f"medians of {runs} alternating runs"
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads; temperature 0, "
        f"one request at a time, after a warm-up of {WARM_UP_TOKENS} tokens, {how}"
    )


def _row(lane: _Lanes) -> tuple[str, ...]:
    from outrider.bench.compare import Outcome

    words = {Outcome.IDENTICAL: "the same", Outcome.TIE: "the same but for a tie"}
    stats = lane.speculative.stats
    return (
        lane.name,
        f"{lane.plain.timings.predicted_per_second:.1f}",
        f"{lane.speculative.timings.predicted_per_second:.1f}",
        f"{lane.ratio:.2f} x" if lane.plausible else "not measurable",
        f"{stats.rounds} for {stats.emitted} tokens",
        f"{stats.acceptance_rate:.0%} of {stats.drafted}",
        words.get(lane.comparison.outcome, "DIFFERENT"),
    )
