"""`outrider tune`: does speculation pay on these prompts, with which drafter and how many tokens?"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import common
from outrider.cli.measuring import Category, IgnoreEos, Limit, Prompts, Refresh, Seed, Setup, WarmUp, console, facts
from outrider.cli.progress import counted_bar
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.bench.measured_costs import MeasuredCosts
    from outrider.bench.peer import Peer
    from outrider.core.types import SamplingParams
    from outrider.engine.llm import LLM
    from outrider.tune.drafters import Possible
    from outrider.tune.run import Tuned, Wanted

DEFAULT_KS = "1,2,3,4,5,6,8"
CONFIGURATION, REPORT, DOCUMENT = "outrider.toml", "report.html", "tune.json"

Temperatures = Annotated[
    list[str] | None,
    typer.Option(
        "--temperature",
        "-t",
        metavar="T[,T...]",
        help="Temperatures to record at; the verdict is made, and measured, at the first. [default: 0]",
    ),
]
Rule = Annotated[
    str,
    typer.Option(
        help="Acceptance rule: auto (greedy at temperature 0, coupled above), greedy, coupled; under others the text "
        "depends on what is drafted, so above temperature 0 they are refused."
    ),
]
Measure = Annotated[int, typer.Option(metavar="N", help="Candidates to measure, the fastest predicted ones; 0: none.")]
Repeat = Annotated[int, typer.Option(metavar="N", help="Measured answers of each prompt in each lane.")]
TimeBudget = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="Take fewer prompts and candidates, so that it takes about so long."),
]
Server = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Also measure this OpenAI-compatible server, beside the fastest candidates."),
]
Out = Annotated[
    Path, typer.Option(metavar="FOLDER", help=f"Where {CONFIGURATION}, {REPORT} and {DOCUMENT} are written; made here.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done and about how long it takes.")]


def tune(
    target: common.Target,
    prompts: Prompts = None,
    drafter: common.DrafterNames = None,
    draft_model: common.DraftModel = None,
    k: Annotated[list[str] | None, common.draft_lengths(DEFAULT_KS)] = None,
    rule: Rule = "auto",
    temperature: Temperatures = None,
    limit: Limit = None,
    category: Category = None,
    max_tokens: common.MaxTokens = 128,
    seed: Seed = 0,
    ignore_eos: IgnoreEos = False,
    measure: Measure = 3,
    repeat: Repeat = 1,
    warm_up: WarmUp = 1,
    time_budget: TimeBudget = None,
    server: Server = None,
    refresh: Refresh = False,
    chat: common.Chat = None,
    out: Out = Path("outrider-tune"),
    dtype: common.Dtype = "auto",
    draft_dtype: common.DraftDtype = "auto",
    threads: common.Threads = None,
    offline: common.Offline = False,
    dry_run: DryRun = False,
    json: common.Json = False,
    quiet: common.Quiet = False,
) -> None:
    """Record what drafters would have got right on your prompts, predict every draft length, measure the best.

    Writes a configuration for --config and a report to look at. It may say to leave speculation off, and why.
    """
    from outrider.bench.lanes import comparable_rules
    from outrider.bench.measure import check_counts
    from outrider.bench.peer import check_url
    from outrider.core.types import SamplingParams
    from outrider.tune.drafters import possible_drafters
    from outrider.tune.run import Wanted

    check_counts(repeat, warm_up)
    if measure < 0:
        raise ConfigError(f"--measure {measure} is not allowed: give a whole number >= 0")
    if time_budget is not None and not 0 < time_budget < float("inf"):
        raise ConfigError(f"--time-budget {time_budget:g} is not allowed: give seconds above 0")
    if server is not None:
        check_url(server, "--server")
    possible = possible_drafters(target, draft_model, common.split_names(drafter or []))
    setup = Setup.from_options(
        drafter=possible.names,
        k=k or [DEFAULT_KS],
        category=category,
        target=target,
        draft_model=draft_model,
        rule="coupled" if rule == "auto" else rule,
        prompts=prompts,
        limit=limit,
        chat=chat,
        dtype=dtype,
        draft_dtype=draft_dtype,
        threads=threads,
        offline=offline,
    )
    if not possible.names or not any(setup.every_k):
        raise ConfigError("nothing to compare with plain: name at least one drafter other than 'none', and one K >= 1")
    temperatures = _temperatures(temperature or ["0"])
    own = [SamplingParams(temperature=t, max_tokens=max_tokens, seed=seed, ignore_eos=ignore_eos) for t in temperatures]
    rules = [comparable_rules([rule], params)[0] for params in own]
    wanted = Wanted(
        possible.names, sorted({*setup.every_k} - {0}), temperatures, rules, measure, repeat, warm_up, time_budget
    )
    run = _Tune(setup, possible, own[0], wanted, out, refresh, json, quiet)
    if dry_run:
        run.dry_run()
        return
    run.run(server)


def _temperatures(texts: list[str]) -> list[float]:
    try:
        return list(dict.fromkeys(float(part) for part in ",".join(texts).split(",")))
    except ValueError:
        raise ConfigError(
            f"--temperature {','.join(texts)!r} is not allowed: give numbers >= 0 separated by commas, as in 0,0.7"
        ) from None


@dataclass(frozen=True, slots=True)
class _Tune:
    """One call of `tune`, its options checked. `params` are those of the first temperature."""

    setup: Setup
    possible: Possible
    params: SamplingParams
    wanted: Wanted
    out: Path
    refresh: bool
    json: bool
    quiet: bool

    def dry_run(self) -> None:
        from outrider.tune.estimate import estimate

        self.setup.check()
        if self.out.exists() and not self.out.is_dir():
            raise ConfigError(f"--out {self.out} is a file: give a folder, or a name that is free")
        found = estimate(self.setup.models, self.wanted, self.setup.read_prompts(), self.params.max_tokens or 1)
        if self.json:
            common.print_json(found.to_json())
            return
        for decision in self.possible.reasons:
            print(f"would try {decision.value}: {decision.reason}")
        for sentence in found.sentences():
            print(sentence)

    def run(self, url: str | None) -> None:
        """Measures, prints, writes."""
        self.setup.check()
        chosen = self.setup.read_prompts()
        self._make_folder()

        from outrider.bench.machine import machine_facts
        from outrider.bench.peer import Peer
        from outrider.tune.run import tune as tune_all

        key = os.environ.get("OUTRIDER_PEER_KEY")
        with closing(Peer(url, api_key=key, option="--server")) if url else nullcontext() as peer:
            if peer is not None:
                peer.connect()
            machine = machine_facts()
            llm = self.setup.open(quiet=self.quiet)
            raw = self.setup.raw(llm)
            kept = self._costs(llm, machine)
            doubts = self._doubts(machine, kept)
            tuned = tune_all(
                llm, chosen, self.params, self.wanted, kept.of_asked, raw=raw, bar=self._bar, peer=peer, doubts=doubts
            )
        machine["threads"] = machine_facts()["threads"]
        self._report(llm, tuned, facts(llm, self.setup, self.params, tuned.share.prompts, machine, raw), kept, peer)

    def _doubts(self, machine: dict[str, object], kept: MeasuredCosts) -> list[str]:
        """What makes every speed provisional, as in bench, and every prediction."""
        from outrider.bench.conclusion import BUILT_IN, BUSY
        from outrider.bench.machine import busy_hour

        now = busy_hour(machine) is not None
        costs = f"the costs were {kept.busy}: measure them again with --refresh"
        doubts = ((BUSY, now), (costs, kept.busy is not None and not now), (BUILT_IN, self.setup.prompts is None))
        return [doubt for doubt, holds in doubts if holds]

    def _make_folder(self) -> None:
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ConfigError(f"--out {self.out} cannot be made: {reason}; give another folder") from None

    def _costs(self, llm: LLM, machine: dict[str, object]) -> MeasuredCosts:
        from outrider.bench.machine import busy_hour
        from outrider.bench.measured_costs import update_costs

        self._say("measuring what passes and drafts cost, unless that is known")
        kept = update_costs(llm, refresh=self.refresh, busy=busy_hour(machine))
        kept.require_kept()
        self._say(kept.sentence())
        return kept

    @contextmanager
    def _bar(self, what: str, steps: int) -> Iterator[Callable[[], None]]:
        self._say(f"{what}: {steps} answers")
        with counted_bar("answers", steps, quiet=self.quiet) as step:
            yield step

    def _say(self, line: str) -> None:
        if not self.quiet:
            print(line, file=sys.stderr, flush=True)

    def _report(self, llm: LLM, tuned: Tuned, about: dict[str, object], kept: MeasuredCosts, peer: Peer | None) -> None:
        from outrider.bench.machine import busy_warning
        from outrider.tune.document import print_tuned, tune_json

        machine = about["machine"]
        assert isinstance(machine, dict)
        busy = busy_warning(machine)
        warnings = [*([busy] if busy else []), *llm.warnings]
        document = tune_json(tuned, self.possible.reasons, about, warnings)
        print_tuned(tuned, warnings, console(stderr=self.json))
        if self.json:
            common.print_json(document)
        self._write(llm, tuned, document, warnings)

    def _write(self, llm: LLM, tuned: Tuned, document: dict[str, object], warnings: list[str]) -> None:
        """The three files."""
        from json import dumps

        from outrider.tune.configuration import write_configuration
        from outrider.tune.document import figures
        from outrider.tune.report import report_html

        verdict, files = tuned.verdict, [self.out / name for name in (CONFIGURATION, REPORT, DOCUMENT)]
        try:
            write_configuration(
                files[0], self._values(llm, tuned), verdict.sentence, [*verdict.reasons, *warnings], figures(tuned)
            )
            files[1].write_text(report_html(tuned, document), encoding="utf-8")
            files[2].write_text(dumps(document, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ConfigError(f"{error.filename}: {reason}; make room, or give another --out") from None
        self._say(f"written: {', '.join(map(str, files))}; use it with outrider generate --config {files[0]}")

    def _values(self, llm: LLM, tuned: Tuned) -> dict[str, str | int | None]:
        """The configuration: what was tried, as it was tried."""
        from outrider.engine.opening import needs_of

        chosen = tuned.verdict.chosen
        needs = needs_of(chosen.drafter) if chosen else frozenset()
        return {
            "model": self.setup.target,
            "drafter": chosen.drafter if chosen else "none",
            "draft_model": self.setup.draft_model if needs & {"model", "head", "drafters"} else None,
            "k": chosen.k if chosen else 0,
            "rule": "auto" if tuned.wanted.rules[0] == "greedy" else tuned.wanted.rules[0],
            "dtype": self.setup.dtype,
            "draft_dtype": self.setup.draft_dtype,
            "threads": next(int(one.value) for one in llm.plan if one.field == "threads"),
        }
