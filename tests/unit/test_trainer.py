"""The loop that trains: its steps are the batches of all epochs, whether it is stopped on the way or not."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from outrider.drafters.head_training import Losses
from outrider.train import trainer as module
from outrider.train.trainer import Trainer, TrainSettings

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


class Head:
    def __init__(self) -> None:
        self.net, self.learned = nn.Linear(1, 1), list[int]()
        self.vocab = SimpleNamespace(ids_S=torch.arange(3))

    def loss(self, lesson: Any, generator: torch.Generator, progress: float) -> Losses:
        if torch.is_grad_enabled():
            self.learned.append(lesson.number)
            assert 0 <= progress < 1
        shares = [1.0 * (lesson.number == 20)], [0.0], [0.0]
        return Losses(self.net.weight.sum(), *shares)


def trainer(head: Head, folder: Path) -> Trainer:
    given: Any = Lessons()
    trained: Any = head
    return Trainer(trained, given, TrainSettings(epochs=3), folder)


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
