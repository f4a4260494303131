"""`outrider compare`: two files of `bench --out`, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import common

if TYPE_CHECKING:
    from outrider.bench.changes import Change

CHANGE = "faster (+), slower (-)"
HEADER = (
    *("lane", "category", "tokens a pass before", "after", "x plain before", "after"),
    *(CHANGE, "95 %", "prompts", "finding"),
)
LEGEND = (
    f"{CHANGE}: by how many percent of BEFORE's speed-up over plain AFTER's is larger or smaller; the median over the "
    "prompts, and its 95 % interval"
)

Before = Annotated[Path, typer.Argument(metavar="BEFORE", help="A file that outrider bench --out wrote.")]
After = Annotated[Path, typer.Argument(metavar="AFTER", help="Another one.")]


def compare(before: Before, after: After, json: common.Json = False) -> None:
    """Compare two results of bench: acceptance lengths as they are, speeds as ratios to plain, each of its own run.

    A lane is called faster or slower only where the 95 % interval of the change leaves out 0 %.
    """
    from outrider.bench.changes import changes, changes_json, doubts
    from outrider.bench.result_file import ResultFile

    first, second = ResultFile(before, "BEFORE"), ResultFile(after, "AFTER")
    found, notes = changes(first, second), doubts(first, second)
    if json:
        common.print_json(changes_json(first, second, found, notes))
        return
    _print(found, notes)


def _print(found: list[Change], notes: list[str]) -> None:
    from outrider.cli.terminal import table

    print(table([_cells(change) for change in found], HEADER))
    print(LEGEND)
    for note in notes:
        print(f"note: {note}")


def _cells(change: Change) -> list[str]:
    interval = change.interval
    return [
        change.lane,
        change.category,
        _figure(change.length_before),
        _figure(change.length_after),
        _figure(change.speedup_before),
        _figure(change.speedup_after),
        "-" if change.factor is None else _percent(change.factor),
        "-" if interval is None else f"{_percent(interval.low)} to {_percent(interval.high)}",
        str(change.prompts),
        change.finding,
    ]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(factor: float) -> str:
    """How much more than 1 it is."""
    return f"{100 * (factor - 1):+.1f} %"
