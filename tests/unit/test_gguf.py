"""Reading GGUF files: names, rotary order, configuration, and one clear line for what is wrong."""

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.core.rope import RopeScaling, inverse_frequencies
from outrider.errors import ModelFileError, ModelNotFoundError
from outrider.models.loader.checkpoint import GGUFVocabulary, UnknownArchitectureError, open_checkpoint
from outrider.models.loader.dequantise import FORMATS, dequantise
from outrider.models.tokenizer import Tokenizer, used_size
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


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_some_rows_are_those_of_the_whole(tmp_path: Path, architecture: str) -> None:
    checkpoint = open_checkpoint(write(tmp_path, tiny_gguf(metadata(architecture))))
    whole = checkpoint.tensor("layers.0.q.weight", torch.float32)
    for start, stop in ((0, 32), (3, 17), (31, 32)):
        assert torch.equal(checkpoint.rows("layers.0.q.weight", start, stop, torch.float32), whole[start:stop])


def test_the_used_size_is_known_before_the_tokenizer(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path, tiny_gguf()))
    assert used_size(checkpoint.tokenizer_source) == Tokenizer.of(checkpoint).used_size
    assert isinstance(checkpoint.tokenizer_source, GGUFVocabulary)
    kinds = [*checkpoint.tokenizer_source.token_types[:-1], 5]
    source = replace(checkpoint.tokenizer_source, token_types=kinds)
    assert used_size(source) == Tokenizer.from_gguf(source).used_size < len(kinds)


def test_the_ends_that_the_file_states_reach_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = Tokenizer.of(open_checkpoint(write(tmp_path, tiny_gguf())))
    assert tokenizer.eos_ids == (2, 1)


BIASES: dict[str, tuple[int, ...]] = {
    f"blk.{layer}.attn_{part}.bias": (rows,) for layer in range(2) for part, rows in (("q", 32), ("k", 16), ("v", 16))
}


def test_biases_of_a_llama_file_are_reordered_like_their_rows(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path, tiny_gguf(tensors=shapes() | BIASES)))
    assert checkpoint.config.qkv_bias
    halves = [*range(0, 16, 2), *range(1, 16, 2)]
    assert checkpoint.tensor("layers.1.k.bias", torch.float32).tolist() == halves
    assert checkpoint.tensor("layers.1.q.bias", torch.float32).tolist() == halves + [16 + row for row in halves]
    assert checkpoint.tensor("layers.1.v.bias", torch.float32).tolist() == list(range(16))


def test_a_quantised_bias_is_decoded_before_its_values_are_reordered() -> None:
    blocks = struct.pack("<e32b", 0.5, *range(-16, 16)) + struct.pack("<e32b", 0.25, *range(32))
    data, order = torch.frombuffer(bytearray(blocks), dtype=torch.uint8), torch.arange(63, -1, -1)
    exact = torch.cat([torch.arange(-16, 16) * 0.5, torch.arange(32) * 0.25])
    assert torch.equal(dequantise(data, FORMATS[8], (64,), torch.float32, order), exact.flip(0))


def test_the_factors_of_llama_3_give_its_scaling_back(tmp_path: Path) -> None:
    def scaling(factors: list[float]) -> RopeScaling | None:
        content = tiny_gguf(tensors=shapes() | {"rope_freqs.weight": (8,)})
        # The tiny writer counts 0, 1, 2 ... in a tensor; this one is the file's last.
        assert content.endswith(struct.pack("<8f", *range(8)))
        return open_checkpoint(write(tmp_path, content[:-32] + struct.pack("<8f", *factors))).config.rope_scaling

    written = RopeScaling("llama3", 8.0, 8192, 1.0, 4.0)
    plain = inverse_frequencies(16, 10000.0, None)
    factors = (plain / inverse_frequencies(16, 10000.0, written)).tolist()
    assert 1.0 in factors
    assert any(1.0 < factor < 8.0 for factor in factors)
    assert scaling(factors) == written
    assert scaling([1.0] * 8) is None
    with pytest.raises(ModelFileError, match="not those of Llama 3's scaling"):
        scaling([*factors[:-1], 5.0])


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
    "one bias of three": (tiny_gguf(tensors=SHAPES | {"blk.0.attn_q.bias": (32,)}), r"lacks .*layers\.0\.k\.bias"),
    "output bias": (tiny_gguf(tensors=SHAPES | BIASES | {"blk.0.attn_output.bias": (32,)}), r"layers\.0\.o\.bias"),
    "eot": (tiny_gguf(metadata(tokenizer__ggml__eot_token_id=5)), "eot_token_id is 5, allowed are 0 to 4"),
    "rotary factors": (
        tiny_gguf(tensors=SHAPES | {"rope_freqs.weight": (4,)}),
        "4 rotary factors .* not those of Llama 3's scaling",
    ),
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
