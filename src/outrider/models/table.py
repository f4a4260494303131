"""The exact model: a Markov chain of any order over a small vocabulary, in float64. For tests, simulation and teaching.

Shapes: V vocabulary, M rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from outrider.core.protocols import KVCache, Pass, Segment


class TableCache:
    """Remembers tokens where a real model remembers keys and values."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.pending: list[int] = []

    @property
    def length(self) -> int:
        return len(self.tokens)

    def keep(self, rows: Seq[int]) -> None:
        self.tokens.extend(self.pending[row] for row in rows)
        self.pending = []

    def truncate(self, length: int) -> None:
        del self.tokens[length:]
        self.pending = []

    def free(self) -> None:
        self.tokens, self.pending = [], []

    def digest(self) -> str:
        return hashlib.sha256(repr(self.tokens).encode()).hexdigest()

    def check_integrity(self) -> None:
        assert all(token >= 0 for token in self.tokens)


class TableModel:
    """Logits are `row(context)`, a function of all tokens before; `from_table` makes one from an order-n table."""

    trees = True

    def __init__(
        self,
        row: Callable[[tuple[int, ...]], Tensor],
        vocab_size: int,
        *,
        context_length: int = 4096,
        name: str = "table",
    ) -> None:
        self._row = row
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.name = name
        self.passes = 0

    @classmethod
    def from_table(cls, logits: Tensor, *, context_length: int = 4096, name: str = "table") -> TableModel:
        """An order-n Markov model from logits of shape [V] * n + [V] (float64). A short context is padded with 0."""
        order = logits.dim() - 1

        def row(context: tuple[int, ...]) -> Tensor:
            last = context[len(context) - order :] if order else ()
            return logits[(*(0,) * (order - len(last)), *last)]

        return cls(row, logits.shape[-1], context_length=context_length, name=name)

    def new_cache(self) -> TableCache:
        return TableCache()

    def forward(self, segments: Seq[Segment], *, logits: bool = True, taps: Seq[int] = ()) -> Pass:
        """One pass; features, when asked for, are the one-hot rows of the tokens (one block for each tap)."""
        self.passes += 1
        rows: list[Tensor] = []
        tokens: list[int] = []
        for segment in segments:
            cache = segment.cache
            assert isinstance(cache, TableCache)
            cache.pending = list(segment.tokens)
            tokens.extend(segment.tokens)
            if logits:
                rows.extend(self._rows(cache, segment))
        features = torch.eye(self.vocab_size, dtype=torch.float64)[tokens].repeat(1, len(taps)) if taps else None
        return Pass(torch.stack(rows) if logits else None, features)

    def _rows(self, cache: TableCache, segment: Segment) -> list[Tensor]:
        parents = segment.parents or range(-1, len(segment.tokens) - 1)
        contexts: list[tuple[int, ...]] = []
        for token, parent in zip(segment.tokens, parents, strict=True):
            contexts.append((*(contexts[parent] if parent >= 0 else cache.tokens), token))
        return [self._row(context).to(torch.float64) for context in contexts]


_: type[KVCache] = TableCache
