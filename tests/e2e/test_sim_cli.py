"""`outrider sim` through the real entry point: the document, what it says of its figures, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from outrider.bench.bandwidth import Bandwidth
from outrider.cli.main import main
from outrider.sim.machines import MACHINES
from tests.tiny_folder import write_tiny_model


def run(capsys, *args):
    code = main(["sim", *map(str, args)])
    return code, *capsys.readouterr()


def test_the_document(capsys):
    args = ("--alpha", "0.8,0.3", "--draft-cost", "0.1", "--k", "2,4", "--machine", "ideal,tpu-v4-chinchilla")
    code, out, err = run(capsys, *args, "--tokens", "200", "--json")
    assert code == 0, err
    assert out.count("\n") == 1
    found = json.loads(out)
    assert (found["schema"], found["simulated"], found["synthetic_acceptance"]) == ("outrider.sim/1", True, True)
    assert found["settings"] == {"tokens": 200, "seed": 0, "dry_run": False, "ks": [2, 4]}
    assert [(r["acceptance"], r["k"], r["machine"]) for r in found["results"]] == [
        (f"alpha {alpha}", k, machine)
        for alpha in (0.8, 0.3)
        for k in (2, 4)
        for machine in ("ideal", "tpu-v4-chinchilla")
    ]
    for result in found["results"]:
        simulated = result["simulated"]
        assert simulated["tokens"] == 200
        assert simulated["speedup"] == pytest.approx(simulated["plain_passes"] / simulated["passes"])
        assert (simulated["tok_s"] is None) == (result["machine"] == "ideal")
    assert "Acceptance is synthetic (alpha 0.8)" in err
    assert "Costs are published (tpu-v4-chinchilla)" in err


def test_a_dry_run_names_everything_and_runs_nothing(capsys, monkeypatch):
    monkeypatch.setattr("outrider.sim.report.simulate", None)
    code, out, err = run(capsys, "--ranks", "0.5,0.2", "--machine", "tpu-v4-t5-base", "--dry-run", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["results"], found["settings"]["dry_run"], found["settings"]["ks"]) == ([], True, [1, 2, 3, 5, 8])
    assert "Acceptance is synthetic (tree by rank)" in err
    assert "0.040" in err


def test_the_list_of_machines(capsys):
    code, out, _ = run(capsys, "--list")
    assert code == 0
    for name, machine in MACHINES.items():
        assert f"{name}  [{machine.kind}] {machine.source}" in out
    code, out, _ = run(capsys, "--list", "--json")
    assert [machine["name"] for machine in json.loads(out)["machines"]] == list(MACHINES)


def test_what_bench_and_profile_write_is_read(capsys, tmp_path, monkeypatch):
    """The whole way: measure a tiny model, replay what was recorded on the costs that were measured."""
    monkeypatch.setattr("outrider.bench.profile.read_bandwidth", lambda: Bandwidth(20.0, "made up", 2))
    model = str(write_tiny_model(tmp_path / "target", layers=2, context=512))
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "x = x = x = x", "category": "code"}))
    asked = ["--prompts", str(tmp_path / "prompts.jsonl"), "--dtype", "float32", "--max-tokens", "24", "--raw"]
    assert main(["bench", model, *asked, "-d", "suffix", "-k", "2,4", "--ignore-eos", "--quiet"]) == 0
    (tmp_path / "bench.json").write_text(capsys.readouterr().out)
    sizes = ["--rows", "1,2,5", "--context", "64", "--repeat", "3", "--dtype", "float32"]
    assert main(["profile", model, *sizes, "--quiet", "--json"]) == 0
    (tmp_path / "profile.json").write_text(capsys.readouterr().out)

    files = ("--bench", tmp_path / "bench.json", "--machine", tmp_path / "profile.json")
    code, out, err = run(capsys, *files, "--tokens", "300", "--k", "1,4", "--json")
    assert code == 0, err
    found, bench = json.loads(out), json.loads((tmp_path / "bench.json").read_text().splitlines()[-1])
    lane = next(lane for lane in bench["lanes"] if lane["lane"] == "suffix K=4")
    [machine], [acceptance] = found["machines"], found["acceptances"]
    assert (found["synthetic_acceptance"], acceptance["label"]) == (False, "suffix (recorded)")
    assert (machine["kind"], machine["rows"], [r["k"] for r in found["results"]]) == ("measured", 5, [1, 4])
    longest = found["results"][1]
    assert longest["theory"]["tokens_per_round"] == pytest.approx(1 + sum(lane["all"]["acceptance_by_position"]))
    assert longest["simulated"]["tok_s"] > 0
    assert "recorded by outrider bench" in err


@pytest.mark.parametrize(
    ("rule", "label", "said"),
    [
        ("auto", "tables", "no theory is stated, since rule block judges a draft as a whole"),
        ("typical", "tables, rule typical (lossy)", "rule typical is lossy: its text does not follow the target's"),
        ("top1", "tables, rule top1 (lossy)", "rule top1 is lossy"),
    ],
)
def test_no_theory_is_stated_for_rules_that_have_none(capsys, rule, label, said):
    code, out, err = run(capsys, "--tables", 1, "--rule", rule, "-k", 2, "--draft-cost", 0, "--tokens", 50, "--json")
    assert code == 0, err
    found = json.loads(out)
    [result] = found["results"]
    assert result["acceptance"] == label
    assert (result["theory"]["tokens_per_round"], result["theory"]["speedup"]) == (None, None)
    assert said in found["acceptances"][0]["source"]
    assert said in err
    assert found["conclusions"][0].startswith(f"ideal, {label}: ")


BAD = {
    "no acceptance": ([], ["--alpha A", "--bench FILE", "as in --alpha 0.8 --draft-cost 0.1"]),
    "no tables for the rule": (["--rule", "chain"], ["--rule chain", "give --tables NOISE with it"]),
    "no bench for the drafter": (["--drafter", "suffix"], ["give it with --bench FILE"]),
    "no acceptance on a wrong machine": (["--machine", "idea"], ["how often drafts are accepted was not said"]),
    "no draft cost": (["--alpha", "0.5"], ["--draft-cost C", "'ideal'"]),
    "alpha no number": (["--alpha", "high"], ["--alpha 'high'", "0 to 1"]),
    "alpha above 1": (["--alpha", "0.5,1.5"], ["--alpha '0.5,1.5'", "0 to 1"]),
    "empty acceptance": (["--acceptance", ""], ["--acceptance ''", "0.8,0.7"]),
    "ranks above 1": (["--ranks", "0.7,0.6", "--draft-cost", "0"], ["1.300", "at most one"]),
    "negative draft cost": (["--alpha", "0.5", "--draft-cost", "-1"], ["c = -1.0", "0 to 1000000"]),
    "noise": (["--tables", "-1"], ["noise -1.0", "0 (equal tables) to 100"]),
    "rule": (["--tables", "0.5", "--rule", "blok"], ["'blok'", "'block'"]),
    "rule without tables": (["--alpha", "0.5", "--rule", "chain"], ["--rule chain", "--tables"]),
    "no machine": (["--alpha", "0.5", "--machine", ","], ["--machine ','", "names nothing", "leave the option out"]),
    "no alpha": (["--acceptance", "0.5", "--alpha", ","], ["--alpha ','", "0 to 1"]),
    "no drafter": (["--bench", "nowhere.json", "--drafter", " ,"], ["--drafter ' ,'", "names nothing"]),
    "machine": (["--alpha", "0.5", "--machine", "idea"], ["'idea'", "did you mean 'ideal'"]),
    "missing bench": (["--bench", "nowhere.json"], ["--bench nowhere.json", "no such file"]),
    "drafter without bench": (["--alpha", "0.5", "--drafter", "suffix"], ["--drafter", "--bench FILE"]),
    "k beyond the positions": (["--acceptance", "0.5", "--draft-cost", "0", "--k", "2"], ["K = 2", "0 to 1"]),
    "k": (["--alpha", "0.5", "--draft-cost", "0", "--k", "99"], ["99", "64"]),
    "tokens": (["--alpha", "0.5", "--draft-cost", "0", "--tokens", "0"], ["0 tokens", "1 to 20000"]),
}


ANSWERED_WITHOUT_TORCH = (
    [],
    ["--rule", "chain"],
    ["--drafter", "suffix"],
    ["--alpha", "2"],
    ["--alpha", "0.5"],
    ["--alpha", "0.5", "--machine", "idea"],
    ["--bench", "nowhere.json"],
    ["--list"],
)


def test_wrong_inputs_do_not_wait_for_torch():
    """In a process of its own, for this one has imported it."""
    code = (
        "import sys; from outrider.cli.main import main\n"
        f"for given in {ANSWERED_WITHOUT_TORCH}: main(['sim', *given]); assert 'torch' not in sys.modules, given"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == len(ANSWERED_WITHOUT_TORCH) - 1


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(capsys, case):
    args, parts = BAD[case]
    code, out, err = run(capsys, *args)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    for part in parts:
        assert part in err
