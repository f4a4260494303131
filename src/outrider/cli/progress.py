"""The bar that a download shows, on stderr. Nothing is shown for a model that is already on this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
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
