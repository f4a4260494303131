"""`outrider doctor` through the real entry point: in this process, and in others at every forced level."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from outrider import kernels
from outrider.bench import bandwidth
from outrider.cli import doctor as command
from outrider.cli.main import main
from outrider.kernels import dispatch, ggml, ops, selfcheck
from outrider.models.linear import TorchLinear
from tests.tiny_decoder import TINY, tiny_decoder
from tests.tiny_folder import write_tiny_model

needs_extension = pytest.mark.skipif(not kernels.available(), reason=kernels.why())


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model whose heads are 8 numbers wide, which the attention kernel does not take."""
    return {"tiny": write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", layers=2, context=64)}


@pytest.fixture
def doctor(capsys, monkeypatch, tmp_path):
    """Runs the command with a model cache of its own; returns (exit code, stdout, stderr)."""
    monkeypatch.setattr(bandwidth, "BLOCK_NBYTES", 1 << 20)
    monkeypatch.setenv("OUTRIDER_MODELS", str(tmp_path / "cache"))

    def run(*args):
        code = main(["doctor", *map(str, args)])
        return code, *capsys.readouterr()

    return run


SMALL = """
import sys
from outrider.bench import bandwidth
from outrider.cli.main import main
bandwidth.BLOCK_NBYTES = 1 << 20
sys.exit(main(sys.argv[1:]))
"""


def elsewhere(level, *args, hidden=False):
    """The command in a process with OUTRIDER_CPU=`level`; `hidden`: as if the extension had not been built."""
    environment = {name: value for name, value in os.environ.items() if name != "OUTRIDER_CPU"}
    if level is not None:
        environment["OUTRIDER_CPU"] = level
    code = "import sys\nsys.modules['outrider.kernels._kernels'] = None\n" + SMALL if hidden else SMALL
    call = [sys.executable, "-c", code, "doctor", *map(str, args)]
    return subprocess.run(call, capture_output=True, text=True, env=environment, timeout=300)


def plan_of(document):
    return {decision["field"]: decision for decision in document["model"]["plan"]}


def test_what_is_said(doctor, tmp_path):
    (tmp_path / "cache" / "own").mkdir(parents=True)
    (tmp_path / "cache" / "own" / "x.gguf").write_bytes(b"12345678")
    code, out, err = doctor("--json")
    assert (code, err, out.count("\n")) == (0, "", 1)
    found = json.loads(out)
    assert found["schema"] == "outrider.doctor/1"
    assert found["cpu"]["name"]
    assert found["cpu"]["logical_cores"] == os.cpu_count()
    assert found["kernels"]["level"] == kernels.active_level()
    assert found["kernels"]["reason"] == kernels.why()
    assert found["kernels"]["wide_rows"] == dispatch.wide_rows()
    assert found["kernels"]["threads"] == kernels.threads()
    assert found["versions"]["torch"] == str(torch.__version__)
    assert set(found["packages"]) == {"transformers", "llguidance"}
    assert found["cache"] == {"folder": str(tmp_path / "cache"), "models": {"own/x.gguf": 8}}
    assert found["read_bandwidth"]["gbps"] > 0
    assert found["self_check"]["ok"]
    assert found["model"] is None


def test_people_get_lines(doctor, tmp_path):
    code, out, _ = doctor()
    assert code == 0
    parts = "processor", "instructions", "memory", "CUDA", "kernels", "wide passes", "extension", "threads", "cache"
    for part in parts:
        assert any(line.startswith(f"{part} ") for line in out.splitlines()), part
    assert f"{tmp_path / 'cache'}: no model" in out
    assert out.splitlines()[-1].startswith("self-check: ")


def test_instruction_sets_are_those_of_the_system(monkeypatch, tmp_path):
    flags = "flags\t\t: fpu avx2 fma avx512f avx512bw avx512vl avx512dq avx512_vnni\n"
    monkeypatch.setattr(command.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(command.Path, "read_text", lambda self, *args: "processor\t: 0\n" + flags * 2)
    found = command.instruction_sets()
    assert {name for name, here in found.items() if here} == {"AVX2", "FMA", "AVX-512", "AVX-512 VNNI"}
    monkeypatch.setattr(command.Path, "read_text", lambda self, *args: flags.replace("avx512bw ", ""))
    assert not command.instruction_sets()["AVX-512"]
    monkeypatch.setattr(command.Path, "read_text", lambda self, *args: "Features : fp asimd bf16 i8mm\n")
    monkeypatch.setattr(command.platform, "machine", lambda: "aarch64")
    found = command.instruction_sets()
    assert {name for name, here in found.items() if here} == {"NEON", "bf16", "int8 matrix"}


@needs_extension
def test_every_kernel_is_checked(doctor):
    names = {check["name"] for check in json.loads(doctor("--json")[1])["self_check"]["checks"]}
    singles = {"rms_norm", "add_rms_norm_", "swiglu", "rope_", "stack"}
    typed = {f"{kernel} {dtype}" for kernel in ("linear", "attention") for dtype in ("float32", "bfloat16")}
    blocks = {f"{kernel} {kind}" for kernel in ("linear", "dequantise") for kind in ggml.FORMATS}
    assert singles | typed | blocks <= names
    assert {case.counted for case in selfcheck._cases()} == set(dispatch.OPERATIONS)


def wrong_by_a_little(x):
    return x * 1.001


def not_a_number(x):
    return x * torch.nan


@needs_extension
@pytest.mark.parametrize("spoil", [wrong_by_a_little, not_a_number])
def test_a_kernel_that_differs_is_named(doctor, monkeypatch, spoil):
    right = ops.swiglu
    monkeypatch.setattr(ops, "swiglu", lambda x: spoil(right(x)))
    code, out, _ = doctor()
    assert code == 1
    assert "self-check: WRONG: swiglu differs from its twin" in out
    assert "attention" not in out.splitlines()[-1]
    code, out, _ = doctor("--json")
    assert code == 1
    report = json.loads(out)["self_check"]
    assert not report["ok"]
    assert [check["name"] for check in report["checks"] if not check["ok"]] == ["swiglu"]


@needs_extension
def test_a_kernel_that_did_not_run_or_fails_is_named(doctor, monkeypatch):
    def broken(*args):
        raise IndexError("row 3")

    monkeypatch.setattr(ops, "rms_norm", selfcheck.reference.rms_norm)
    monkeypatch.setattr(ops, "attention", broken)
    code, out, _ = doctor()
    assert code == 1
    assert "rms_norm did not run in C++" in out
    assert "attention float32 failed: IndexError: row 3" in out


@pytest.mark.parametrize("level", ["torch", pytest.param("portable", marks=needs_extension)])
def test_a_forced_level(level, models):
    run = elsewhere(level, models["tiny"], "--json")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["kernels"]["level"] == found["kernels"]["forced"] == level
    assert "OUTRIDER_CPU" in found["kernels"]["reason"]
    assert found["self_check"]["ok"]
    assert found["self_check"]["ran"] == (level != "torch")
    plan = plan_of(found)
    assert plan["dtype"]["value"] == ("float32" if level == "torch" else "bfloat16")
    in_kernels = level != "torch"
    assert plan["attention"]["value"] == ("kernels" if in_kernels else "torch")
    assert plan["layers"]["value"] == ("all in one call" if in_kernels else "one call an operation")
    assert ("heads of 16 numbers" if in_kernels else "OUTRIDER_CPU") in plan["attention"]["reason"]


def test_without_the_extension():
    run = elsewhere(None, hidden=True)
    assert run.returncode == 0, run.stderr
    assert "self-check: nothing to check" in run.stdout
    lines = {line.split()[0]: line for line in run.stdout.splitlines()}
    assert "was not built" in lines["extension"]
    assert "torch: the C++ extension was not built" in lines["kernels"]
    assert "does not load" not in run.stdout
    assert f"; {kernels.usable_processors()} logical processors for this process" in lines["processor"]
    assert "no: OUTRIDER_CPU is not set" in run.stdout


def test_a_plan_names_the_level_once(models):
    run = elsewhere(None, models["tiny"])
    assert run.returncode == 0, run.stderr
    level = kernels.active_level()
    assert f"{level}: {kernels.reason()}" in run.stdout
    assert f"{level}: {level}:" not in run.stdout


def test_the_dtype_under_a_forced_torch_says_who_asks(models):
    run = elsewhere("torch", models["tiny"], "--json")
    assert plan_of(json.loads(run.stdout))["dtype"]["reason"].startswith("as OUTRIDER_CPU asks; torch does the work")


def test_a_busy_machine_is_noted(doctor, monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (99.0, 0, 0))
    out = doctor()[1]
    assert "note: the machine was busy: load average 99.0" in out.splitlines()[-2]
    found = json.loads(doctor("--json")[1])
    assert found["cpu"]["load_1min"] == 99.0
    assert [note[:20] for note in found["notes"]] == ["the machine was busy"]
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0, 0))
    assert json.loads(doctor("--json")[1])["notes"] == []


def test_a_level_that_does_not_exist_is_one_line():
    environment = os.environ | {"OUTRIDER_CPU": "sse2"}
    call = [sys.executable, "-m", "outrider.cli.main", "doctor"]
    run = subprocess.run(call, capture_output=True, text=True, env=environment, timeout=300)
    assert (run.returncode, run.stdout) == (2, "")
    assert "OUTRIDER_CPU=sse2 is unknown; allowed: portable, avx2, avx512, amx, torch" in run.stderr
    assert run.stderr.count("\n") == 1


@needs_extension
@pytest.mark.parametrize(
    ("overrides", "attention", "layers"),
    [({}, "kernels", "all in one call"), ({"head_dim": 8}, "torch", "one call an operation")],
)
def test_what_is_said_of_a_pass_is_what_the_decoder_does(overrides, attention, layers):
    decoder = tiny_decoder(**overrides)
    found = {decision.field: decision.value for decision in command.pass_decisions(decoder)}
    assert found == {"attention": attention, "layers": layers}
    assert decoder._fast == (attention == "kernels")
    assert (decoder._stack is not None) == (layers == "all in one call")


def test_another_backend_is_named():
    assert {decision.value for decision in command.pass_decisions(object())} == {"transformers"}


@needs_extension
def test_a_loose_matrix_is_named():
    decoder = tiny_decoder()
    loose = TorchLinear(torch.zeros(TINY.hidden_size, TINY.n_heads * TINY.head_dim))
    decoder.layers[1] = replace(decoder.layers[1], o=loose)
    [layers] = [decision for decision in command.pass_decisions(decoder) if decision.field == "layers"]
    assert layers.value == "one call an operation"
    assert "layer 1" in layers.reason


def test_a_model_that_is_not_there_is_one_line(doctor):
    code, out, err = doctor("smollm3", "--offline")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "smollm2" in err
