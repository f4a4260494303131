"""`outrider doctor`: what this machine has, what of it is used and why, and whether the kernels compute right."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import common
from outrider.cli.terminal import megabytes

if TYPE_CHECKING:
    from outrider.bench.bandwidth import Bandwidth
    from outrider.core.types import Decision
    from outrider.kernels.selfcheck import Check

SCHEMA = "outrider.doctor/1"
EXIT_DIFFERS = 1
PACKAGES = ("transformers", "llguidance")

X86_SETS = {
    "AVX2": ("avx2",),
    "FMA": ("fma",),
    "F16C": ("f16c",),
    "AVX-512": ("avx512f", "avx512bw", "avx512vl", "avx512dq"),
    "AVX-512 VNNI": ("avx512_vnni",),
    "AVX-512 bf16": ("avx512_bf16",),
    "AVX VNNI": ("avx_vnni",),
    "AMX": ("amx_tile", "amx_int8", "amx_bf16"),
}
ARM_SETS = {
    "NEON": ("asimd",),
    "dot product": ("asimddp",),
    "bf16": ("bf16",),
    "int8 matrix": ("i8mm",),
    "SVE": ("sve",),
}
"""Instruction set -> the flags of /proc/cpuinfo that make it up."""

Model = Annotated[
    str | None,
    typer.Argument(metavar="[MODEL]", help=f"Also load this model and say how it runs: {common.MODEL_NAMES}."),
]


def doctor(
    model: Model = None,
    offline: common.Offline = False,
    json: common.Json = False,
) -> None:
    """Print what was detected, what is used and why, and check every kernel against its twin in torch.

    Exit code 1: a kernel differs from its twin, and is named.
    """
    found = _examine()
    plan = _plan(model, offline) if model is not None else None
    if json:
        common.print_json(_document(found, model, plan))
    else:
        rows = [*_lines(found), *((d.field, f"{d.value}: {d.reason}") for d in plan or ())]
        width = max(len(label) for label, _ in rows)
        for label, text in rows:
            print(f"{label:{width}}  {text}")
        for note in found.notes:
            print(f"note: {note}")
        print(_verdict(found.checks), flush=True)
    if not all(check.ok for check in found.checks):
        raise typer.Exit(EXIT_DIFFERS)


@dataclass(frozen=True, slots=True)
class _Found:
    """`instruction_sets` is None where the system does not tell; `extension` says what became of the C++ code.

    `physical_cores` is None without that code, `usable_processors` counts the logical ones of this process.
    """

    cpu: str
    physical_cores: int | None
    logical_cores: int | None
    usable_processors: int
    load_1min: object
    notes: list[str]
    instruction_sets: dict[str, bool] | None
    torch_level: str
    memory_gib: object
    cuda: list[dict[str, object]]
    extension: str
    levels: list[str]
    level: str
    reason: str
    wide_rows: int
    forced: str | None
    threads: int
    torch_threads: int
    versions: dict[str, str]
    packages: dict[str, str | None]
    cache: Path
    models: dict[str, int]
    heads: list[str]
    bandwidth: Bandwidth
    checks: list[Check]


def _examine() -> _Found:
    """Raises ConfigError where OUTRIDER_CPU asks for what cannot run here."""
    import torch

    import outrider
    from outrider import kernels
    from outrider.bench.bandwidth import read_bandwidth
    from outrider.bench.machine import busy_warning, machine_facts
    from outrider.engine.shipped import shipped_heads
    from outrider.kernels.dispatch import VARIABLE, wide_rows
    from outrider.kernels.selfcheck import check_kernels
    from outrider.models.loader.sources import models_folder

    torch_threads = torch.get_num_threads()
    extension, levels, cores = _extension()
    facts = machine_facts()
    busy = busy_warning(facts)
    return _Found(
        cpu=str(facts["cpu"]),
        physical_cores=cores,
        logical_cores=os.cpu_count(),
        usable_processors=kernels.usable_processors(),
        load_1min=facts["load_1min"],
        notes=[busy] if busy else [],
        instruction_sets=instruction_sets(),
        torch_level=torch.backends.cpu.get_cpu_capability(),
        memory_gib=facts["memory_gib"],
        cuda=_cuda_devices(),
        extension=extension,
        levels=levels,
        level=kernels.active_level(),
        reason=kernels.why(),
        wide_rows=wide_rows(),
        forced=os.environ.get(VARIABLE) or None,
        threads=kernels.threads(),
        torch_threads=torch_threads,
        versions={
            "outrider": outrider.__version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
        },
        packages={name: _version(name) for name in PACKAGES},
        cache=models_folder(),
        models=_cached_models(models_folder()),
        heads=[head.name for head in shipped_heads()],
        bandwidth=read_bandwidth(rounds=4),
        checks=check_kernels(),
    )


def _extension() -> tuple[str, list[str], int | None]:
    """(what became of the C++ code, its levels on this processor, physical cores), whatever OUTRIDER_CPU says."""
    from outrider.kernels.dispatch import load_extension

    extension, state = load_extension()
    if extension is None:
        return state, [], None
    return state, extension.available_levels(), extension.physical_cores()


def instruction_sets() -> dict[str, bool] | None:
    """What the processor has of the sets that matter here; None where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    flags = next(
        (set(line.partition(":")[2].split()) for line in lines if line.startswith(("flags", "Features"))), None
    )
    if flags is None:
        return None
    known = ARM_SETS if platform.machine() in ("aarch64", "arm64") else X86_SETS
    return {name: flags.issuperset(needed) for name, needed in known.items()}


def _cuda_devices() -> list[dict[str, object]]:
    import torch

    if not torch.cuda.is_available():
        return []
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [{"name": device.name, "memory_gib": round(device.total_memory / 2**30, 1)} for device in devices]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cached_models(folder: Path) -> dict[str, int]:
    """Size in bytes of each model file in the cache, by its path there."""
    files = sorted(folder.rglob("*.gguf")) if folder.is_dir() else []
    return {str(file.relative_to(folder)): file.stat().st_size for file in files}


def _plan(name: str, offline: bool) -> list[Decision]:
    """What loading the model decides, how its passes run, and what drafts for it by default."""
    from outrider.cli.progress import download_bar
    from outrider.engine.llm import LLM
    from outrider.engine.opening import find_heads
    from outrider.engine.shipped import default_drafter

    with download_bar(quiet=False) as progress:
        llm = LLM(name, drafter="none", k=0, offline=offline, progress=progress)
    decisions = [decision for decision in llm.plan if decision.field not in ("drafter", "k", "rule")]
    assert llm.opened is not None
    drafter = default_drafter(find_heads([], llm.opened, None), None)
    return [*decisions, *pass_decisions(llm.engine.target), drafter]


def pass_decisions(model: object) -> list[Decision]:
    """How attention and the layers of a pass run, and why."""
    from outrider.core.types import Decision
    from outrider.models.attention import why_not_kernels
    from outrider.models.decoder import Decoder

    if not isinstance(model, Decoder):
        reason = "transformers runs the model"
        return [Decision("attention", "transformers", reason), Decision("layers", "transformers", reason)]
    missing = why_not_kernels(model.config.head_dim, model.device)
    if missing is not None:
        return [Decision("attention", "torch", missing), Decision("layers", "one call an operation", missing)]
    loose = next((i for i, layer in enumerate(model.layers) if layer.for_stack() is None), None)
    fits = f"heads of {model.config.head_dim} numbers on the CPU fit the kernel"
    if loose is not None:
        layers = Decision("layers", "one call an operation", f"a matrix of layer {loose} is not packed for the kernels")
    else:
        layers = Decision("layers", "all in one call", "every matrix is packed for the kernels")
    return [Decision("attention", "kernels", fits), layers]


def _lines(found: _Found) -> Iterator[tuple[str, str]]:
    """(label, text) for people."""
    if found.physical_cores is None:
        cores = (
            f"{found.usable_processors} logical processors for this process (how many cores: only the extension tells)"
        )
    else:
        cores = f"{found.physical_cores} physical cores for this process, {found.logical_cores} logical"
    yield "processor", f"{found.cpu}; {cores}"
    sets = found.instruction_sets
    has = "not told by this system" if sets is None else ", ".join(name for name, here in sets.items() if here)
    lacks = ", ".join(name for name, here in (sets or {}).items() if not here)
    yield "instructions", f"{has or 'none of note'}{f'; not {lacks}' if lacks else ''}; torch uses {found.torch_level}"
    read = found.bandwidth
    yield "memory", f"{found.memory_gib} GiB; reads at {read.gbps:.1f} GB/s ({read.way}, {read.threads} threads)"
    yield "CUDA", ", ".join(f"{d['name']} ({d['memory_gib']} GiB)" for d in found.cuda) or "no device"
    yield "kernels", found.reason
    yield "wide passes", _wide_passes(found)
    yield "extension", found.extension + (f"; levels here: {', '.join(found.levels)}" if found.levels else "")
    yield "forced", f"OUTRIDER_CPU={found.forced}" if found.forced else "no: OUTRIDER_CPU is not set"
    if found.level == "torch":
        yield "threads", f"{found.torch_threads} in torch, which does the work"
    else:
        torch_has = f"torch has {found.torch_threads}, 1 while a model uses the kernels"
        yield "threads", f"{found.threads} in the kernels; {torch_has}"
    yield "versions", ", ".join(f"{name} {number}" for name, number in found.versions.items())
    yield "packages", ", ".join(f"{name} {number or 'not installed'}" for name, number in found.packages.items())
    models = ", ".join(f"{name} ({megabytes(size)})" for name, size in found.models.items())
    yield "cache", f"{found.cache}: {models or 'no model'}"
    yield "heads", ", ".join(found.heads) or "none comes with the package"


def _wide_passes(found: _Found) -> str:
    if found.wide_rows:
        return f"AMX tiles from {found.wide_rows} rows on, for quantised matrices but those of Q6_K"
    return f"as narrow ones: no AMX at level {found.level}"


def _verdict(checks: list[Check]) -> str:
    wrong = [check.sentence for check in checks if not check.ok]
    if wrong:
        return f"self-check: WRONG: {'; '.join(wrong)}. Run with OUTRIDER_CPU=torch or another level, and report it"
    if not checks:
        return "self-check: nothing to check: torch does the work, no kernel runs"
    return f"self-check: OK: {len(checks)} kernels equal their twins in torch"


def _document(found: _Found, model: str | None, plan: list[Decision] | None) -> dict[str, object]:
    from outrider.engine.report import plan_json

    return {
        "schema": SCHEMA,
        "cpu": {
            "name": found.cpu,
            "physical_cores": found.physical_cores,
            "logical_cores": found.logical_cores,
            "usable_processors": found.usable_processors,
            "load_1min": found.load_1min,
            "instruction_sets": found.instruction_sets,
            "torch_level": found.torch_level,
            "memory_gib": found.memory_gib,
        },
        "cuda": found.cuda,
        "kernels": {
            "level": found.level,
            "reason": found.reason,
            "wide_rows": found.wide_rows,
            "forced": found.forced,
            "extension": found.extension,
            "levels": found.levels,
            "threads": found.threads,
            "torch_threads": found.torch_threads,
        },
        "versions": found.versions,
        "packages": found.packages,
        "cache": {"folder": str(found.cache), "models": found.models},
        "heads": found.heads,
        "read_bandwidth": found.bandwidth.to_json(),
        "self_check": {
            "ok": all(check.ok for check in found.checks),
            "ran": bool(found.checks),
            "checks": [{"name": check.name, "ok": check.ok, "finding": check.sentence} for check in found.checks],
        },
        "model": None if plan is None else {"target": model, "plan": plan_json(plan)},
        "notes": found.notes,
    }
