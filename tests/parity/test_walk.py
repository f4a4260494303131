"""Greedy walks and softmax rows of the kernels against their twins, at every level."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider import kernels
from outrider.kernels import dispatch, ops, quantised, walk, walk_reference

pytestmark = pytest.mark.skipif(not kernels.available(), reason=kernels.why())

TOKENS, COLUMNS, RANK = 500, 333, 32


def _levels() -> list[str]:
    if not kernels.available():
        return []
    from outrider.kernels import _kernels

    return list(_kernels.available_levels())


@pytest.fixture(params=_levels() or ["none"])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for module in (ops, quantised, walk):
        monkeypatch.setattr(module, "_LEVEL", dispatch.choose(request.param).level)
    return str(request.param)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def matrices() -> dict[str, Any]:
    weight = normal(COLUMNS, RANK, seed=1)
    return {
        "nothing": None,
        "float32": kernels.pack_linear(weight),
        "bfloat16": kernels.pack_linear(weight.bfloat16()),
        "int8": kernels.pack_quantised(kernels.encode_q8_0(weight), "Q8_0", (COLUMNS, RANK)),
    }


def pairs() -> kernels.Pairs:
    row_of = torch.full((TOKENS,), -1, dtype=torch.int32)
    row_of[::2] = torch.arange(TOKENS // 2, dtype=torch.int32)
    columns = torch.randint(0, COLUMNS, (TOKENS // 2, 4), generator=torch.Generator().manual_seed(2))
    return kernels.Pairs(row_of, columns, 9 * normal(TOKENS // 2, 4, seed=3))


@pytest.mark.parametrize("kind", list(matrices()))
def test_a_walk_is_its_twin_s(level: str, kind: str) -> None:
    matrix, table = matrices()[kind], normal(TOKENS, RANK, seed=4)
    ids = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(5))[:COLUMNS].sort().values
    logits, counts, before = normal(11, COLUMNS, seed=6), [4, 1, 6], [3, 480, 77]
    own = [pairs(), None, pairs()]
    ends = (table if matrix else None, matrix)
    twin, calls = logits.clone(), kernels.fast_calls().get("walk", 0)
    expected = walk_reference.walk_(twin, counts, before, own, *ends, ids, shares=True)
    picker = kernels.Walk(ids, TOKENS, *ends)
    found = picker(logits, counts, before, own, shares=True)
    assert kernels.fast_calls()["walk"] == calls + 1
    assert found[0] == expected[0]
    assert torch.equal(logits, twin)
    assert found[1] == expected[1]
    assert found[2] == pytest.approx(expected[2], rel=1e-5)
    assert picker(normal(11, COLUMNS, seed=6), counts, before, own) == (*found[:2], [])


def test_sequences_do_not_depend_on_company(level: str) -> None:
    picker = kernels.Walk(torch.arange(COLUMNS), TOKENS, normal(TOKENS, RANK), matrices()["int8"])
    counts, before, rows = [2, 5, 3], [9, 100, 7], normal(10, COLUMNS, seed=7)
    together = picker(rows.clone(), counts, before)
    alone = [picker(part.clone(), [n], [t]) for part, n, t in zip(rows.split(counts), counts, before, strict=True)]
    assert together[0] == [column for one in alone for column in one[0]]
    assert together[1] == [top for one in alone for top in one[1]]


@pytest.mark.parametrize("size", [1, 3, 16, 255, 256, 257, 1000])
def test_the_first_of_equals_and_what_is_not_finite(level: str, size: int) -> None:
    picker = kernels.Walk(torch.arange(size), size)
    rows = torch.full((2, size), -2.0)
    rows[1, [size // 2, size - 1]] = -1.0
    assert picker(rows, [2], [0])[:2] == ([0, size // 2], [-2.0, -1.0])
    for bad in (math.nan, math.inf, -math.inf):
        for at in {0, size // 2, size - 1}:
            row = normal(1, size)
            row[0, at] = bad
            assert math.isnan(picker(row, [1], [0])[1][0])
            assert kernels.softmax(row[0], 1.0) is None


def test_a_token_outside_the_table_is_refused(level: str) -> None:
    picker = kernels.Walk(torch.arange(COLUMNS), TOKENS, normal(TOKENS, RANK), matrices()["float32"])
    for token in (-1, TOKENS):
        with pytest.raises(IndexError, match="outside the table"):
            picker(normal(1, COLUMNS), [1], [token])


@pytest.mark.parametrize("size", [1, 7, 333, 4096])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0, 1e-40])
def test_softmax_is_its_twin_s_and_sums_to_one(level: str, size: int, temperature: float) -> None:
    logits = 5 * normal(size)
    found, expected = kernels.softmax(logits, temperature), walk_reference.softmax(logits, temperature)
    assert found is not None
    assert expected is not None
    assert abs(float(found.sum()) - 1) < 1e-13
    assert float(found.min()) > 0
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-30)
    exact = (logits.double() / max(temperature, 1e-30)).softmax(0)
    assert float((found - exact).abs().max()) < 1e-6
