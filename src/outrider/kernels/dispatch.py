"""Which code the kernels run: an instruction-set level of the C++ extension, or torch. Chosen once, at import.

The environment variable OUTRIDER_CPU forces a choice: portable, avx2, avx512, amx, or torch.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.kernels._kernels import Level

VARIABLE = "OUTRIDER_CPU"
LEVELS = ("portable", "avx2", "avx512", "amx")
REFUSED = "the system refuses AMX tiles to this process"
DTYPE_CODE = {torch.float32: 0, torch.bfloat16: 1}
"""How the extension is told of a dtype."""


@dataclass(frozen=True, slots=True)
class Choice:
    """`level` is None where torch does the work; `reason` does not name the level."""

    level: Level | None
    reason: str


def choose(wanted: str | None) -> Choice:
    """The best level, or the one asked for. Raises ConfigError when that one cannot run here."""
    if wanted and wanted not in (*LEVELS, "torch"):
        raise ConfigError(f"{VARIABLE}={wanted} is unknown; allowed: {', '.join(LEVELS)}, torch")
    if wanted == "torch":
        return Choice(None, f"as {VARIABLE} asks")
    extension, state = load_extension()
    if extension is None:
        if wanted:
            raise ConfigError(f"{VARIABLE}={wanted} needs the C++ extension, which {state}; reinstall outrider")
        return Choice(None, f"the C++ extension {state}; reinstall outrider with a compiler for the fast path")
    levels: list[str] = extension.available_levels()
    refused = extension.amx_refused()
    if wanted and wanted not in levels:
        why = f": {REFUSED}" if wanted == "amx" and refused else " on this processor"
        raise ConfigError(f"{VARIABLE}={wanted} cannot run{why}; available: {', '.join(levels)}, torch")
    name = wanted or levels[-1]
    if wanted:
        return Choice(extension.Level(name), f"as {VARIABLE} asks")
    best = f"the best of {', '.join(levels)} on this processor"
    return Choice(extension.Level(name), f"{best}; no amx: {REFUSED}" if refused else best)


def load_extension() -> tuple[ModuleType | None, str]:
    """(the C++ extension or None, what became of it), whatever OUTRIDER_CPU says."""
    try:
        return importlib.import_module("outrider.kernels._kernels"), "was built"
    except ModuleNotFoundError:
        return None, "was not built (no C++ compiler or Python headers at install)"
    except ImportError as error:
        return None, f"was built and does not load ({error})"


OPERATIONS = (
    "linear",
    "quantised_linear",
    "dequantise",
    "encode_q4_0",
    "rms_norm",
    "add_rms_norm_",
    "swiglu",
    "rope_",
    "attention",
    "stack",
    "chain",
    "walk",
    "softmax",
)
"""What runs in C++, by the names under which its calls are counted."""

CHOICE = choose(os.environ.get(VARIABLE))
CALLS = dict.fromkeys(OPERATIONS, 0)


def available() -> bool:
    """Whether C++ kernels run; if not, torch does the same work."""
    return CHOICE.level is not None


def active_level() -> str:
    """portable, avx2, avx512, amx or torch."""
    return CHOICE.level.name if CHOICE.level else "torch"


def reason() -> str:
    """Why the active level is the one chosen, for people."""
    return CHOICE.reason


def why() -> str:
    """The active level and the reason for it, in one line."""
    return f"{active_level()}: {reason()}"


def wide_rows() -> int:
    """Rows of a pass from which on quantised matrices use AMX tiles; 0: never. Results are the same bit for bit."""
    return CHOICE.level.wide_rows if CHOICE.level else 0


def fast_calls() -> dict[str, int]:
    """Calls that ran in C++ so far, by operation (those with none left out): for tests that the fast path ran."""
    return {operation: count for operation, count in CALLS.items() if count}


def usable_processors() -> int:
    """Logical processors that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not every system tells
        return os.cpu_count() or 1


def set_threads(count: int) -> None:
    """Size of the kernels' own pool, the caller included; without C++ kernels it has no effect.

    The pool and torch's pool should not work at once: the kernels block their caller, and torch's workers are idle
    between its own operations.
    """
    if count < 1:
        raise ConfigError(f"threads is {count}; allowed: at least 1")
    if CHOICE.level:
        importlib.import_module("outrider.kernels._kernels").set_threads(count)


def threads() -> int:
    """Size of the kernels' own pool; 1 without C++ kernels."""
    if CHOICE.level is None:
        return 1
    count: int = importlib.import_module("outrider.kernels._kernels").threads()
    return count
