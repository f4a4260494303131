"""The C++ extension: addresses (tensor.data_ptr(), 0 for none) and sizes. Dtype codes: 0 float32, 1 bfloat16."""

from collections.abc import Sequence

def available_levels() -> list[str]: ...
def amx_refused() -> bool: ...
def set_threads(count: int) -> None: ...
def threads() -> int: ...
def physical_cores() -> int: ...
def find_copy(text: int, size: int, /) -> tuple[int, int]: ...
def softmax(row: int, out: int, size: int, temperature: float, /) -> bool: ...
def dequantise(raw: int, out: int, values: int, type: int, dtype: int, /) -> None: ...

class Level:
    def __init__(self, name: str) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def panel(self) -> int: ...
    @property
    def wide_rows(self) -> int: ...
    def pack(self, weight: int, packed: int, n: int, k: int, dtype: int, /) -> None: ...
    def linear(self, packed: int, bias: int, x: int, y: int, rows: int, n: int, k: int, dtype: int, /) -> None: ...
    def quant_bytes(self, n: int, k: int, type: int, /) -> int: ...
    def quant_pack_rows(self, rows: int, packed: int, n: int, k: int, type: int, /) -> None: ...
    def quant_linear(self, packed: int, bias: int, x: int, y: int, rows: int, n: int, k: int, type: int, /) -> None: ...
    def encode_q4_0(self, x: int, out: int, blocks: int, /) -> None: ...
    def rms_norm(self, x: int, delta: int, weight: int, out: int, rows: int, k: int, eps: float, /) -> None: ...
    def swiglu(self, gate_up: int, out: int, rows: int, width: int, /) -> None: ...
    def rope(
        self, x: int, cos: int, sin: int, positions: int, table: int, rows: int, step: int, heads: int, width: int, /
    ) -> None: ...
    def attention(
        self,
        q: int,
        keys: int,
        values: int,
        out: int,
        lengths: int,
        starts: int,
        ancestors: int,
        positions: int,
        rows: int,
        q_step: int,
        slots: int,
        heads: int,
        kv_heads: int,
        width: int,
        dtype: int,
        /,
    ) -> None: ...
    def stack(
        self, hidden: int, feed: int, heads: int, kv_heads: int, width: int, eps: float, cache_dtype: int, /
    ) -> Stack: ...
    def walker(self, size: int, tokens: int, ids: int, table: int, /) -> Walker: ...

class Stack:
    def layer(self, attention_norm: int, q_norm: int, k_norm: int, feed_norm: int, /) -> None: ...
    def linear(self, role: str, packed: int, bias: int, n: int, k: int, dtype: int, /) -> None: ...
    def quant_linear(self, role: str, packed: int, bias: int, n: int, k: int, type: int, /) -> None: ...
    def last_norm(self, norm: int, /) -> None: ...
    def chain(
        self,
        hidden: int,
        eps: float,
        embedded_norm: int,
        handed_norm: int,
        joint_norm: int,
        adds_to_norm: bool,
        hands_norm: bool,
        table: int,
        row_of: int,
        tokens: int,
        ids: int,
        /,
    ) -> Chain: ...
    def run(
        self,
        x: int,
        out: int,
        rows: int,
        cos: int,
        sin: int,
        table: int,
        positions: int,
        spans: Sequence[int],
        taps: Sequence[int],
        features: int,
        read: int,
        /,
    ) -> None: ...

class Walker:
    def linear(self, role: str, packed: int, bias: int, n: int, k: int, dtype: int, /) -> None: ...
    def quant_linear(self, role: str, packed: int, bias: int, n: int, k: int, type: int, /) -> None: ...
    def run(
        self,
        logits: int,
        counts: int,
        before: int,
        sequences: int,
        pairs: Sequence[int],
        ways: int,
        columns: int,
        tops: int,
        shares: int,
        /,
    ) -> None: ...

class Chain:
    def linear(self, role: str, packed: int, bias: int, n: int, k: int, dtype: int, /) -> None: ...
    def quant_linear(self, role: str, packed: int, bias: int, n: int, k: int, type: int, /) -> None: ...
    def run(
        self,
        embedded: int,
        handed: int,
        cos: int,
        sin: int,
        table: int,
        spans: Sequence[int],
        stops: Sequence[Sequence[int]],
        leasts: Sequence[float],
        temperatures: Sequence[float],
        uniforms: Sequence[Sequence[float]],
        copies: Sequence[float],
        most: int,
        tokens: int,
        shares: int,
        weights: int,
        counts: int,
        carried: int,
        /,
    ) -> None: ...
