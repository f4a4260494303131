"""`outrider profile` through the real entry point, on a tiny model. No timing is judged."""

from __future__ import annotations

import json

import pytest

from outrider.bench import bandwidth
from outrider.cli.main import main
from tests.tiny_folder import FFN, HIDDEN, write_tiny_model

ROWS = ["1", "2", "5"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "target", layers=2, context=256)


@pytest.fixture
def profile(model, capsys, monkeypatch):
    """Runs the command on the tiny target; returns (exit code, stdout, stderr)."""
    monkeypatch.setattr(bandwidth, "BLOCK_NBYTES", 1 << 20)

    def run(*args):
        code = main(["profile", str(model), *map(str, args)])
        return code, *capsys.readouterr()

    return run


def numbers(document, path=""):
    for key, value in document.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{path}{key}.")
        elif isinstance(value, int | float):
            yield f"{path}{key}", value


def test_the_document(profile, model):
    code, out, err = profile("--rows", "5,2", "--context", "100", "--repeat", "3", "--json", "--dtype", "float32")
    assert code == 0
    assert out.count("\n") == 1
    found = json.loads(out)
    assert found["schema"] == "outrider.profile/1"
    assert found["settings"] == {"rows": [1, 2, 5], "context": 100, "repeat": 3, "dtype": "float32"}
    by_rows = ("target_seconds", "target_spread", "v", "achieved_gbps", "bandwidth_share", "sampling_seconds")
    for name in (*by_rows, "sampling_share", "sampled_seconds", "greedy_seconds"):
        assert list(found[name]) == ROWS, name
    assert found["v"]["1"] == 1
    for rows in ROWS:
        spread = found["target_spread"][rows]
        assert 0 < spread["best"] <= spread["q1"] <= spread["median"] <= spread["q3"]
        assert found["target_seconds"][rows] == spread["median"]
        assert found["v"][rows] == pytest.approx(spread["median"] / found["target_seconds"]["1"])
        gbps = found["bytes_per_pass"]["total"] / spread["median"] / 1e9
        assert found["achieved_gbps"][rows] == pytest.approx(gbps)
        assert found["bandwidth_share"][rows] == pytest.approx(gbps / found["read_bandwidth"]["gbps"])
        added = found["sampled_seconds"][rows] - found["greedy_seconds"][rows]
        assert found["sampling_seconds"][rows] == pytest.approx(added)
        assert found["sampling_share"][rows] == pytest.approx(added / spread["median"])
    for name, value in numbers(found):
        if not name.startswith(("sampling_", "machine.load_1min")):
            assert value > 0, name
    assert found["prefill_tokens"] == 256
    assert found["overhead_seconds"] < found["round_seconds"]
    assert found["file_bytes"] == (model / "model.safetensors").stat().st_size
    assert found["peak_rss_bytes"] >= found["rss_before_load_bytes"]
    assert found["model"]["target"] == str(model)
    assert {"rows", "share", "sampling"} <= set(err.split())


def test_bytes_of_a_pass_are_those_of_its_matrices(profile):
    layer = HIDDEN * (HIDDEN + 2 * HIDDEN // 2 + HIDDEN + 3 * FFN)
    padded_head = (257 + 15) // 16 * 16 * HIDDEN
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        out = profile("--rows", "1", "--context", "50", "--repeat", "1", "--json", "--quiet", "--dtype", dtype)[1]
        found = json.loads(out)["bytes_per_pass"]
        assert size * (2 * layer + 257 * HIDDEN) <= found["weights"] <= size * (2 * layer + padded_head)
        assert found["kv"] == 2 * 2 * 50 * HIDDEN // 2 * 4
        assert found["total"] == found["weights"] + found["kv"]


def test_people_get_a_table_and_a_sentence(profile):
    code, out, err = profile("--rows", "1,2,5", "--context", "20", "--repeat", "2", "--quiet")
    assert code == 0
    assert err == ""
    lines = out.splitlines()
    assert "rows" in lines[1]
    assert [line.split()[1] for line in lines if line.startswith("│")] == ROWS
    assert any(line.startswith("memory reads at ") for line in lines)
    assert lines[-1].startswith("checking 5 tokens costs ")
    assert lines[-1].endswith(" x one")


def test_a_full_context_leaves_out_the_rounds_and_says_so(profile):
    code, out, _ = profile("--rows", "1", "--context", "255", "--repeat", "1", "--json", "--quiet")
    assert code == 0
    found = json.loads(out)
    assert found["round_seconds"] is found["overhead_seconds"] is None
    assert found["target_seconds"]["1"] > 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--rows", "0,2"], "rows = 0 is not allowed: give integers >= 1"),
        (["--rows", "-3"], "rows = -3 is not allowed"),
        (["--rows", "1,x"], "--rows '1,x' is not allowed"),
        (["--rows", ""], "--rows '' is not allowed"),
        (["--context", "0"], "context = 0 is not allowed"),
        (["--repeat", "0"], "repeat = 0 is not allowed"),
        (["--threads", "0"], "threads = 0 is not allowed"),
        (["--repeat", "2", "--repeat", "3"], "--repeat was given 2 times"),
        (["--context", "254", "--rows", "1,4"], "holds 256 tokens: give --context 252 or less"),
        (["--context", "1", "--rows", "256"], "holds 256 tokens: give fewer rows"),
        (["--dtype", "int3"], "dtype 'int3' is not allowed"),
    ],
)
def test_what_cannot_be_done_is_one_line(profile, args, message):
    code, out, err = profile("--quiet", *args)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert not out


def test_ctrl_c_leaves_no_document(profile, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.bench.profile.time_passes", interrupted)
    code, out, err = profile("--quiet", "--json", "--context", "20")
    assert (code, out) == (130, "")
    assert "Traceback" not in err
