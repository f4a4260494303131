"""The fallback through `transformers`: the same logits, exact roll-back, and clear refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.core.protocols import Segment
from outrider.errors import ConfigError, MissingExtraError, ModelFileError
from outrider.models.hf import TransformersModel
from tests.tiny_decoder import VOCAB, random_tokens, reference_logits, write_reference

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=["qwen2", "mistral-window"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, TransformersModel]:
    folder = tmp_path_factory.mktemp(request.param)
    return write_reference(folder, request.param), TransformersModel.from_folder(folder)


def test_sizes(pair: tuple[Any, TransformersModel]) -> None:
    _, model = pair
    assert (model.vocab_size, model.context_length, model.n_layers) == (VOCAB, 256, 3)


def test_chunks_and_roll_back_across_the_window(pair: tuple[Any, TransformersModel]) -> None:
    reference, model = pair
    tokens, cache = random_tokens(24), model.new_cache()
    expected = reference_logits(reference, tokens)
    for count in (9, 1, 6):
        start = cache.length
        logits = model.forward([Segment(cache, [*tokens[start : start + count], 3, 4, 5])]).logits_MV
        assert logits is not None
        torch.testing.assert_close(logits[:count], expected[start : start + count], rtol=0, atol=1e-4)
        cache.keep(range(count))
        cache.check_integrity()
    cache.truncate(8)
    logits = model.forward([Segment(cache, tokens[8:])]).logits_MV
    torch.testing.assert_close(logits, expected[8:], rtol=0, atol=1e-4)


def test_a_batch_is_one_sequence_after_the_other(pair: tuple[Any, TransformersModel]) -> None:
    reference, model = pair
    prompts = [random_tokens(5, seed=1), random_tokens(12, seed=2)]
    out = model.forward([Segment(model.new_cache(), prompt) for prompt in prompts]).logits_MV
    torch.testing.assert_close(out, torch.cat([reference_logits(reference, p) for p in prompts]), rtol=0, atol=1e-4)


def test_digest_after_append_and_roll_back(pair: tuple[Any, TransformersModel]) -> None:
    _, model = pair
    plain, drafted = model.new_cache(), model.new_cache()
    empty = plain.digest()
    for cache in (plain, drafted):
        model.forward([Segment(cache, random_tokens(9))], logits=False)
        cache.keep(range(9))
    before = plain.digest()
    assert before != empty
    model.forward([Segment(drafted, [1, 2, 3])])
    assert drafted.digest() == before
    drafted.keep([0, 1])
    assert drafted.digest() != before
    drafted.truncate(9)
    assert drafted.digest() == before
    drafted.free()
    assert drafted.digest() == empty


def test_features(pair: tuple[Any, TransformersModel]) -> None:
    _, model = pair
    out = model.forward([Segment(model.new_cache(), random_tokens(4))], logits=False, taps=(1, 0))
    assert out.logits_MV is None
    assert out.features_MF is not None
    assert out.features_MF.shape == (4, 128)
    with pytest.raises(ConfigError, match="final norm"):
        model.forward([Segment(model.new_cache(), [1])], taps=(2,))


def test_trees_are_refused_and_chains_written_as_trees_are_not(pair: tuple[Any, TransformersModel]) -> None:
    _, model = pair
    model.forward([Segment(model.new_cache(), [1, 2, 3], [-1, 0, 1])])
    with pytest.raises(ConfigError, match="chain drafts only"):
        model.forward([Segment(model.new_cache(), [1, 2, 3], [-1, 0, 0])])


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'outrider\[transformers\]'"):
        TransformersModel.from_folder(tmp_path)


def test_a_pickled_checkpoint_is_never_opened(tmp_path: Path) -> None:
    model = write_reference(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match="safetensors"):
        TransformersModel.from_folder(tmp_path)


def test_code_in_a_folder_is_never_run(tmp_path: Path) -> None:
    write_reference(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise SystemExit('this code ran')")
    with pytest.raises(ModelFileError, match="cannot load"):
        TransformersModel.from_folder(tmp_path)


def test_a_state_that_cannot_be_rolled_back_is_refused(tmp_path: Path) -> None:
    config = transformers.MambaConfig(vocab_size=40, hidden_size=16, state_size=4, num_hidden_layers=2)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelFileError, match="rolled back"):
        TransformersModel.from_folder(tmp_path)
