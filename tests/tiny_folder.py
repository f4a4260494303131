"""A tiny random model as a Hugging Face folder, with a byte tokenizer: for tests that go through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from tests.tiny import bytes_of

HIDDEN, FFN, HEADS, EOS = 64, 96, 4, 256
"""Heads of width 16: those that the compiled attention takes, and with it the whole decoder in one call."""
SCALE = 0.08
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]"


def write_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    vocab: int = EOS + 1,
    context: int = 512,
    wild_padding: bool = False,
    template: str | None = TEMPLATE,
    shuffled: bool = False,
) -> Path:
    """Token ids are bytes, EOS is 256, further ids are unused rows. The answers are gibberish that soon repeats.

    `shuffled` gives another tokenizer, in which id i is byte 255 - i.
    `wild_padding` gives the unused rows of the head large weights, as untrained rows may have.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template} if template else {}))
    weights = _weights(seed, layers, vocab)
    if wild_padding:
        weights["lm_head.weight"][EOS + 1 :] = torch.randn(vocab - EOS - 1, HIDDEN) * 10
    save_file(weights, folder / "model.safetensors")
    _backend(shuffled).save(str(folder / "tokenizer.json"))
    return folder


def broken_model(folder: Path) -> Path:
    """A tiny model whose logits are all NaN."""
    write_tiny_model(folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][:] = float("nan")
    save_file(weights, folder / "model.safetensors")
    return folder


def _weights(seed: int, layers: int, vocab: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * SCALE

    weights = {
        "model.embed_tokens.weight": matrix(vocab, HIDDEN) / SCALE,
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": matrix(vocab, HIDDEN),
    }
    weights["lm_head.weight"][EOS:] = 0
    for i in range(layers):
        prefix = f"model.layers.{i}."
        weights |= {
            prefix + "input_layernorm.weight": torch.ones(HIDDEN),
            prefix + "post_attention_layernorm.weight": torch.ones(HIDDEN),
            prefix + "self_attn.q_proj.weight": matrix(HIDDEN, HIDDEN),
            prefix + "self_attn.k_proj.weight": matrix(HIDDEN // 2, HIDDEN),
            prefix + "self_attn.v_proj.weight": matrix(HIDDEN // 2, HIDDEN),
            prefix + "self_attn.o_proj.weight": matrix(HIDDEN, HIDDEN),
            prefix + "mlp.gate_proj.weight": matrix(FFN, HIDDEN),
            prefix + "mlp.up_proj.weight": matrix(FFN, HIDDEN),
            prefix + "mlp.down_proj.weight": matrix(HIDDEN, FFN),
        }
    return weights


def _backend(shuffled: bool) -> Backend:
    by_byte = {bytes_of(char): char for char in sorted(pre_tokenizers.ByteLevel.alphabet())}
    backend = Backend(
        models.BPE(vocab={by_byte[bytes([255 - i if shuffled else i])]: i for i in range(256)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return backend
