"""What a model will take, from its file's header alone: the decoder that would be loaded, with sizes for weights.

The same code as loads a model walks its layers and decides the form of each matrix; only the last step, which reads and
packs, is replaced by the size of the result. Keys and values are shapes on torch's meta device, which hold no memory.

Shapes: d model width, N x K one matrix.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.types import Decision
from outrider.kernels import ggml
from outrider.kernels.dispatch import CHOICE
from outrider.models.decoder import Decoder
from outrider.models.linear import Embedding, Linear
from outrider.models.load import DTYPES, precision_of, require_dtype
from outrider.models.loader.checkpoint import Checkpoint
from outrider.models.tokenizer import Tokenizer, used_size
from outrider.models.weights import WeightReader

KV_DTYPE = torch.float32
"""Of keys and values on a CPU."""


@dataclass(frozen=True, slots=True)
class Sized:
    """A matrix that is not there, of `nbytes` when it is."""

    nbytes: int

    def __call__(self, *rows: Tensor, **named: Tensor) -> Tensor:
        raise AssertionError("a size has no values")


class SizeReader(WeightReader):
    """Gives sizes in place of matrices, and shapes in place of vectors; reads no weight."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype | None, *, four_bits: bool) -> None:
        super().__init__(checkpoint, dtype, torch.device("meta"), four_bits=four_bits)

    def vector(self, name: str) -> Tensor:
        return torch.empty(self._checkpoint.shape(name), device="meta")

    def embedding(self) -> Embedding:
        """On a CPU it stays in the file."""
        return Sized(0)

    def head(self, ids: Seq[int]) -> Linear:
        form = self._kind(self._head_name) or self._float
        return Sized(packed_nbytes(len(ids), self.config.hidden_size, form))

    def _run(self, kind: str | None, names: list[str]) -> Linear:
        rows = sum(self._checkpoint.shape(f"{name}.weight")[0] for name in names)
        biased = any(f"{name}.bias" in self._names for name in names)
        inputs = self._checkpoint.shape(f"{names[0]}.weight")[1]
        nbytes = packed_nbytes(rows, inputs, kind or self._float)
        return Sized(nbytes + (torch.float32.itemsize * rows if biased else 0))


def packed_nbytes(rows: int, inputs: int, form: str | torch.dtype) -> int:
    """Of a matrix as it is packed in a kind of blocks or as floats: outputs rounded up to a panel of the kernels."""
    level = CHOICE.level
    if isinstance(form, torch.dtype):
        panel = level.panel if level is not None else 1
        return -(-rows // panel) * panel * inputs * form.itemsize
    if level is None:
        return rows * ggml.FORMATS[form].row_nbytes(inputs)
    return level.quant_bytes(rows, inputs, ggml.FORMATS[form].number)


def sized_decoder(checkpoint: Checkpoint, name: str, *, dtype: str, draft: bool = False) -> tuple[Decoder, Decision]:
    """The decoder that `load_model` would make of it on the CPU, and why its weights are in that form. It has sizes,
    caches have shapes, and it cannot run. Raises ConfigError for a `dtype` that is not possible."""
    require_dtype(dtype)
    precision = precision_of(dtype, "cpu", checkpoint, draft)
    reader = SizeReader(checkpoint, DTYPES[precision.value], four_bits=precision.value == "int4")
    config, used = checkpoint.config, used_size(checkpoint.tokenizer_source)
    rows = min(Tokenizer.of(checkpoint).used_size if used is None else used, config.vocab_size)
    decoder = Decoder(
        reader,
        reader.embedding(),
        [reader.layer(index) for index in range(config.n_layers)],
        reader.vector("norm.weight"),
        reader.head(range(rows)),
        vocab_size=rows,
        kv_dtype=KV_DTYPE,
        context_length=config.context_length,
        name=name,
    )
    return decoder, precision
