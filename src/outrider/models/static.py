"""Passes of fixed shape: the same operations at the same addresses, so that a GPU can record them once and replay them.

Launching one by one the few hundred operations of a pass takes a GPU's host longer than the GPU needs to do them. A
recorded pass (CUDA graph) is one launch, and takes fixed shapes and addresses: inputs are copied into buffers, rows and
positions are padded to buckets, keys and values lie in an `Arena`, and what each row sees is a mask made on the device.

Shapes: B slots of a pass, m rows a slot, M = B m rows, T positions that are looked at, H query heads, G key-value
heads, h = H / G, D head width, R = D / 2, V vocabulary, F feature width.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.protocols import Pass, Segment
from outrider.core.rope import Rope
from outrider.core.tree import depths, visible
from outrider.models.attention import PassRows
from outrider.models.slots import Arena, SlotCache

log = logging.getLogger("outrider")

ROW_BUCKETS = (1, 2, 4, 8, 16)
SHORTEST = 256
"""Fewest positions that a pass looks at; then doublings, up to a slot's length."""
WARM_UPS = 3
"""Runs before a recording, as PyTorch's notes on CUDA graphs ask for: libraries set themselves up in the first."""

Out = tuple[Tensor | None, Tensor | None]
"""Logits [M, V] and features [M, F]; None for what was not asked for."""
Run = Callable[[], Out]
Capture = Callable[[Run], Run]
"""From a pass to one that does the same when called; its results are overwritten by the next call."""


@dataclass(frozen=True, slots=True)
class StaticSize:
    """Sequences that have a slot, and positions in each: that much memory is taken when the first sequence begins."""

    slots: int = 8
    length: int = 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """What is fixed in a pass. `slots` are the first ones, `length` the positions of each that are looked at."""

    slots: int
    rows: int
    length: int
    logits: bool
    taps: tuple[int, ...]


class StaticRows:
    """The rows of one shape: buffers of inputs, and attention over the arena. See `PassRows`.

    Every buffer is a view of one tensor, filled by one copy. Row i of slot b sees positions start .. base[b] - 1, and
    base[b] + s where ancestors[b, i, s]. Rows of padding write to the spare position and see themselves.
    """

    def __init__(self, shape: Shape, arena: Arena, rope: Rope, *, group: int, window: int | None) -> None:
        self.shape, self._arena, self._group, self._window = shape, arena, group, window
        self.cos_TR, self.sin_TR = rope.tables(arena.length)
        device = arena.store.device
        self._nothing = self._padding()
        self._inputs = self._nothing.to(device, copy=True)
        tokens_Bm, positions_Bm, self._places_Bm, self._starts_Bm, self._base_B, self._ancestors_Bmm = self._split(
            self._inputs
        )
        self.tokens_M, self.positions_M = tokens_Bm.flatten(), positions_Bm.flatten()
        self._slot_B1 = torch.arange(shape.slots, device=device)[:, None]
        self._position_T = torch.arange(shape.length, device=device)
        self._mask = torch.empty(0, device=device)

    def _split(self, packed: Tensor) -> list[Tensor]:
        """tokens, positions, places, starts [B, m]; base [B]; ancestors [B, m, m]; as views of one int64 tensor."""
        slots, rows = self.shape.slots, self.shape.rows
        shapes = [(slots, rows)] * 4 + [(slots,), (slots, rows, rows)]
        parts = packed.split_with_sizes([math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _padding(self) -> Tensor:
        """The inputs of a pass without rows, on the host."""
        slots, rows = self.shape.slots, self.shape.rows
        packed = torch.zeros(slots * (5 * rows + 1 + rows * rows) - slots * rows, dtype=torch.int64)
        _, _, places_Bm, _, _, ancestors_Bmm = self._split(packed)
        places_Bm.fill_(self._arena.length)
        ancestors_Bmm.copy_(torch.eye(rows, dtype=torch.int64))
        return packed

    def load(self, segments: Seq[Segment]) -> None:
        """Copies the rows of `segments`, whose caches lie in slots of this shape, into the buffers."""
        packed = self._nothing.clone()
        tokens_Bm, positions_Bm, places_Bm, starts_Bm, base_B, ancestors_Bmm = self._split(packed)
        for segment in segments:
            cache, rows = segment.cache, len(segment.tokens)
            assert isinstance(cache, SlotCache), f"a {type(cache).__name__} has no slot"
            slot, length = cache.slot, cache.length
            assert slot is not None, "the cache has left its slot"
            depth_m = torch.tensor(range(rows) if segment.parents is None else depths(segment.parents))
            tokens_Bm[slot, :rows] = torch.tensor(segment.tokens)
            positions_m = positions_Bm[slot, :rows] = depth_m + length
            places_Bm[slot, :rows] = torch.arange(length, length + rows)
            base_B[slot] = length
            seen_mm = _ancestors(segment)
            if self._window is not None:
                starts_m = (positions_m - self._window + 1).clamp(min=0)
                starts_Bm[slot, :rows] = starts_m
                seen_mm = seen_mm & (positions_m >= starts_m[:, None])
            ancestors_Bmm[slot, :rows, :rows] = seen_mm
        self._inputs.copy_(packed.to(self._inputs.device))

    def begin(self) -> None:
        """Makes the mask, which all layers share: [B, 1, h m, T] numbers to add to the scores."""
        rows, length = self.shape.rows, self.shape.length
        behind_BT = self._position_T - self._base_B[:, None]
        column_BmT = behind_BT.clamp(0, rows - 1)[:, None].expand(-1, rows, -1)
        pending_BT = (behind_BT >= 0) & (behind_BT < rows)
        seen_BmT = (self._ancestors_Bmm.gather(2, column_BmT) != 0) & pending_BT[:, None]
        seen_BmT |= (behind_BT < 0)[:, None] & (self._position_T >= self._starts_Bm[:, :, None])
        mask_BmT = torch.zeros(seen_BmT.shape, dtype=self._arena.store.dtype, device=seen_BmT.device)
        mask_BmT.masked_fill_(~seen_BmT, -math.inf)
        self._mask = mask_BmT.view(-1, 1, rows, length).repeat(1, 1, self._group, 1)

    def mix(self, index: int, q_MHD: Tensor, k_MGD: Tensor, v_MGD: Tensor) -> Tensor:
        slots, rows, length, group = self.shape.slots, self.shape.rows, self.shape.length, self._group
        keys_STGD, values_STGD = self._arena.layer(index)
        dtype, (_, n_kv, head_dim) = keys_STGD.dtype, k_MGD.shape
        for cached_STGD, new_MGD in ((keys_STGD, k_MGD), (values_STGD, v_MGD)):
            new_BmGD = new_MGD.to(dtype).view(slots, rows, n_kv, head_dim)
            cached_STGD.index_put_((self._slot_B1, self._places_Bm), new_BmGD)
        q_BGhmD = q_MHD.to(dtype).view(slots, rows, n_kv, group, head_dim).permute(0, 2, 3, 1, 4)
        out_BGXD = F.scaled_dot_product_attention(
            q_BGhmD.reshape(slots, n_kv, group * rows, head_dim),
            keys_STGD[:slots, :length].transpose(1, 2),
            values_STGD[:slots, :length].transpose(1, 2),
            attn_mask=self._mask,
        )
        out_BGhmD = out_BGXD.view(slots, n_kv, group, rows, head_dim)
        return out_BGhmD.permute(0, 3, 1, 2, 4).reshape(slots * rows, n_kv * group, head_dim).float()


def _ancestors(segment: Segment) -> Tensor:
    """[m, m] bool: the rows that each row sees, itself included."""
    if segment.parents is not None:
        return visible(segment.parents)
    rows = len(segment.tokens)
    return torch.ones(rows, rows, dtype=torch.bool).tril()


class StaticPasses:
    """A decoder's passes of fixed shape, made as they are first needed.

    `run(rows, logits, taps)` computes a pass over `rows`; `capture` records it. `calls` counts passes: "recorded",
    "replayed" (every pass of a recorded shape) and "direct" (where nothing records).
    """

    def __init__(
        self,
        arena: Arena,
        rope: Rope,
        run: Callable[[PassRows, bool, Seq[int]], Out],
        *,
        group: int,
        window: int | None,
        capture: Capture | None,
    ) -> None:
        self.arena = arena
        self.calls: Counter[str] = Counter()
        self._rope, self._run, self._group, self._window, self._capture = rope, run, group, window, capture
        self._made: dict[Shape, tuple[StaticRows, Run, str]] = {}

    def forward(self, segments: Seq[Segment], *, logits: bool, taps: Seq[int]) -> Pass | None:
        """The pass, if its shape is one of these; None, and nothing done, if not. Call it in inference mode."""
        shape = self._shape(segments, logits, tuple(taps))
        if shape is None:
            return None
        for segment in segments:
            assert isinstance(segment.cache, SlotCache)
            segment.cache.reserve(len(segment.tokens))
        if shape not in self._made:
            self._made[shape] = self._make(shape, segments)
        rows, run, how = self._made[shape]
        rows.load(segments)
        self.calls[how] += 1
        logits_MV, features_MF = run()
        spans = [_span(segment, shape.rows) for segment in segments]
        return Pass(_take(logits_MV, spans), _take(features_MF, spans))

    def _shape(self, segments: Seq[Segment], logits: bool, taps: tuple[int, ...]) -> Shape | None:
        """The smallest shape that holds the pass; None: a cache without a slot, too many rows, or too long a text."""
        slots, longest = 0, 0
        for segment in segments:
            cache = segment.cache
            if not isinstance(cache, SlotCache) or cache.arena is not self.arena or cache.slot is None:
                return None
            slots, longest = max(slots, cache.slot + 1), max(longest, cache.length)
        most = max(len(segment.tokens) for segment in segments)
        rows = next((bucket for bucket in ROW_BUCKETS if bucket >= most), None)
        if rows is None or longest + rows > self.arena.length:
            return None
        slots = min(_power_of_two(slots), self.arena.slots)
        length = min(max(_power_of_two(longest + rows), SHORTEST), self.arena.length)
        return Shape(slots, rows, length, logits, taps)

    def _make(self, shape: Shape, segments: Seq[Segment]) -> tuple[StaticRows, Run, str]:
        """(rows, run, how it is counted) of a new shape. Recording computes the pass of `segments` a few times."""
        rows = StaticRows(shape, self.arena, self._rope, group=self._group, window=self._window)

        def run() -> Out:
            rows.begin()
            return self._run(rows, shape.logits, shape.taps)

        if self._capture is None:
            return rows, run, "direct"
        rows.load(segments)
        try:
            recorded = self._capture(run)
        except RuntimeError as error:
            log.warning("passes are not recorded, and slower for it: recording %s failed: %s", shape, error)
            self._capture = None
            return rows, run, "direct"
        self.calls["recorded"] += 1
        return rows, recorded, "replayed"


def _span(segment: Segment, rows: int) -> slice:
    assert isinstance(segment.cache, SlotCache)
    assert segment.cache.slot is not None
    start = segment.cache.slot * rows
    return slice(start, start + len(segment.tokens))


def _take(out_MX: Tensor | None, spans: list[slice]) -> Tensor | None:
    """A copy of the rows of `spans`, in their order."""
    return None if out_MX is None else torch.cat([out_MX[span] for span in spans])


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


class CudaGraphs:
    """A `Capture` of CUDA graphs, which share one pool of memory.

    Sharing is allowed because the graphs never run at once, and because a pass's results are copied before the next.
    Warming up and recording use one stream of the model's own device: libraries keep their working memory by stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own

    def __call__(self, run: Run) -> Run:
        """Runs it to warm up, which writes the same keys and values every time, then records it."""
        with torch.cuda.device(self._device):
            main = torch.cuda.current_stream()
            self._stream.wait_stream(main)
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):
                    run()
            main.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                out = run()

        def replay() -> Out:
            graph.replay()
            return out

        return replay
