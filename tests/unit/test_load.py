"""Opening a model by path: which backend, which dtype, and why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider import kernels
from outrider.core.protocols import Segment
from outrider.errors import ConfigError, ModelNotFoundError
from outrider.models.decoder import Decoder
from outrider.models.hf import TransformersModel
from outrider.models.load import load_model
from outrider.models.loader.checkpoint import UnknownArchitectureError
from tests.tiny_folder import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2, which the native decoder cannot run, with the byte tokenizer of the tiny Llama."""
    transformers = pytest.importorskip("transformers")
    folder = write_tiny_model(tmp_path_factory.mktemp("foreign") / "tiny-gpt2")
    for file in ("model.safetensors", "config.json"):
        (folder / file).unlink()
    config = transformers.GPT2Config(
        vocab_size=257, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=256, eos_token_id=256
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def test_a_known_architecture_runs_natively(folder: Path) -> None:
    loaded = load_model(folder, dtype="float32")
    assert isinstance(loaded.model, Decoder)
    assert loaded.model.name == "tiny-llama"
    assert loaded.size_bytes == loaded.model.nbytes > 4 * 257 * 32
    assert loaded.tokenizer.vocab_size == loaded.model.vocab_size == 257
    assert loaded.template.render([{"role": "user", "content": "hi"}]) == "[user]hi\n[assistant]"
    chosen = {decision.field: decision for decision in loaded.decisions}
    assert (chosen["backend"].value, chosen["dtype"].value) == ("native", "float32")
    assert chosen["dtype"].reason == "asked for"
    assert chosen["kernels"].value == kernels.active_level()


def test_auto_dtype_is_what_is_fastest_here_and_says_why(folder: Path) -> None:
    loaded = load_model(folder)
    (dtype,) = (decision for decision in loaded.decisions if decision.field == "dtype")
    assert dtype.value == ("bfloat16" if kernels.available() else "float32")
    assert "kernels" in dtype.reason
    wide = load_model(folder, dtype="float32").size_bytes
    assert loaded.size_bytes < 0.6 * wide if kernels.available() else loaded.size_bytes == wide


def test_other_architectures_run_through_transformers(foreign: Path) -> None:
    loaded = load_model(foreign, dtype="float32")
    assert isinstance(loaded.model, TransformersModel)
    assert loaded.size_bytes > 0
    assert "gpt2" in loaded.decisions[0].reason
    tokens = loaded.tokenizer.encode("abc", add_special=False)
    out = loaded.model.forward([Segment(loaded.model.new_cache(), tokens)]).logits_MV
    assert out is not None
    assert out.shape == (3, 257)
    with pytest.raises(UnknownArchitectureError, match="gpt2"):
        load_model(foreign, backend="native")


def test_both_backends_agree(folder: Path) -> None:
    pytest.importorskip("transformers")
    logits = []
    for backend in ("native", "transformers"):
        model = load_model(folder, dtype="float32", backend=backend).model
        logits.append(model.forward([Segment(model.new_cache(), [104, 105, 33])]).logits_MV)
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)


def test_bad_options(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dtype 'int3' is not allowed: give one of auto, float32"):
        load_model(folder, dtype="int3")
    with pytest.raises(ConfigError, match="backend 'vllm' is not allowed: give auto, native or transformers"):
        load_model(folder, backend="vllm")
    with pytest.raises(ModelNotFoundError, match="does not exist"):
        load_model(tmp_path / "nothing.gguf")
