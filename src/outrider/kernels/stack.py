"""All layers of a decoder in one call: the same kernels in the same order as one call each, bit for bit.

Shapes: M rows, d model width, K inputs of the first attention, H query heads, G key-value heads, D head width, I
feed-forward width, T positions of a cache, U of a table, R = D / 2, F features.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from outrider.kernels.dispatch import CALLS, DTYPE_CODE
from outrider.kernels.ops import HEAD_STEP, PackedLinear
from outrider.kernels.quantised import QuantisedLinear

if TYPE_CHECKING:
    from outrider.kernels._kernels import Level
    from outrider.kernels._kernels import Stack as NativeStack

Matrix = PackedLinear | QuantisedLinear


@dataclass(frozen=True, slots=True)
class StackLayer:
    """One layer. Matrices of a tuple read the same rows; their outputs stand side by side: (q, k, v) and (gate, up)."""

    attn_norm_d: Tensor
    qkv: tuple[Matrix, ...]
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    o: tuple[Matrix, ...]
    ffn_norm_d: Tensor
    gate_up: tuple[Matrix, ...]
    down: tuple[Matrix, ...]

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.qkv + self.o + self.gate_up + self.down

    @property
    def norms(self) -> list[Tensor]:
        norms = (self.attn_norm_d, self.q_norm_D, self.k_norm_D, self.ffn_norm_d)
        return [norm for norm in norms if norm is not None]


class CacheRows(NamedTuple):
    """Rows of one sequence in a pass: its cache [layers, 2 (keys, values), T, G, D], the position from which the rows'
    keys and values go there, and what each row sees, as in `attention` (ancestors square)."""

    rows: int
    store: Tensor
    length: int
    lengths_m: Tensor
    starts_m: Tensor | None
    ancestors_mm: Tensor | None


class Stack:
    """Layers and the norm behind them, ready to run. Made by `build_stack`.

    `cache_shape` is (G, D), `hidden` the width d and `reads` K, where what the first attention reads is given;
    `native` is the extension's own, for what runs a stack among other things.
    """

    def __init__(
        self,
        level: Level,
        layers: Seq[StackLayer],
        last_norm_d: Tensor,
        heads: tuple[int, int, int],
        eps: float,
        cache_dtype: torch.dtype,
        reads: int | None,
    ) -> None:
        self.reads = reads
        self._kept = (list(layers), last_norm_d)
        self.hidden, self._depth, self._cache_dtype = len(last_norm_d), len(layers), cache_dtype
        n_heads, n_kv, width = heads
        self.cache_shape, self.eps, self.level = (n_kv, width), eps, level
        feed = _outputs(layers[0].gate_up) // 2
        self.native = level.stack(self.hidden, feed, n_heads, n_kv, width, eps, DTYPE_CODE[cache_dtype])
        for index, layer in enumerate(layers):
            assert layer.attn_norm_d.shape == layer.ffn_norm_d.shape == (self.hidden,), "norms of another width"
            assert (layer.q_norm_D is None) == (layer.k_norm_D is None), "a norm of queries or of keys alone"
            norms = (layer.attn_norm_d, layer.q_norm_D, layer.k_norm_D, layer.ffn_norm_d)
            self.native.layer(*(0 if norm is None else norm.data_ptr() for norm in norms))
            attended = n_heads * width
            inputs = reads if reads is not None and index == 0 else self.hidden
            _add(self.native, "qkv", layer.qkv, inputs, attended + 2 * n_kv * width)
            _add(self.native, "o", layer.o, attended, self.hidden)
            _add(self.native, "gate_up", layer.gate_up, self.hidden, 2 * feed)
            _add(self.native, "down", layer.down, feed, self.hidden)
        self.native.last_norm(last_norm_d.data_ptr())

    def run(
        self,
        x_Md: Tensor,
        positions_M: Tensor,
        cos_UR: Tensor,
        sin_UR: Tensor,
        spans: Seq[CacheRows],
        taps: Seq[int] = (),
        read_MK: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(x after the last layer, normed [M, d]; x after each of the layers `taps` side by side [M, F], or None).

        Adds every layer's output to x in place, and writes the rows' keys and values into the caches. The rows of the
        spans, in order, are the rows of x. `read_MK` is what the first attention reads, where the stack was built so.
        Raises IndexError for a position outside the tables or a row outside its cache.
        """
        rows, hidden = x_Md.shape
        assert hidden == self.hidden, f"rows of {hidden} for layers of {self.hidden}"
        assert x_Md.dtype == torch.float32, f"rows are {x_Md.dtype}"
        assert x_Md.is_contiguous(), "rows must follow one another"
        assert positions_M.shape == (rows,), f"positions {tuple(positions_M.shape)} of {rows} rows"
        assert positions_M.dtype == torch.int64, f"positions are {positions_M.dtype}"
        table = cos_UR.shape[0]
        assert cos_UR.shape == sin_UR.shape == (table, self.cache_shape[1] // 2), f"tables {tuple(cos_UR.shape)}"
        assert all(0 <= tap < self._depth for tap in taps), f"taps {list(taps)} of {self._depth} layers"
        assert (read_MK is None) == (self.reads is None), "the first attention reads a norm of x, or what is given"
        if read_MK is not None:
            assert read_MK.shape == (rows, self.reads), f"{tuple(read_MK.shape)} read by {rows} rows of {self.reads}"
            assert read_MK.dtype == torch.float32, f"what is read is {read_MK.dtype}"
            assert read_MK.is_contiguous(), "rows must follow one another"
        fields = [field for span in spans for field in self._fields(span)]
        out_Md = torch.empty_like(x_Md)
        features_MF = x_Md.new_empty((rows, len(taps) * hidden)) if taps else None
        self.native.run(
            x_Md.data_ptr(),
            out_Md.data_ptr(),
            rows,
            cos_UR.data_ptr(),
            sin_UR.data_ptr(),
            table,
            positions_M.data_ptr(),
            fields,
            taps,
            0 if features_MF is None else features_MF.data_ptr(),
            0 if read_MK is None else read_MK.data_ptr(),
        )
        CALLS["stack"] += 1
        return out_Md, features_MF

    def _fields(self, span: CacheRows) -> tuple[int, ...]:
        rows, store, length, lengths_m, starts_m, ancestors_mm = span
        depth, _, positions, *heads = store.shape
        assert depth >= self._depth, f"a cache of {depth} layers for {self._depth}"
        assert tuple(heads) == self.cache_shape, f"a cache of heads {heads} for {self.cache_shape}"
        assert store.dtype == self._cache_dtype, f"a cache of {store.dtype} for {self._cache_dtype}"
        assert lengths_m.shape == (rows,), f"lengths {tuple(lengths_m.shape)} of {rows} rows"
        assert lengths_m.dtype == torch.int32, f"lengths are {lengths_m.dtype}"
        starts_at = ancestors_at = 0
        if starts_m is not None:
            assert starts_m.shape == (rows,), f"starts {tuple(starts_m.shape)} of {rows} rows"
            assert starts_m.dtype == torch.int32, f"starts are {starts_m.dtype}"
            starts_at = starts_m.data_ptr()
        if ancestors_mm is not None:
            assert ancestors_mm.shape == (rows, rows), f"ancestors {tuple(ancestors_mm.shape)} of {rows} rows"
            assert ancestors_mm.dtype == torch.bool, f"ancestors are {ancestors_mm.dtype}"
            assert ancestors_mm.is_contiguous(), "rows of ancestors must follow one another"
            ancestors_at = ancestors_mm.data_ptr()
        return rows, store.data_ptr(), positions, length, lengths_m.data_ptr(), starts_at, ancestors_at


def build_stack(
    layers: Seq[StackLayer],
    last_norm_d: Tensor,
    *,
    heads: tuple[int, int, int],
    eps: float,
    cache_dtype: torch.dtype,
    reads: int | None = None,
) -> Stack | None:
    """`reads` is the width of what the first attention reads, if that is not a norm of x but given with each pass.

    None where the layers cannot run so: weights that are not packed, or packed for different levels, and heads
    (query heads, key-value heads, width) that the attention kernel does not take."""
    levels = {matrix.level for layer in layers for matrix in layer.matrices}
    norms = [last_norm_d, *(norm for layer in layers for norm in layer.norms)]
    plain = all(n.dtype == torch.float32 and n.device.type == "cpu" and n.is_contiguous() for n in norms)
    level = levels.pop() if len(levels) == 1 else None
    if level is None or not plain or heads[2] % HEAD_STEP or cache_dtype not in DTYPE_CODE:
        return None
    return Stack(level, layers, last_norm_d, heads, eps, cache_dtype, reads)


def _outputs(parts: Seq[Matrix]) -> int:
    return sum(part.out_features for part in parts)


def _add(native: NativeStack, role: str, parts: Seq[Matrix], inputs: int, outputs: int) -> None:
    assert _outputs(parts) == outputs, f"{role} has {_outputs(parts)} outputs, not {outputs}"
    assert all(part.in_features == inputs for part in parts), f"{role} reads rows of another width than {inputs}"
    for part in parts:
        part.add_to(native, role)
