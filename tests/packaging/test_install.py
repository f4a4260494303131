"""What `pip wheel .` and `pip install .` give, with a compiler and without: each in a new virtual environment."""

from __future__ import annotations

import json
import os
import re
import shutil
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.tiny_folder import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]
SYSTEM_LIBRARIES = re.compile(r"(libc|libm|libstdc\+\+|libgcc_s|libpthread|ld-linux[-\w]*)\.so\.\d+")
STATE = """
import json, outrider, torch
from outrider import kernels
weight = torch.ones(16, 32)
out = kernels.pack_linear(weight)(torch.ones(1, 32))
print(json.dumps({
    "file": outrider.__file__, "available": kernels.available(), "level": kernels.active_level(),
    "why": kernels.why(), "sum": float(out.sum()), "calls": sum(kernels.fast_calls().values()),
}))
"""
LACKING = {
    "a compiler": {"CXX": "/nonexistent/c++"},
    "a compiler that works": {"CXX": shutil.which("false") or "/bin/false"},
    "Python's headers": {"CMAKE_ARGS": "-DPython_INCLUDE_DIR=/nonexistent"},
}


def pip(*args: str | Path, **env: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, args)]
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def build(folder: Path, **env: str) -> Path:
    """The wheel of this working tree, built in isolation."""
    pip("wheel", "--no-deps", "--wheel-dir", folder, ROOT, **env)
    (wheel,) = folder.glob("outrider-*.whl")
    return wheel


class Machine:
    """A new virtual environment that sees this one's other packages, and no program but its own."""

    def __init__(self, root: Path) -> None:
        venv.create(root, symlinks=True)
        self.bin = root / "bin"
        self.home = root / "home"
        self.home.mkdir()
        (packages,) = root.glob("lib/python*/site-packages")
        paths = [path for path in site.getsitepackages() if Path(path).is_dir()]
        (packages / "shared.pth").write_text("\n".join(paths) + "\n")
        self.packages = packages

    def install(self, what: Path, **env: str) -> None:
        pip("--python", self.bin / "python", "install", "--no-deps", what, **env)

    def run(self, program: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.bin / program), *args]
        clean = {"PATH": str(self.bin), "HOME": str(self.home), **env}
        return subprocess.run(command, env=clean, capture_output=True, text=True, cwd=self.home)

    def state(self) -> dict:
        """What `outrider.kernels` says of itself there."""
        done = self.run("python", "-c", STATE)
        assert done.returncode == 0, done.stderr
        state = json.loads(done.stdout)
        assert Path(state["file"]).is_relative_to(self.packages), "another copy of the package was imported"
        assert state["sum"] == 512
        return state

    def answer(self, folder: Path) -> dict:
        done = self.run("outrider", "generate", "hello there", "--model", str(folder), "-n", "24", "--json", "-q")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))


def members(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def read(wheel: Path, suffix: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(suffix)]
        return archive.read(name).decode()


def extensions(wheel: Path) -> list[str]:
    return [name for name in members(wheel) if name.startswith("outrider/kernels/_kernels") and name.endswith(".so")]


def test_the_wheel_is_the_package_and_nothing_else(wheel: Path) -> None:
    names = members(wheel)
    assert len(extensions(wheel)) == 1
    assert {"outrider/py.typed", "outrider/kernels/_kernels.pyi"} <= set(names)
    assert "outrider = outrider.cli.main:main" in read(wheel, ".dist-info/entry_points.txt").splitlines()
    assert read(wheel, ".dist-info/licenses/LICENSE") == (ROOT / "LICENSE").read_text()
    assert all(re.match(r"outrider/|outrider-[\w.]+\.dist-info/", name) for name in names)
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    assert sources <= set(names)
    heads = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src/outrider/heads").rglob("*") if path.is_file()}
    assert heads <= set(names)


def test_the_wheels_tag_names_this_python_and_platform(wheel: Path) -> None:
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"-{tag}-{tag}-" in wheel.name
    assert "Root-Is-Purelib: false" in read(wheel, ".dist-info/WHEEL")


@pytest.mark.skipif(sys.platform != "linux", reason="reads the extension's ELF header")
def test_the_extension_needs_only_the_systems_own_libraries(wheel: Path, tmp_path: Path) -> None:
    (name,) = extensions(wheel)
    with zipfile.ZipFile(wheel) as archive:
        file = archive.extract(name, tmp_path)
    text = subprocess.run(["readelf", "--dynamic", file], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", text)
    assert "libc.so.6" in needed
    assert all(SYSTEM_LIBRARIES.fullmatch(library) for library in needed), needed
    assert not re.search(r"\((RPATH|RUNPATH)\)", text)
    resolved = subprocess.run(["ldd", file], capture_output=True, text=True, check=True).stdout
    assert "not found" not in resolved


def test_the_wheel_runs_where_no_compiler_is(wheel: Path, tmp_path: Path, tiny: Path) -> None:
    machine = Machine(tmp_path / "venv")
    machine.install(wheel)
    assert all(shutil.which(name, path=machine.bin) is None for name in ("c++", "g++", "cc", "cmake", "ninja"))
    state = machine.state()
    assert state["available"]
    assert state["calls"] > 0
    assert "the best of" in state["why"]
    answer = machine.answer(tiny)
    plan = {line["field"]: line["value"] for line in answer["plan"]}
    assert plan["kernels"] == state["level"]
    assert len(answer["token_ids"]) == 24


@pytest.mark.parametrize("lacking", LACKING)
def test_an_install_that_cannot_compile_runs_on_torch_and_says_so(lacking: str, tmp_path: Path, tiny: Path) -> None:
    machine = Machine(tmp_path / "venv")
    machine.install(ROOT, **LACKING[lacking])
    state = machine.state()
    assert (state["available"], state["level"], state["calls"]) == (False, "torch", 0)
    for part in ("torch", "was not built", "no C++ compiler or Python headers", "reinstall outrider with a compiler"):
        assert part in state["why"]
    answer = machine.answer(tiny)
    plan = {line["field"]: line for line in answer["plan"]}
    assert plan["kernels"]["value"] == "torch"
    assert state["why"] == f"torch: {plan['kernels']['reason']}"
    forced = machine.run("outrider", "generate", "hello", "--model", str(tiny), OUTRIDER_CPU="portable")
    assert (forced.returncode, forced.stdout) == (2, "")
    assert "OUTRIDER_CPU=portable needs the C++ extension" in forced.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="poses as another Linux")
def test_another_architecture_gets_the_portable_kernels_alone(tmp_path: Path, tiny: Path) -> None:
    """The build is told that the target is an aarch64 machine; what it compiles still runs here."""
    foreign = "-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64"
    machine = Machine(tmp_path / "venv")
    machine.install(build(tmp_path / "wheel", CMAKE_ARGS=foreign))
    state = machine.state()
    assert state["level"] == "portable"
    assert state["why"].startswith("portable: the best of portable on this processor")
    assert state["calls"] > 0
    assert machine.answer(tiny)["token_ids"]
