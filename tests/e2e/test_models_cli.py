"""`outrider models` through the real entry point. Nothing is downloaded."""

import json

import pytest

from outrider.cli.main import main
from outrider.models.loader.catalogue import CATALOGUE, DEFAULT_MODEL
from tests.tiny_folder import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    write_tiny_model(root / "target", layers=2)
    write_tiny_model(root / "draft", layers=1)
    write_tiny_model(root / "padded", layers=1, vocab=300)
    write_tiny_model(root / "foreign", layers=1, shuffled=True)
    return root


@pytest.fixture
def models(capsys, monkeypatch, tmp_path):
    """Runs the command with an empty model folder; returns (exit code, stdout, stderr)."""
    monkeypatch.setenv("OUTRIDER_MODELS", str(tmp_path / "cache"))

    def run(*args):
        code = main(["models", *map(str, args)])
        return code, *capsys.readouterr()

    return run


def test_list_shows_the_catalogue(models, tmp_path):
    code, out, _ = models("list")
    assert code == 0
    for entry in CATALOGUE:
        [line] = [line for line in out.splitlines() if line.startswith(entry.name + " ")]
        assert entry.licence in line
        assert "no" in line.split()
    code, out, _ = models("list", "--json")
    listed = json.loads(out)
    assert listed["folder"] == str(tmp_path / "cache")
    assert [model["name"] for model in listed["models"]] == [entry.name for entry in CATALOGUE]
    assert listed["models"][0]["name"] == DEFAULT_MODEL
    assert all(model["path"] is None and model["size_bytes"] > 0 for model in listed["models"])


def test_info(models, folder):
    facts = json.loads(models("info", folder / "padded", "--json")[1])
    assert facts["architecture"] == "llama"
    assert (facts["layers"], facts["context_length"], facts["quantisation"]) == (1, 512, "F32")
    assert (facts["vocabulary_rows"], facts["vocabulary_used"], facts["end_of_text_ids"]) == (300, 257, [256])
    assert facts["chat_template"] == "present"
    assert facts["weights_on_disk_bytes"] == facts["weights_in_float32_bytes"] == 4 * facts["parameters"]
    code, out, _ = models("info", folder / "padded")
    assert code == 0
    for part in ("llama", "vocabulary used", "257", "F32"):
        assert part in out


def test_info_with_load_measures_memory(models, folder):
    facts = json.loads(models("info", folder / "draft", "--load", "--json")[1])
    assert facts["memory_as_loaded_bytes"] > 0
    assert facts["load_s"] >= 0


def test_check_of_a_pair_that_fits(models, folder):
    code, out, _ = models("check", folder / "target", folder / "draft")
    assert code == 0
    first, second, *sizes = out.splitlines()
    assert first == f"usable: {folder / 'draft'} as a draft for {folder / 'target'}"
    assert second.startswith("tokenizers: identical: all 257 token ids")
    assert [line.split(",")[0] for line in sizes] == [f"target: {folder / 'target'}", f"draft: {folder / 'draft'}"]
    assert "warning" not in out


def test_check_of_a_padded_pair(models, folder):
    code, out, _ = models("check", folder / "target", folder / "padded", "--json")
    report = json.loads(out)
    assert code == 0
    assert (report["usable"], report["verdict"], report["common_ids"]) == (True, "padded", 257)


def test_check_of_a_foreign_vocabulary(models, folder):
    code, out, _ = models("check", folder / "target", folder / "foreign", "--json")
    report = json.loads(out)
    assert code == 1
    assert not report["usable"]
    assert report["different_ids"] > 0
    assert report["first_differences"][0]["target"] != report["first_differences"][0]["draft"]
    code, out, _ = models("check", folder / "target", folder / "foreign")
    assert code == 1
    assert "NOT usable" in out
    assert f"id {report['first_differences'][0]['token_id']}: " in out


def test_check_warns_of_a_draft_that_is_no_smaller(models, folder):
    code, out, _ = models("check", folder / "draft", folder / "target")
    assert code == 0
    assert "no smaller" in out


def test_pull_of_a_path_prints_it(models, folder):
    assert models("pull", folder / "draft")[:2] == (0, f"{folder / 'draft'}\n")


def test_pull_offline_of_what_is_not_cached(models):
    code, out, err = models("pull", DEFAULT_MODEL, "--offline")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert DEFAULT_MODEL in err


@pytest.mark.parametrize("command", [["pull", "smollm3"], ["info", "smollm3"], ["check", "smollm3", "smollm3"]])
def test_unknown_model_names_the_closest(models, command):
    code, out, err = models(*command)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "smollm2" in err


@pytest.mark.model
def test_the_default_model(capsys):
    assert main(["models", "pull", DEFAULT_MODEL, "--json"]) == 0
    path = json.loads(capsys.readouterr().out)["path"]
    assert path.endswith(".gguf")
    assert main(["models", "info", path, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["architecture"], facts["layers"], facts["quantisation"]) == ("llama", 30, "Q4_1")
    assert facts["vocabulary_used"] == 49152
