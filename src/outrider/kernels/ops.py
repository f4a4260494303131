"""Typed entry to the kernels: checks shapes, passes addresses, counts calls; torch twins where no kernel runs.

Every result of a kernel is row-invariant: bit-identical whatever the other rows, their number, and the threads. The
twins are not. Inputs are float32 on the CPU unless said otherwise; other devices go to the twins.

Shapes: as in reference.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.kernels import reference
from outrider.kernels.dispatch import CALLS, CHOICE, DTYPE_CODE
from outrider.kernels.room import Room

if TYPE_CHECKING:
    from outrider.kernels._kernels import Chain, Level, Stack, Walker

_LEVEL = CHOICE.level
HEAD_STEP = 16
"""Head widths that the attention kernel takes are multiples of the widest vector."""


class PackedLinear:
    """y = x W^T + b, its weights in the kernels' own order. Made by `pack_linear`."""

    def __init__(
        self,
        chunks: Iterable[Tensor],
        shape_NK: tuple[int, int],
        dtype: torch.dtype,
        bias_N: Tensor | None,
        level: Level | None,
        room: Room | None,
    ) -> None:
        self.out_features, self.in_features = shape_NK
        self.dtype = dtype
        self._bias_N = None if bias_N is None else bias_N.detach().float().contiguous()
        self._bias_at = 0 if self._bias_N is None else self._bias_N.data_ptr()
        self._level = level
        if level is None:
            whole = [chunk.detach() for chunk in chunks]
            self._weight = whole[0] if len(whole) == 1 else torch.cat(whole)
            return
        panels = -(-self.out_features // level.panel)
        size = panels * level.panel * self.in_features * dtype.itemsize
        self._weight = (room.take(size) if room else torch.empty(size, dtype=torch.uint8)).view(dtype)
        self._weight_at = self._weight.data_ptr()
        self._code = DTYPE_CODE[self.dtype]
        self._pack(level, chunks)

    def _pack(self, level: Level, chunks: Iterable[Tensor]) -> None:
        """Whole panels at a time; rows that do not fill one wait for the next chunk."""
        waiting_NK, at = torch.empty((0, self.in_features), dtype=self.dtype), 0
        for chunk_NK in chunks:
            rows_NK = torch.cat([waiting_NK, chunk_NK.detach()]) if len(waiting_NK) else chunk_NK.detach().contiguous()
            whole = len(rows_NK) // level.panel * level.panel
            self._pack_rows(level, rows_NK[:whole], at)
            waiting_NK, at = rows_NK[whole:].clone(), at + whole
        self._pack_rows(level, waiting_NK, at)
        assert at + len(waiting_NK) == self.out_features, f"{at + len(waiting_NK)} rows of {self.out_features}"

    def _pack_rows(self, level: Level, rows_NK: Tensor, at: int) -> None:
        """`at` is the first column, of a panel too."""
        assert at + len(rows_NK) <= self.out_features, f"more than {self.out_features} rows"
        assert rows_NK.dtype == self.dtype, f"rows are {rows_NK.dtype}, not {self.dtype}"
        assert rows_NK.shape[1:] == (self.in_features,), f"rows of {tuple(rows_NK.shape[1:])}, not {self.in_features}"
        if len(rows_NK):
            to = self._weight_at + at * self.in_features * self.dtype.itemsize
            level.pack(rows_NK.data_ptr(), to, len(rows_NK), self.in_features, self._code)

    @property
    def nbytes(self) -> int:
        """Bytes held: packed weights (outputs rounded up to a panel) and bias."""
        return self._weight.nbytes + (0 if self._bias_N is None else self._bias_N.nbytes)

    @property
    def level(self) -> Level | None:
        """For which the weights are packed; None where torch does the work."""
        return self._level

    def add_to(self, stack: Stack | Walker | Chain, role: str) -> None:
        """Makes this one of the matrices called `role` of the latest layer of `stack` (the one of a chain; the only one
        of a walker), which must not outlive it."""
        stack.linear(role, self._weight_at, self._bias_at, self.out_features, self.in_features, self._code)

    def __call__(self, x_MK: Tensor) -> Tensor:
        """[M, N] float32."""
        if self._level is None:
            return reference.linear(x_MK, self._weight, self._bias_N)
        rows, width = x_MK.shape
        assert width == self.in_features, f"rows of {width} for {self.in_features} inputs"
        assert x_MK.dtype == torch.float32, f"rows are {x_MK.dtype}"
        x_MK = x_MK.contiguous()
        y_MN = torch.empty((rows, self.out_features), dtype=torch.float32)
        self._level.linear(
            self._weight_at,
            self._bias_at,
            x_MK.data_ptr(),
            y_MN.data_ptr(),
            rows,
            self.out_features,
            width,
            self._code,
        )
        CALLS["linear"] += 1
        return y_MN


def pack_linear(weight_NK: Tensor, bias_N: Tensor | None = None) -> PackedLinear:
    """Copies a float32 or bfloat16 matrix into the kernels' order; the caller may drop the original.

    Without kernels (no extension, or a weight on another device) it keeps the tensor, and computes in float32 like the
    twin: exact, and slow for bfloat16.
    """
    assert weight_NK.dim() == 2 == sum(size > 0 for size in weight_NK.shape), (
        f"a weight of shape {tuple(weight_NK.shape)}"
    )
    assert weight_NK.dtype in DTYPE_CODE, f"weights are {weight_NK.dtype}"
    assert bias_N is None or bias_N.shape == weight_NK.shape[:1], "a bias of another width than the weight"
    level = _LEVEL if weight_NK.device.type == "cpu" else None
    return PackedLinear([weight_NK], (weight_NK.shape[0], weight_NK.shape[1]), weight_NK.dtype, bias_N, level, None)


def pack_linear_chunks(
    chunks: Iterable[Tensor],
    shape_NK: tuple[int, int],
    dtype: torch.dtype,
    bias_N: Tensor | None = None,
    *,
    room: Room | None = None,
) -> PackedLinear:
    """The same for a matrix given some rows at a time, on the CPU; each chunk is used before the next is asked for.

    Chunks of whole panels (32 rows at every level) are packed without a further copy. The packed weights lie in `room`,
    or in memory of their own.
    """
    assert min(shape_NK) > 0, f"a weight of shape {shape_NK}"
    assert dtype in DTYPE_CODE, f"weights are {dtype}"
    assert bias_N is None or bias_N.shape == shape_NK[:1], "a bias of another width than the weight"
    return PackedLinear(chunks, shape_NK, dtype, bias_N, _LEVEL, room)


def _plain(*tensors: Tensor) -> bool:
    return all(t.dtype == torch.float32 and t.device.type == "cpu" and t.is_contiguous() for t in tensors)


def rms_norm(x_MK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
    """[M, K]: root-mean-square norm of each row."""
    if _LEVEL is None or not _plain(x_MK, weight_K):
        return reference.rms_norm(x_MK, weight_K, eps)
    rows, width = x_MK.shape
    assert weight_K.shape == (width,), f"weights {tuple(weight_K.shape)} for rows of {width}"
    out_MK = torch.empty((rows, width), dtype=torch.float32)
    _LEVEL.rms_norm(x_MK.data_ptr(), 0, weight_K.data_ptr(), out_MK.data_ptr(), rows, width, eps)
    CALLS["rms_norm"] += 1
    return out_MK


def add_rms_norm_(x_MK: Tensor, delta_MK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
    """[M, K]: the norm of x + delta. Adds delta to x in place: the residual of a layer and the norm of the next."""
    if _LEVEL is None or not _plain(x_MK, delta_MK, weight_K):
        return reference.add_rms_norm_(x_MK, delta_MK, weight_K, eps)
    rows, width = x_MK.shape
    assert delta_MK.shape == x_MK.shape, f"{tuple(delta_MK.shape)} added to {tuple(x_MK.shape)}"
    assert weight_K.shape == (width,), f"weights {tuple(weight_K.shape)} for rows of {width}"
    out_MK = torch.empty((rows, width), dtype=torch.float32)
    _LEVEL.rms_norm(x_MK.data_ptr(), delta_MK.data_ptr(), weight_K.data_ptr(), out_MK.data_ptr(), rows, width, eps)
    CALLS["add_rms_norm_"] += 1
    return out_MK


def swiglu(gate_up_M2I: Tensor) -> Tensor:
    """[M, I]: silu(gate) * up."""
    if _LEVEL is None or not _plain(gate_up_M2I):
        return reference.swiglu(gate_up_M2I)
    rows, both = gate_up_M2I.shape
    assert both % 2 == 0, f"rows of {both} are not a gate and an up"
    out_MI = torch.empty((rows, both // 2), dtype=torch.float32)
    _LEVEL.swiglu(gate_up_M2I.data_ptr(), out_MI.data_ptr(), rows, both // 2)
    CALLS["swiglu"] += 1
    return out_MI


def _heads_together(x_MHD: Tensor) -> bool:
    """Heads of a row follow one another; rows may be apart, as in a slice of a joint projection."""
    return x_MHD.stride()[1:] == (x_MHD.shape[2], 1) and x_MHD.device.type == "cpu"


def rope_(q_MHD: Tensor, k_MGD: Tensor, cos_TR: Tensor, sin_TR: Tensor, positions_M: Tensor) -> None:
    """Rotates q and k in place by the angles of `positions_M` (int64), rows of the tables.

    Raises IndexError for a position outside the tables.
    """
    fits = _plain(cos_TR, sin_TR) and positions_M.dtype == torch.int64 and positions_M.is_contiguous()
    if _LEVEL is None or not (fits and _heads_together(q_MHD) and _heads_together(k_MGD)):
        reference.rope_(q_MHD, k_MGD, cos_TR, sin_TR, positions_M)
        return
    rows, heads, width = q_MHD.shape
    assert k_MGD.shape == (rows, k_MGD.shape[1], width), f"keys {tuple(k_MGD.shape)}, queries {tuple(q_MHD.shape)}"
    assert positions_M.shape == (rows,), f"positions {tuple(positions_M.shape)} of {rows} rows"
    assert cos_TR.shape == sin_TR.shape == (len(cos_TR), width // 2), f"tables of shape {tuple(cos_TR.shape)}"
    assert q_MHD.dtype == k_MGD.dtype == torch.float32, f"{q_MHD.dtype}, {k_MGD.dtype}"
    cos_at, sin_at, positions_at, table = cos_TR.data_ptr(), sin_TR.data_ptr(), positions_M.data_ptr(), len(cos_TR)
    _LEVEL.rope(q_MHD.data_ptr(), cos_at, sin_at, positions_at, table, rows, q_MHD.stride(0), heads, width)
    _LEVEL.rope(k_MGD.data_ptr(), cos_at, sin_at, positions_at, table, rows, k_MGD.stride(0), k_MGD.shape[1], width)
    CALLS["rope_"] += 1


def _attention_fits(q_MHD: Tensor, keys_TGD: Tensor, values_TGD: Tensor) -> bool:
    cache_fits = all(t.is_contiguous() and t.dtype in DTYPE_CODE for t in (keys_TGD, values_TGD))
    same = keys_TGD.dtype == values_TGD.dtype and q_MHD.dtype == torch.float32
    return cache_fits and same and q_MHD.shape[2] % HEAD_STEP == 0 and _heads_together(q_MHD)


def attention(
    q_MHD: Tensor,
    keys_TGD: Tensor,
    values_TGD: Tensor,
    lengths_M: Tensor,
    ancestors_MS: Tensor | None = None,
    starts_M: Tensor | None = None,
) -> Tensor:
    """[M, H, D] float32: what each row reads from a float32 or bfloat16 cache of T positions.

    Row m sees positions starts[m] (0) .. lengths[m] - 1 (int32), and position lengths[m] + s for every s with
    ancestors[m, s] (bool). A chain passes increasing lengths that count the row itself; a tree passes the committed
    length for each row and its ancestors, itself included. A tree's row equals, bit for bit, the chain's row that sees
    the same keys and values. A row that sees nothing is NaN. Raises IndexError for a length outside the cache.
    """
    rows, heads, width = q_MHD.shape
    positions, kv_heads, _ = keys_TGD.shape
    if _LEVEL is None or not _attention_fits(q_MHD, keys_TGD, values_TGD):
        return reference.attention(q_MHD, keys_TGD, values_TGD, lengths_M, ancestors_MS, starts_M)
    assert keys_TGD.shape == values_TGD.shape == (positions, kv_heads, width), f"cache {tuple(keys_TGD.shape)}"
    assert heads % kv_heads == 0, f"{heads} heads over {kv_heads}"
    assert lengths_M.shape == (rows,), f"lengths {tuple(lengths_M.shape)} of {rows} rows"
    starts_at, ancestors_at, slots = 0, 0, 0
    lengths_M = lengths_M.to(torch.int32).contiguous()
    if starts_M is not None:
        assert starts_M.shape == (rows,), f"starts of shape {tuple(starts_M.shape)}"
        starts_M = starts_M.to(torch.int32).contiguous()
        starts_at = starts_M.data_ptr()
    if ancestors_MS is not None:
        assert ancestors_MS.shape[0] == rows, f"ancestors of shape {tuple(ancestors_MS.shape)}"
        ancestors_MS = ancestors_MS.to(torch.bool).contiguous()
        ancestors_at, slots = ancestors_MS.data_ptr(), ancestors_MS.shape[1]
    out_MHD = torch.empty((rows, heads, width), dtype=torch.float32)
    _LEVEL.attention(
        q_MHD.data_ptr(),
        keys_TGD.data_ptr(),
        values_TGD.data_ptr(),
        out_MHD.data_ptr(),
        lengths_M.data_ptr(),
        starts_at,
        ancestors_at,
        positions,
        rows,
        q_MHD.stride(0),
        slots,
        heads,
        kv_heads,
        width,
        DTYPE_CODE[keys_TGD.dtype],
    )
    CALLS["attention"] += 1
    return out_MHD
