"""The JSON files of a Hugging Face folder: configuration and chat template."""

from __future__ import annotations

from pathlib import Path

from outrider.core.json_file import MOST_JSON_BYTES, JsonObject
from outrider.core.rope import read_rope
from outrider.errors import ModelFileError
from outrider.models.loader.checkpoint import DecoderConfig, unknown_architecture

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def architecture(config: JsonObject) -> str:
    names = config.values.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else config.values.get("model_type")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise unknown_architecture(config.path.parent, str(name))
    return family


def read_config(config: JsonObject, *, qkv_bias: bool, qk_norm: bool) -> DecoderConfig:
    """`qkv_bias` and `qk_norm` tell what the tensors have."""
    family = architecture(config)
    if (activation := config.text("hidden_act", "silu")) not in ("silu", "swish"):
        raise unknown_architecture(config.path.parent, f"{family} with hidden_act {activation}")
    if config.values.get("quantization_config") is not None:
        raise ModelFileError(
            f"{config.path}: a quantised checkpoint (quantization_config) is not readable. "
            "Take the bfloat16 folder, or a GGUF file"
        )
    hidden_size, n_heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    context = config.whole("max_position_embeddings")
    theta, scaling = read_rope(config, context)
    partial = config.child("rope_parameters").number("partial_rotary_factor", 1.0)
    if config.number("partial_rotary_factor", partial) != 1.0:
        raise unknown_architecture(config.path.parent, f"{family} with partial_rotary_factor")
    return DecoderConfig(
        architecture=family,
        n_layers=config.whole("num_hidden_layers"),
        hidden_size=hidden_size,
        ffn_size=config.whole("intermediate_size"),
        n_heads=n_heads,
        n_kv_heads=config.whole("num_key_value_heads", n_heads),
        head_dim=config.whole("head_dim", hidden_size // max(n_heads, 1)),
        vocab_size=config.whole("vocab_size"),
        context_length=context,
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=config.number("rms_norm_eps"),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        tie_embeddings=config.boolean("tie_word_embeddings", False),
        sliding_window=_sliding_window(config, family, context),
    )


def _sliding_window(config: JsonObject, family: str, context: int) -> int | None:
    """The window of all layers, or None. Qwen states one and uses it only if told to."""
    if family == "llama" or config.values.get("sliding_window") is None:
        return None
    window = config.whole("sliding_window")
    if window >= context or (family.startswith("qwen") and not config.boolean("use_sliding_window", False)):
        return None
    if window < 1:
        raise ModelFileError(f"{config.path}: sliding_window is {window}, it must be positive or null")
    n_layers, kinds = config.whole("num_hidden_layers"), config.values.get("layer_types")
    if isinstance(kinds, list) and family.startswith("qwen"):
        n_slid = sum(kind == "sliding_attention" for kind in kinds)
    else:
        n_slid = n_layers - (min(config.whole("max_window_layers", 0), n_layers) if family.startswith("qwen") else 0)
    if 0 < n_slid < n_layers:
        raise unknown_architecture(config.path.parent, f"{family} with a sliding window in {n_slid} of its layers")
    return window if n_slid else None


def read_chat_template(folder: Path) -> str | None:
    """`chat_template.jinja`, or the template of tokenizer_config.json; of several, the one named "default"."""
    file = folder / "chat_template.jinja"
    if file.is_file() and file.stat().st_size <= MOST_JSON_BYTES:
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ModelFileError(f"{file} is no UTF-8 text. Fetch it again") from None
    template = JsonObject.read(folder / "tokenizer_config.json", optional=True).values.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
