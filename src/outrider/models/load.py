"""Opens a model by path: weights in the fastest form for this machine, tokenizer, chat template, and the reasons."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider import kernels
from outrider.core.protocols import LanguageModel
from outrider.core.types import Decision
from outrider.errors import ConfigError
from outrider.models.chat_template import ChatTemplate
from outrider.models.decoder import Decoder
from outrider.models.hf import TransformersModel
from outrider.models.loader.checkpoint import Checkpoint, UnknownArchitectureError, open_checkpoint
from outrider.models.tokenizer import Tokenizer, used_size

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "quantised": None, "int4": None}
"""Weights in memory by option; quantised: the file's own blocks, as they are; int4: Q4_0, Q4_1 and Q4_K blocks as they
are, all else encoded in 4.5 bits, with some loss."""
BACKENDS = ("auto", "native", "transformers")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and what is needed to talk to it. `size_bytes` is the memory of the weights as loaded."""

    name: str
    path: Path
    model: LanguageModel
    tokenizer: Tokenizer
    template: ChatTemplate
    size_bytes: int
    load_s: float
    decisions: tuple[Decision, ...]


_Parts = tuple[Decoder | TransformersModel, Tokenizer, ChatTemplate, tuple[Decision, ...]]


def load_model(
    path: str | Path,
    *,
    name: str | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    backend: str = "auto",
    draft: bool = False,
) -> LoadedModel:
    """A GGUF file or a Hugging Face folder, under `name` (None: the path's). `backend` "auto" runs natively whatever
    the native decoder can run. The `dtype` "auto" of a `draft` may lose precision, which costs acceptance alone.

    Raises `ConfigError` for an option, `ModelNotFoundError`, `ModelFileError` or `MissingExtraError` for the model.
    """
    require_dtype(dtype)
    if backend not in BACKENDS:
        raise ConfigError(f"backend {backend!r} is not allowed: give {', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}")
    path, began = Path(path), time.perf_counter()
    model, tokenizer, template, decisions = _parts(path, dtype, device, backend, draft)
    load_s = time.perf_counter() - began
    return LoadedModel(name or model.name, path, model, tokenizer, template, model.nbytes, load_s, decisions)


def require_dtype(dtype: str) -> None:
    """Raises ConfigError unless it is one of DTYPES, or auto."""
    if dtype not in ("auto", *DTYPES):
        raise ConfigError(f"dtype {dtype!r} is not allowed: give one of auto, {', '.join(DTYPES)}")


def _parts(path: Path, dtype: str, device: str, backend: str, draft: bool) -> _Parts:
    if backend == "transformers":
        return _through_transformers(path, device, dtype, "asked for")
    try:
        checkpoint = open_checkpoint(path)
    except UnknownArchitectureError as error:
        if backend == "native" or not path.is_dir():
            raise
        return _through_transformers(path, device, dtype, f"the native decoder cannot: {error}")
    return _natively(checkpoint, device, precision_of(dtype, device, checkpoint, draft))


def precision_of(asked: str, device: str, checkpoint: Checkpoint | None, draft: bool = False) -> Decision:
    """The form of the weights that is fastest here. Activations between layers and logits are float32 either way."""
    kind = checkpoint.raw("layers.0.gate.weight").type_name if checkpoint else "unknown"
    has_kernels = kernels.available() and torch.device(device).type == "cpu"
    computes_blocks = has_kernels and kind in kernels.QUANTISED_TYPES
    if asked == "int4" and not (has_kernels and checkpoint):
        raise ConfigError(
            f"dtype 'int4' is not possible here: it takes the compiled CPU kernels ({kernels.why()}) and a model of "
            "the native decoder; give bfloat16 or float32"
        )
    if asked == "quantised" and not computes_blocks:
        raise ConfigError(
            f"dtype 'quantised' is not possible here: it takes the compiled CPU kernels ({kernels.why()}) and a GGUF "
            f"file of type {', '.join(sorted(kernels.QUANTISED_TYPES))} (this one: {kind}); give bfloat16 or float32"
        )
    if asked == "int4" and not draft:
        return Decision(
            "dtype",
            "int4",
            "asked for; weights were encoded anew in 4.5 bits, all but the file's own blocks of Q4_0, Q4_1 and Q4_K: "
            "the answers are those of the encoded model, with speculation and without",
        )
    if asked != "auto":
        return Decision("dtype", asked, "asked for")
    if draft and has_kernels and checkpoint:
        return Decision(
            "dtype", "int4", "a draft counts by its speed; what 4.5 bits a weight lose costs acceptance alone"
        )
    if computes_blocks:
        return Decision(
            "dtype",
            "quantised",
            f"the {kernels.active_level()} kernels compute with the file's blocks ({kind}) as they are",
        )
    if torch.device(device).type == "cuda":
        if torch.cuda.is_bf16_supported():
            return Decision("dtype", "bfloat16", "half the memory traffic of float32, and this GPU computes in it")
        return Decision("dtype", "float32", "this GPU has no bfloat16 arithmetic")
    if kernels.available():
        reason = f"half the memory traffic of float32; the {kernels.active_level()} kernels widen it on the way"
        return Decision("dtype", "bfloat16", reason)
    why = f"{kernels.reason()}; torch does the work, and its bfloat16 products are slow on a CPU"
    return Decision("dtype", "float32", why)


def _natively(checkpoint: Checkpoint, device: str, precision: Decision) -> _Parts:
    path = checkpoint.path
    name = path.stem if path.is_file() else path.name
    with ThreadPoolExecutor(max_workers=1) as beside:  # packing leaves Python to the tokenizer
        reading = beside.submit(Tokenizer.of, checkpoint)
        known = used_size(checkpoint.tokenizer_source)
        vocab_size = reading.result().used_size if known is None else known
        model = Decoder.from_checkpoint(
            checkpoint,
            dtype=DTYPES[precision.value],
            four_bits=precision.value == "int4",
            device=device,
            vocab_size=vocab_size,
            name=name,
        )
        tokenizer = reading.result()
    how = (
        f"{checkpoint.config.architecture} is an architecture of the native decoder ({checkpoint.quantisation} on disk)"
    )
    template = ChatTemplate.for_tokenizer(checkpoint.chat_template, tokenizer)
    return model, tokenizer, template, (Decision("backend", "native", how), precision, _arithmetic(model))


def _arithmetic(model: Decoder) -> Decision:
    if model.device.type != "cpu":
        return Decision("kernels", "torch", f"torch's own on {model.device}")
    return Decision("kernels", kernels.active_level(), kernels.reason())


def _through_transformers(folder: Path, device: str, dtype: str, why: str) -> _Parts:
    precision = precision_of(dtype, device, None)
    weights = DTYPES[precision.value]
    assert weights is not None
    model = TransformersModel.from_folder(folder, dtype=weights, device=device)
    tokenizer = Tokenizer.from_folder(folder, vocab_size=model.vocab_size)
    model.vocab_size = tokenizer.used_size
    template = ChatTemplate.from_folder(folder, tokenizer)
    return model, tokenizer, template, (Decision("backend", "transformers", why), precision)
