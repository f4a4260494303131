"""`outrider verify` through the real entry point, on a tiny model; and on the default model where marked."""

from __future__ import annotations

import json

import pytest

from outrider.cli.main import main
from outrider.core.verdict import Origin, Verdict
from outrider.verify.greedy import GreedyVerifier
from tests.tiny_folder import broken_model, write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    write_tiny_model(root / "target")
    write_tiny_model(root / "draft", layers=1)
    (root / "prompts.jsonl").write_text(
        '{"prompt": "serving serving serving"}\n{"turns": ["a b a b"], "category": "x"}\n'
    )
    return root


@pytest.fixture
def verify(folder, capsys):
    """Runs the command on the tiny target; returns (exit code, stdout, stderr)."""

    def run(*args):
        options = {"--dtype": "float32", "--max-tokens": "8", "--prompts": str(folder / "prompts.jsonl")}
        usual = [word for option in options.items() if option[0] not in args for word in option]
        code = main(["verify", str(folder / "target"), *usual, *args])
        return code, *capsys.readouterr()

    return run


class KeepsTheFirst(GreedyVerifier):
    """A broken rule: the first draft token is kept, right or wrong."""

    def verify(self, draft, p, rng, seed, position):
        path = [0] if draft.size else []
        return Verdict(path, p[len(path)].only, Origin.BONUS)


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_all_drafters_and_lengths_are_clean(verify, folder, temperature):
    drafters = ["--drafter", "ngram,suffix,draft_model", "--draft-model", str(folder / "draft")]
    code, out, _ = verify(*drafters, "--k", "1,5", "--temperature", temperature, "--json")
    assert code == 0
    document = json.loads(out)
    assert out.count("\n") == 1
    assert document["outcome"] in ("IDENTICAL", "TIE")
    assert [(lane["drafter"], lane["k"]) for lane in document["lanes"]] == [
        (drafter, k) for drafter in ("ngram", "suffix", "draft_model") for k in (1, 5)
    ]
    for lane in document["lanes"]:
        assert lane["prompts"] == 2
        assert lane["diverged"] == 0
        assert lane["rule"] == ("greedy" if temperature == "0" else "coupled")
    assert document["lanes"][-1]["stats"]["drafted"] > 0
    assert document["settings"]["temperature"] == float(temperature)
    assert document["relative_tolerance"] == 1e-4


def test_repeated_options_add_up(verify):
    code, out, _ = verify("-d", "ngram", "-d", "suffix,ngram", "-k", "1", "-k", "2,1", "--json", "--category", "x")
    assert code in (0, 1)
    lanes = json.loads(out)["lanes"]
    assert [(lane["drafter"], lane["k"]) for lane in lanes] == [(d, k) for d in ("ngram", "suffix") for k in (1, 2)]
    _, out, _ = verify("-d", "ngram", "-k", "1", "--json", "--category", "x", "--category", "other")
    assert json.loads(out)["settings"]["categories"] == ["other", "x"]


def test_a_table_and_a_verdict_for_people(verify, folder):
    code, out, err = verify("--drafter", "draft_model", "--draft-model", str(folder / "draft"), "--k", "3")
    assert code == 0
    assert "drafter" in out
    assert out.splitlines()[-1].startswith(("IDENTICAL 2 speculative", "TIE 2 speculative"))
    assert "target:" in err


def test_a_broken_rule_diverges_with_exit_code_1(verify, folder, monkeypatch):
    monkeypatch.setattr("outrider.verify.greedy.GreedyVerifier", KeepsTheFirst)
    drafting = ["--drafter", "draft_model", "--draft-model", str(folder / "draft"), "--k", "3"]
    code, out, _ = verify(*drafting)
    assert code == 1
    assert "DIVERGED: draft_model K=3, prompt 1, output token" in out
    assert "this is a bug" in out.splitlines()[-1]
    code, out, _ = verify(*drafting, "--json")
    assert code == 1
    document = json.loads(out)
    assert document["outcome"] == "DIVERGED"
    assert document["lanes"][0]["divergence_list"][0]["gap"] > document["lanes"][0]["divergence_list"][0]["tolerance"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--temperature", "0.8", "--rule", "block"], "use --rule coupled, or --temperature 0"),
        (["--temperature", "nan"], "temperature = nan is not allowed"),
        (["--k", "-1"], "K = -1 is not allowed"),
        (["--k", "two"], "as in 1,2,5"),
        (["--drafter", "sufix"], "did you mean 'suffix'"),
        (["--drafter", "draft_model"], "needs a draft model"),
        (["--drafter", "none"], "nothing to compare with plain"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl does not exist"),
        (["--category", "poetry"], "choose from other, x"),
        (["--limit", "0"], "limit = 0 is not allowed"),
        (["--tolerance", "7"], "--tolerance 7.0 is not allowed"),
        (["--max-tokens", "0"], "max_tokens = 0 is not allowed"),
        (["--rule", "gredy"], "did you mean 'greedy'"),
        (["--rule", "greedy", "--rule", "coupled"], "--rule was given 2 times"),
        (["--draft-model", "a", "--draft-model", "b"], "--draft-model was given 2 times"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(verify, args, message):
    code, out, err = verify("--quiet", *args)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert not out


@pytest.mark.model
@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_the_default_model_is_clean(capsys, temperature):
    from outrider.models.loader.catalogue import DEFAULT_MODEL

    options = ["--drafter", "ngram,suffix", "--k", "2,5", "--limit", "1", "--max-tokens", "16", "--json", "--quiet"]
    code = main(["verify", DEFAULT_MODEL, "--temperature", temperature, *options])
    document = json.loads(capsys.readouterr().out)
    assert code == 0
    assert all(lane["diverged"] == 0 for lane in document["lanes"])
    assert sum(lane["stats"]["drafted"] for lane in document["lanes"]) > 0


def test_a_model_that_fails_by_itself_is_named_and_no_bug(folder, tmp_path, capsys):
    broken = broken_model(tmp_path / "broken")
    code = main(["verify", str(broken), "-d", "ngram", "-k", "2", "--prompts", str(folder / "prompts.jsonl"), "-q"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert code == 1
    assert "2 of 2 answers cannot be compared, as plain decoding fails by itself" in last
    assert "plain ended with \"error: the target's logits are NaN" in last
    assert "bug" not in last


def test_verifying_nothing_is_not_a_pass(verify):
    code, out, _ = verify("--drafter", "ngram", "--k", "0", "--json")
    assert code == 1
    assert json.loads(out)["outcome"] == "UNVERIFIED"


@pytest.mark.model
def test_c1_a_repeated_word_is_drafted_and_equals_plain(tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "serving" * 48}) + "\n")
    options = ["--drafter", "ngram", "--k", "1,5,8", "--max-tokens", "32", "--raw", "--ignore-eos"]
    code = main(["verify", "smollm2-135m", *options, "--prompts", str(prompts), "--json", "--quiet"])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (code, document["outcome"]) == (0, "IDENTICAL")
    for lane in document["lanes"]:
        assert lane["stats"]["accepted"] > 0
        assert lane["stats"]["emitted"] == 32
