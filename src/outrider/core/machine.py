"""The processor that all of this runs on."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu_name() -> str:
    """The processor as the operating system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
