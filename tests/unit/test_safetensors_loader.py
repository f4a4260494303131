"""Hugging Face folders: configuration, shards, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from outrider.errors import ModelFileError
from outrider.models.loader.checkpoint import TokenizerFolder, UnknownArchitectureError, open_checkpoint

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 6,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ATTENTION = {"q_proj": (8, 8), "k_proj": (4, 8), "v_proj": (4, 8), "o_proj": (8, 8)}
MLP = {"gate_proj": (12, 8), "up_proj": (12, 8), "down_proj": (8, 12)}


def tensors() -> dict[str, torch.Tensor]:
    layer = "model.layers.0."
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (6, 8), "model.norm.weight": (8,)}
    shapes |= {"lm_head.weight": (6, 8), f"{layer}input_layernorm.weight": (8,)}
    shapes[f"{layer}post_attention_layernorm.weight"] = (8,)
    shapes |= {f"{layer}self_attn.{name}.weight": shape for name, shape in ATTENTION.items()}
    shapes |= {f"{layer}mlp.{name}.weight": shape for name, shape in MLP.items()}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write(folder: Path, weights: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file(tensors() if weights is None else weights, folder / "model.safetensors")
    return folder


def test_a_folder(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ x }}"}')
    checkpoint = open_checkpoint(write(tmp_path))
    assert checkpoint.chat_template == "{{ x }}"
    assert checkpoint.tokenizer_source == TokenizerFolder(tmp_path)
    assert checkpoint.quantisation == "F32"
    expected = tensors()["model.layers.0.self_attn.k_proj.weight"]
    assert torch.equal(checkpoint.tensor("layers.0.k.weight", torch.bfloat16), expected.bfloat16())


def test_shards(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    weights, index = tensors(), {}
    for shard, names in enumerate((sorted(weights)[:5], sorted(weights)[5:])):
        save_file({name: weights[name] for name in names}, tmp_path / f"part-{shard}.safetensors")
        index |= dict.fromkeys(names, f"part-{shard}.safetensors")
    file = tmp_path / "model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": index}))
    assert len(open_checkpoint(tmp_path).names()) == len(weights)
    for name in ("../part-0.safetensors", "/etc/x.safetensors", "x.bin", 3):
        file.write_text(json.dumps({"weight_map": index | {"model.norm.weight": name}}))
        with pytest.raises(ModelFileError, match="no name of a safetensors file"):
            open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 16}, "shape"),
        ({"num_hidden_layers": 2}, r"lacks .*layers\.1"),
        ({"num_hidden_layers": 10**9}, "only 12 tensors"),
        ({"num_attention_heads": 0}, "n_heads is 0"),
        ({"rms_norm_eps": "small"}, "expected a finite number"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ({"vocab_size": None}, "missing"),
    ],
)
def test_configurations_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        open_checkpoint(write(tmp_path, **changes))


def test_foreign_tensors_types_and_models(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="q_proj"):
        open_checkpoint(write(tmp_path, tensors() | {"model.layers.7.self_attn.q_proj.bias_": torch.ones(8)}))
    with pytest.raises(ModelFileError, match="F8_E4M3"):
        open_checkpoint(write(tmp_path, tensors() | {"x": torch.ones(8).to(torch.float8_e4m3fn)}))
    with pytest.raises(UnknownArchitectureError, match="SmolLM3ForCausalLM"):
        open_checkpoint(write(tmp_path, architectures=["SmolLM3ForCausalLM"]))


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"sliding_window": 8, "use_sliding_window": False}, None),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, 8),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, None),
        ({"sliding_window": 64, "use_sliding_window": True}, None),
    ],
)
def test_qwen_uses_its_window_only_if_told_to(tmp_path: Path, changes: dict[str, Any], window: int | None) -> None:
    checkpoint = open_checkpoint(write(tmp_path, architectures=["Qwen2ForCausalLM"], **changes))
    assert checkpoint.config.sliding_window == window
