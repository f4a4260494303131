"""A greedy draft in one call against a pass of the layer and of the head for each token, at every level.

Shapes: M rows, d head width, S draft vocabulary.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider import kernels
from outrider.drafters.head_cache import HeadCache, Span
from outrider.drafters.head_layer import PackedMatrix
from outrider.drafters.recurrent_chain import Ask, DraftChain, make_chain
from outrider.drafters.recurrent_core import Core, StackCore, make_core
from outrider.drafters.recurrent_net import RecurrentNet
from outrider.drafters.token_rows import OwnRows
from outrider.kernels import Drafted, TokenTable, build_chain, dispatch, ops, quantised
from tests.tiny_head import random_head, random_module

pytestmark = pytest.mark.skipif(not kernels.available(), reason=kernels.why())

VOCAB, WIDTH, LIMIT = 90, 64, 5
IDS = list(range(3, 90, 2))
NETS: dict[str, Callable[[], RecurrentNet]] = {
    "eagle3": lambda: random_head(vocab=VOCAB, draft_ids=IDS, own_embedding=True),
    "eagle3 switches": lambda: random_head(
        vocab=VOCAB, draft_ids=IDS, own_embedding=True, norm_before_residual=True, norm_output=True, qk_norm=True
    ),
    "mtp": lambda: random_module(vocab=VOCAB, draft_ids=IDS, own_embedding=True, bias=True),
}


def _levels() -> list[str]:
    if not kernels.available():
        return []
    from outrider.kernels import _kernels

    return list(_kernels.available_levels())


@pytest.fixture(params=_levels() or ["none"])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Packs and runs at each level, whatever was chosen at import."""
    for module in (ops, quantised):
        monkeypatch.setattr(module, "_LEVEL", dispatch.choose(request.param).level)
    return str(request.param)


@dataclass
class Head:
    net: RecurrentNet
    core: Core
    rows: OwnRows
    chain: DraftChain

    def begun(self, held: int, rows: int, seed: int, window: int = 100) -> Begun:
        """A cache of `held` positions, and the rows behind it."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(VOCAB, (held + rows,), generator=generator).tolist()
        g_Md = torch.randn(held + rows, WIDTH, generator=generator)
        cache = HeadCache(seed)
        if held:
            self.core.fill(*self.net.inputs(self.rows(tokens[:held]), g_Md[:held]), [Span(cache, held, window)])
        return Begun(cache, self.rows(tokens[held:]), g_Md[held:].contiguous(), window)


@dataclass
class Begun:
    cache: HeadCache
    embedded_Md: Tensor
    g_Md: Tensor
    window: int

    @property
    def span(self) -> Span:
        return Span(self.cache, len(self.g_Md), self.window)


def packed(kind: str, dtype: str) -> Head:
    net = NETS[kind]()
    assert net.embed_tokens is not None
    rows = OwnRows(net.embed_tokens.weight)
    core = make_core(net, dtype)
    chain = make_chain(net, core, torch.tensor(IDS), rows.table)
    assert chain is not None
    return Head(net, core, rows, chain)


def drafted(head: Head, begun: list[Begun], limits: list[int], least: float = 0.0, stops: Any = ()) -> tuple[Any, Any]:
    """In one call."""
    before = kernels.fast_calls()
    asks = [Ask(one.span, limit, stops, least) for one, limit in zip(begun, limits, strict=True)]
    embedded_Md, g_Md = torch.cat([one.embedded_Md for one in begun]), torch.cat([one.g_Md for one in begun])
    found = head.chain.draft(embedded_Md, g_Md, asks)
    counted = {name: count - before.get(name, 0) for name, count in kernels.fast_calls().items()}
    assert {name for name, count in counted.items() if count} == {"chain"}
    assert counted["chain"] == 1
    return found


def walked(head: Head, one: Begun, limit: int) -> tuple[Drafted, Tensor]:
    """A pass for each token."""
    embedded_Md, g_Md, tokens, shares = one.embedded_Md, one.g_Md, [], []
    while len(tokens) < limit:
        normed_1d, g_Md = head.core.last(
            *head.net.inputs(embedded_Md, g_Md.clone()), [Span(one.cache, len(g_Md), one.window)]
        )
        assert head.net.lm_head is not None
        logits_S = head.net.lm_head(normed_1d)[0]
        tokens.append(IDS[int(logits_S.argmax())])
        shares.append(float(logits_S.softmax(0).max()))
        embedded_Md = head.rows(tokens[-1:])
    return Drafted(tokens, shares, False), g_Md[0]


def assert_same(head: Head, one: Begun, found: Drafted, carried_d: Tensor, twin: Begun, limit: int) -> None:
    expected, expected_d = walked(head, twin, limit)
    assert found.tokens == expected.tokens
    assert found.shares == pytest.approx(expected.shares, rel=1e-5)
    assert torch.equal(carried_d, expected_d)
    assert (one.cache.start, one.cache.length) == (twin.cache.start, twin.cache.length)
    assert torch.equal(one.cache.last(1000), twin.cache.last(1000))


@torch.inference_mode()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("kind", sorted(NETS))
def test_a_draft_is_a_pass_a_token(level: str, kind: str, dtype: str) -> None:
    """Bit for bit: also what goes on, keys and values; where the window cuts; and where a cache must grow."""
    head = packed(kind, dtype)
    for held, rows, window in ((0, 1, 100), (20, 3, 100), (9, 2, 6), (62, 1, 100)):
        one, twin = (head.begun(held, rows, 7, window) for _ in range(2))
        (found,), carried_1d = drafted(head, [one], [LIMIT])
        assert_same(head, one, found, carried_1d[0], twin, LIMIT)


@torch.inference_mode()
@pytest.mark.parametrize("kind", sorted(NETS))
def test_sequences_do_not_depend_on_company_or_threads(level: str, kind: str) -> None:
    head, threads = packed(kind, "int8"), kernels.threads()
    sizes, limits = [(30, 1), (0, 16), (5, 4)], [2, 5, 1]
    try:
        for count in (1, 3):
            kernels.set_threads(count)
            together, alone = ([head.begun(*size, seed) for seed, size in enumerate(sizes)] for _ in range(2))
            found, carried_nd = drafted(head, together, limits)
            for n, (one, limit) in enumerate(zip(alone, limits, strict=True)):
                (own,), carried_1d = drafted(head, [one], [limit])
                assert own == found[n]
                assert len(own.tokens) == limit
                assert torch.equal(carried_1d[0], carried_nd[n])
                assert torch.equal(one.cache.last(1000), together[n].cache.last(1000))
    finally:
        kernels.set_threads(threads)


@torch.inference_mode()
def test_where_a_draft_ends() -> None:
    """At a token that ends the text, behind the one with which their product is too small, before one that is not at
    hand, and where numbers are lost; a sequence that ends leaves the others as they were."""
    head = packed("eagle3", "int8")
    (whole,), _ = drafted(head, [head.begun(4, 1, 0)], [LIMIT])
    stop = whole.tokens[1]
    (found,), _ = drafted(head, [one := head.begun(4, 1, 0)], [LIMIT], stops=frozenset({stop}))
    assert found.tokens == whole.tokens[: whole.tokens.index(stop) + 1]
    assert one.cache.length == 4 + len(found.tokens)
    for at, product in enumerate(accumulate(whole.shares, operator.mul)):
        (found,), _ = drafted(head, [head.begun(4, 1, 0)], [LIMIT], least=math.nextafter(product, 1))
        assert found.tokens == whole.tokens[: at + 1]
        (found,), _ = drafted(head, [head.begun(4, 1, 0)], [LIMIT], least=product)
        assert found.tokens == whole.tokens[: at + 2]
    lost = head.begun(4, 2, 5)
    lost.g_Md[0] = math.nan
    (found, other), _ = drafted(head, [lost, head.begun(4, 1, 0)], [LIMIT, LIMIT])
    assert found == Drafted([], [], True)
    assert other == whole
    assert lost.cache.length == 4 + 2


@torch.inference_mode()
def test_all_wait_for_an_embedding_that_is_not_at_hand() -> None:
    net = NETS["eagle3"]()
    assert net.embed_tokens is not None
    rows = OwnRows(net.embed_tokens.weight)
    core = make_core(net, "float32")
    row_of_V = torch.arange(VOCAB, dtype=torch.int32)
    chain = make_chain(net, core, torch.tensor(IDS), TokenTable(rows.table.rows_Rd, row_of_V))
    assert chain is not None
    head = Head(net, core, rows, chain)
    (whole, other), _ = drafted(head, [head.begun(4, 1, 2), head.begun(4, 1, 9)], [LIMIT, LIMIT])
    row_of_V[whole.tokens[1]] = -1
    assert whole.tokens[1] not in (whole.tokens[0], other.tokens[0])
    both = [head.begun(4, 1, 2), head.begun(4, 1, 9)]
    found, carried_nd = drafted(head, both, [LIMIT, LIMIT])
    assert [one.tokens for one in found] == [whole.tokens[:2], other.tokens[:2]]
    row_of_V[whole.tokens[1]] = whole.tokens[1]
    rest = [
        replace(one, embedded_Md=rows(own.tokens[-1:]), g_Md=g_d[None])
        for one, own, g_d in zip(both, found, carried_nd, strict=True)
    ]
    found, _ = drafted(head, rest, [LIMIT - 2, LIMIT - 2])
    assert [one.tokens for one in found] == [whole.tokens[2:], other.tokens[2:]]


@torch.inference_mode()
def test_rows_outside_a_cache_or_a_table_are_refused() -> None:
    head = packed("eagle3", "float32")
    native, one = head.chain._chain, head.begun(4, 1, 3)
    cos_UR = torch.zeros(4 + 3 + LIMIT, 8)
    store_2TGD = torch.zeros(2, 4 + LIMIT, 2, 16)
    rows = kernels.ChainRows(1, store_2TGD, 4, 3, 100, LIMIT, (), 0.0)
    native.draft(one.embedded_Md, one.g_Md, cos_UR, cos_UR, [rows])
    for bad in (rows._replace(length=5), rows._replace(limit=LIMIT + 1), rows._replace(limit=0)):
        with pytest.raises(IndexError, match="cache row"):
            native.draft(one.embedded_Md, one.g_Md, torch.zeros(99, 8), torch.zeros(99, 8), [bad])
    for first in (4, -1):
        with pytest.raises(IndexError, match="position"):
            native.draft(one.embedded_Md, one.g_Md, cos_UR, cos_UR, [rows._replace(first=first)])


@torch.inference_mode()
def test_parts_that_do_not_fit_are_refused() -> None:
    """They would be read beyond their ends."""
    net = NETS["mtp"]()
    core, inputs = make_core(net, "float32"), net.chain_inputs()
    assert isinstance(core, StackCore)
    assert isinstance(net.lm_head, PackedMatrix)
    head, ids_S, table = net.lm_head.packed, torch.tensor(IDS), TokenTable(torch.zeros(VOCAB, WIDTH), None)
    for wrong, said in (
        (replace(inputs, joint=None, joint_norm_d=None), f"reads {WIDTH} for {2 * WIDTH}"),
        (replace(inputs, joint=head), "a joint of another shape"),
        (replace(inputs, joint_norm_d=None), "a joint without its norm"),
    ):
        with pytest.raises(AssertionError, match=said):
            build_chain(core.stack, wrong, head, ids_S, table)
    whole = packed("eagle3", "float32")
    native, one, cos_UR = whole.chain._chain, whole.begun(4, 1, 3), torch.zeros(99, 8)
    rows = kernels.ChainRows(1, torch.zeros(2, 4 + LIMIT, 2, 16), 4, 3, 100, LIMIT, (), 0.0)
    for wrong_UR in (
        torch.zeros(98, 8),
        torch.zeros(99, 4),
        torch.zeros(99, 8, dtype=torch.float64),
        torch.zeros(8, 99).T,
    ):
        for tables in ((cos_UR, wrong_UR), (wrong_UR, cos_UR)):
            with pytest.raises(AssertionError, match="table"):
                native.draft(one.embedded_Md, one.g_Md, *tables, [rows])


def test_heads_that_the_kernels_cannot_run_whole() -> None:
    narrow = random_head(vocab=VOCAB, draft_ids=IDS, own_embedding=True, head_dim=8)
    for net, dtype in ((narrow, "float32"), (NETS["mtp"](), None)):
        core = make_core(net, dtype)
        assert make_chain(net, core, torch.tensor(IDS), TokenTable(torch.zeros(VOCAB, WIDTH), None)) is None
    head = NETS["eagle3"]()
    core = make_core(head, "float32")
    table = TokenTable(torch.zeros(VOCAB, WIDTH), None)
    assert make_chain(head, core, torch.tensor(IDS), table) is not None
    assert make_chain(head, core, torch.tensor(IDS), TokenTable(table.rows_Rd.double(), None)) is None
