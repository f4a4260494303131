"""`outrider sim`: what would another drafter, draft length or machine give? The engine's loop on a virtual clock."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import common
from outrider.cli.progress import counted_bar
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.sim.machines import Machine
    from outrider.sim.report import Answer, Question
    from outrider.sim.workload import Workload

DEFAULT_KS = "1,2,3,5,8"
DEFAULT_MACHINE = "ideal"

Alpha = Annotated[
    list[str] | None, typer.Option(metavar="A[,A...]", help="Accept every draft token with probability A.")
]
Acceptance = Annotated[
    str | None,
    typer.Option(metavar="P,P...", help="Acceptance at each draft position, given that those before were accepted."),
]
Ranks = Annotated[
    str | None,
    typer.Option(
        metavar="P,P...",
        help="The chance that the token is the draft's first choice, its second, ...: the best tree of K nodes.",
    ),
]
Tables = Annotated[
    float | None,
    typer.Option(metavar="NOISE", help="Two random tables, the draft's with so much noise, under a real rule."),
]
Bench = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Replay the acceptance that a document of outrider bench recorded.")
]
Drafters = Annotated[
    list[str] | None,
    typer.Option("--drafter", "-d", metavar="NAME[,NAME...]", help="Of --bench these only. [default: all]"),
]
Category = Annotated[str, typer.Option(metavar="NAME", help="Of --bench the prompts of this category.")]
Machines = Annotated[
    list[str] | None,
    typer.Option(
        "--machine",
        metavar="NAME|FILE[,...]",
        help="What passes cost: a document of outrider profile --json, or a built-in name (--list). "
        f"[default: {DEFAULT_MACHINE}]",
    ),
]
DraftCost = Annotated[
    float | None,
    typer.Option(
        metavar="C",
        help="A pass of the draft model in passes of the target over one row. [default: what --bench or the machine "
        "says]",
    ),
]
DraftLengths = Annotated[list[str] | None, common.draft_lengths(f"{DEFAULT_KS}, as far as acceptance is known")]
Tokens = Annotated[int, typer.Option(metavar="N", help="Length of the simulated answer.")]
Seed = Annotated[int, typer.Option(metavar="N", help="The seed of every draw.")]
List = Annotated[bool, typer.Option("--list", help="Print the built-in machines and their sources, and stop.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be simulated on what, and stop.")]


def sim(
    alpha: Alpha = None,
    acceptance: Acceptance = None,
    ranks: Ranks = None,
    tables: Tables = None,
    bench: Bench = None,
    drafter: Drafters = None,
    category: Category = "all",
    rule: common.Rule = "auto",
    machine: Machines = None,
    draft_cost: DraftCost = None,
    k: DraftLengths = None,
    tokens: Tokens = 2000,
    seed: Seed = 0,
    list_machines: List = False,
    dry_run: DryRun = False,
    json: common.Json = False,
    quiet: common.Quiet = False,
) -> None:
    """Simulate drafts of a given acceptance on machines of given costs, beside what theory says. No model is loaded.

    With --json one JSON document is the last line of stdout, and the table goes to stderr.
    """
    from outrider.sim.machines import MACHINES, find_machine
    from outrider.sim.recorded import recorded

    if list_machines:
        _print_machines(list(MACHINES.values()), json=json)
        return
    drafters = common.split_names(drafter or [])
    given = {"--alpha": ",".join(alpha) if alpha else None, "--acceptance": acceptance, "--ranks": ranks}
    chances = {option: _chances(text, option) for option, text in given.items() if text is not None}
    _require_acceptance(bool(chances), tables, rule, bench, chooses=bool(drafters) or category != "all")
    machines = [find_machine(name) for name in common.split_names(machine or [DEFAULT_MACHINE], "--machine")]
    for one in machines if chances else ():
        one.draft_cost(draft_cost)
    replayed = recorded(bench, drafters, category) if bench is not None else []

    from outrider.bench.lanes import parse_ks
    from outrider.cli.measuring import console
    from outrider.sim.report import answer, ask, document

    workloads = list(dict.fromkeys([*_supposed(chances, tables, rule), *replayed]))
    questions = ask(workloads, machines, parse_ks(",".join(k or [DEFAULT_KS])), draft_cost, tokens, given=bool(k))
    answers: list[Answer] = []
    if not dry_run:
        with counted_bar("simulations", len(questions), quiet=quiet) as on_question:
            answers = answer(questions, tokens, seed, on_question)
    shown = console(stderr=json)
    _print(questions, answers, shown, dry_run=dry_run)
    if json:
        common.print_json(document(questions, answers, tokens=tokens, seed=seed, dry_run=dry_run))


def _require_acceptance(
    has_chances: bool, tables: float | None, rule: str, bench: Path | None, *, chooses: bool
) -> None:
    """Raises ConfigError where nothing says how often drafts are accepted, or an option lacks the one that it needs."""
    if chooses and bench is None:
        raise ConfigError(
            "--drafter and --category choose from a document of outrider bench: give it with --bench FILE, or leave "
            "them out"
        )
    if rule != "auto" and tables is None:
        raise ConfigError(
            f"--rule {rule} judges drafts of --tables only, for the other acceptances are told, not judged: give "
            "--tables NOISE with it, or leave it out"
        )
    if not has_chances and tables is None and bench is None:
        raise ConfigError(
            "how often drafts are accepted was not said: give --alpha A, --acceptance P,P..., --ranks P,P... or "
            "--tables NOISE, each with --draft-cost C unless the machine says what drafting costs, or --bench FILE "
            "with what outrider bench recorded; as in --alpha 0.8 --draft-cost 0.1"
        )


def _supposed(chances: Mapping[str, list[float]], tables: float | None, rule: str) -> list[Workload]:
    """Every acceptance that nobody recorded, in the order of the options."""
    from outrider.engine.engine import resolve_rule
    from outrider.sim.workload import Tables, by_position, by_rank, iid

    found: list[Workload] = [*map(iid, chances.get("--alpha", ()))]
    for option, made in (("--acceptance", by_position), ("--ranks", by_rank)):
        if option in chances:
            found.append(made(chances[option]))
    if tables is not None:
        found.append(Tables(tables, resolve_rule(rule, greedy=False)))
    return found


def _chances(text: str, option: str) -> list[float]:
    """Probabilities separated by commas, at least one. Raises ConfigError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        values = [float(part) for part in parts]
    except ValueError:
        values = [-1.0]
    if not values or not all(0 <= value <= 1 for value in values):
        raise ConfigError(
            f"{option} {text!r} is not allowed: give probabilities from 0 to 1 separated by commas, as in 0.8,0.7"
        )
    return values


def _print_machines(machines: Seq[Machine], *, json: bool) -> None:
    from outrider.cli.measuring import console

    shown = console(stderr=json)
    for machine in machines:
        shown.print(f"{machine.name}  [{machine.kind}] {machine.source}", markup=False, highlight=False, soft_wrap=True)
    if json:
        common.print_json(
            {"schema": "outrider.sim.machines/1", "machines": [machine.to_json() for machine in machines]}
        )


def _print(questions: Seq[Question], answers: Seq[Answer], shown: object, *, dry_run: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from outrider.sim.report import best_lines, statements

    assert isinstance(shown, Console)
    table = Table(header_style="bold")
    for name in ("machine", "acceptance", "K", "c"):
        table.add_column(name, justify="left" if name in ("machine", "acceptance") else "right")
    for name in () if dry_run else ("tokens a round", "theory", "speed-up", "theory", "break-even alpha", "tok/s"):
        table.add_column(name, justify="right")
    for question in questions if dry_run else ():
        for machine, cost in zip(question.machines, question.costs, strict=True):
            table.add_row(machine.name, question.workload.label, str(question.k), f"{cost.c:.3f}")
    for answer in answers:
        table.add_row(
            answer.machine.name,
            answer.workload.label,
            str(answer.k),
            f"{answer.cost.c:.3f}",
            f"{answer.tokens_per_round:.2f} ±{answer.half_width:.2f}",
            _shown(answer.theory_tokens, 2),
            f"{answer.speedup:.2f} ±{answer.speedup_half_width:.2f}",
            _shown(answer.theory_speedup, 2),
            _shown(answer.break_even_alpha, 2),
            _shown(answer.tok_s, 1),
        )
    shown.print(table)
    for line in [*statements(questions), *best_lines(answers)]:
        shown.print(line, markup=False, highlight=False, soft_wrap=True)


def _shown(figure: float | None, digits: int) -> str:
    return "-" if figure is None else f"{figure:.{digits}f}"
