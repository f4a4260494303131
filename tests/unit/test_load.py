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
from outrider.models.loader.sources import resolve
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


@pytest.mark.skipif(not kernels.available(), reason="four bits take the compiled kernels")
def test_a_draft_takes_four_bits_a_weight_and_says_why(folder: Path) -> None:
    draft, plain = load_model(folder, draft=True), load_model(folder, dtype="bfloat16")
    (dtype,) = (decision for decision in draft.decisions if decision.field == "dtype")
    assert dtype.value == "int4"
    assert "acceptance" in dtype.reason
    assert isinstance(draft.model, Decoder)
    assert isinstance(plain.model, Decoder)
    packed = [part for layer in draft.model.layers if (stack := layer.for_stack()) for part in stack.matrices]
    assert packed
    assert {part.dtype for part in packed} == {"Q4_0"}
    assert draft.size_bytes < 0.4 * plain.size_bytes
    tokens = [104, 105, 33, 34, 35]
    found, exact = (
        loaded.model.forward([Segment(loaded.model.new_cache(), tokens)]).logits_MV for loaded in (draft, plain)
    )
    assert found is not None
    assert exact is not None
    assert 0 < (found - exact).norm() < 0.5 * exact.norm()
    assert load_model(folder, dtype="float32", draft=True).decisions[1].value == "float32"


@pytest.mark.model
@pytest.mark.skipif(not kernels.available(), reason="four bits take the compiled kernels")
def test_blocks_of_four_bits_stay_and_the_rest_is_encoded() -> None:
    """SmolLM2's layers are Q4_1, its head is not."""
    path = resolve("smollm2-135m")
    stored, encoded = load_model(path, dtype="quantised"), load_model(path, dtype="int4")
    kinds = []
    for loaded in (stored, encoded):
        assert isinstance(loaded.model, Decoder)
        stack = loaded.model.layers[0].for_stack()
        assert stack is not None
        kinds.append(({part.dtype for part in stack.matrices}, loaded.model._head.dtype))
    assert kinds[0][0] == kinds[1][0] == {"Q4_1"}
    assert kinds[0][1] != "Q4_0" == kinds[1][1]
    assert encoded.size_bytes < stored.size_bytes


def test_four_bits_without_kernels_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "available", lambda: False)
    with pytest.raises(ConfigError, match="'int4' is not possible here"):
        load_model(folder, dtype="int4")
    assert load_model(folder, draft=True).decisions[1].value == "float32"


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
