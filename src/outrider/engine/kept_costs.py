"""The kept costs of a target and its drafters here: under which key they lie, and a governor made of them."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

import outrider
from outrider import kernels
from outrider.control.acceptance import alpha_of
from outrider.control.cost_cache import CostKey, find_costs, identity_of_files
from outrider.core.machine import cpu_name
from outrider.core.protocols import Controller
from outrider.core.registry import controller_class
from outrider.core.types import Decision
from outrider.engine.opening import DraftOptions, OpenedHead, needs_of
from outrider.engine.shipped import last_of_cascade
from outrider.errors import ConfigError
from outrider.kernels.dispatch import load_extension
from outrider.models.load import LoadedModel
from outrider.models.loader.sources import cache_folder


def costs_folder() -> Path:
    """Where costs are kept. Not created."""
    return cache_folder() / "costs"


def cost_key(target: LoadedModel) -> CostKey:
    """What the costs of this target depend on, threads as they are set now."""
    told = {decision.field: decision.value for decision in target.decisions}
    native = kernels.available() and told.get("backend") != "transformers"
    return CostKey(
        file=identity_of_files(target.path),
        dtype=told.get("dtype", "float32"),
        device=str(getattr(target.model, "device", "cpu")),
        processor=cpu_name(),
        threads=kernels.threads() if native else torch.get_num_threads(),
        kernels=told.get("kernels", "torch"),
        build=_build(),
    )


def drafter_identities(
    names: Iterable[str],
    draft: LoadedModel | None,
    heads: Mapping[str, OpenedHead],
    options: Mapping[str, DraftOptions] | None = None,
) -> dict[str, str]:
    """What each drafter is, beside its name: its options, and the files of a draft model or of heads behind it."""
    found = {}
    for name in names:
        needs, parts = needs_of(name), []
        if draft is not None and needs & {"model", "drafters"}:
            dtype = next((d.value for d in draft.decisions if d.field == "dtype"), "")
            parts.append(f"{draft.name} {dtype} {identity_of_files(draft.path)}")
        if needs & {"head", "drafters"}:
            riders = [heads[name]] if name in heads else list(heads.values()) if "drafters" in needs else []
            parts += [f"{head.name} {head.dtype} {identity_of_files(head.path)}" for head in riders]
        if own := (options or {}).get(name):
            parts.append(json.dumps(own, sort_keys=True, default=str))
        found[name] = "; ".join(parts) or "as it comes"
    return found


def build_governor(
    target: LoadedModel,
    identities: Mapping[str, str],
    heads: Mapping[str, OpenedHead],
    most: int,
    options: Mapping[str, object],
) -> tuple[Controller, Decision]:
    """A governor over these drafters, by the costs that were kept, and where those are. Raises ConfigError, with the
    command that measures them under these `options`, where costs are missing or no longer hold."""
    kept = find_costs(costs_folder(), cost_key(target), identities)
    if kept.costs is None or kept.stale:
        words = ["outrider", "profile", target.name, "-d", ",".join(identities) or "none"]
        for option, value in options.items():
            words += [option, str(value)] if value not in (None, "auto") else []
        raise ConfigError(
            f"controller 'governor' needs measured costs: {kept.stale[0]}; measure them with: {shlex.join(words)}"
        )
    alphas = {}
    for name in identities:
        head = heads.get(name) if "drafters" not in needs_of(name) else heads.get(last_of_cascade(heads) or "")
        if head is not None and head.card is not None:
            alphas[name] = alpha_of(head.card.test.acceptance_length, head.card.test.k)
    known = {n: kept.costs.drafters[n] for n in (*identities, "prediction") if n in kept.costs.drafters}
    made = controller_class("governor")(replace(kept.costs, drafters=known), list(known), most=most, alphas=alphas)
    why = f"asked for; it decides by the costs in {kept.path}"
    if (busy := kept.costs.busiest(identities)) is not None:
        why += f", {busy}: outrider profile --refresh measures them again"
    return made, Decision("controller", "governor", why)


def _build() -> str:
    """A short hash of what computes: the kernels' binary and the versions."""
    digest = hashlib.sha256(f"{outrider.__version__} {torch.__version__}".encode())
    extension, _ = load_extension()
    if extension is not None and extension.__file__:
        digest.update(Path(extension.__file__).read_bytes())
    return digest.hexdigest()[:20]
