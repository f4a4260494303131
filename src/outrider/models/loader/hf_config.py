"""The JSON files of a Hugging Face folder: configuration and chat template."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from outrider.errors import ModelFileError
from outrider.models.loader.checkpoint import DecoderConfig, RopeScaling, unknown_architecture

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
MOST_JSON_BYTES = 64 << 20


class JsonObject:
    """An object of a JSON file, read by type. Raises ModelFileError for a missing value or one of another type."""

    def __init__(self, path: Path, values: Mapping[str, object]) -> None:
        self.path = path
        self.values = values

    @classmethod
    def read(cls, path: Path, *, optional: bool = False) -> JsonObject:
        if optional and not path.is_file():
            return cls(path, {})
        try:
            if path.stat().st_size > MOST_JSON_BYTES:
                raise ModelFileError(f"{path} has {path.stat().st_size} bytes, allowed are {MOST_JSON_BYTES}")
            return cls(path, parse_object(path, path.read_bytes()))
        except OSError as error:
            raise ModelFileError(f"{path} cannot be read: {error.strerror}. A model folder needs it") from None

    def whole(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if type(value) is not int:
            raise self._wrong(key, value, "a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1e300 < value < 1e300:
            raise self._wrong(key, value, "a finite number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "text")
        return value

    def child(self, key: str) -> JsonObject:
        """The object under `key`; empty if there is none."""
        value = self.values.get(key)
        if value is None:
            return JsonObject(self.path, {})
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return JsonObject(self.path, value)

    def _get(self, key: str, default: object) -> object:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelFileError(f"{self.path}: {key!r} is missing")
        return value

    def _wrong(self, key: str, value: object, wanted: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {key!r} is {str(value)[:60]!r}, expected {wanted}")


def parse_object(path: Path, data: bytes) -> dict[str, object]:
    """Raises ModelFileError, one line, unless `data` is one JSON object."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0][:100]
        raise ModelFileError(f"{path}: its JSON cannot be read ({reason}). Fetch the file again") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: its JSON is a {type(value).__name__}, expected an object")
    return value


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
    rope = config.child("rope_parameters")
    scaling = rope if rope.values else config.child("rope_scaling")
    theta = rope.number("rope_theta", config.number("rope_theta", 10000.0))
    if config.number("partial_rotary_factor", rope.number("partial_rotary_factor", 1.0)) != 1.0:
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
        rope_scaling=_rope_scaling(scaling, context),
        norm_eps=config.number("rms_norm_eps"),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        tie_embeddings=config.boolean("tie_word_embeddings", False),
        sliding_window=_sliding_window(config, family, context),
    )


def _rope_scaling(rope: JsonObject, context: int) -> RopeScaling | None:
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise ModelFileError(
            f"{rope.path}: rotary scaling {kind[:40]!r} is not supported, allowed are default, linear and llama3. "
            "Load this model through transformers instead"
        )
    factor = rope.number("factor")
    if not (factor > 0 and math.isfinite(factor)):
        raise ModelFileError(f"{rope.path}: rotary scaling factor {factor}, it must be positive")
    if kind == "linear":
        return RopeScaling("linear", factor)
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if not low < high:
        raise ModelFileError(f"{rope.path}: low_freq_factor {low} is not below high_freq_factor {high}")
    llama3: Literal["llama3"] = "llama3"
    return RopeScaling(llama3, factor, rope.whole("original_max_position_embeddings", context), low, high)


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
