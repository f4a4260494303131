"""The fused loss of heads against the same thing written down plainly and differentiated by torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.drafters import head_loss
from outrider.drafters.head_loss import Bias, fused_loss
from outrider.drafters.head_training import Aims
from outrider.drafters.reduced_vocab import ReducedVocab

ROWS, WIDTH, RANK, DRAFTS, LIKELIEST, VOCAB = 37, 16, 4, 50, 8, 70


def random_aims(generator: torch.Generator) -> Aims:
    ids = torch.randperm(VOCAB, generator=generator)[:DRAFTS].sort().values
    likeliest = torch.stack([torch.randperm(VOCAB, generator=generator)[:LIKELIEST] for _ in range(ROWS)])
    logp = torch.randn(ROWS, LIKELIEST, generator=generator).sort(descending=True).values.log_softmax(-1) - 0.1
    return Aims(likeliest, logp, ReducedVocab(ids, VOCAB))


@pytest.mark.parametrize("block_numbers", [1, 1 << 20])
@pytest.mark.parametrize(("ce", "tv"), [(1.0, 0.0), (0.0, 1.0), (0.3, 0.9)])
def test_loss_and_gradients_are_those_of_the_formula(
    ce: float, tv: float, block_numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_loss, "BLOCK_NUMBERS", block_numbers)
    monkeypatch.setattr(head_loss, "LEAST_ROWS", 5)
    generator = torch.Generator().manual_seed(1)
    aims = random_aims(generator)
    shapes = ((ROWS, WIDTH), (DRAFTS, WIDTH), (ROWS, RANK), (DRAFTS, RANK))
    x, head, biased, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes
    )
    weight = torch.rand(ROWS, generator=generator, dtype=torch.float64)
    rows = torch.randperm(ROWS, generator=generator)

    def plainly() -> Tensor:
        logq = (x @ head.T + biased @ bias.T).log_softmax(-1).gather(-1, aims.columns_XC[rows])
        p = aims.p_XC[rows].double()
        cross_entropy = -(p / p.sum(-1, keepdim=True) * logq).sum(-1) * aims.usable_X[rows]
        overlap = torch.minimum(p, logq.exp()).sum(-1)
        return (weight * (ce * cross_entropy + tv * (1 - overlap))).sum()

    expected = plainly()
    found = fused_loss(x, head, aims, rows, weight_M=weight, ce=ce, tv=tv, bias=Bias(biased, bias))
    assert float(found.loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    inputs = (x, head, biased, bias)
    pairs = zip(torch.autograd.grad(found.loss, inputs), torch.autograd.grad(expected, inputs), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in pairs)
    assert float((found.overlap_M > 1).sum()) == 0


def test_products_of_bfloat16_change_loss_and_gradients_little() -> None:
    generator = torch.Generator().manual_seed(4)
    aims = random_aims(generator)
    shapes = ((ROWS, WIDTH), (DRAFTS, WIDTH), (ROWS, RANK), (DRAFTS, RANK))
    inputs = x, head, biased, bias = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]

    def found(*, narrow: bool) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            loss = fused_loss(
                x, head, aims, torch.arange(ROWS), weight_M=torch.ones(ROWS) / ROWS, tv=0.5, bias=Bias(biased, bias)
            ).loss
        return loss.detach(), *torch.autograd.grad(loss, inputs)

    (wide, *wide_grads), (narrow, *narrow_grads) = found(narrow=False), found(narrow=True)
    assert float(narrow) != float(wide)
    assert float(narrow) == pytest.approx(float(wide), rel=1e-2)
    for a, b in zip(narrow_grads, wide_grads, strict=True):
        assert a.dtype == torch.float32
        assert float(torch.cosine_similarity(a.flatten(), b.flatten(), dim=0)) > 0.999


def test_what_is_frozen_gets_no_gradient() -> None:
    generator = torch.Generator().manual_seed(2)
    aims = random_aims(generator)
    x = torch.randn(ROWS, WIDTH, generator=generator).requires_grad_()
    head = torch.randn(DRAFTS, WIDTH, generator=generator)
    fused_loss(x, head, aims, torch.arange(ROWS), weight_M=torch.ones(ROWS)).loss.backward()
    assert x.grad is not None
    assert head.grad is None


def test_no_rows_give_no_loss() -> None:
    aims = random_aims(torch.Generator().manual_seed(3))
    none = torch.zeros(0, dtype=torch.int64)
    found = fused_loss(torch.zeros(0, WIDTH), torch.ones(DRAFTS, WIDTH), aims, none, weight_M=torch.zeros(0))
    assert float(found.loss) == 0
    assert len(found.overlap_M) == 0
