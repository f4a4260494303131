"""The loop that trains: its steps are the batches of all epochs, whether it is stopped on the way or not."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outrider import kernels
from outrider.drafters.head_training import Losses
from outrider.drafters.reduced_vocab import ReducedVocab
from outrider.train import trainer as module
from outrider.train.heads import HeadSettings, TrainedHead, steps_at
from outrider.train.rounding import four_bits
from outrider.train.trainer import Trainer, TrainSettings

needs_kernels = pytest.mark.skipif(not kernels.available(), reason=kernels.why())

EPOCHS = ([[1], [2], [3]], [[4], [5]], [[6], [7], [8], [9]])
"""Of different lengths, as epochs are whose batches are of like lengths."""


class Lessons:
    held_out = (0,)

    def epoch(self, number: int) -> list[list[int]]:
        return EPOCHS[number]

    def in_batches(self, places: Any) -> list[list[int]]:
        return [[20], [21]]

    def lesson(self, batch: list[int], *, answers_only: bool = False) -> Any:
        """Of held-out batch 20 one position counts, of 21 three."""
        return SimpleNamespace(number=batch[0], counted_BT=torch.ones(1, 2 * batch[0] - 39 if batch[0] >= 20 else 1))


class Head(TrainedHead):
    def __init__(self, net: nn.Module | None = None) -> None:
        self._net, self.learned = net or nn.Linear(1, 1), list[int]()
        self.vocab = ReducedVocab(torch.arange(3), 3)
        self.seen, self.judged = list[Tensor](), list[Tensor]()

    @property
    def net(self) -> nn.Module:
        return self._net

    def loss(self, lesson: Any, generator: torch.Generator, progress: float) -> Losses:
        weight_NK = self.net.get_parameter("weight").detach().clone()
        if torch.is_grad_enabled():
            self.learned.append(lesson.number)
            assert 0 <= progress < 1
            self.seen.append(weight_NK)
        else:
            self.judged.append(weight_NK)
        shares = [1.0 * (lesson.number == 20)], [0.0], [0.0]
        return Losses(self.net.get_parameter("weight").sum(), *shares)

    def write(self, folder: Path, layout: str | None = None) -> None:
        raise AssertionError("no head is written here")


def trainer(head: Head, folder: Path, **settings: Any) -> Trainer:
    given: Any = Lessons()
    return Trainer(head, given, TrainSettings(epochs=3, **settings), folder)


@pytest.mark.parametrize("stop", [None, 3, 4, 6])
def test_every_batch_of_every_epoch_is_one_step(
    stop: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SAVE_EVERY", 1)
    first, second = Head(), Head()

    def stopping(done: module.Progressed) -> None:
        if done.step == stop:
            raise KeyboardInterrupt

    if stop is not None:
        with pytest.raises(KeyboardInterrupt):
            trainer(first, tmp_path).run(stopping)
    trainer(second, tmp_path).run(lambda done: None)
    assert first.learned + second.learned == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(line["step"], line["steps"]) for line in lines] == [(step, 9) for step in range(1, 10)]
    assert [bool(line["held_out"]) for line in lines] == [False] * 8 + [True]


def test_an_evaluation_takes_a_part_of_many_held_out_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = list[int]()
    monkeypatch.setattr(Lessons, "held_out", tuple(range(200)))
    monkeypatch.setattr(Lessons, "in_batches", lambda self, places: taken.extend(places) or [[20]])
    trainer(Head(), tmp_path).evaluate()
    assert taken == list(range(0, 200, 4))
    assert len(taken) <= module.EVALUATED


def test_a_held_out_batch_weighs_as_many_positions_as_it_has(tmp_path: Path) -> None:
    assert trainer(Head(), tmp_path).evaluate()["loss"] == [0.25]


def is_rounded(weight_NK: Tensor) -> bool:
    return torch.equal(weight_NK, four_bits(weight_NK))


@needs_kernels
@pytest.mark.parametrize(("share", "rounded"), [(0.0, 0), (0.3, 2), (1.0, 9)])
def test_the_last_steps_learn_with_the_weights_that_are_served(share: float, rounded: int, tmp_path: Path) -> None:
    torch.manual_seed(1)
    head = Head(nn.Linear(64, 4))
    trainer(head, tmp_path, rounded=share, lr=1e-3).run(lambda done: None)
    assert [is_rounded(weight_NK) for weight_NK in head.seen] == [False] * (9 - rounded) + [True] * rounded
    assert is_rounded(head.net.get_parameter("weight")) == bool(rounded)
    assert [is_rounded(weight_NK) for weight_NK in head.judged] == [bool(rounded)] * 2


@needs_kernels
def test_small_steps_add_up_behind_rounded_weights(tmp_path: Path) -> None:
    """Each of nine steps is far less than half of the distance of two codes: rounded for good, none would have any
    effect."""
    torch.manual_seed(1)
    head = Head(nn.Linear(64, 4))
    before_NK = four_bits(head.net.get_parameter("weight").detach())
    apart = float(before_NK.unique().diff().max())
    rates: list[float] = []
    trainer(head, tmp_path, rounded=1.0, lr=apart / 8).run(lambda done: rates.append(done.lr))
    moved = float((before_NK - head.net.get_parameter("weight").detach()).mean())
    assert max(rates) < apart / 4
    assert moved == pytest.approx(sum(rates), rel=0.2)


@needs_kernels
def test_the_rows_of_the_target_are_rounded_with_the_head(tmp_path: Path) -> None:
    head = Head()
    head._head_Sd = whole_Sd = torch.randn(3, 64)
    with head.rounded():
        assert torch.equal(head._head_Sd, four_bits(whole_Sd))
    assert head._head_Sd is whole_Sd


def test_a_new_head_begins_with_one_token_and_a_trained_one_goes_on_with_all() -> None:
    assert [steps_at(progress, HeadSettings(steps=4)) for progress in (0.0, 0.4, 0.6, 0.8, 0.9)] == [1, 1, 2, 3, 4]
    assert steps_at(0.0, HeadSettings(steps=4, start="head")) == 4
