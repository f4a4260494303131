"""What every checkpoint offers, whatever its format: a configuration, and tensors under one set of names.

    embed.weight  norm.weight  head.weight (absent: the embedding is the head)
    layers.{i}.attn_norm.weight  .q.weight  .k.weight  .v.weight  .o.weight  (.q.bias  .k.bias  .v.bias)
    layers.{i}.q_norm.weight  .k_norm.weight  .ffn_norm.weight  .gate.weight  .up.weight  .down.weight

Matrices are [out, in]; rows of q and k are in half-rotation order: pair r of a head is (x[r], x[r + head_dim / 2]).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from outrider.core.rope import RopeScaling
from outrider.errors import ModelFileError, ModelNotFoundError
from outrider.models.loader.stored_rows import Place

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


class UnknownArchitectureError(ModelFileError):
    """The file is sound, but its model is none that the native decoder computes; `transformers` may."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The shape of a decoder. `sliding_window` is None unless it is shorter than the context."""

    architecture: str
    n_layers: int
    hidden_size: int
    ffn_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    norm_eps: float
    qkv_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    sliding_window: int | None


@dataclass(frozen=True, slots=True)
class GGUFVocabulary:
    """The `tokenizer.ggml.*` metadata of a GGUF file.

    `eos_id` ends a text, `eot_id` a turn, `eom_id` a message: each ends generation. A file's `add_eos_token` is left
    unread on purpose: a prompt closed by an end token asks for no continuation.
    """

    model: str
    pre: str
    tokens: Sequence[str]
    token_types: Sequence[int]
    merges: Sequence[str]
    scores: Sequence[float] | None
    bos_id: int | None
    eos_id: int | None
    eot_id: int | None
    eom_id: int | None
    unk_id: int | None
    pad_id: int | None
    add_bos: bool
    add_space_prefix: bool


@dataclass(frozen=True, slots=True)
class TokenizerFolder:
    """A Hugging Face folder that holds the tokenizer's files."""

    path: Path


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as stored. Row n of the [out, in] matrix is stored row `row_order[n]`, or n when that is None.

    `data` is a view on the mapped file and must not be written to; the same bytes begin at `place`.
    """

    type_name: str
    shape: tuple[int, ...]
    data: Tensor
    row_order: Tensor | None
    place: Place


class Checkpoint(Protocol):
    """An open model file or folder. Safe to read from several threads."""

    @property
    def path(self) -> Path: ...
    @property
    def config(self) -> DecoderConfig: ...
    @property
    def tokenizer_source(self) -> GGUFVocabulary | TokenizerFolder: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def size_bytes(self) -> int:
        """Of the weights on disk."""
        ...

    @property
    def quantisation(self) -> str:
        """A label such as "Q4_K_M" or "BF16"."""
        ...

    def names(self) -> tuple[str, ...]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """Dequantised, contiguous, in memory of its own. `dtype` is float32, bfloat16 or float16."""
        ...

    def rows(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Rows `start` to `stop` of a matrix, as `tensor` gives them, without reading the others."""
        ...

    def raw(self, name: str) -> RawTensor: ...

    def release(self) -> None:
        """Takes what was read so far out of this process's memory; tensors of `raw` come back when they are used."""
        ...


def expected_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every canonical name that a checkpoint of this configuration must have, with its shape."""
    d, width = config.hidden_size, config.head_dim
    q, kv = config.n_heads * width, config.n_kv_heads * width
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (d,),
        "q.weight": (q, d),
        "k.weight": (kv, d),
        "v.weight": (kv, d),
        "o.weight": (d, q),
        "ffn_norm.weight": (d,),
        "gate.weight": (config.ffn_size, d),
        "up.weight": (config.ffn_size, d),
        "down.weight": (d, config.ffn_size),
    }
    if config.qkv_bias:
        layer |= {"q.bias": (q,), "k.bias": (kv,), "v.bias": (kv,)}
    if config.qk_norm:
        layer |= {"q_norm.weight": (width,), "k_norm.weight": (width,)}
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (config.vocab_size, d), "norm.weight": (d,)}
    for index in range(config.n_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    if not config.tie_embeddings:
        shapes["head.weight"] = (config.vocab_size, d)
    return shapes


def check_sizes(path: Path, config: DecoderConfig, n_tensors: int) -> None:
    """Raises ModelFileError for sizes that no decoder has, before anything is built from them."""
    for field in ("n_layers", "hidden_size", "ffn_size", "n_heads", "n_kv_heads", "head_dim", "vocab_size"):
        if not 1 <= (value := getattr(config, field)) < 2**31:
            raise ModelFileError(f"{path}: {field} is {value}, allowed are 1 to 2147483647. {DAMAGED}")
    if config.n_layers > n_tensors:
        raise ModelFileError(f"{path}: {config.n_layers} layers, but only {n_tensors} tensors. {DAMAGED}")
    if config.n_heads % config.n_kv_heads:
        raise ModelFileError(f"{path}: {config.n_heads} heads are no multiple of {config.n_kv_heads} key-value heads")
    if config.head_dim % 2:
        raise ModelFileError(f"{path}: head width {config.head_dim} is odd, so rotary positions cannot be applied")
    if not 1 <= config.context_length < 2**31:
        raise ModelFileError(f"{path}: context length {config.context_length}, allowed are 1 to 2147483647")
    for field in ("rope_theta", "norm_eps"):
        if not 0 < (number := getattr(config, field)) < 1e30:
            raise ModelFileError(f"{path}: {field} is {number}, it must be positive. {DAMAGED}")


DAMAGED = "The file is damaged or was made for another program; fetch it again"


def check_layout(
    path: Path,
    config: DecoderConfig,
    shapes: Mapping[str, tuple[int, ...]],
    unknown: Iterable[str],
) -> None:
    """Raises ModelFileError unless the tensors are exactly those of `config`; `unknown` names have no canonical one."""
    expected = expected_shapes(config)
    if missing := [name for name in expected if name not in shapes]:
        raise ModelFileError(f"{path} lacks {_listed(missing)} that a {config.architecture} model needs. {DAMAGED}")
    if unexpected := [*(name for name in shapes if name not in expected), *unknown]:
        raise ModelFileError(
            f"{path} has {_listed(unexpected)} that a {config.architecture} model has no place for, "
            "so the native decoder would compute something else. Load it through transformers instead"
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise ModelFileError(f"{path}: tensor {name} has shape {list(shapes[name])}, expected {list(shape)}")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(name[:80] for name in names[:5])
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"the tensor{'s' if len(names) > 1 else ''} {shown}{more}"


def unknown_architecture(path: Path, name: str) -> UnknownArchitectureError:
    """The error for a model that is none of ours."""
    return UnknownArchitectureError(
        f"{path} is a {name[:80]!r} model; the native decoder runs {', '.join(ARCHITECTURES)}. "
        "Other causal models run through transformers: install outrider[transformers] and give a Hugging Face folder"
    )


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a GGUF file, a .safetensors file or a Hugging Face folder, and checks it whole. Never unpickles.

    Raises ModelNotFoundError for no file, ModelFileError for a bad one, UnknownArchitectureError for a foreign model.
    """
    from outrider.models.loader.gguf import GGUFCheckpoint, is_gguf
    from outrider.models.loader.safetensors import SafetensorsCheckpoint

    path = Path(path)
    if path.is_dir():
        if not any(path.glob("*.safetensors")) and not (path / "model.safetensors.index.json").is_file():
            _refuse_folder(path)
        return SafetensorsCheckpoint(path)
    if not path.exists():
        raise ModelNotFoundError(f"{path} does not exist. Give a GGUF file or a folder with safetensors files")
    if not path.is_file():
        raise ModelFileError(f"{path} is neither a file nor a folder. Give a GGUF file or a model folder")
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise _pickle_error(path, path.parent)
    if path.suffix.lower() == ".safetensors":
        return SafetensorsCheckpoint(path.parent, only=path.name)
    if path.suffix.lower() != ".gguf" and not is_gguf(path):
        raise ModelFileError(f"{path} is no GGUF file. Readable are GGUF files and folders with safetensors files")
    return GGUFCheckpoint(path)


def _refuse_folder(folder: Path) -> None:
    files = sorted(folder.iterdir())
    if pickles := [file for file in files if file.suffix.lower() in PICKLE_SUFFIXES]:
        raise _pickle_error(pickles[0], folder)
    if ggufs := [file.name for file in files if file.suffix.lower() == ".gguf"]:
        raise ModelFileError(f"{folder} is a folder of GGUF files. Give one of them: {', '.join(ggufs[:5])}")
    raise ModelFileError(f"{folder} holds no safetensors file. Give a GGUF file or a complete model folder")


def _pickle_error(file: Path, folder: Path) -> ModelFileError:
    return ModelFileError(
        f"{file} is a pickle checkpoint, which can run code when it is loaded, so it is refused. Convert it once: "
        f'python -c "from transformers import AutoModelForCausalLM as M; '
        f'M.from_pretrained({str(folder)!r}).save_pretrained({str(folder) + "-safetensors"!r})"'
    )
