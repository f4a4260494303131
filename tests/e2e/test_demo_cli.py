"""`outrider demo` through the real entry point: both lanes, the same text, honest figures."""

import json

import pytest

from outrider.bench.compare import Comparison, Outcome
from outrider.cli import answer
from outrider.cli.demo import PROMPTS
from outrider.cli.main import main
from outrider.engine.request import Timings
from tests.tiny_folder import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "target", context=1024)


@pytest.fixture
def demo(folder, capsys):
    def run(*args):
        length = [] if "-n" in args else ["-n", "16"]
        code = main(["demo", "--model", str(folder), "--dtype", "float32", *length, *args])
        return code, *capsys.readouterr()

    return run


def test_both_lanes_and_the_table(demo):
    code, out, err = demo()
    assert code == 0
    assert err.startswith("loading ")
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
        assert prompt["speedup"] in (None, pytest.approx(speeds[0] / speeds[1]))  # None: beyond what can be
        assert prompt["plain"]["draft_n"] == 0
        assert prompt["outcome"] == "IDENTICAL"
    assert report["machine"]["cores"] >= 1


class Clock:
    """Stands in for the figures of a run: plain is always the faster lane, or always slower than can be."""

    def __init__(self, plain_faster: bool) -> None:
        self.plain_faster = plain_faster

    def per_second(self, timings) -> float:
        return 25.0 if timings.draft_n else 50.0 if self.plain_faster else 1.0


@pytest.mark.parametrize(("plain_faster", "ratio"), [(True, "0.50 x"), (False, "not measurable")])
def test_a_slower_lane_is_said_to_be_slower(demo, monkeypatch, plain_faster, ratio):
    monkeypatch.setattr(Timings, "predicted_per_second", property(Clock(plain_faster).per_second))
    code, out, _ = demo("-n", "40")
    assert code == 0
    assert out[out.index("plain tok/s") :].count(ratio) == len(PROMPTS)
    assert ("Speculation was slower than plain on: prose, code, edit." in out) is plain_faster


@pytest.mark.parametrize(
    ("outcome", "code", "words"),
    [
        (Outcome.DIVERGED, 1, ["DIFFERENT", "That is a bug"]),
        (Outcome.TIE, 0, ["but for a tie"]),
        (Outcome.NOT_COMPARABLE, 0, ["DIFFERENT"]),
    ],
)
def test_only_a_divergence_is_an_error(demo, monkeypatch, outcome, code, words):
    verdict = Comparison(outcome, 0, [], sentence="what was found")
    monkeypatch.setattr(answer, "judge", lambda *args: verdict)
    found, out, _ = demo()
    assert found == code
    for word in [*words, "plain gives what was found"]:
        assert word in out
