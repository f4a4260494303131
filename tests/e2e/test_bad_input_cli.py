"""Bad input: one clear line on stderr, exit code 2, nothing on stdout, nothing left in the cache."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.cli.main import main
from tests.tiny_folder import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    write_tiny_model(root / "target", context=128)
    write_tiny_model(root / "foreign", layers=1, shuffled=True)
    strange = write_tiny_model(root / "strange")
    config = json.loads((strange / "config.json").read_text())
    config |= {"architectures": ["MysteryForCausalLM"], "model_type": "mystery"}
    (strange / "config.json").write_text(json.dumps(config))
    whole = (root / "target" / "model.safetensors").read_bytes()
    write_tiny_model(root / "cut")
    (root / "cut" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    (root / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + b"\x01" * 40)
    (root / "noise.gguf").write_bytes(bytes(range(256)))
    (root / "empty.gguf").write_bytes(b"")
    (root / "pickle.bin").write_bytes(b"\x80\x04.")
    (root / "latin1.txt").write_bytes(b"caf\xe9")
    return root


BAD_OPTIONS = {
    "K below 0": (["hello", "--k", "-1"], ["K = -1", "from 0 to 64"]),
    "K too large": (["hello", "--k", "65"], ["K = 65", "from 0 to 64"]),
    "K no number": (["hello", "--k", "many"], ["K = 'many'", "one integer from 0 to 64"]),
    "several K": (["hello", "-k", "3,5"], ["K = '3,5'", "one integer from 0 to 64", "outrider bench"]),
    "K twice": (["hello", "-k", "3", "--k", "5"], ["--k was given 2 times", "give it once", "outrider bench"]),
    "several drafters": (["hello", "-d", "ngram,suffix"], ["'ngram,suffix'", "give one name", "outrider bench"]),
    "drafter twice": (["hello", "-d", "ngram", "-d", "suffix"], ["--drafter was given 2 times", "give it once"]),
    "seed twice": (["hello", "--seed", "1", "--seed", "2"], ["--seed was given 2 times", "give it once"]),
    "threads twice": (["hello", "--threads", "1", "--threads", "1"], ["--threads was given 2 times"]),
    "chat and raw": (["hello", "--raw", "--chat"], ["--chat/--raw was given 2 times"]),
    "rule twice": (["hello", "--rule", "block", "--rule", "chain"], ["--rule was given 2 times", "give it once"]),
    "an internal drafter": (["hello", "-d", "fixed"], ["'fixed' is unknown", "none, ngram, suffix"]),
    "temperature NaN": (["hello", "--temperature", "nan"], ["temperature = nan", ">= 0"]),
    "temperature below 0": (["hello", "--temperature", "-1"], ["temperature = -1.0", ">= 0"]),
    "temperature infinite": (["hello", "--temperature", "inf"], ["temperature = inf", ">= 0"]),
    "top-p": (["hello", "--top-p", "0"], ["top_p = 0.0", "(0, 1]"]),
    "top-k": (["hello", "--top-k", "-2"], ["top_k = -2", ">= 0"]),
    "min-p": (["hello", "--min-p", "1"], ["min_p = 1.0", "[0, 1)"]),
    "penalty": (["hello", "--frequency-penalty", "3"], ["frequency_penalty = 3.0", "[-2, 2]"]),
    "repetition": (["hello", "--repetition-penalty", "0"], ["repetition_penalty = 0.0", "[0.01, 100]"]),
    "max tokens": (["hello", "--max-tokens", "0"], ["max_tokens = 0", ">= 1", "--max-tokens 256"]),
    "n": (["hello", "--n", "0"], ["n = 0", ">= 1"]),
    "logprobs": (["hello", "--logprobs", "-1"], ["logprobs = -1", "[0, 100]"]),
    "empty stop": (["hello", "--stop", ""], ["stop", "non-empty"]),
    "threads": (["hello", "--threads", "0"], ["threads = 0", "from 1 to"]),
    "more threads than processors": (["hello", "--threads", "4096"], ["threads = 4096", "from 1 to", "processors"]),
    "dtype": (["hello", "--dtype", "float8"], ["float8", "bfloat16"]),
    "draft dtype without a draft": (
        ["hello", "-d", "ngram", "--draft-dtype", "float8"],
        ["draft_dtype 'float8'", "give one of auto", "int8", "quantised"],
    ),
    "draft dtype of a model": (
        ["hello", "--draft-model", "nowhere", "--draft-dtype", "int8"],
        ["draft_dtype 'int8'", "auto, float32, bfloat16, quantised, int4"],
    ),
    "draft dtype of a head": (
        ["hello", "-d", "mtp", "--draft-model", "nowhere", "--draft-dtype", "quantised"],
        ["draft_dtype 'quantised'", "auto, int4, int8, bfloat16, float32"],
    ),
    "empty prompt": ([""], ["prompt is empty"]),
    "missing prompt file": (["--file", "nowhere.txt"], ["--file nowhere.txt", "no such file"]),
    "two prompts": (["hello", "--file", "nowhere.txt"], ["PROMPT and --file"]),
    "prompt longer than the context": (["x" * 500], ["holds 128", "shorten"]),
    "unknown drafter": (["hello", "--drafter", "sufix"], ["'sufix'", "'suffix'", "ngram"]),
    "drafter without its model": (["hello", "--drafter", "draft_model"], ["draft_model", "--draft-model"]),
    "unknown rule": (["hello", "--rule", "greddy"], ["'greddy'", "'greedy'"]),
    "missing draft model": (["hello", "--draft-model", "nowhere"], ["nowhere", "catalogue"]),
    "schema no JSON": (["hello", "--json-schema", "{a"], ["--json-schema", "JSON"]),
    "schema of a missing file": (["hello", "--json-schema", "nowhere.json"], ["nowhere.json", "no such file"]),
    "prediction of a missing file": (["hello", "--prediction", "nowhere.txt"], ["--prediction nowhere.txt"]),
    "system message without chat": (["hello", "--raw", "--system", "x"], ["--system", "--raw"]),
    "trace into a missing folder": (["hello", "--trace", "nowhere/trace.jsonl"], ["--trace", "cannot be written"]),
    "unknown option": (["hello", "--temprature", "1"], ["--temprature"]),
}


def one_line(capfd, code, parts):
    out, err = capfd.readouterr()
    assert code == 2, err
    assert out == ""
    assert err.count("\n") == 1, err
    for part in parts:
        assert part in err


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options(capfd, folder, case):
    args, parts = BAD_OPTIONS[case]
    code = main(["generate", "--model", str(folder / "target"), "--quiet", *args])
    one_line(capfd, code, parts)


def test_no_weights_are_read_for_threads_that_cannot_be(capfd, folder, monkeypatch):
    monkeypatch.setattr("outrider.models.load.Decoder.from_checkpoint", None)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 3, 4}, raising=False)
    code = main(["generate", "hello", "--quiet", "--model", str(folder / "target"), "--threads", "4"])
    one_line(capfd, code, ["threads = 4 is not allowed: give an integer from 1 to 3"])


@pytest.mark.parametrize("command", ["bench", "verify", "tune", "plan"])
@pytest.mark.parametrize("option", ["dtype", "draft_dtype"])
def test_dtypes_are_known_before_anything_is_loaded(capfd, folder, command, option, monkeypatch):
    monkeypatch.setattr("outrider.models.load.Decoder.from_checkpoint", None)
    words = [] if command == "plan" else ["--dry-run"]
    code = main([command, str(folder / "target"), "-d", "ngram", *words, f"--{option.replace('_', '-')}", "bogus"])
    one_line(capfd, code, [f"{option} 'bogus' is not allowed: give one of auto"])


@pytest.mark.parametrize("option", ["--drafter", "--category"])
def test_a_list_that_names_nothing_is_refused(capfd, folder, option):
    code = main(["bench", str(folder / "target"), "--dry-run", option, ","])
    one_line(capfd, code, [f"{option} ',' names nothing: give names separated by commas"])


def test_a_flag_said_twice_says_the_same(capfd, folder):
    code = main(["generate", "hello", "-q", "--quiet", "-n", "1", "--model", str(folder / "target")])
    assert code == 0, capfd.readouterr().err


def test_stops_add_up(capfd, folder):
    line = ["generate", "hello", "-q", "-n", "1", "--model", str(folder / "target")]
    assert main([*line, "--stop", "a", "--stop", "b"]) == 0, capfd.readouterr().err


BAD_MODELS = {
    "nowhere.gguf": ["nowhere.gguf", "no such file", "outrider models list"],
    "./nowhere/model.gguf": ["nowhere/model.gguf", "there is no folder nowhere"],
    "smolm2": ["smolm2", "smollm2"],
    "cut.gguf": ["cut.gguf"],
    "noise.gguf": ["noise.gguf"],
    "empty.gguf": ["empty.gguf"],
    "cut": ["model.safetensors"],
    "pickle.bin": ["pickle.bin", "safetensors"],
    "strange": ["ystery"],
    "hf:not a name": ["names no repository"],
    "pypi:../evil": ["names no package"],
}


def test_a_path_that_leads_nowhere_names_what_is_there(capfd, folder):
    code = main(["generate", "hello", "--quiet", "--model", str(folder / "noize.gguf")])
    one_line(capfd, code, ["noize.gguf", "no such file", f"close in {folder}: noise.gguf"])


def test_a_repository_offline_is_a_command_to_run(capfd, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    code = main(["generate", "hello", "--quiet", "--offline", "--model", "hf:org/name"])
    one_line(capfd, code, ["hf:org/name is not in", "offline", "outrider models pull hf:org/name"])


class PlugIn:
    name = "their_own"


def test_an_unknown_drafter_is_told_of_those_of_other_packages_too(capfd, folder, monkeypatch):
    monkeypatch.setattr("outrider.core.registry.entry_points", lambda group: [PlugIn])
    code = main(["generate", "hello", "--quiet", "--model", str(folder / "target"), "-d", "there_own"])
    one_line(capfd, code, ["'there_own' is unknown", "did you mean 'their_own'", "cascade, their_own"])


@pytest.mark.parametrize("name", BAD_MODELS)
@pytest.mark.parametrize("command", ["generate", "info"])
def test_bad_models(capfd, folder, monkeypatch, tmp_path, name, command):
    monkeypatch.setenv("OUTRIDER_MODELS", str(tmp_path / "cache"))
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    model = str(folder / name) if (folder / name).exists() else name
    line = {"generate": ["generate", "hello", "--quiet", "--model", model], "info": ["models", "info", model]}
    one_line(capfd, main(line[command]), BAD_MODELS[name])
    assert not (tmp_path / "cache").exists()


def test_a_draft_of_another_vocabulary(capfd, folder):
    pair = ["--model", str(folder / "target"), "--draft-model", str(folder / "foreign")]
    code = main(["generate", "hello", "--quiet", *pair])
    one_line(capfd, code, [str(folder / "target"), str(folder / "foreign"), "id 0"])


def test_files_that_are_not_utf8(capfd, folder):
    file = str(folder / "latin1.txt")
    for args in (["--file", file], ["hello", "--prediction", file]):
        code = main(["generate", "--model", str(folder / "target"), "--quiet", *args])
        one_line(capfd, code, ["UTF-8", "latin1.txt"])


def test_an_empty_pipe(capfd, folder, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    one_line(capfd, main(["generate", "--model", str(folder / "target"), "--quiet"]), ["prompt is empty"])


def test_a_terminal_and_no_prompt(capfd, folder, monkeypatch):
    stdin = io.StringIO("")
    stdin.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", stdin)
    one_line(capfd, main(["generate", "--model", str(folder / "target"), "--quiet"]), ["no prompt", "--file"])


def test_the_installed_program(folder):
    """The console script itself: exit codes reach the shell, and a reader that goes away is no error to talk about."""
    program = Path(sys.executable).with_name("outrider")
    bad = subprocess.run([program, "generate", "x", "--k", "-1"], capture_output=True, text=True)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.count("\n") == 1
    line = [program, "generate", "hello", "--model", folder / "target", "--quiet", "--n", "3", "--max-tokens", "40"]
    closed = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    closed.stdout.close()
    assert closed.stderr.read() == ""
    assert closed.wait() == 1
