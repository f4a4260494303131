"""`outrider demo` through the real entry point: both lanes, the same text, honest figures."""

import json

import pytest

from outrider.cli import answer
from outrider.cli.demo import PROMPTS
from outrider.cli.main import main
from tests.tiny_folder import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "target", context=1024)


@pytest.fixture
def demo(folder, capsys):
    def run(*args):
        code = main(["demo", "--model", str(folder), "--dtype", "float32", "-n", "16", *args])
        return code, *capsys.readouterr()

    return run


def test_both_lanes_and_the_table(demo):
    code, out, err = demo()
    assert code == 0
    assert "target: " in err
    table = out[out.index("plain tok/s") :]
    for name in PROMPTS:
        [row] = [line for line in table.splitlines() if line.startswith(name + " ")]
        assert row.endswith("the same")
    assert "cores" in table
    assert "temperature 0" in table


def test_figures_are_those_of_the_runs(demo):
    code, out, err = demo("--json", "--quiet")
    assert (code, err, out.count("\n")) == (0, "", 1)
    report = json.loads(out)
    assert [prompt["prompt"] for prompt in report["prompts"]] == list(PROMPTS)
    for prompt in report["prompts"]:
        speeds = [prompt[lane]["predicted_per_second"] for lane in ("speculative", "plain")]
        assert prompt["speedup"] == pytest.approx(speeds[0] / speeds[1])
        assert prompt["plain"]["draft_n"] == 0
        assert prompt["outcome"] == "IDENTICAL"
    assert report["machine"]["cores"] >= 1


def test_a_slower_lane_is_said_to_be_slower(demo):
    rows = {}
    _, out, _ = demo()
    for line in out[out.index("plain tok/s") :].splitlines()[1:]:
        if line.split(" ")[0] in PROMPTS:
            rows[line.split()[0]] = float(line.split()[3])
    slower = [name for name, ratio in rows.items() if ratio < 0.995]
    assert all(name in out[out.index("Speculation was slower") :] for name in slower)


def test_a_difference_is_an_error(demo, monkeypatch):
    monkeypatch.setattr(answer, "judge", lambda *args: ("DIVERGED", "ANOTHER TEXT"))
    code, out, _ = demo()
    assert code == 1
    assert "DIFFERENT" in out
    assert "That is a bug" in out
    monkeypatch.setattr(answer, "judge", lambda *args: ("TIE", "another text, by 1 tie(s)"))
    code, out, _ = demo()
    assert code == 0
    assert "but for a tie" in out
