"""`outrider verify`: is the speculative answer the plain answer?"""

from __future__ import annotations

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
    console,
    facts,
    print_dry_run,
)
from outrider.cli.progress import counted_bar

if TYPE_CHECKING:
    from outrider.bench.dry_run import Work
    from outrider.core.types import SamplingParams

EXIT_DIVERGED = 1
DEFAULT_KS = "1,2,3,5,8"

DraftLengths = Annotated[list[str] | None, common.draft_lengths(DEFAULT_KS)]
Rules = Annotated[
    str,
    typer.Option(
        help="Acceptance rule: auto is greedy at temperature 0 and coupled above, the one rule whose sampled answers "
        "can be compared token by token."
    ),
]
Tolerance = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help="How wide a gap is a tie, as a share of the largest |logit|. [default: by the arithmetic's precision]",
    ),
]


def verify(
    target: common.Target,
    drafter: common.DrafterNames = None,
    draft_model: common.DraftModel = None,
    k: DraftLengths = None,
    rule: Rules = "auto",
    prompts: Prompts = None,
    limit: Limit = None,
    category: Category = None,
    max_tokens: common.MaxTokens = 64,
    temperature: common.Temperature = 0.0,
    seed: Seed = 0,
    ignore_eos: IgnoreEos = False,
    tolerance: Tolerance = None,
    chat: common.Chat = None,
    dtype: common.Dtype = "auto",
    draft_dtype: common.DraftDtype = "auto",
    threads: common.Threads = None,
    offline: common.Offline = False,
    dry_run: DryRun = False,
    json: common.Json = False,
    quiet: common.Quiet = False,
) -> None:
    """Check that speculation changes no answer: plain once a prompt, then every drafter and K against it.

    IDENTICAL: token by token. TIE: the answers part only where two tokens are equally good up to rounding. DIVERGED:
    they differ by more (exit code 1).
    """
    from outrider.bench.lanes import comparable_rules
    from outrider.core.types import SamplingParams

    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed, ignore_eos=ignore_eos)
    [resolved] = comparable_rules([rule], params)
    _check_tolerance(tolerance)
    setup = Setup.from_options(
        drafter=drafter,
        k=k or [DEFAULT_KS],
        category=category,
        target=target,
        draft_model=draft_model,
        rule=resolved if resolved != "greedy" else "auto",
        prompts=prompts,
        limit=limit,
        chat=chat,
        dtype=dtype,
        draft_dtype=draft_dtype,
        threads=threads,
        offline=offline,
    )
    if dry_run:
        print_dry_run(_work(setup, max_tokens, resolved), json=json)
        return
    _run(setup, params, resolved, tolerance, json=json, quiet=quiet)


def _work(setup: Setup, max_tokens: int, rule: str) -> Work:
    """What `_run` would do. Raises UserError for what it would refuse."""
    from outrider.bench.dry_run import Work
    from outrider.bench.lanes import PLAIN, combinations

    setup.check()
    names = [lane.name for lane in combinations(setup.ks, [rule])]
    return Work("verify", setup.models, (PLAIN, *names), setup.read_prompts(), max_tokens)


def _run(setup: Setup, params: SamplingParams, rule: str, tolerance: float | None, *, json: bool, quiet: bool) -> None:
    """Reads the prompts, loads the models, compares, prints; exits with 1 unless all was verified and equal."""
    chosen = setup.read_prompts()

    from outrider.bench.compare import Outcome
    from outrider.bench.lanes import lanes
    from outrider.bench.machine import machine_facts
    from outrider.bench.tables import print_verify, verify_json
    from outrider.bench.verification import verify as compare_all
    from outrider.engine.report import token_text

    llm = setup.open(quiet=quiet)
    raw = setup.raw(llm)
    wanted = lanes(llm, setup.ks, [rule])
    encoded = [
        (prompt.id, llm.encode_prompt(prompt.turns[0] if raw else [{"role": "user", "content": prompt.turns[0]}]))
        for prompt in chosen
    ]
    with counted_bar("answers", len(encoded) * (1 + len(wanted)), quiet=quiet) as on_answer:
        report = compare_all(llm, encoded, params, wanted, relative_tolerance=tolerance, on_answer=on_answer)
    print_verify(report, console(stderr=json), lambda token: token_text(token, llm.tokenizer))
    if json:
        common.print_json(verify_json(report, facts(llm, setup, params, chosen, machine_facts(), raw)))
    if report.outcome in (Outcome.DIVERGED, Outcome.UNVERIFIED):
        raise typer.Exit(EXIT_DIVERGED)


def _check_tolerance(tolerance: float | None) -> None:
    from outrider.errors import ConfigError

    if tolerance is not None and not 0 <= tolerance < 1:
        raise ConfigError(f"--tolerance {tolerance} is not allowed: give a number in [0, 1), such as 1e-4")
