"""Draft tokens of a head that goes on with its own output: all tokens of a draft in one call.

The same kernels in the same order as a call for each norm and matrix, bit for bit.

Shapes: M rows, n sequences, d head width, K inputs of the attention, S columns of the logits, V tokens, R rows of a
table, T positions of a cache or tokens of a text, U of a rotation's table, G key-value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.kernels.dispatch import CALLS
from outrider.kernels.stack import Matrix, Stack


@dataclass(frozen=True, slots=True)
class ChainInputs:
    """What a row is made of: a token's embedding and what the row before hands on, each normed, side by side.

    `joint` reads both, and the layer a norm of what it gives, to which its output is added. Without it the layer reads
    both, and its output is added to what was handed on (`adds_to_norm`: to the norm of that). What the layer gives is
    handed on (`hands_norm`: the norm behind it).
    """

    embedded_norm_d: Tensor
    handed_norm_d: Tensor
    joint: Matrix | None = None
    joint_norm_d: Tensor | None = None
    adds_to_norm: bool = False
    hands_norm: bool = False

    @property
    def norms(self) -> list[Tensor]:
        norms = (self.embedded_norm_d, self.handed_norm_d, self.joint_norm_d)
        return [norm for norm in norms if norm is not None]


class TokenTable(NamedTuple):
    """float32 embeddings by token: row `row_of_V[token]` (int32; None: the token's own number) of `rows_Rd`; none where
    that is negative. Both may change between calls, in place."""

    rows_Rd: Tensor
    row_of_V: Tensor | None

    @property
    def tokens(self) -> int:
        return len(self.rows_Rd if self.row_of_V is None else self.row_of_V)


class ChainRows(NamedTuple):
    """One sequence: so many rows before its first token, its cache [2 (keys, values), T, G, D] with room for them and
    all tokens but the last, how many positions it holds, the position of the first, how many a row sees, how many
    tokens are wanted, those behind which nothing follows, and the least product of their rows' largest probabilities
    with which it goes on. At temperature 0 the tokens are the likeliest; else each is drawn with the next of
    `uniforms`: the first at which the running sum of the probabilities exceeds it. With `copy`, the logit of the token
    that `find_copy` finds is raised by it for each token matched but one: the first `known` of `text_T` (int64) are the
    sequence's tokens, and there is room behind them for all that is drafted."""

    rows: int
    store_2TGD: Tensor
    length: int
    first: int
    window: int
    limit: int
    stops: Collection[int]
    least: float
    temperature: float = 0.0
    uniforms: Seq[float] = ()
    copy: float = 0.0
    text_T: Tensor | None = None
    known: int = 0


class Drafted(NamedTuple):
    """Of one sequence: its tokens and the largest probabilities of their rows, the one with which their product fell
    below the least included. `lost`: a logit behind them was not finite. `weights_kS` are the rows that were drawn
    from (float64, summing to 1); None of likeliest tokens."""

    tokens: list[int]
    shares: list[float]
    lost: bool
    weights_kS: Tensor | None = None

    @property
    def steps(self) -> int:
        """Times that the head ran for it."""
        return len(self.tokens) + self.lost


class Chain:
    """A head of one layer, ready to draft. Made by `build_chain`."""

    def __init__(self, stack: Stack, inputs: ChainInputs, head: Matrix, ids_S: Tensor, table: TokenTable) -> None:
        width = len(inputs.embedded_norm_d)
        assert all(norm.shape == (width,) for norm in inputs.norms), "norms of different widths"
        assert table.rows_Rd.shape[1] == width == head.in_features, f"a table of {table.rows_Rd.shape[1]} for {width}"
        assert ids_S.shape == (head.out_features,), f"{len(ids_S)} tokens for {head.out_features} columns"
        assert 0 <= int(ids_S.min()) <= int(ids_S.max()) < table.tokens, "a token that the table does not know"
        joint, reads = inputs.joint, 2 * width if inputs.joint is None else width
        assert (stack.hidden, stack.reads) == (width, reads), f"a layer that reads {stack.reads} for {reads}"
        assert joint is None or (joint.in_features, joint.out_features) == (2 * width, width), (
            "a joint of another shape"
        )
        assert (joint is None) == (inputs.joint_norm_d is None), "a joint without its norm, or a norm without a joint"
        self._kept = (stack, inputs, head, ids_S, table)
        self._width, self._columns, self._cache_shape = width, head.out_features, stack.cache_shape
        self._native = stack.native.chain(
            width,
            stack.eps,
            inputs.embedded_norm_d.data_ptr(),
            inputs.handed_norm_d.data_ptr(),
            0 if inputs.joint_norm_d is None else inputs.joint_norm_d.data_ptr(),
            inputs.adds_to_norm,
            inputs.hands_norm,
            table.rows_Rd.data_ptr(),
            0 if table.row_of_V is None else table.row_of_V.data_ptr(),
            table.tokens,
            ids_S.data_ptr(),
        )
        head.add_to(self._native, "head")
        if joint is not None:
            joint.add_to(self._native, "joint")

    def draft(
        self,
        embedded_Md: Tensor,
        handed_Md: Tensor,
        cos_UR: Tensor,
        sin_UR: Tensor,
        spans: Seq[ChainRows],
    ) -> tuple[list[Drafted], Tensor]:
        """(of each sequence one token or more, what its last row hands on [n, d]).

        The rows of the spans, in order, are those of `embedded_Md` and `handed_Md`. All end where one should go on
        behind a token that the table has no embedding of.
        Writes the rows' keys and values into the caches. Raises IndexError for a row outside a cache or the tables.
        """
        rows = sum(span.rows for span in spans)
        for given in (embedded_Md, handed_Md):
            assert given.shape == (rows, self._width), f"{tuple(given.shape)} for {rows} rows of {self._width}"
            assert given.dtype == torch.float32, f"rows are {given.dtype}"
            assert given.is_contiguous(), "rows must follow one another"
        tables = (len(cos_UR), self._cache_shape[1] // 2)
        assert cos_UR.shape == sin_UR.shape == tables, f"tables {tuple(cos_UR.shape)} and {tuple(sin_UR.shape)}"
        assert cos_UR.dtype == sin_UR.dtype == torch.float32, f"tables of {cos_UR.dtype} and {sin_UR.dtype}"
        assert all(table_UR.is_contiguous() for table_UR in (cos_UR, sin_UR)), "rows of a table must follow one another"
        most, n = max(span.limit for span in spans), len(spans)
        tokens_nk = torch.empty((n, most), dtype=torch.int64)
        shares_nk = torch.empty((n, most), dtype=torch.float64)
        drawn = any(span.temperature for span in spans)
        weights_nkS = torch.empty((n, most if drawn else 0, self._columns), dtype=torch.float64)
        counts_n = torch.empty(n, dtype=torch.int64)
        carried_nd = torch.empty((n, self._width), dtype=torch.float32)
        self._native.run(
            embedded_Md.data_ptr(),
            handed_Md.data_ptr(),
            cos_UR.data_ptr(),
            sin_UR.data_ptr(),
            len(cos_UR),
            list(chain.from_iterable(self._fields(span) for span in spans)),
            [list(span.stops) for span in spans],
            [span.least for span in spans],
            [span.temperature for span in spans],
            [list(span.uniforms) for span in spans],
            [span.copy for span in spans],
            most,
            tokens_nk.data_ptr(),
            shares_nk.data_ptr(),
            weights_nkS.data_ptr(),
            counts_n.data_ptr(),
            carried_nd.data_ptr(),
        )
        CALLS["chain"] += 1
        rows_n = [weights_kS if span.temperature else None for span, weights_kS in zip(spans, weights_nkS, strict=True)]
        found = zip(tokens_nk.tolist(), shares_nk.tolist(), rows_n, counts_n.tolist(), strict=True)
        return [_drafted(tokens[:count], shares, weights) for tokens, shares, weights, count in found], carried_nd

    def _fields(self, span: ChainRows) -> tuple[int, ...]:
        assert not span.temperature or len(span.uniforms) == span.limit, f"{len(span.uniforms)} draws of {span.limit}"
        rows, store_2TGD, length, first, window, limit, *_, text_T, known = span
        two, positions, *heads = store_2TGD.shape
        assert (two, *heads) == (2, *self._cache_shape), f"a cache {tuple(store_2TGD.shape)} for {self._cache_shape}"
        assert store_2TGD.dtype == torch.float32, f"a cache of {store_2TGD.dtype}"
        assert store_2TGD.is_contiguous(), "positions must follow one another"
        text = 0
        if span.copy:
            assert text_T is not None, "copying from no text"
            assert text_T.dtype == torch.int64, f"a text of {text_T.dtype}"
            assert text_T.is_contiguous(), "tokens must follow one another"
            assert 0 < known <= len(text_T) - limit, f"no room for {limit} tokens behind {known} of {len(text_T)}"
            text = text_T.data_ptr()
        return rows, store_2TGD.data_ptr(), positions, length, first, window, limit, text, known


def build_chain(stack: Stack, inputs: ChainInputs, head: object, ids_S: Tensor, table: TokenTable) -> Chain | None:
    """Column c of `head` stands for the token `ids_S[c]`. `stack` is one layer that reads what it is given, with a
    float32 cache. None where the kernels cannot run it: a matrix that is not packed for the stack's level, or norms and
    embeddings that are not float32 on the CPU."""
    matrices = [head] if inputs.joint is None else [head, inputs.joint]
    packed = all(isinstance(matrix, Matrix) and matrix.level is stack.level for matrix in matrices)
    tensors = [*inputs.norms, table.rows_Rd]
    plain = all(t.dtype == torch.float32 and t.device.type == "cpu" and t.is_contiguous() for t in tensors)
    if not packed or not plain:
        return None
    assert isinstance(head, Matrix), "a packed matrix"
    return Chain(stack, inputs, head, ids_S.contiguous(), table)


def _drafted(tokens: list[int], shares: list[float], weights_kS: Tensor | None) -> Drafted:
    lost = tokens[-1] < 0
    kept = len(tokens) - lost
    return Drafted(tokens[:kept], shares[:kept], lost, None if weights_kS is None else weights_kS[:kept])
