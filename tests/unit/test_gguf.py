"""Reading GGUF files: names, rotary order, configuration, and one clear line for what is wrong."""

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.errors import ModelFileError, ModelNotFoundError
from outrider.models.loader.checkpoint import GGUFVocabulary, UnknownArchitectureError, open_checkpoint
from tests.tiny_gguf import TOKENS, VOCAB, D, metadata, shapes, tiny_gguf, write


@pytest.mark.parametrize("version", [2, 3])
def test_a_llama_file(tmp_path: Path, version: int) -> None:
    checkpoint = open_checkpoint(write(tmp_path, tiny_gguf(version=version)))
    config = checkpoint.config
    assert (config.architecture, config.n_layers, config.head_dim, config.vocab_size) == ("llama", 2, 16, VOCAB)
    assert config.tie_embeddings
    assert config.sliding_window is None
    source = checkpoint.tokenizer_source
    assert isinstance(source, GGUFVocabulary)
    assert source.tokens == TOKENS
    assert (source.bos_id, source.eos_id, source.eot_id, source.eom_id) == (None, 2, 1, None)
    embed = checkpoint.tensor("embed.weight", torch.float32)
    assert torch.equal(embed, torch.arange(VOCAB * D).float().view(VOCAB, D))


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_only_llama_rows_are_reordered(tmp_path: Path, architecture: str) -> None:
    checkpoint = open_checkpoint(write(tmp_path, tiny_gguf(metadata(architecture))))
    rows = (checkpoint.tensor("layers.0.q.weight", torch.float32)[:, 0] / D).int().tolist()
    halves = [*range(0, 16, 2), *range(1, 16, 2), *range(16, 32, 2), *range(17, 32, 2)]
    assert rows == (halves if architecture == "llama" else list(range(32)))
    order = checkpoint.raw("layers.0.q.weight").row_order
    assert (order is None) == (architecture == "qwen2")


SHAPES = shapes()
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "not gguf": (b"PK" + bytes(40), "GGUF file starts with"),
    "big-endian": (tiny_gguf(version=3 << 24), "big-endian"),
    "version": (tiny_gguf(version=9), "version 9"),
    "cut": (tiny_gguf()[:-2000], "the file ends at"),
    "type": (tiny_gguf(kind=23), "IQ4_XS"),
    "offset": (tiny_gguf(shift=4), "no multiple of 32"),
    "missing tensor": (
        tiny_gguf(tensors={k: s for k, s in SHAPES.items() if "blk.1.attn_q" not in k}),
        r"layers\.1\.q",
    ),
    "unexpected tensor": (tiny_gguf(tensors=SHAPES | {"blk.0.router.weight": (4,)}), r"blk\.0\.router"),
    "wrong shape": (tiny_gguf(tensors=SHAPES | {"blk.0.ffn_up.weight": (8, D)}), r"layers\.0\.up"),
    "layers": (tiny_gguf(metadata(llama__block_count=4_000_000_000)), "n_layers"),
    "no epsilon": (tiny_gguf(metadata(llama__attention__layer_norm_rms_epsilon=None)), "missing"),
    "text for number": (tiny_gguf(metadata(llama__context_length="64")), "expected a whole number"),
    "eos": (tiny_gguf(metadata(tokenizer__ggml__eos_token_id=99)), "allowed are 0 to 4"),
    "alignment": (tiny_gguf(metadata(general__alignment=24)), "alignment is 24"),
    "yarn": (
        tiny_gguf(metadata(llama__rope__scaling__type="yarn", llama__rope__scaling__factor=4.0)),
        "yarn",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_have_one_clear_line(tmp_path: Path, case: str) -> None:
    content, message = BAD[case]
    with pytest.raises(ModelFileError, match=message) as caught:
        open_checkpoint(write(tmp_path, content))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keys", [metadata("mamba"), metadata(llama__expert_count=8)])
def test_foreign_architectures_point_at_transformers(tmp_path: Path, keys: dict[str, Any]) -> None:
    with pytest.raises(UnknownArchitectureError, match="transformers"):
        open_checkpoint(write(tmp_path, tiny_gguf(keys)))


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt"])
def test_pickles_are_refused(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"pytorch_model{suffix}"
    file.write_bytes(b"\x80\x02.")
    for path in (file, tmp_path):
        with pytest.raises(ModelFileError, match="save_pretrained"):
            open_checkpoint(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="does not exist"):
        open_checkpoint(tmp_path / "none.gguf")
