"""Whole drafts of a head that drafts token by token, in one call of the kernels.

Shapes: M rows, n sequences, d head width, S draft vocabulary, T tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from typing import NamedTuple

from torch import Tensor

from outrider.drafters.head_cache import Span
from outrider.drafters.head_layer import PackedMatrix
from outrider.drafters.recurrent_core import Core, StackCore
from outrider.drafters.recurrent_net import RecurrentNet
from outrider.kernels import Chain, ChainRows, Drafted, TokenTable, build_chain


class Ask(NamedTuple):
    """At most `limit` tokens behind the rows of a span, and none behind one of `stops`, or from where on the product of
    their largest probabilities is less than `least`. Of `temperature` 0 the likeliest; else each is drawn with its own
    of `uniforms`, as `Rng.foresee` says. `copy` is what `copies.add_copy_` is given; then the first `known` of `text_T`
    are the tokens so far, with room behind them for `limit` more."""

    span: Span
    limit: int
    stops: Collection[int]
    least: float
    temperature: float = 0.0
    uniforms: Seq[float] = ()
    copy: float = 0.0
    text_T: Tensor | None = None
    known: int = 0


class DraftChain:
    """The tokens that would be taken from the rows of `Core.last` and lm_head, one after the other."""

    def __init__(self, core: StackCore, chain: Chain) -> None:
        self._core, self._chain = core, chain

    def draft(self, embedded_Md: Tensor, g_Md: Tensor, asks: Seq[Ask]) -> tuple[list[Drafted], Tensor]:
        """(the tokens of each, what its last row hands on [n, d]). All end where one goes on behind a token whose
        embedding is not at hand."""
        ends = [ask.span.cache.end + ask.span.rows + ask.limit for ask in asks]
        cos_UR, sin_UR = self._core.rope.tables(max(ends))
        rows = [self._rows(ask) for ask in asks]
        drafts, carried_nd = self._chain.draft(embedded_Md, g_Md, cos_UR, sin_UR, rows)
        for ask, found in zip(asks, drafts, strict=True):
            ask.span.cache.length += ask.span.rows + found.steps - 1
        return drafts, carried_nd

    def _rows(self, ask: Ask) -> ChainRows:
        cache, rows, window = ask.span
        store_2TGD = cache.room(rows + ask.limit - 1, self._core.like)[0]
        return ChainRows(rows, store_2TGD, cache.length, cache.start, window, *ask[1:])


def make_chain(net: RecurrentNet, core: Core, ids_S: Tensor, table: TokenTable) -> DraftChain | None:
    """Of a net that `make_core` has used up; None where the kernels cannot run all of a draft."""
    if not isinstance(core, StackCore) or not isinstance(net.lm_head, PackedMatrix):
        return None
    chain = build_chain(core.stack, net.chain_inputs(), net.lm_head.packed, ids_S, table)
    return None if chain is None else DraftChain(core, chain)
