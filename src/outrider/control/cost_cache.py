"""Where measured costs are kept: one file a model, precision, processor, number of threads and kernel level.

A file that is damaged, foreign or of another build is no error: it is said why it was not used, and it is measured
again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from outrider.control.cost_model import SCHEMA, CostModel
from outrider.core.json_file import JsonObject
from outrider.errors import ConfigError, ModelFileError

EDGE_NBYTES = 1 << 20
"""Of a file of weights, as much of its beginning and of its end is hashed."""


@dataclass(frozen=True, slots=True)
class CostKey:
    """What the costs of a target depend on. `file` stands for its weights, `build` for the code that runs."""

    file: str
    dtype: str
    device: str
    processor: str
    threads: int
    kernels: str
    build: str

    @property
    def name(self) -> str:
        """The file's name: of everything but the build, so that a new build replaces what the old one measured."""
        told = {key: value for key, value in asdict(self).items() if key != "build"}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:20] + ".json"


@dataclass(frozen=True, slots=True)
class Kept:
    """What was found: `costs` that hold (of drafters, those only that are the ones asked for), and in `stale` a
    sentence for each thing that has to be measured."""

    path: Path
    costs: CostModel | None
    stale: tuple[str, ...]


def find_costs(folder: Path, key: CostKey, drafters: Mapping[str, str]) -> Kept:
    """The kept costs of `key`, and of `drafters` (name to identity). Never raises for what a file contains."""
    path = folder / key.name
    if not path.is_file():
        return Kept(path, None, ("nothing has been measured for this model, precision, machine and number of threads",))
    try:
        costs = _read(path, key)
    except ModelFileError as error:
        what = str(error).removeprefix(f"{path}: ").partition(". ")[0]
        return Kept(path, None, (f"{path} is no file of costs: {what}",))
    if isinstance(costs, str):
        return Kept(path, None, (costs,))
    stale = []
    for name, identity in drafters.items():
        if name not in costs.drafters:
            stale.append(f"drafter {name!r} has not been measured")
        elif costs.drafters[name].identity != identity:
            stale.append(f"drafter {name!r} was another when it was measured ({costs.drafters[name].identity})")
    holds = {name: cost for name, cost in costs.drafters.items() if drafters.get(name, cost.identity) == cost.identity}
    return Kept(path, replace(costs, drafters=holds), tuple(stale))


def keep_costs(folder: Path, key: CostKey, costs: CostModel) -> Path:
    """Writes them, whole or not at all. Raises ConfigError where the folder cannot be written."""
    path = folder / key.name
    document = {"schema": SCHEMA, "key": asdict(key), **costs.to_json()}
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(
            f"costs cannot be kept in {folder}: {reason}; set OUTRIDER_CACHE to a folder that can be written"
        ) from None
    return path


def _read(path: Path, key: CostKey) -> CostModel | str:
    """The costs, or why they do not hold. Raises ModelFileError for a damaged file."""
    values = JsonObject.read(path)
    if (schema := values.text("schema", "")) != SCHEMA:
        return f"{path} has schema {schema[:40]!r} and this reads {SCHEMA!r}"
    told = values.child("key")
    for name, wanted in asdict(key).items():
        if (found := told.values.get(name)) != wanted:
            what = "the build has changed" if name == "build" else f"{name} is {str(found)[:40]!r}, not {wanted!r}"
            return f"{path.name}: {what} since it was measured"
    return CostModel.from_json(values)


def identity_of_files(path: Path) -> str:
    """A short hash of a model's file or folder: names, sizes, and both ends of every file. Raises ConfigError."""
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(file for file in path.glob("*") if file.is_file())
    try:
        for file in files:
            size = file.stat().st_size
            digest.update(f"{file.name}\0{size}\0".encode())
            with file.open("rb") as opened:
                digest.update(opened.read(EDGE_NBYTES))
                if size > EDGE_NBYTES:
                    opened.seek(max(size - EDGE_NBYTES, EDGE_NBYTES))
                    digest.update(opened.read(EDGE_NBYTES))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None
    return digest.hexdigest()[:20]
