"""`outrider bench`: what does speculation do for the speed of these prompts, on this machine?"""

from __future__ import annotations

import os
import sys
import time
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import common
from outrider.cli.measuring import (
    Category,
    DryRun,
    IgnoreEos,
    Limit,
    Prompts,
    Seed,
    Setup,
    WarmUp,
    console,
    facts,
    form,
    print_dry_run,
    settings,
)
from outrider.cli.progress import counted_bar
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.bench.baseline import Allowed
    from outrider.bench.dry_run import Work
    from outrider.bench.measure import Measured
    from outrider.bench.peer import Peer
    from outrider.bench.price import Price
    from outrider.bench.result_file import ResultFile
    from outrider.bench.summary import LaneSummary
    from outrider.core.types import SamplingParams
    from outrider.engine.llm import LLM
    from outrider.engine.prompt_file import Conversation

EXIT_FELL = 1

DraftLengths = Annotated[list[str] | None, common.draft_lengths("what a head's card says, else 5")]
ControllerName = Annotated[
    str,
    typer.Option(
        "--controller",
        metavar="NAME",
        help="governor adds a lane in which it decides each round who drafts and how much, up to the largest K, by "
        "costs that outrider profile has kept; the other lanes are fixed.",
    ),
]
Repeat = Annotated[int, typer.Option(metavar="N", help="Answers of each prompt in each lane; medians are reported.")]
Turns = Annotated[int, typer.Option(metavar="N", help="Turns of each conversation; later ones follow plain's answers.")]
PeerUrl = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Also measure this OpenAI-compatible server, alternating with the lanes."),
]
PeerModel = Annotated[str | None, typer.Option(metavar="NAME", help="The peer's model. [default: the first it lists]")]
PeerKey = Annotated[
    str | None, typer.Option(metavar="KEY", envvar="OUTRIDER_PEER_KEY", help="The peer's API key, if it wants one.")
]
Out = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the document and every answer's figures, to compare later.")
]
Markdown = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a table of every lane in every category as Markdown.")
]
SpecBench = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Write each lane's answers as Spec-Bench's evaluation scripts read them."),
]
PricePerHour = Annotated[
    float | None, typer.Option(metavar="X", help="Of this machine: adds the price of a million tokens.")
]
Watts = Annotated[
    float | None, typer.Option(metavar="W", help="Of this machine at work: adds the energy of a million tokens.")
]
Baseline = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A file of --out: exit with 1 where a lane fell below it by more than allowed."),
]
MinAcceptance = Annotated[
    float | None,
    typer.Option(
        "--min-acceptance-ratio",
        metavar="X",
        help="Least acceptance length, as a share of the baseline's. [default: 1]",
    ),
]
MinSpeed = Annotated[
    float | None,
    typer.Option(
        "--min-speed-ratio",
        metavar="X",
        help="Least speed-up over plain, as a share of the baseline's. [default: 0.9]",
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Nothing on stdout but the JSON document, which is its last line in any case: the table to stderr.",
    ),
]


def bench(
    target: common.Target,
    config: common.Config = None,
    drafter: common.DrafterNames = None,
    draft_model: common.DraftModel = None,
    k: DraftLengths = None,
    min_confidence: common.MinConfidence = None,
    controller: ControllerName = "fixed",
    rule: common.Rule = "auto",
    prompts: Prompts = None,
    limit: Limit = None,
    category: Category = None,
    turns: Turns = 1,
    max_tokens: common.MaxTokens = 128,
    temperature: common.Temperature = 0.0,
    seed: Seed = 0,
    ignore_eos: IgnoreEos = False,
    repeat: Repeat = 1,
    warm_up: WarmUp = 1,
    chat: common.Chat = None,
    peer_url: PeerUrl = None,
    peer_model: PeerModel = None,
    peer_key: PeerKey = None,
    out: Out = None,
    markdown: Markdown = None,
    spec_bench: SpecBench = None,
    price_per_hour: PricePerHour = None,
    watts: Watts = None,
    baseline: Baseline = None,
    min_acceptance_ratio: MinAcceptance = None,
    min_speed_ratio: MinSpeed = None,
    dtype: common.Dtype = "auto",
    draft_dtype: common.DraftDtype = "auto",
    threads: common.Threads = None,
    offline: common.Offline = False,
    dry_run: DryRun = False,
    json: Json = False,
    quiet: common.Quiet = False,
) -> None:
    """Measure plain and every drafter and K on the same prompts, alternating, with the answers compared.

    A table, then one JSON document as the last line of stdout (with --json the table goes to stderr). With --baseline
    the exit code is 1 where acceptance or speed fell.
    """
    from outrider.bench.measure import check_counts
    from outrider.bench.price import Price
    from outrider.core.types import SamplingParams
    from outrider.engine.engine import resolve_rule

    check_counts(repeat, warm_up)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed, ignore_eos=ignore_eos)
    resolved = resolve_rule(rule, greedy=params.greedy)
    setup = Setup.from_options(
        drafter=drafter,
        k=k,
        category=category,
        target=target,
        draft_model=draft_model,
        rule=rule,
        prompts=prompts,
        limit=limit,
        chat=chat,
        dtype=dtype,
        draft_dtype=draft_dtype,
        threads=threads,
        offline=offline,
        turns=turns,
        controller=controller,
        min_confidence=min_confidence,
    )
    run = _Bench(
        setup,
        params,
        resolved,
        repeat,
        warm_up,
        quiet,
        _Files(out, markdown, spec_bench),
        Price(price_per_hour, watts),
        _Gate.of(baseline, min_acceptance_ratio, min_speed_ratio),
    )
    if dry_run:
        print_dry_run(run.work(max_tokens, has_peer=peer_url is not None), json=json)
        return
    run.run(peer_url, peer_model, peer_key, json=json)


@dataclass(frozen=True, slots=True)
class _Files:
    """What is written beside the report; None: it is not. Raises ConfigError, before anything is measured, for a place
    that cannot be written."""

    out: Path | None
    markdown: Path | None
    spec_bench: Path | None

    def __post_init__(self) -> None:
        for option, path in (("--out", self.out), ("--markdown", self.markdown)):
            if path is not None and not _writable(path):
                raise ConfigError(
                    f"{option} {path} cannot be written: give a file that may be, in a folder that exists"
                )
        if self.spec_bench is not None and not (self.spec_bench.is_dir() and os.access(self.spec_bench, os.W_OK)):
            raise ConfigError(f"--spec-bench {self.spec_bench} is no folder that can be written: make it first")

    def write(self, measured: Measured, summaries: list[LaneSummary], target: str, document: dict[str, object]) -> None:
        """All that were asked for. Raises ConfigError where the disk fails."""
        from outrider.bench.markdown import markdown_table
        from outrider.bench.result_file import write_result
        from outrider.bench.spec_bench import write_answers

        try:
            if self.out is not None:
                write_result(self.out, document, measured)
            if self.markdown is not None:
                self.markdown.write_text(markdown_table(summaries), "utf-8")
            if self.spec_bench is not None:
                write_answers(measured, target, self.spec_bench, now=time.time())
        except OSError as error:
            reason, what = (error.strerror or str(error)).lower(), error.filename or "a file of the results"
            raise ConfigError(f"{what} was not written: {reason}; make room, or give another place") from None


def _writable(path: Path) -> bool:
    """Whether a file can be written there, over one that is there."""
    return not path.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)


@dataclass(frozen=True, slots=True)
class _Gate:
    """The stored result that this run must not fall below."""

    baseline: ResultFile
    allowed: Allowed

    @classmethod
    def of(cls, path: Path | None, acceptance: float | None, speed: float | None) -> _Gate | None:
        """None without a baseline. Raises ConfigError for a file that is none, or shares of nothing."""
        from outrider.bench.baseline import Allowed
        from outrider.bench.result_file import ResultFile

        told = {"acceptance_ratio": acceptance, "speed_ratio": speed}
        allowed = Allowed(**{name: share for name, share in told.items() if share is not None})
        if path is None:
            for option, share in (("--min-acceptance-ratio", acceptance), ("--min-speed-ratio", speed)):
                if share is not None:
                    raise ConfigError(
                        f"{option} {share:g} is a share of a baseline's figure and no --baseline was given: name a "
                        "file of bench --out with it, or leave the share out"
                    )
            return None
        return cls(ResultFile(path, "--baseline"), allowed)

    def check_before(
        self, setup: Setup, params: SamplingParams, rule: str, prompts: list[Conversation], lanes: list[str]
    ) -> None:
        """Refuses what cannot be compared, before anything is loaded. Raises ConfigError."""
        from outrider.bench.baseline import draft_counts, require_common_lane, require_same_settings
        from outrider.bench.result_file import prompts_digest

        require_common_lane(self.baseline, lanes)
        asked = {"prompts_digest": prompts_digest(prompts), "turns": setup.turns, "rule": rule, **settings(params)}
        if draft_counts(self.baseline, lanes):
            asked["draft"] = setup.draft_model
        require_same_settings(self.baseline, asked)

    def check_form(self, raw: bool) -> None:
        """The same of what only the model tells."""
        from outrider.bench.baseline import require_same_settings

        require_same_settings(self.baseline, {"form": form(raw)})

    def judge(self, summaries: list[LaneSummary], about: dict[str, object]) -> dict[str, object]:
        """What fell, a line each on stderr, or that nothing did; and as JSON."""
        from outrider.bench.baseline import falls, sentence, unchecked
        from outrider.bench.lanes import PLAIN

        found = falls(self.baseline, summaries, self.allowed)
        lanes = list(dict.fromkeys(s.lane for s in summaries if s.lane != PLAIN))
        notes = unchecked(self.baseline, lanes, about)
        held = [] if found else [f"baseline: {sentence(self.baseline, summaries, self.allowed)}"]
        lines = [*(f"note: {note}" for note in notes), *(f"outrider: bench: {fall.sentence}" for fall in found), *held]
        for line in lines:
            print(line, file=sys.stderr, flush=True)
        return {
            "file": str(self.baseline.path),
            "min_acceptance_ratio": self.allowed.acceptance_ratio,
            "min_speed_ratio": self.allowed.speed_ratio,
            "falls": [fall.to_json() for fall in found],
            "notes": notes,
        }


@dataclass(frozen=True, slots=True)
class _Bench:
    """One call of `bench`, its options checked. `rule` is the rule that really runs."""

    setup: Setup
    params: SamplingParams
    rule: str
    repeat: int
    warm_up: int
    quiet: bool
    files: _Files
    price: Price
    gate: _Gate | None

    def work(self, max_tokens: int, *, has_peer: bool) -> Work:
        """What `run` would do. Raises UserError for what it would refuse before it loads a model."""
        from outrider.bench.dry_run import Work
        from outrider.bench.lanes import PLAIN
        from outrider.bench.measure import PEER, WARM_UP_TOKENS

        self.setup.check()
        chosen = self._prompts()
        lanes = (PLAIN, *self._lane_names(), *([PEER] if has_peer else []))
        return Work(
            "bench",
            self.setup.models,
            lanes,
            chosen,
            max_tokens,
            self.repeat,
            self.warm_up,
            warm_up_tokens=WARM_UP_TOKENS,
        )

    def _lane_names(self) -> list[str]:
        from outrider.bench.lanes import GOVERNOR, combinations

        fixed = [lane.name for lane in combinations(self.setup.ks, [self.rule])]
        return [*fixed, *([GOVERNOR] if self._governed else [])]

    @property
    def _governed(self) -> bool:
        from outrider.bench.lanes import GOVERNOR

        return self.setup.controller == GOVERNOR

    def _prompts(self) -> list[Conversation]:
        """Read, and found comparable with the baseline."""
        chosen = self.setup.read_prompts()
        if self.gate is not None:
            self.gate.check_before(self.setup, self.params, self.rule, chosen, self._lane_names())
        return chosen

    def run(self, peer_url: str | None, peer_model: str | None, peer_key: str | None, *, json: bool) -> None:
        """Reads the prompts, connects to the peer, loads the models, measures, prints, writes; exits with 1 where a
        lane fell below the baseline."""
        chosen = self._prompts()

        from outrider.bench.machine import machine_facts
        from outrider.bench.peer import Peer

        with closing(Peer(peer_url, model=peer_model, api_key=peer_key)) if peer_url else nullcontext() as peer:
            if peer is not None:
                peer.connect()
            machine = machine_facts()
            llm = self.setup.open(quiet=self.quiet)
            raw = self.setup.raw(llm)
            if self.gate is not None:
                self.gate.check_form(raw)
            measured = self._measure(llm, chosen, raw, peer)
        machine["threads"] = machine_facts()["threads"]
        about = facts(llm, self.setup, self.params, chosen, machine, raw)
        self._report(llm, measured, about, machine, json=json)

    def _report(
        self, llm: LLM, measured: Measured, about: dict[str, object], machine: dict[str, object], *, json: bool
    ) -> None:
        from outrider.bench.conclusion import conclude
        from outrider.bench.machine import busy_warning
        from outrider.bench.summary import lengths, summarise
        from outrider.bench.tables import bench_json, print_bench

        summaries = summarise(measured)
        about["measurement"] = {"repeat": self.repeat, "warm_up": self.warm_up, **lengths(measured)}
        busy = busy_warning(machine)
        warnings = [*([busy] if busy else []), *llm.warnings]
        verdict = conclude(summaries, busy=busy is not None, builtin=self.setup.prompts is None)
        price = self.price if self.price.given else None
        print_bench(measured, summaries, warnings, console(stderr=json), verdict=verdict, price=price)
        judged = self.gate.judge(summaries, about) if self.gate is not None else None
        document = bench_json(measured, summaries, about, warnings, verdict=verdict, price=price)
        document["baseline"] = judged
        common.print_json(document)
        self.files.write(measured, summaries, llm.name, document)
        if judged is not None and judged["falls"]:
            raise typer.Exit(EXIT_FELL)

    def _measure(self, llm: LLM, chosen: list[Conversation], raw: bool, peer: Peer | None) -> Measured:
        from outrider.bench.lanes import governor_lane, lanes, ungoverned
        from outrider.bench.measure import bench as run_all

        wanted = lanes(llm, self.setup.ks, [self.rule])
        wanted += [governor_lane(self.rule)] if self._governed else []
        total = sum(len(p.turns) for p in chosen) * self.repeat * (1 + len(wanted) + (peer is not None))
        with counted_bar("answers", total, quiet=self.quiet) as on_run:
            return run_all(
                llm,
                chosen,
                self.params,
                wanted,
                repeat=self.repeat,
                warm_up=self.warm_up,
                raw=raw,
                peer=peer,
                ungoverned=ungoverned(llm) if self._governed else None,
                on_run=on_run,
            )
