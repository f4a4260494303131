"""`outrider bench`: what does speculation do for the speed of these prompts, on this machine?"""

from __future__ import annotations

from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import common
from outrider.cli.measuring import Category, IgnoreEos, Limit, Prompts, Seed, Setup, answers_bar, console, facts

if TYPE_CHECKING:
    from outrider.bench.measure import Measured
    from outrider.bench.peer import Peer
    from outrider.core.types import SamplingParams
    from outrider.engine.llm import LLM
    from outrider.engine.prompt_file import Conversation

DEFAULT_KS = "5"

DraftLengths = Annotated[list[str] | None, common.draft_lengths(DEFAULT_KS)]
Repeat = Annotated[int, typer.Option(metavar="N", help="Answers of each prompt in each lane; medians are reported.")]
WarmUp = Annotated[
    int, typer.Option(metavar="N", help="Short unmeasured answers of each lane before the first prompt.")
]
Turns = Annotated[int, typer.Option(metavar="N", help="Turns of each conversation; later ones follow plain's answers.")]
PeerUrl = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Also measure this OpenAI-compatible server, alternating with the lanes."),
]
PeerModel = Annotated[str | None, typer.Option(metavar="NAME", help="The peer's model. [default: the first it lists]")]
PeerKey = Annotated[
    str | None, typer.Option(metavar="KEY", envvar="OUTRIDER_PEER_KEY", help="The peer's API key, if it wants one.")
]


def bench(
    target: common.Target,
    drafter: common.DrafterNames = None,
    draft_model: common.DraftModel = None,
    k: DraftLengths = None,
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
    dtype: common.Dtype = "auto",
    draft_dtype: common.DraftDtype = "auto",
    threads: common.Threads = None,
    offline: common.Offline = False,
    json: common.Json = False,
    quiet: common.Quiet = False,
) -> None:
    """Measure plain and every drafter and K on the same prompts, alternating, with the answers compared.

    A table, then one JSON document as the last line of stdout (with --json the table goes to stderr).
    """
    from outrider.core.types import SamplingParams
    from outrider.engine.engine import resolve_rule

    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed, ignore_eos=ignore_eos)
    resolved = resolve_rule(rule, greedy=params.greedy)
    setup = Setup.from_options(
        drafter=drafter,
        k=k or [DEFAULT_KS],
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
    )
    _Bench(setup, params, resolved, repeat, warm_up, quiet).run(peer_url, peer_model, peer_key, json=json)


@dataclass(frozen=True, slots=True)
class _Bench:
    """One call of `bench`, its options checked. `rule` is the rule that really runs."""

    setup: Setup
    params: SamplingParams
    rule: str
    repeat: int
    warm_up: int
    quiet: bool

    def run(self, peer_url: str | None, peer_model: str | None, peer_key: str | None, *, json: bool) -> None:
        """Reads the prompts, connects to the peer, loads the models, measures, prints."""
        chosen = self.setup.read_prompts()

        from outrider.bench.conclusion import conclude
        from outrider.bench.machine import busy_warning, machine_facts
        from outrider.bench.peer import Peer
        from outrider.bench.summary import lengths, summarise
        from outrider.bench.tables import bench_json, print_bench

        with closing(Peer(peer_url, model=peer_model, api_key=peer_key)) if peer_url else nullcontext() as peer:
            if peer is not None:
                peer.connect()
            machine = machine_facts()
            llm = self.setup.open(quiet=self.quiet)
            raw = self.setup.raw(llm)
            measured = self._measure(llm, chosen, raw, peer)
        summaries = summarise(measured)
        machine["threads"] = machine_facts()["threads"]
        about = facts(llm, self.setup, self.params, chosen, machine, raw)
        about["measurement"] = {"repeat": self.repeat, "warm_up": self.warm_up, **lengths(measured)}
        busy = busy_warning(machine)
        warnings = [*([busy] if busy else []), *llm.warnings]
        verdict = conclude(summaries, busy=busy is not None, builtin=self.setup.prompts is None)
        print_bench(measured, summaries, warnings, console(stderr=json), verdict=verdict)
        common.print_json(bench_json(measured, summaries, about, warnings, verdict=verdict))

    def _measure(self, llm: LLM, chosen: list[Conversation], raw: bool, peer: Peer | None) -> Measured:
        from outrider.bench.lanes import lanes
        from outrider.bench.measure import bench as run_all

        wanted = lanes(llm, self.setup.drafters, self.setup.ks, [self.rule])
        total = sum(len(p.turns) for p in chosen) * self.repeat * (1 + len(wanted) + (peer is not None))
        with answers_bar(total, quiet=self.quiet) as on_run:
            return run_all(
                llm,
                chosen,
                self.params,
                wanted,
                repeat=self.repeat,
                warm_up=self.warm_up,
                raw=raw,
                peer=peer,
                on_run=on_run,
            )
