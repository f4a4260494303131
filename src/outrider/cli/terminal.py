"""What a person sees: tokens coloured by origin, the plan, warnings, progress, the last line. Imports no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from outrider.core.stats import SpecStats
    from outrider.core.types import Decision
    from outrider.engine.request import Timings

_RESET, _DIM, _BOLD = "\x1b[0m", "\x1b[2m", "\x1b[1m"
ORIGIN_STYLE = {"accepted": "\x1b[32m", "recovered": "\x1b[33m", "bonus": "\x1b[36m"}
ORIGIN_MEANING = {
    "accepted": "draft token kept",
    "recovered": "the target's own, where a draft token was turned down",
    "bonus": "the target's own, after a draft kept whole (or no draft)",
}
_VISIBLE = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {0x7F: "␡", 0x9B: "␛["}
"""A terminal acts on control characters; a model's text is only shown."""


def colours(stream: TextIO) -> bool:
    """Whether to colour what goes to `stream`: a terminal, and NO_COLOR is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


class TokenPrinter:
    """Writes tokens to stdout as they come; the legend, once, before the first coloured one."""

    def __init__(self, *, legend: bool = True) -> None:
        self._colour = colours(sys.stdout)
        self._terminal = sys.stdout.isatty()
        self._legend_due = legend and self._colour
        self._column_zero = True

    def token(self, text: str, origin: str) -> None:
        if not text:
            return
        if self._legend_due:
            self._legend_due = False
            note(legend())
        if self._terminal:
            text = text.translate(_VISIBLE)
        self._column_zero = text.endswith("\n")
        sys.stdout.write(f"{ORIGIN_STYLE[origin]}{text}{_RESET}" if self._colour else text)
        sys.stdout.flush()

    def end(self) -> None:
        """Ends the line that the text left open."""
        if not self._column_zero:
            sys.stdout.write("\n")
        sys.stdout.flush()
        self._column_zero = True


def legend() -> str:
    paint = ORIGIN_STYLE if colours(sys.stderr) else dict.fromkeys(ORIGIN_STYLE, "")
    reset = _RESET + _DIM if colours(sys.stderr) else ""
    return "; ".join(f"{paint[origin]}{origin}{reset}: {meaning}" for origin, meaning in ORIGIN_MEANING.items())


def note(line: str) -> None:
    """A dim line on stderr: of interest, and no part of the answer."""
    sys.stdout.flush()
    print(f"{_DIM}{line}{_RESET}" if colours(sys.stderr) else line, file=sys.stderr, flush=True)


def aside(line: str) -> None:
    """A dim line on stdout."""
    print(f"{_DIM}{line}{_RESET}" if colours(sys.stdout) else line, flush=True)


def heading(line: str) -> None:
    """A line on stdout that stands out."""
    print(f"{_BOLD}{line}{_RESET}" if colours(sys.stdout) else line, flush=True)


def print_loading(model: str) -> None:
    """What a person waits for."""
    note(f"loading {model} ...")


def print_plan(plan: Iterable[Decision]) -> None:
    for decision in plan:
        note(f"{decision.field}: {decision.value} ({decision.reason})")


def summary(stats: SpecStats, per_second: float, plain: Timings | None = None) -> str:
    """The last line: speed, plain speed and their ratio where plain was measured, acceptance, target passes."""
    speed = f"{stats.emitted} tokens, {per_second:.1f} tok/s"
    if plain is not None:
        base = plain.predicted_per_second
        ratio = f", {per_second / base:.2f} x" if base else ""
        if base and per_second / base > stats.acceptance_length:
            ratio += ": more than its tokens a pass can give, so the machine was disturbed"
        speed += f" (plain {base:.1f} tok/s{ratio})"
    passes = f"{stats.rounds} target passes"
    if not stats.drafted:
        return f"{speed} | nothing drafted | {passes}"
    return (
        f"{speed} | acceptance {stats.acceptance_rate:.0%} ({stats.accepted} of {stats.drafted} drafted), "
        f"{stats.acceptance_length:.2f} tokens a pass | {passes}"
    )


def megabytes(size_bytes: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.3g} {name}"
    return f"{size_bytes / 1e3:.3g} kB"


def count(number: float) -> str:
    """A large count, as people say it: 135 M."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:.0f}"


def table(rows: Iterable[Iterable[str]], header: Iterable[str]) -> str:
    """Columns aligned with spaces; the last one as long as it is."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
