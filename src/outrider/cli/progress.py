"""The bars on stderr: of a download, where the model is not on this machine yet, and of work that is counted."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.models.loader.sources import Progress

SAY_EVERY_S = 30.0
"""How often a line says how far counted work is, where there is no terminal for a bar."""


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
    """What to call after each of `total` steps: it moves a bar, or off a terminal prints a line now and then. Nothing
    is shown when `quiet`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    shown = Console(stderr=True)
    if not quiet and not shown.is_terminal:
        now = time.monotonic()
        yield _Lines(what, total, began=now, said=now).step
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=shown, transient=True, disable=quiet) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)


@dataclass(slots=True)
class _Lines:
    """Says how far counted work is and about how long the rest takes."""

    what: str
    total: int
    began: float
    said: float
    done: int = 0

    def step(self) -> None:
        self.done += 1
        now = time.monotonic()
        if now - self.said < SAY_EVERY_S or self.done >= self.total:
            return
        self.said = now
        left_s = (now - self.began) / self.done * (self.total - self.done)
        left = f"{left_s:.0f} s" if left_s < 100 else f"{left_s / 60:.0f} min"
        print(f"{self.what}: {self.done} of {self.total}, about {left} left", file=sys.stderr, flush=True)
