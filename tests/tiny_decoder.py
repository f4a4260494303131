"""Tiny random decoders: in memory, and as Hugging Face folders written by `transformers`, the reference."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from outrider.models.decoder import Decoder
from outrider.models.loader.checkpoint import Checkpoint, DecoderConfig, RawTensor, expected_shapes
from outrider.models.loader.stored_rows import Place

VOCAB = 131
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
}


TINY = DecoderConfig(
    architecture="llama",
    n_layers=3,
    hidden_size=64,
    ffn_size=96,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    vocab_size=VOCAB,
    context_length=256,
    rope_theta=1e4,
    rope_scaling=None,
    norm_eps=1e-6,
    qkv_bias=False,
    qk_norm=False,
    tie_embeddings=False,
    sliding_window=None,
)


class RandomCheckpoint:
    """Random weights of any `DecoderConfig`, as far as `Decoder.from_checkpoint` reads a checkpoint."""

    def __init__(self, config: DecoderConfig, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.config = config
        self._folder = tempfile.TemporaryDirectory()
        self._tensors = {
            name: torch.randn(shape, generator=generator) * (0.2 if "norm" in name else 0.15) + ("norm" in name)
            for name, shape in expected_shapes(config).items()
        }

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._tensors[name].to(dtype)

    def rows(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        return self._tensors[name][start:stop].to(dtype)

    def raw(self, name: str) -> RawTensor:
        tensor = self._tensors[name]
        data = tensor.view(-1).view(torch.uint8)
        file = Path(self._folder.name) / name
        if not file.exists():
            file.write_bytes(data.numpy().tobytes())
        return RawTensor("F32", tuple(tensor.shape), data, None, Place(file, 0))

    def release(self) -> None:
        pass


def tiny_decoder(*, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Decoder:
    """A random native decoder; `overrides` are fields of `DecoderConfig`."""
    checkpoint = RandomCheckpoint(replace(TINY, **overrides), seed)
    return Decoder.from_checkpoint(cast(Checkpoint, checkpoint), dtype=dtype, name=f"tiny-{seed}")


def reference(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A random float32 `transformers` causal LM of a family of `FAMILIES`."""
    import transformers

    model_type, options = FAMILIES[family]
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = transformers.AutoConfig.for_model(model_type, **(sizes | options | overrides))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.15 * noise)
    return model.eval()


def write_reference(folder: Path, family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """Saves `reference(...)` as a Hugging Face folder and returns the model."""
    model = reference(family, seed=seed, **overrides)
    model.save_pretrained(folder)
    return model


def reference_logits(model: Any, tokens: list[int]) -> Tensor:
    """[m, V] of a whole sequence, computed by `transformers` in one go."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens])).logits[0].float()


def random_tokens(count: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
