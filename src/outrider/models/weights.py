"""A checkpoint's tensors as the decoder's layers: stacked, packed, or kept as the file's own quantised blocks.

Shapes: d model width, D head width, V vocabulary, N x K one matrix.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider import kernels
from outrider.kernels import BlockRows, StackLayer
from outrider.models.linear import (
    Embedding,
    Linear,
    StackedLinear,
    StoredEmbedding,
    TableEmbedding,
    make_linear,
    packed_parts,
)
from outrider.models.loader.checkpoint import Checkpoint

CHUNK_VALUES = 1 << 22
"""Weights that are converted at a time: a converted matrix never lies beside its packed form; an encoded one does, in
4.5 bits."""
ROW_STEP = 32
"""Chunks are whole panels of the kernels at every level."""
FOUR_BITS = frozenset({"Q4_0", "Q4_1", "Q4_K"})
"""Block types that `four_bits` leaves as they are."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One block's weights. `qkv` and `gate_up` are the matrices that read the same input, stacked."""

    attn_norm_d: Tensor
    qkv: Linear
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    o: Linear
    ffn_norm_d: Tensor
    gate_up: Linear
    down: Linear

    def for_stack(self) -> StackLayer | None:
        """The same layer as the kernels' stack takes it; None unless every matrix is packed."""
        qkv, o, gate_up, down = (packed_parts(matrix) for matrix in (self.qkv, self.o, self.gate_up, self.down))
        if qkv is None or o is None or gate_up is None or down is None:
            return None
        return StackLayer(self.attn_norm_d, qkv, self.q_norm_D, self.k_norm_D, o, self.ffn_norm_d, gate_up, down)


class WeightReader:
    """Reads matrices as `dtype`; with None, blocks that have a kernel stay as they are, the rest becomes bfloat16.

    With `four_bits`, matrices that are not of `FOUR_BITS` are encoded anew, with some loss.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype | None, device: torch.device, *, four_bits: bool = False
    ) -> None:
        assert not four_bits or dtype is None, "four bits are a form of quantised weights"
        self.config = checkpoint.config
        self.device = device
        self._names = frozenset(checkpoint.names())
        self._checkpoint, self._dtype, self._four_bits = checkpoint, dtype, four_bits
        self._room = kernels.Room()

    def vector(self, name: str) -> Tensor:
        """A norm or bias, float32."""
        return self._checkpoint.tensor(name, torch.float32).to(self.device)

    def embedding(self) -> Embedding:
        """On a CPU the rows stay in the mapped file, whatever their type: only those looked up are read."""
        if self.device.type != "cpu":
            return TableEmbedding(self._matrix("embed"))
        return StoredEmbedding(self._checkpoint.raw("embed.weight"), self._dtype or torch.float32)

    def head(self, ids: Seq[int]) -> Linear:
        """These rows of the head, which is the embedding where the file has no other."""
        name = self._head_name
        first = len(ids) if ids == range(len(ids)) else None
        kind, width = self._kind(name), self.config.hidden_size
        if kind is not None:
            chosen = self._block_rows(name, first)
            if first is None:
                chosen = BlockRows(chosen.blocks, torch.tensor(list(ids)))
            return self._packed([chosen], kind, width, None)
        if first is None:
            return make_linear(iter([self._matrix(name)[torch.tensor(list(ids))]]), (len(ids), width), room=self._room)
        return make_linear(self._chunks(name, first, self._float), (first, width), room=self._room)

    def head_weights(self, ids: Seq[int]) -> Tensor:
        """float32 [len(ids), d]: these rows of the head as the file has them."""
        chosen = self._checkpoint.tensor(f"{self._head_name}.weight", torch.float32)[torch.tensor(list(ids))]
        self._checkpoint.release()
        return chosen.to(self.device)

    def layer(self, index: int) -> Layer:
        prefix = f"layers.{index}"
        return Layer(
            attn_norm_d=self.vector(f"{prefix}.attn_norm.weight"),
            qkv=self._linear(f"{prefix}.q", f"{prefix}.k", f"{prefix}.v"),
            q_norm_D=self._optional(f"{prefix}.q_norm.weight"),
            k_norm_D=self._optional(f"{prefix}.k_norm.weight"),
            o=self._linear(f"{prefix}.o"),
            ffn_norm_d=self.vector(f"{prefix}.ffn_norm.weight"),
            gate_up=self._linear(f"{prefix}.gate", f"{prefix}.up"),
            down=self._linear(f"{prefix}.down"),
        )

    @property
    def _head_name(self) -> str:
        """Of the matrix that the head is: the embedding where the file has no other."""
        return "head" if "head.weight" in self._names else "embed"

    def layer_weights(self, index: int) -> dict[str, Tensor]:
        """A layer's norms and matrices as numbers, float32, under the checkpoint's short names ("q", "attn_norm")."""
        names = [name for name in self._names if name.startswith(f"layers.{index}.") and name.endswith(".weight")]
        return {name.split(".")[2]: self.vector(name) for name in names}

    def _optional(self, name: str) -> Tensor | None:
        return self.vector(name) if name in self._names else None

    @property
    def _float(self) -> torch.dtype:
        """Of the matrices that are not blocks."""
        return self._dtype or torch.bfloat16

    def _matrix(self, name: str) -> Tensor:
        return self._checkpoint.tensor(f"{name}.weight", self._float).to(self.device)

    def _kind(self, name: str) -> str | None:
        """The block type under which a matrix stays quantised; None: it does not."""
        if self._dtype is not None:
            return None
        if self._is_encoded(name):
            return "Q4_0"
        kind = self._checkpoint.raw(f"{name}.weight").type_name
        return kind if kind in kernels.QUANTISED_TYPES else None

    def _is_encoded(self, name: str) -> bool:
        kind = self._checkpoint.raw(f"{name}.weight").type_name
        inputs = self._checkpoint.shape(f"{name}.weight")[1]
        return self._four_bits and kind not in FOUR_BITS and kernels.can_encode(inputs)

    def _block_rows(self, name: str, rows: int | None = None) -> BlockRows:
        """The first `rows` rows (None: all) as blocks, in the decoder's order: the mapped file's, or new ones."""
        if self._is_encoded(name):
            return BlockRows(self._encoded(name, rows or self._checkpoint.shape(f"{name}.weight")[0]))
        raw = self._checkpoint.raw(f"{name}.weight")
        blocks = BlockRows(raw.data.view(raw.shape[0], -1), raw.row_order)
        if rows is None:
            return blocks
        assert raw.row_order is None, f"{name} has an order of its own"
        return BlockRows(blocks.blocks[:rows])

    def _encoded(self, name: str, rows: int) -> Tensor:
        """uint8 [rows, bytes of a row]"""
        chunks = (kernels.encode_q4_0(chunk) for chunk in self._chunks(name, rows, torch.float32))
        first = next(chunks)
        encoded = first.new_empty((rows, first.shape[1]))
        start = 0
        for chunk in itertools.chain([first], chunks):
            encoded[start : start + len(chunk)] = chunk
            start += len(chunk)
        return encoded

    def _chunks(self, name: str, rows: int, dtype: torch.dtype) -> Iterator[Tensor]:
        """The first `rows` rows of a matrix, a few at a time; what was read is released as it is used."""
        step = max(ROW_STEP, CHUNK_VALUES // self._checkpoint.shape(f"{name}.weight")[1] // ROW_STEP * ROW_STEP)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            yield self._checkpoint.rows(f"{name}.weight", start, stop, dtype).to(self.device)
            self._checkpoint.release()

    def _linear(self, *names: str) -> Linear:
        """The matrices `names` stacked by output; neighbours of one kind become one matrix."""
        runs = [(kind, list(run)) for kind, run in itertools.groupby(names, self._kind)]
        linears = [self._run(kind, run) for kind, run in runs]
        return linears[0] if len(linears) == 1 else StackedLinear(linears)

    def _run(self, kind: str | None, names: list[str]) -> Linear:
        bias_N = self._bias(names)
        inputs = self._checkpoint.shape(f"{names[0]}.weight")[1]
        if kind is None:
            sizes = [self._checkpoint.shape(f"{name}.weight")[0] for name in names]
            chunks = (
                chunk
                for name, rows in zip(names, sizes, strict=True)
                for chunk in self._chunks(name, rows, self._float)
            )
            return make_linear(chunks, (sum(sizes), inputs), bias_N, room=self._room)
        return self._packed([self._block_rows(name) for name in names], kind, inputs, bias_N)

    def _packed(self, sources: list[BlockRows], kind: str, inputs: int, bias_N: Tensor | None) -> Linear:
        packed = kernels.pack_quantised_rows(sources, kind, inputs, bias_N, room=self._room)
        self._checkpoint.release()
        return packed

    def _bias(self, names: list[str]) -> Tensor | None:
        """Their biases end to end, zeros for a matrix without one; None when none has one."""
        biases = [self._optional(f"{name}.bias") for name in names]
        if all(bias is None for bias in biases):
            return None
        sizes = [self._checkpoint.shape(f"{name}.weight")[0] for name in names]
        filled = [
            torch.zeros(n, device=self.device) if bias is None else bias for n, bias in zip(sizes, biases, strict=True)
        ]
        return torch.cat(filled)
