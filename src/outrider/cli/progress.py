"""The bars on stderr: of a download, where the model is not on this machine yet, and of work that is counted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.models.loader.sources import Progress


@contextmanager
def download_bar(*, quiet: bool) -> Iterator[Progress | None]:
    """A callback for `resolve`; None when `quiet`. Off a terminal, one line when a download starts and no bar."""
    if quiet:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn("fetching"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    task = bar.add_task("fetching", total=None)
    started = False

    def show(done_bytes: int, total_bytes: int) -> None:
        nonlocal started
        if not started:
            started = True
            bar.start()
            if not console.is_terminal:
                size = f" ({total_bytes / 1e6:.0f} MB)" if total_bytes else ""
                print(f"fetching the model{size}", file=sys.stderr, flush=True)
        bar.update(task, completed=done_bytes, total=total_bytes or None)

    try:
        yield show
    finally:
        if started:
            bar.stop()


@contextmanager
def counted_bar(what: str, total: int, *, quiet: bool) -> Iterator[Callable[[], None]]:
    """What to call after each of `total` steps. Nothing is shown when `quiet`, or off a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    shown = Console(stderr=True)
    with Progress(*columns, console=shown, transient=True, disable=quiet or not shown.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)
