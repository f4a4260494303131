"""`outrider profile`: what does checking several tokens cost on this machine, and where does the time go?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import common
from outrider.cli.measuring import Refresh, console
from outrider.cli.progress import counted_bar

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.bench.measured_costs import MeasuredCosts
    from outrider.bench.profile import Profile
    from outrider.engine.llm import LLM

DEFAULT_ROWS = "1,2,3,4,5,8,16"

Rows = Annotated[
    list[str] | None,
    typer.Option(
        metavar="M[,M...]",
        help="Rows of a pass: 1 and the draft tokens it checks; separated by commas or each with its own --rows. "
        f"[default: {DEFAULT_ROWS}]",
    ),
]
Context = Annotated[int, typer.Option(metavar="N", help="Tokens in the cache before the pass.")]
Repeat = Annotated[int, typer.Option(metavar="N", help="Measured rounds over all numbers of rows; medians are shown.")]


def profile(
    target: common.Target,
    rows: Rows = None,
    context: Context = 512,
    repeat: Repeat = 11,
    drafter: common.DrafterNames = None,
    draft_model: common.DraftModel = None,
    refresh: Refresh = False,
    dtype: common.Dtype = "auto",
    draft_dtype: common.DraftDtype = "auto",
    threads: common.Threads = None,
    offline: common.Offline = False,
    json: common.Json = False,
    quiet: common.Quiet = False,
) -> None:
    """Measure a target pass by its number of rows, with its share of the memory bandwidth, prefill and sampling.

    Also measures what a round and the drafters cost (without -d, the target's default drafter) and keeps it for the
    controller `governor`; what was kept before and still holds is not measured again. With --json one JSON document is
    the last line of stdout, and the table goes to stderr.
    """
    from outrider.bench.machine import busy_hour, busy_warning, machine_facts
    from outrider.bench.measured_costs import rows_to_share, update_costs
    from outrider.bench.memory import rss
    from outrider.bench.profile import check_sizes, parse_rows, steps
    from outrider.bench.profile import profile as measure

    counts = parse_rows(",".join(rows or [DEFAULT_ROWS]))
    check_sizes(context, repeat)
    machine, before = machine_facts(), rss()
    _check_header(target, offline, quiet, context, max(counts))
    names = common.split_names(drafter) if drafter else None
    common.check_drafters(names or [])
    llm = _open(target, names, draft_model, dtype, draft_dtype, threads, offline, quiet)
    timed = sorted({*counts, *rows_to_share(llm, context, repeat, refresh=refresh)})
    with counted_bar("measuring", steps(timed, repeat), quiet=quiet) as on_step:
        whole = measure(llm, timed, context=context, repeat=repeat, rss_before_load=before, on_step=on_step)
    found = whole.of_rows(counts)
    kept = update_costs(llm, refresh=refresh, seen=whole, busy=busy_hour(machine))
    machine["threads"] = machine_facts()["threads"]
    busy = busy_warning(machine)
    notes = [*([busy] if busy else []), *found.notes()]
    _print(found, kept, notes, console(stderr=json))
    if json:
        common.print_json({**_document(llm, found, notes, machine, dtype), "costs": kept.to_json()})
    kept.require_kept()


def _check_header(target: str, offline: bool, quiet: bool, context: int, most_rows: int) -> None:
    """Refuses sizes that the model's files say it cannot hold, before its weights are loaded. Raises UserError."""
    from outrider.bench.profile import check_room
    from outrider.cli.progress import download_bar
    from outrider.models.loader.checkpoint import UnknownArchitectureError, open_checkpoint
    from outrider.models.loader.sources import resolve

    with download_bar(quiet=quiet) as progress:
        path = resolve(target, offline=offline, progress=progress)
    try:
        config = open_checkpoint(path).config
    except UnknownArchitectureError:
        return  # transformers may know it, and its context
    check_room(target, config.context_length, context, most_rows)


def _open(
    target: str,
    names: list[str] | None,
    draft_model: str | None,
    dtype: str,
    draft_dtype: str,
    threads: int | None,
    offline: bool,
    quiet: bool,
) -> LLM:
    from outrider.cli.progress import download_bar
    from outrider.cli.terminal import print_plan
    from outrider.engine.llm import LLM

    with download_bar(quiet=quiet) as progress:
        llm = LLM(
            target,
            drafter=names,
            draft_model=draft_model,
            dtype=dtype,
            draft_dtype=draft_dtype,
            threads=threads,
            offline=offline,
            progress=progress,
        )
    if not quiet:
        print_plan(decision for decision in llm.plan if decision.field not in ("drafter", "k", "rule"))
    return llm


def _print(found: Profile, kept: MeasuredCosts, notes: list[str], console: Console) -> None:
    from rich.table import Table

    from outrider.bench.reading import sentences
    from outrider.cli.terminal import megabytes

    table = Table(header_style="bold")
    for name in ("rows", "ms", "IQR", "v", "GB/s", "share", "sampling ms", "of the pass"):
        table.add_column(name, justify="right")
    for rows, times in found.passes.items():
        gbps, share, sampling_s = found.gbps(rows), found.share(rows), found.sampling_s(rows)
        table.add_row(
            str(rows),
            f"{1e3 * times.median_s:.2f}",
            f"{1e3 * times.spread.q1:.2f}..{1e3 * times.spread.q3:.2f}",
            f"{found.v(rows):.2f}",
            "-" if gbps is None else f"{gbps:.1f}",
            "-" if share is None else f"{share:.0%}",
            f"{1e3 * sampling_s:.2f}",
            f"{sampling_s / times.median_s:.0%}",
        )
    console.print(table)
    for line in _lines(found, megabytes):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for line in (*_cost_lines(kept), kept.sentence()):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for note in notes:
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    for sentence in sentences(found):
        console.print(sentence, markup=False, highlight=False, soft_wrap=True, style="bold")


def _lines(found: Profile, size: Callable[[float], str]) -> Iterator[str]:
    """What stands below the table."""
    memory, bandwidth = found.memory, found.bandwidth
    if memory.pass_weights is not None and memory.kv is not None:
        yield f"a pass reads {size(memory.pass_weights)} of weights and {size(memory.kv)} of keys and values"
    yield f"memory reads at {bandwidth.gbps:.1f} GB/s ({bandwidth.way}, {bandwidth.threads} threads)"
    yield f"prefill of {found.prefill_tokens} tokens: {found.prefill_per_s:.0f} tokens a second"
    if found.rounds is not None and found.overheads is not None:
        outside, whole = found.overheads.median_s, found.rounds.median_s
        yield f"a plain round takes {1e3 * whole:.2f} ms, {1e3 * outside:.2f} ms of it outside the pass"
    yield f"loaded in {found.load_s:.2f} s from {size(memory.file)}"
    if memory.peak_rss is not None and memory.model_peak_to_file is not None:
        before = size(memory.rss_before_load or 0)
        ratio = f"{memory.model_peak_to_file:.2f} x the file without the {before} of before"
        yield f"peak memory {size(memory.peak_rss)}: {ratio} (mapped file pages count)"


def _cost_lines(kept: MeasuredCosts) -> Iterator[str]:
    """What the drafters that were asked for cost, in plain rounds."""
    costs = kept.costs
    plain_s = costs.round_s(1, costs.passes[0][0], greedy=True)
    for name in kept.asked:
        lengths = costs.drafters[name].greedy.alone.at
        shares = ", ".join(f"{k:g}: {costs.draft_s(name, int(k), greedy=True) / plain_s:.3f}" for k in lengths)
        yield f"drafting with {name}, in plain rounds, by K: {shares}"


def _document(llm: LLM, found: Profile, notes: list[str], machine: dict[str, object], dtype: str) -> dict[str, object]:
    from outrider.bench.profile import SCHEMA
    from outrider.bench.reading import conclusion_json
    from outrider.engine.report import plan_json

    return {
        "schema": SCHEMA,
        "machine": machine,
        "model": {"target": llm.name, "plan": plan_json(llm.plan), "warnings": list(llm.warnings)},
        "settings": {"rows": list(found.passes), "context": found.context, "repeat": found.repeat, "dtype": dtype},
        **found.to_json(),
        "conclusion": conclusion_json(found),
        "notes": notes,
    }
