"""`outrider plan`: what it says without loading is what loading takes."""

from __future__ import annotations

import json
import struct

import pytest

from outrider import LLM, SamplingParams, kernels
from outrider.cli.main import main
from outrider.drafters.block_files import write_block
from outrider.drafters.eagle3_files import write_eagle3
from outrider.drafters.head_card import CardTest, write_card
from outrider.drafters.head_files import read_head
from outrider.drafters.medusa_files import write_medusa
from outrider.drafters.mtp_files import write_mtp
from outrider.engine.opening import identity_of
from outrider.models.kv import DecoderCache
from outrider.models.load import load_model
from outrider.models.loader.safetensors import SafetensorsCheckpoint
from tests.tiny_block import DFLASH, DSPARK, random_block
from tests.tiny_folder import write_tiny_model
from tests.tiny_head import random_head, random_medusa, random_module

needs_kernels = pytest.mark.skipif(not kernels.available(), reason=kernels.why())
K = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    write_tiny_model(root / "target", context=2048, vocab=300)
    write_tiny_model(root / "draft", layers=1, context=2048)
    return root


@pytest.fixture
def plan(folder, capsys):
    """Runs the command on the tiny target with a draft model; returns (exit code, document)."""

    def run(*args):
        models = [str(folder / "target"), "--draft-model", str(folder / "draft"), "-k", str(K)]
        code = main(["plan", *models, "--json", *args])
        return code, json.loads(capsys.readouterr().out)

    return run


def sizes(document):
    return {item["name"]: item["nbytes"] for item in document["items"]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", pytest.param("int4", marks=needs_kernels)])
def test_the_weights_are_those_that_loading_takes(folder, plan, dtype):
    code, document = plan("--dtype", dtype, "--draft-dtype", dtype)
    assert code == 0
    for role in ("target", "draft"):
        loaded = load_model(folder / role, dtype=dtype, draft=role == "draft")
        assert sizes(document)[f"{role} weights"] == loaded.size_bytes


@pytest.mark.parametrize("context", [20, 300, 700, 1500])
def test_the_caches_are_those_that_the_engine_fills(folder, plan, monkeypatch, context):
    held = {}
    free = DecoderCache.free

    def freed(cache):
        layers = cache.store.shape[0]
        held[layers] = max(held.get(layers, 0), cache.nbytes)
        free(cache)

    monkeypatch.setattr(DecoderCache, "free", freed)
    llm = LLM(str(folder / "target"), draft_model=str(folder / "draft"), k=K, dtype="float32", draft_dtype="float32")
    ids = [i % 250 for i in range(context - K - 1)]
    llm.generate([ids], SamplingParams(max_tokens=K + 1, ignore_eos=True))
    _, document = plan("--context", str(context), "--dtype", "float32")
    assert held == {2: sizes(document)["target cache"], 1: sizes(document)["draft cache"]}


def test_a_batch_has_as_many_caches(plan):
    one, three = (sizes(plan("--context", "300", "--batch", batch)[1]) for batch in ("1", "3"))
    assert three["target cache"] == 3 * one["target cache"]
    assert three["draft cache"] == 3 * one["draft cache"]
    assert three["target weights"] == one["target weights"]


@pytest.fixture
def large(tmp_path):
    """A folder whose weights are a hole of 2 GB in a file: a header, and nothing behind it."""
    hidden, ffn, layers = 4096, 16384, 4
    folder = write_tiny_model(tmp_path / "large")
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": 32}
    config |= {"num_key_value_heads": 32, "max_position_embeddings": 32768}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {
        "model.embed_tokens.weight": [257, hidden],
        "model.norm.weight": [hidden],
        "lm_head.weight": [257, hidden],
    }
    for i in range(layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{i}.{name}.weight"] = [hidden]
        for name in "qkvo":
            shapes[f"model.layers.{i}.self_attn.{name}_proj.weight"] = [hidden, hidden]
        for name in ("gate", "up"):
            shapes[f"model.layers.{i}.mlp.{name}_proj.weight"] = [ffn, hidden]
        shapes[f"model.layers.{i}.mlp.down_proj.weight"] = [hidden, ffn]
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    return folder


@pytest.fixture
def unreadable(monkeypatch):
    """Reading a weight is an error."""

    def read(self, *args):
        raise AssertionError("plan read a weight")

    monkeypatch.setattr(SafetensorsCheckpoint, "tensor", read)
    monkeypatch.setattr(SafetensorsCheckpoint, "rows", read)
    monkeypatch.setattr("outrider.engine.opening.load_model", read)


def test_nothing_is_loaded_and_what_would_fit_is_said(large, unreadable, capsys, monkeypatch):
    monkeypatch.setattr("outrider.bench.plan.available", lambda: 34 * 10**8)
    words = [str(large), "--dtype", "bfloat16", "--context", "4096"]
    assert main(["plan", *words]) == 0
    assert "it fits" in capsys.readouterr().out
    assert main(["plan", *words, "--batch", "8"]) == 1
    out = capsys.readouterr().out
    assert "it does NOT fit" in out
    remedies = out.splitlines()[-1]
    assert "--context " in remedies
    assert "--batch 1" in remedies
    assert main(["plan", *words, "--batch", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["needed_bytes"] == sum(item["nbytes"] for item in document["items"])
    weights = sizes(document)["target weights"]
    assert 2 * 4 * (4 * 4096**2 + 3 * 4096 * 16384) < weights < 1.01 * 2 * 4 * (4 * 4096**2 + 3 * 4096 * 16384)
    assert document["remedies"] == []


@needs_kernels
def test_fewer_bits_are_a_remedy(large, unreadable, capsys, monkeypatch):
    monkeypatch.setattr("outrider.bench.plan.available", lambda: 15 * 10**8)
    assert main(["plan", str(large), "--dtype", "bfloat16", "--context", "512", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["fits"] is False
    assert document["remedies"] == ["--dtype int4"]


WRITERS = {
    "eagle3": lambda folder: write_eagle3(random_head(vocab=300, draft_ids=[*range(64)]), folder, "safeailab"),
    "mtp": lambda folder: write_mtp(random_module(vocab=300, own_head=False), folder, "speculators"),
    "medusa": lambda folder: write_medusa(random_medusa(vocab=300), folder),
    "dflash": lambda folder: write_block(random_block(vocab=300, **DFLASH), folder, "zlab"),
    "dspark": lambda folder: write_block(random_block(vocab=300, **DSPARK), folder, "deepspec"),
}
DTYPES = ["int4", "int8", "bfloat16", "float32"] if kernels.available() else ["bfloat16", "float32"]


@pytest.fixture(params=WRITERS)
def head(request, tmp_path):
    """(kind, folder) of a head of every kind."""
    WRITERS[request.param](tmp_path / "head")
    return request.param, tmp_path / "head"


def planned_head(capsys, folder, kind, path, *args):
    words = [str(folder / "target"), "-d", kind, "--draft-model", str(path), "--json", *args]
    assert main(["plan", *words]) == 0, capsys.readouterr().err
    document = json.loads(capsys.readouterr().out)
    [item] = [item for item in document["items"] if item["name"] == "head weights"]
    assert (document["head"], document["draft"], item["exact"]) == (str(path), None, False)
    return item


def test_a_head_counts_in_the_form_that_it_would_have(folder, head, capsys):
    kind, path = head
    found = [planned_head(capsys, folder, kind, path, "--draft-dtype", dtype)["nbytes"] for dtype in DTYPES]
    assert found == sorted(set(found))
    [weights] = [file for file in path.iterdir() if file.name != "config.json"]
    assert found[-1] >= sum(tensor.numel() for tensor in read_head(path).tensors.values() if tensor.is_floating_point())
    assert planned_head(capsys, folder, kind, weights, "--draft-dtype", "float32")["nbytes"] == found[-1]
    usual = planned_head(capsys, folder, kind, path)
    assert usual["nbytes"] == (found[0] if kernels.available() else found[-1])
    assert usual["how"].startswith("int4" if kernels.available() else "float32")


@pytest.mark.parametrize("asked", ["eagle3", "mtp", "medusa", "dflash"])
def test_a_head_of_another_kind_is_refused(folder, tmp_path, capsys, asked):
    other = "eagle3" if asked == "medusa" else "medusa"
    WRITERS[other](tmp_path / "head")
    assert main(["plan", str(folder / "target"), "-d", asked, "--draft-model", str(tmp_path / "head")]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert str(tmp_path / "head") in err


def test_a_model_is_no_head(folder, capsys):
    assert main(["plan", str(folder / "target"), "-d", "medusa", "--draft-model", str(folder / "draft")]) == 2
    assert "holds no Medusa heads" in capsys.readouterr().err


def test_a_model_as_its_own_draft_is_listed_as_one(folder, capsys):
    target = str(folder / "target")
    assert main(["plan", target, "--draft-model", target, "--batch", "3", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    names = [item["name"] for item in document["items"]]
    assert names == [f"{role} {what}" for role in ("target", "draft") for what in ("weights", "cache", "scratch")]
    found = sizes(document)
    assert found["draft weights"] == found["target weights"]
    assert found["draft scratch"] > found["target scratch"], "prompts of the batch go through a draft in one pass"


@pytest.fixture
def shipped(folder, tmp_path, monkeypatch):
    """A head of kind eagle3 and one of kind dspark that come with the package for the target."""
    monkeypatch.setattr("outrider.engine.shipped.HEADS", tmp_path)
    known = identity_of(load_model(folder / "target", dtype="float32")).vocabulary_sha256
    for kind in ("eagle3", "dspark"):
        WRITERS[kind](head := tmp_path / "target" / kind)
        write_card(
            head, {"drafter": kind, "target": "target", "vocabulary_sha256": known}, CardTest(((1,),), 8, 2, 2.0)
        )
    return tmp_path / "target"


@pytest.mark.parametrize(
    ("args", "kind"),
    [
        ([], "eagle3"),
        (["-d", "dspark"], "dspark"),
        (["-d", "cascade"], "eagle3"),
        (["-d", "suffix"], None),
        (["-k", "0"], None),
    ],
)
def test_a_head_that_comes_with_the_package_counts(folder, shipped, capsys, args, kind):
    assert main(["plan", str(folder / "target"), *args, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["head"] == (str(shipped / kind) if kind else None)
    assert ("head weights" in sizes(document)) == (kind is not None)


def test_a_head_of_another_target_is_not_taken(folder, shipped, capsys):
    assert main(["plan", str(folder / "draft"), "-d", "eagle3"]) == 2
    assert "drafter 'eagle3' needs a head's folder or file" in capsys.readouterr().err


def test_the_largest_batch_of_a_billion_that_fits(folder, capsys, monkeypatch):
    monkeypatch.setattr("outrider.bench.plan.available", lambda: 10**9)
    target = str(folder / "target")
    assert main(["plan", target, "--batch", str(10**9), "--context", "64", "--json"]) == 1
    [remedy] = json.loads(capsys.readouterr().out)["remedies"]
    largest = int(remedy.removeprefix("--batch "))
    assert main(["plan", target, "--batch", str(largest), "--context", "64"]) == 0
    assert main(["plan", target, "--batch", str(largest + 1), "--context", "64"]) == 1


def test_a_model_of_another_kind_is_no_draft(folder, tmp_path, capsys):
    strange = write_tiny_model(tmp_path / "strange")
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps(config | {"architectures": ["Mystery"], "model_type": "mystery"}))
    assert main(["plan", str(folder / "target"), "--draft-model", str(strange)]) == 2
    err = capsys.readouterr().err
    assert "plan knows the models of the native decoder alone; a draft head is named with --drafter: " in err
    assert err.count("\n") == 1


def test_a_system_that_does_not_tell(plan, monkeypatch):
    monkeypatch.setattr("outrider.bench.plan.available", lambda: None)
    code, document = plan()
    assert (code, document["fits"], document["remedies"]) == (0, None, [])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--context", "4096"], "--context 4096 is not allowed: give 1 to 2048"),
        (["--context", "0"], "--context 0 is not allowed"),
        (["--batch", "0"], "--batch 0 is not allowed"),
        (["--batch", "1" + 400 * "0"], "give an integer from 1 to 1000000000"),
        (["-k", "65"], "K = 65 is not allowed"),
        (["--dtype", "float31"], "dtype 'float31' is not allowed"),
        (["--drafter", "draft_model"], "needs a draft model"),
        (["--drafter", "eagle"], "'eagle' is unknown"),
    ],
)
def test_what_cannot_be_planned_is_one_line(folder, capsys, args, words):
    assert main(["plan", str(folder / "target"), *args]) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert err.count("\n") == 1
    assert not out


@pytest.mark.model
@needs_kernels
def test_the_default_model_takes_what_is_planned(capsys):
    from outrider.models.loader.catalogue import DEFAULT_MODEL
    from outrider.models.loader.sources import resolve

    for dtype in ("auto", "bfloat16", "int4"):
        assert main(["plan", DEFAULT_MODEL, "--dtype", dtype, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert sizes(document)["target weights"] == load_model(resolve(DEFAULT_MODEL), dtype=dtype).size_bytes
