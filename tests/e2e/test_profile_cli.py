"""`outrider profile` through the real entry point, on a tiny model. No timing is judged."""

from __future__ import annotations

import json

import pytest

from outrider.bench import measured_costs
from outrider.bench.bandwidth import Bandwidth
from outrider.bench.profile import Times
from outrider.cli.main import main
from outrider.models.decoder import Decoder
from tests.tiny_folder import FFN, HIDDEN, write_tiny_model

ROWS = ["1", "2", "5"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "target", layers=2, context=256)


@pytest.fixture
def profile(model, capsys, monkeypatch, tmp_path):
    """Runs the command on the tiny target; returns (exit code, stdout, stderr). `gbps`: bandwidths before and after."""

    def run(*args, gbps=(20.0, 22.0)):
        reads = iter(gbps)
        monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("outrider.bench.profile.read_bandwidth", lambda: Bandwidth(next(reads), "made up", 2))
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
    reads = found["read_bandwidth"]
    assert [reads["gbps"], reads["before"]["gbps"], reads["after"]["gbps"]] == [22.0, 20.0, 22.0]
    assert found["conclusion"]["break_even_rows"] == 5
    assert found["conclusion"]["break_even_tokens_per_pass"] == max(found["v"]["5"], 1)
    assert found["conclusion"]["nearly_free_rows"] in (1, 2, 5)
    assert found["file_bytes"] == (model / "model.safetensors").stat().st_size
    assert found["peak_rss_bytes"] >= found["rss_before_load_bytes"]
    assert found["model"]["target"] == str(model)
    assert {"rows", "share", "sampling"} <= set(err.split())


def test_bytes_of_a_pass_are_those_of_its_matrices(profile):
    layer = HIDDEN * (HIDDEN + 2 * HIDDEN // 2 + HIDDEN + 3 * FFN)
    padded_head = (257 + 31) // 32 * 32 * HIDDEN  # the widest panel of any level; the layers fill theirs
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
    costs, free, pays = lines[-3:]
    assert costs.startswith("checking 5 tokens costs ")
    assert costs.endswith(" x one")
    assert "nearly free here" in free or free.endswith("not free here")
    assert pays.startswith("with 5 rows, drafts that cost nothing (ngram, suffix) pay above ")
    assert pays.endswith(" tokens a pass")


def test_the_conclusions_are_those_of_the_figures(profile, monkeypatch):
    costs = {1: 0.1, 2: 0.104, 3: 0.11, 5: 0.15}
    made = {rows: Times.of([seconds]) for rows, seconds in costs.items()}
    monkeypatch.setattr("outrider.bench.profile.time_passes", lambda *args, **options: made)
    out = profile("--rows", "1,2,3,5", "--context", "20", "--repeat", "1", "--quiet")[1]
    assert out.splitlines()[-3:] == [
        "checking 5 tokens costs 1.50 x one",
        "up to 3 rows cost at most 1.1 x one: checking 2 drafted tokens is nearly free here",
        "with 5 rows, drafts that cost nothing (ngram, suffix) pay above 1.50 tokens a pass",
    ]


def test_repeated_rows_add_up(profile):
    out = profile("--rows", "2", "--rows", "5", "--context", "20", "--repeat", "1", "--json", "--quiet")[1]
    assert json.loads(out)["settings"]["rows"] == [1, 2, 5]


def test_no_share_without_a_steady_bandwidth(profile):
    args = ("--rows", "1", "--context", "20", "--repeat", "1", "--quiet")
    out = profile(*args, gbps=(20.0, 25.0))[1]
    assert "note: memory read at 20.0 GB/s before the passes and at 25.0 after" in out
    [row] = [line for line in out.splitlines() if line.startswith("│")]
    assert row.split("│")[6].strip() == "-"
    found = json.loads(profile(*args, "--json", gbps=(20.0, 25.0))[1])
    assert found["bandwidth_share"] == {"1": None}
    assert found["achieved_gbps"]["1"] > 0


def test_numbers_of_rows_take_turns_and_plain_rounds_follow_in_a_row(profile, monkeypatch):
    rows, forward = [], Decoder.forward

    def spy(self, segments, **options):
        if options.get("logits", True):
            rows.append((len(segments[0].tokens), segments[0].cache.length))
        return forward(self, segments, **options)

    monkeypatch.setattr(Decoder, "forward", spy)
    code, out, _ = profile("--rows", "1,3", "--context", "20", "--repeat", "2", "--quiet", "--json")
    assert code == 0
    assert json.loads(out)["round_seconds"] > 0
    turns = [count if length == 20 else "plain" for count, length in rows]  # first the draft (2), then the prompt
    assert turns[2:12] == [1, 3, 3, 1, 1, 3, 1, "plain", "plain", "plain"]  # behind the passes a prompt's, then rounds


def test_sizes_that_the_file_cannot_hold_are_refused_before_the_weights(profile, monkeypatch):
    monkeypatch.setattr("outrider.engine.llm.open_model", None)
    code, out, err = profile("--context", "300")
    assert (code, out) == (2, "")
    assert "--context 300 and 16 rows do not fit" in err
    assert "holds 256 tokens: give --context 240 or less" in err


def test_a_full_context_leaves_out_the_rounds_and_says_so(profile):
    code, out, _ = profile("--rows", "1", "--context", "255", "--repeat", "1", "--json", "--quiet")
    assert code == 0
    found = json.loads(out)
    assert found["round_seconds"] is found["overhead_seconds"] is None
    assert found["target_seconds"]["1"] > 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--rows", "0,2"], "--rows 0 is not allowed: give integers >= 1"),
        (["--rows", "-3"], "--rows -3 is not allowed"),
        (["--rows", "1,x"], "--rows '1,x' is not allowed"),
        (["--rows", ""], "--rows '' is not allowed"),
        (["--context", "0"], "--context 0 is not allowed"),
        (["--repeat", "0"], "--repeat 0 is not allowed"),
        (["--threads", "0", "--context", "20"], "threads = 0 is not allowed"),
        (["--repeat", "2", "--repeat", "3"], "--repeat was given 2 times"),
        (["--context", "254", "--rows", "1,4"], "holds 256 tokens: give --context 252 or less"),
        (["--context", "1", "--rows", "256"], "holds 256 tokens: give fewer rows"),
        (["--dtype", "int3", "--context", "20"], "dtype 'int3' is not allowed"),
    ],
)
def test_what_cannot_be_done_is_one_line(profile, args, message):
    code, out, err = profile("--quiet", *args)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert not out


def test_passes_behind_the_same_context_are_measured_once(profile, monkeypatch):
    for name, fewer in (("CONTEXTS", (20, 40)), ("ROWS", (1, 2, 3)), ("LENGTHS", (1,)), ("REPEAT", 2)):
        monkeypatch.setattr(measured_costs, name, fewer)
    behind, time_passes = [], measured_costs.time_passes

    def spy(model, cache, *args, **options):
        behind.append(cache.length)
        return time_passes(model, cache, *args, **options)

    monkeypatch.setattr(measured_costs, "time_passes", spy)
    args = ("--rows", "1,2", "--context", "20", "--json", "--quiet")
    found = json.loads(profile(*args, "--repeat", "2")[1])
    assert behind == [40]
    assert (found["settings"]["rows"], list(found["v"])) == ([1, 2], ["1", "2"])
    kept = found["costs"]["target_seconds"]
    assert {context: list(curve) for context, curve in kept.items()} == {"20": ["1", "2", "3"], "40": ["1", "2", "3"]}
    assert kept["20"]["1"] <= found["target_seconds"]["1"], "but for what noise made fall"
    profile(*args, "--repeat", "1", "--refresh")
    assert behind[1:] == [20, 40], "fewer rounds than costs take do not serve"
    monkeypatch.setattr(measured_costs, "time_passes", None)
    assert json.loads(profile(*args, "--repeat", "2")[1])["costs"]["measured"] == [], "what holds needs no more rows"


def test_the_document_is_printed_whatever_becomes_of_the_costs(profile, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "costs").write_text("no folder")
    code, out, err = profile("--rows", "1,2", "--context", "20", "--repeat", "1", "--json", "--quiet")
    found = json.loads(out)
    assert (code, found["costs"]["path"]) == (2, None)
    assert found["costs"]["measured"][0] == "the target"
    assert found["target_seconds"]["2"] > 0
    assert "measured (nothing has been measured for this" in err
    assert "and not kept" in err
    assert "costs cannot be kept in" in err.splitlines()[-1]


def test_ctrl_c_leaves_no_document(profile, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.bench.profile.time_passes", interrupted)
    code, out, err = profile("--quiet", "--json", "--context", "20")
    assert (code, out) == (130, "")
    assert "Traceback" not in err
