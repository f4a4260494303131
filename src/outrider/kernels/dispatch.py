"""Which code the kernels run: an instruction-set level of the C++ extension, or torch. Chosen once, at import.

The environment variable OUTRIDER_CPU forces a choice: portable, avx2, avx512, or torch.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.kernels._kernels import Level

VARIABLE = "OUTRIDER_CPU"
LEVELS = ("portable", "avx2", "avx512")
DTYPE_CODE = {torch.float32: 0, torch.bfloat16: 1}
"""How the extension is told of a dtype."""


@dataclass(frozen=True, slots=True)
class Choice:
    """`level` is None where torch does the work."""

    level: Level | None
    reason: str


def choose(wanted: str | None) -> Choice:
    """The best level, or the one asked for. Raises ConfigError when that one cannot run here."""
    if wanted and wanted not in (*LEVELS, "torch"):
        raise ConfigError(f"{VARIABLE}={wanted} is unknown; allowed: {', '.join(LEVELS)}, torch")
    if wanted == "torch":
        return Choice(None, f"torch, as {VARIABLE} asks")
    try:
        extension = importlib.import_module("outrider.kernels._kernels")
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError)
        cause = (
            "was not built (no C++ compiler or Python headers at install)" if missing else f"does not load ({error})"
        )
        if wanted:
            raise ConfigError(
                f"{VARIABLE}={wanted} needs the C++ extension, which {cause}; reinstall outrider"
            ) from error
        return Choice(None, f"torch: the C++ extension {cause}; reinstall outrider with a compiler for the fast path")
    levels: list[str] = extension.available_levels()
    if wanted and wanted not in levels:
        raise ConfigError(f"{VARIABLE}={wanted} cannot run on this processor; available: {', '.join(levels)}, torch")
    name = wanted or levels[-1]
    why = f"as {VARIABLE} asks" if wanted else f"the best of {', '.join(levels)} on this processor"
    return Choice(extension.Level(name), f"{name}: {why}")


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
)
"""What runs in C++, by the names under which its calls are counted."""

CHOICE = choose(os.environ.get(VARIABLE))
CALLS = dict.fromkeys(OPERATIONS, 0)


def available() -> bool:
    """Whether C++ kernels run; if not, torch does the same work."""
    return CHOICE.level is not None


def active_level() -> str:
    """portable, avx2, avx512 or torch."""
    return CHOICE.level.name if CHOICE.level else "torch"


def why() -> str:
    """One line on the choice of the active level, for people."""
    return CHOICE.reason


def fast_calls() -> dict[str, int]:
    """Calls that ran in C++ so far, by operation (those with none left out): for tests that the fast path ran."""
    return {operation: count for operation, count in CALLS.items() if count}


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
