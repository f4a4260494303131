"""Typed access to a GGUF file's metadata, and what is more than one value: the vocabulary and rotary scaling."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TypeVar, cast

from outrider.core.json_file import TypedValues
from outrider.core.rope import RopeScaling
from outrider.errors import ModelFileError
from outrider.models.loader.checkpoint import DAMAGED, GGUFVocabulary
from outrider.models.loader.gguf_header import Value

Item = TypeVar("Item", str, int, float)

NORMAL_TOKEN = 1
LLAMA3_ORIGINAL_CONTEXT, LLAMA3_LOW, LLAMA3_HIGH = 8192, 1.0, 4.0
TOKENS = "tokenizer.ggml."
SENTENCEPIECE = "llama"


class Metadata(TypedValues):
    """The file's keys. A method without a default raises ModelFileError for a missing key, all for a wrong type."""

    def __init__(self, path: Path, values: dict[str, Value]) -> None:
        super().__init__(path)
        self._values = values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def per_layer(self, key: str, default: int | None = None) -> int:
        """A whole number, or a list of equal ones."""
        value = self._get(key, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if type(value) is not int:
            raise self._wrong(key, value, "one whole number for all layers")
        return value

    def items(self, key: str, kind: type[Item], default: list[Item] | None = None) -> list[Item]:
        value = self._get(key, default)
        if not isinstance(value, list) or set(map(type, value)) - {kind}:
            raise self._wrong(key, value, f"a list of {kind.__name__}")
        return cast("list[Item]", value)

    def token_id(self, name: str, vocab_size: int) -> int | None:
        """An id below `vocab_size`. Files write -1 or its unsigned twin for "none"."""
        key = f"{TOKENS}{name}_token_id"
        token = self.whole(key, -1)
        if token in (-1, 0xFFFFFFFF):
            return None
        if not 0 <= token < vocab_size:
            raise ModelFileError(f"{self.path}: {key} is {token}, allowed are 0 to {vocab_size - 1}. {DAMAGED}")
        return token

    def _get(self, key: str, default: object) -> object:
        value = self._values.get(key, default)
        if value is None:
            raise ModelFileError(f"{self.path}: metadata {key[:80]!r} is missing. {DAMAGED}")
        return value

    def _wrong(self, key: str, value: object, wanted: str) -> ModelFileError:
        shown = f"a list of {len(value)}" if isinstance(value, list) else f"{str(value)[:40]!r}"
        return ModelFileError(f"{self.path}: metadata {key[:80]!r} is {shown}, expected {wanted}. {DAMAGED}")


def read_vocabulary(metadata: Metadata, vocab_size: int) -> GGUFVocabulary:
    model = metadata.text(TOKENS + "model")
    tokens = metadata.items(TOKENS + "tokens", str)
    types = metadata.items(TOKENS + "token_type", int, [NORMAL_TOKEN] * len(tokens))
    scores = metadata.items(TOKENS + "scores", float) if TOKENS + "scores" in metadata else None
    for what, found in (("token types", len(types)), ("scores", len(tokens if scores is None else scores))):
        if found != len(tokens):
            raise ModelFileError(f"{metadata.path}: {len(tokens)} tokens but {found} {what}. {DAMAGED}")
    if not 1 <= len(tokens) <= vocab_size:
        raise ModelFileError(f"{metadata.path}: {len(tokens)} tokens for an embedding of {vocab_size} rows. {DAMAGED}")
    return GGUFVocabulary(
        model=model,
        pre=metadata.text(TOKENS + "pre", "default"),
        tokens=tokens,
        token_types=types,
        merges=metadata.items(TOKENS + "merges", str, []),
        scores=scores,
        bos_id=metadata.token_id("bos", vocab_size),
        eos_id=metadata.token_id("eos", vocab_size),
        eot_id=metadata.token_id("eot", vocab_size),
        eom_id=metadata.token_id("eom", vocab_size),
        unk_id=metadata.token_id("unknown", vocab_size),
        pad_id=metadata.token_id("padding", vocab_size),
        add_bos=metadata.boolean(TOKENS + "add_bos_token", model == SENTENCEPIECE),
        add_space_prefix=metadata.boolean(TOKENS + "add_space_prefix", model == SENTENCEPIECE),
    )


def read_rope_scaling(
    metadata: Metadata, prefix: str, head_dim: int, factors: list[float] | None
) -> RopeScaling | None:
    """From the keys, or from the factors that a converter wrote for Llama 3's scaling."""
    kind = metadata.text(f"{prefix}rope.scaling.type", "none")
    factor = metadata.number(f"{prefix}rope.scaling.factor", metadata.number(f"{prefix}rope.scale_linear", 1.0))
    if kind not in ("none", "linear") and factor != 1.0:
        raise ModelFileError(
            f"{metadata.path}: rotary scaling {kind[:40]!r} is not supported, allowed are none, linear and llama3. "
            "Load the Hugging Face folder of this model through transformers instead"
        )
    if factor <= 0:
        raise ModelFileError(f"{metadata.path}: rotary scaling factor {factor}, it must be positive. {DAMAGED}")
    if factors is not None:
        theta = metadata.number(f"{prefix}rope.freq_base", 10000.0)
        return _llama3(metadata.path, head_dim, theta, factors)
    return RopeScaling("linear", factor) if factor != 1.0 else None


def _llama3(path: Path, head_dim: int, theta: float, factors: list[float]) -> RopeScaling | None:
    """The scaling whose factors these are, as Meta's published code for Llama 3.1 defines it: the largest factor is
    that of the scaling."""
    if all(factor == 1.0 for factor in factors):
        return None
    largest = max(factors)
    scaling = RopeScaling("llama3", largest, LLAMA3_ORIGINAL_CONTEXT, LLAMA3_LOW, LLAMA3_HIGH)
    if len(factors) == head_dim // 2 and theta > 0 and largest > 0:
        expected = [_llama3_factor(scaling, theta ** (2 * pair / head_dim)) for pair in range(head_dim // 2)]
        if all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(factors, expected, strict=True)):
            return scaling
    raise ModelFileError(
        f"{path}: the {len(factors)} rotary factors (largest {largest:g}) are not those of Llama 3's scaling from "
        f"{LLAMA3_ORIGINAL_CONTEXT} tokens, the only kind read. Load the Hugging Face folder instead"
    )


def _llama3_factor(scaling: RopeScaling, wavelength: float) -> float:
    turns = scaling.original_context / (2 * math.pi * wavelength)
    kept = min(1.0, max(0.0, (turns - scaling.low_freq) / (scaling.high_freq - scaling.low_freq)))
    return 1 / (kept + (1 - kept) / scaling.factor)
