"""What a speed depends on beside the code: the machine, the versions, and who else is using them."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import outrider
from outrider import kernels
from outrider.control.cost_model import Busy
from outrider.core.machine import cpu_name

BUSY_SHARE = 0.25
"""A load average above this share of the cores, before the measurement begins, is worth a warning."""


def machine_facts() -> dict[str, object]:
    """Machine, threads, versions and git commit, as JSON. The load is that of the moment of the call."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": kernels.threads() if kernels.available() else torch.get_num_threads(),
        "memory_gib": _memory_gib(),
        "platform": platform.platform(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_1min": _load(),
        "versions": {"python": platform.python_version(), "outrider": outrider.__version__, **_versions()},
        "git": git_commit(Path(outrider.__file__).parent),
    }


def busy_hour(facts: Mapping[str, object]) -> Busy | None:
    """How busy the machine was before the measurement began; None: not busy, or the system does not tell."""
    load, cores = facts["load_1min"], facts["cores"]
    if not isinstance(load, float) or not isinstance(cores, int) or load <= BUSY_SHARE * cores:
        return None
    return Busy(load, cores)


def busy_warning(facts: Mapping[str, object]) -> str | None:
    """A sentence when the machine was busy, which makes speeds too low and unsteady."""
    if (busy := busy_hour(facts)) is None:
        return None
    return (
        f"the machine was busy: load average {busy.load:.1f} on {busy.cores} cores before the first measurement; "
        "speeds are too low and unsteady, so repeat this when it is idle"
    )


def git_commit(folder: Path) -> str | None:
    """The commit that `folder` is checked out at, with "+" if it has been changed since; None when it is no part of a
    checkout (an installed package inside somebody's checkout is none)."""
    commit = _git(folder, "rev-parse", "--short=12", "HEAD")
    if not commit or not _git(folder, "ls-files", "__init__.py"):
        return None
    return commit + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    found = {"torch": str(torch.__version__)}
    for package in ("tokenizers", "transformers", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _load() -> float | None:
    try:
        return round(os.getloadavg()[0], 2)
    except (OSError, AttributeError):
        return None


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (OSError, ValueError, AttributeError):
        return None
