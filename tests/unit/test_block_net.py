"""Block heads: the loss against a plain reference of the whole arithmetic, and what a block must not see."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.drafters.block_net import BlockNet
from outrider.drafters.block_training import block_loss
from outrider.drafters.head_training import Lesson, Losses
from tests.block_reference import said
from tests.tiny_block import DFLASH, DSPARK, random_block
from tests.tiny_head import SHAPE

VOCAB, IDS, LENGTH, KEPT = 40, [1, 4, 5, 9, 12, 20, 33, 39], 9, 5
OWN = {"own_embedding": True, "own_head": True}
KINDS: list[dict[str, Any]] = [
    DSPARK,
    DFLASH,
    DSPARK | {"markov_head_type": "rnn"},
    DSPARK | {"confidence_with_markov": False},
    {"markov_rank": 4},
    {"confidence": True, "confidence_with_markov": False},
    DSPARK | {"qk_norm": True, "bias": True, "n_layers": 1},
    DFLASH | {"target_hidden_size": 48, "layer_ids": (1, 3)},
    DSPARK | OWN,
]


def head(**fields: Any) -> BlockNet:
    return random_block(vocab=VOCAB, draft_ids=IDS, **fields).double()


def lesson_for(net: BlockNet, *, counted: list[int] | None = None, seed: int = 5, length: int = LENGTH) -> Lesson:
    generator = torch.Generator().manual_seed(seed)
    width = len(net.config.layer_ids) * net.config.target_hidden_size
    features = torch.randn(1, length, width, generator=generator, dtype=torch.float64)
    logits = 3 * torch.randn(1, length, VOCAB, generator=generator, dtype=torch.float64)
    logits[..., IDS] += 2
    logp, likeliest = logits.log_softmax(-1).topk(KEPT)
    counted_T = torch.zeros(1, length, dtype=torch.bool)
    counted_T[0, list(range(length)) if counted is None else counted] = True
    return Lesson(torch.randint(VOCAB, (1, length), generator=generator), features, likeliest, logp, counted_T)


def shared() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    width = SHAPE.hidden_size
    return (torch.randn(n, width, generator=generator, dtype=torch.float64) * 0.3 for n in (VOCAB, len(IDS)))  # type: ignore[return-value]


def loss_of(net: BlockNet, lesson: Lesson, **options: Any) -> Losses:
    embedding, rows = shared()
    options = {"anchors_per_sequence": 99, "decay": 2.0, "ce": 0.1, "tv": 1.8, **options}
    own = net.config
    return block_loss(
        net,
        lesson,
        embedding_Vd=None if own.own_embedding else embedding,
        head_Sd=None if own.own_head else rows,
        **options,
    )


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind))
def test_the_loss_equals_a_plain_reference(kind: dict[str, Any]) -> None:
    net = head(**kind)
    lesson = lesson_for(net, counted=[2, 3, 4, 6, 7, 8])
    weights = {"ce": 0.3, "tv": 0.8, "confidence": 0.7}
    got = loss_of(net, lesson, **weights)
    tokens, drafts = lesson.tokens_BT[0].tolist(), net.config.n_drafts
    found: list[list[tuple[float, float, float]]] = [[] for _ in range(drafts)]
    for anchor in (2, 3, 4, 6, 7, 8):
        rows = said(net, lesson.features_BTF[0], anchor, tokens[anchor:], *shared())
        for k, (logits, sure) in enumerate(rows):
            at = anchor + k
            if at >= LENGTH or not lesson.counted_BT[0, at]:
                break
            q = logits.softmax(0)
            ids, p = lesson.likeliest_BTC[0, at].tolist(), lesson.logp_BTC[0, at].exp()
            known = [(IDS.index(token), p[c]) for c, token in enumerate(ids) if token in IDS]
            overlap = float(sum(min(share, q[column]) for column, share in known))
            usable = ids[0] in IDS
            mass = sum(share for _, share in known)
            entropy = float(-sum(share / mass * q[column].log() for column, share in known)) if usable else 0.0
            doubt = 0.0
            if sure is not None:
                doubt = -overlap * math.log(float(sure)) - (1 - overlap) * math.log(1 - float(sure))
            loss = 0.3 * entropy + 0.8 * (1 - overlap) + 0.7 * doubt
            found[k].append((loss, float(usable and int(q.argmax()) == known[0][0]), overlap))
    assert len(got.loss_by_position) == drafts == (4 if net.config.sample_from_anchor else 3)
    assert all(found[k] for k in range(3))
    for part, numbers in enumerate((got.loss_by_position, got.agreement_by_position, got.overlap_by_position)):
        expected = [sum(row[part] for row in rows) / max(len(rows), 1) for rows in found]
        assert numbers == pytest.approx(expected, rel=1e-4, abs=1e-6)
    share = [math.exp(-k / 2.0) for k in range(drafts)]
    total = sum(share[k] * row[0] for k in range(drafts) for row in found[k])
    assert float(got.total.detach()) == pytest.approx(
        total / sum(share[k] * len(found[k]) for k in range(drafts)), rel=1e-5
    )


@pytest.mark.parametrize("kind", [DSPARK, DFLASH], ids=["dspark", "dflash"])
def test_a_block_sees_the_features_before_its_anchor_and_no_other(kind: dict[str, Any]) -> None:
    net = head(**kind)
    lesson = lesson_for(net, counted=[5])
    features = lesson.features_BTF.requires_grad_()
    loss_of(net, lesson).total.backward()
    assert features.grad is not None
    moved = features.grad[0].abs().sum(-1)
    assert bool((moved[:5] > 0).all())
    assert not moved[5:].any()


@pytest.mark.parametrize("kind", [DSPARK, DFLASH], ids=["dspark", "dflash"])
def test_blocks_do_not_see_each_other(kind: dict[str, Any]) -> None:
    net = head(**kind)
    both, first, second = (loss_of(net, lesson_for(net, counted=at)).total.item() for at in ([3, 5], [3], [5]))
    assert both == pytest.approx((first + second) / 2, rel=1e-6)
    assert first != pytest.approx(second, rel=1e-3)


def test_a_ragged_batch_is_its_sequences() -> None:
    net = head(**DSPARK)
    long, short = lesson_for(net), lesson_for(net, seed=6, length=6)
    padded = {}
    for name in ("tokens_BT", "features_BTF", "likeliest_BTC", "logp_BTC", "counted_BT"):
        a, b = getattr(long, name), getattr(short, name)
        padded[name] = torch.cat([a, torch.cat([b, torch.zeros_like(a[:, 6:])], dim=1)])
    nothing = replace(long, counted_BT=torch.zeros_like(long.counted_BT))
    padded = {name: torch.cat([value, getattr(nothing, name)]) for name, value in padded.items()}
    together, *alone = (loss_of(net, lesson) for lesson in (Lesson(**padded), long, short))
    counts = [[n - 1 - k for k in range(4)] for n in (LENGTH, 6)]  # position 0 is no anchor
    for k in range(4):
        mean = sum(one.loss_by_position[k] * n[k] for one, n in zip(alone, counts, strict=True))
        assert together.loss_by_position[k] == pytest.approx(mean / (counts[0][k] + counts[1][k]), rel=1e-5)


def test_a_lesson_without_anchors_is_worth_nothing() -> None:
    net = head(**DSPARK)
    empty = loss_of(net, lesson_for(net, counted=[0]))
    empty.total.backward()
    assert (empty.total.item(), empty.loss_by_position) == (0.0, [0.0] * 4)


def test_anchors_are_drawn_by_the_generator() -> None:
    net = head(**DSPARK)
    lesson = lesson_for(net, length=30)
    few = [
        loss_of(net, lesson, anchors_per_sequence=3, generator=torch.Generator().manual_seed(seed)).total.item()
        for seed in (0, 0, 1)
    ]
    assert few[0] == few[1] != few[2]


@pytest.mark.parametrize("kind", [DSPARK, DFLASH, DSPARK | {"markov_head_type": "rnn"} | OWN], ids=str)
def test_overfit_on_one_sequence(kind: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = random_block(vocab=VOCAB, **kind)
    lesson = lesson_for(net, length=14, counted=list(range(13)))
    likeliest = lesson.tokens_BT.roll(-1, 1)[..., None]
    sure = torch.full_like(likeliest, -0.02, dtype=torch.float32)
    lesson = Lesson(lesson.tokens_BT, lesson.features_BTF.float(), likeliest, sure, lesson.counted_BT)
    embedding, rows = (torch.randn(VOCAB, SHAPE.hidden_size) * 0.3 for _ in range(2))
    optimiser = torch.optim.AdamW(net.parameters(), lr=4e-3, weight_decay=0.0)
    for _ in range(100):
        losses = block_loss(net, lesson, embedding_Vd=embedding, head_Sd=rows, anchors_per_sequence=99, ce=0.1, tv=1.8)
        optimiser.zero_grad()
        losses.total.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
    assert losses.agreement_by_position == pytest.approx([1.0] * net.config.n_drafts)
    assert min(losses.overlap_by_position) > 0.9
