"""What `verify`, `bench`, `tune` and `profile` share: options, opening the models, prompts, the facts of a report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import common

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.bench.dry_run import Work
    from outrider.core.types import SamplingParams
    from outrider.engine.llm import LLM
    from outrider.engine.prompt_file import Conversation
    from outrider.models.load import LoadedModel

Prompts = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="JSONL: `prompt` or Spec-Bench's `turns` on each line. [default: built-in prompts]"
    ),
]
Limit = Annotated[int | None, typer.Option(metavar="N", help="Take the first N prompts only.")]
Category = Annotated[
    list[str] | None, typer.Option(metavar="NAME[,NAME...]", help="Take prompts of these categories only.")
]
Seed = Annotated[int, typer.Option(metavar="N", help="The seed of every answer.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on to --max-tokens, whatever the model says.")]
WarmUp = Annotated[
    int, typer.Option(metavar="N", help="Short unmeasured answers of each lane before the first prompt.")
]
Refresh = Annotated[bool, typer.Option("--refresh", help="Measure the kept costs again, also where they still hold.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Say which lanes, prompts and tokens that would be, and do nothing.")
]


@dataclass(frozen=True, slots=True)
class Setup:
    """What to load and which prompts to run, as the options say it."""

    target: str
    drafters: list[str]
    draft_model: str | None
    ks: dict[str, list[int]]
    rule: str
    prompts: Path | None
    limit: int | None
    categories: list[str]
    chat: bool | None
    dtype: str
    draft_dtype: str
    threads: int | None
    offline: bool
    turns: int = 1
    controller: str = "fixed"
    min_confidence: float | None = None

    @classmethod
    def from_options(
        cls, *, drafter: list[str] | None, k: list[str] | None, category: list[str] | None, **options: object
    ) -> Setup:
        """Checks what can be checked before anything is loaded; every list may hold comma-separated lists. Without a K
        each drafter takes its usual one. Raises UserError."""
        from outrider.bench.lanes import parse_ks
        from outrider.bench.lengths import usual_ks
        from outrider.engine.choosing import asked_for

        names = common.split_names(drafter or [])
        common.check_drafters(names)
        target, draft_model = str(options["target"]), options["draft_model"]
        given = None if draft_model is None else str(draft_model)
        names = names or ["ngram", "suffix", *asked_for(None, given)]
        return cls(
            drafters=names,
            ks=dict.fromkeys(names, parse_ks(",".join(k))) if k else usual_ks(names, target, given),
            categories=common.split_names(category or [], "--category"),
            **options,  # type: ignore[arg-type]  # named and typed by the command's own signature
        )

    def read_prompts(self) -> list[Conversation]:
        """The prompts; before the model is loaded, so that a mistake in the file costs no time."""
        from outrider.bench.prompts import builtin_prompts
        from outrider.engine.prompt_file import read_prompts

        if self.prompts is None:
            return builtin_prompts(self.limit, self.categories)
        return read_prompts(self.prompts, limit=self.limit, categories=self.categories, turns=self.turns)

    def open(self, *, quiet: bool) -> LLM:
        """Loads the models. Unless `quiet`, stderr says so, shows a download, and then the plan."""
        from outrider.cli.progress import download_bar
        from outrider.cli.terminal import print_loading, print_plan
        from outrider.engine.llm import LLM

        with download_bar(quiet=quiet) as progress:
            llm = LLM(
                self.target,
                drafter=self.drafters,
                draft_model=self.draft_model,
                k=max(self.every_k),
                min_confidence=self.min_confidence,
                rule=self.rule,
                controller=self.controller,
                dtype=self.dtype,
                draft_dtype=self.draft_dtype,
                threads=self.threads,
                max_batch=1,
                offline=self.offline,
                progress=progress,
                on_load=None if quiet else print_loading,
            )
        if not quiet:
            print_plan(llm.plan)
        return llm

    @property
    def every_k(self) -> list[int]:
        """Of all drafters."""
        return [k for own in self.ks.values() for k in own]

    @property
    def models(self) -> tuple[str, ...]:
        """What `open` would load."""
        return (self.target, *([self.draft_model] if self.draft_model else []))

    def check(self) -> None:
        """Refuses what `open` would refuse before it loads anything. Raises ConfigError."""
        from outrider.core.registry import controller_class
        from outrider.engine.choosing import check_options

        controller_class(self.controller)
        check_options(
            self.drafters,
            self.rule,
            self.threads,
            max(self.every_k),
            dtype=self.dtype,
            draft_dtype=self.draft_dtype,
            draft_model=self.draft_model,
            min_confidence=self.min_confidence,
        )

    def raw(self, llm: LLM) -> bool:
        """Whether prompts are given as they are, without the chat template."""
        from outrider.cli.answer import has_own_template

        return not (has_own_template(llm) if self.chat is None else self.chat)


def facts(
    llm: LLM, setup: Setup, params: SamplingParams, prompts: list[Conversation], machine: dict[str, object], raw: bool
) -> dict[str, object]:
    """Machine, model and settings of a report."""
    from outrider.bench.result_file import prompts_digest
    from outrider.engine.report import plan_json

    return {
        "machine": machine,
        "model": {
            "target": llm.name,
            "draft": llm.draft_name,
            "dtype": _dtype(llm.opened),
            "draft_dtype": _dtype(llm.opened_draft) or (setup.draft_dtype if llm.draft_name else None),
            "plan": plan_json(llm.plan),
            "warnings": list(llm.warnings),
        },
        "settings": {
            "prompts": str(setup.prompts) if setup.prompts else "built-in",
            "prompt_count": len(prompts),
            "prompts_digest": prompts_digest(prompts),
            "categories": sorted({prompt.category for prompt in prompts}),
            "form": form(raw),
            "turns": setup.turns,
            **settings(params),
            "batch": 1,
        },
    }


def _dtype(opened: LoadedModel | None) -> str | None:
    """What a model's weights are in memory."""
    return next((d.value for d in opened.decisions if d.field == "dtype"), None) if opened is not None else None


def form(raw: bool) -> str:
    """How prompts are given."""
    return "raw" if raw else "chat"


def settings(params: SamplingParams) -> dict[str, object]:
    """Of the answers."""
    return {
        "temperature": params.temperature,
        "max_tokens": params.max_tokens,
        "ignore_eos": params.ignore_eos,
        "seed": params.seed,
    }


def print_dry_run(work: Work, *, json: bool) -> None:
    """On stdout: sentences, or a document."""
    if json:
        common.print_json(work.to_json())
        return
    for sentence in work.sentences():
        print(sentence)


def console(*, stderr: bool) -> Console:
    """Where tables go. Wide enough for them when nobody looks."""
    from rich.console import Console

    made = Console(stderr=stderr)
    return made if made.is_terminal else Console(stderr=stderr, width=200)
