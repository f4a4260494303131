"""The loop that trains a head, with checkpoints from which a run goes on exactly as if it had never stopped.

Everything that is drawn is drawn from (seed, step), so a checkpoint holds no generator's state: weights, the
optimiser's moments, the step and the draft vocabulary are all there is.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch

from outrider.core.rng import fold_seed
from outrider.drafters.head_training import Lesson, Losses
from outrider.drafters.options import require_int, require_number
from outrider.errors import ConfigError, ModelFileError
from outrider.train.heads import TrainedHead
from outrider.train.lessons import Lessons, Place
from outrider.train.ranges import MOST_SEED, require_within
from outrider.train.rounding import round_
from outrider.train.shards import write_whole

CHECKPOINT = "checkpoint.pt"
LOG = "log.jsonl"
SAVE_EVERY = 100
EVALUATE_EVERY, EVALUATIONS = 200, 12
"""Steps from one evaluation to the next, at least; and about how many there are in a long run."""
EVALUATED = 64
"""Held-out sequences of an evaluation, evenly among all there are."""
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """How a head is trained.

    lr, warm_up    the highest learning rate, and the share of the steps until it; it falls along a cosine to nothing
    clip           of the gradient's norm
    batch_tokens   of a step, padding included
    longest        tokens of a sequence that are used
    rounded        the share of the steps, the last ones, that learn with weights rounded as a CPU serves them; the head
                   then has the rounded weights
    precision      in which products are made; "auto": bfloat16 where the processor multiplies tiles of it, else
                   float32. Weights and sums are float32
    """

    epochs: int = 3
    lr: float = 8e-4
    warm_up: float = 0.04
    weight_decay: float = 0.1
    clip: float = 1.0
    batch_tokens: int = 1024
    longest: int = 1280
    rounded: float = 0.3
    precision: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("epochs", 1), ("batch_tokens", 1), ("longest", 2)):
            require_int("train", name, getattr(self, name), low)
        for name, least, most in (("lr", 1e-9, 1.0), ("warm_up", 0.0, 1.0), ("rounded", 0.0, 1.0), ("clip", 1e-9, 1e9)):
            require_number("train", name, getattr(self, name), least, most)
        require_within("seed", self.seed, 0, MOST_SEED)
        if self.precision not in ("auto", *PRECISIONS):
            raise ConfigError(
                f"train: precision = {self.precision!r} is not allowed: give auto, {' or '.join(PRECISIONS)}"
            )

    @property
    def working_dtype(self) -> torch.dtype:
        """In which products are made here."""
        if self.precision == "auto":
            return torch.bfloat16 if torch.cpu._is_amx_tile_supported() else torch.float32
        return PRECISIONS[self.precision]


@dataclass(frozen=True, slots=True)
class Progressed:
    """What is told of a step, and written as a line of log.jsonl. `held_out`: of the evaluation that it ended with."""

    step: int
    steps: int
    lr: float
    loss: float
    agreement: list[float]
    overlap: list[float]
    held_out: dict[str, list[float]] | None = None


class Trainer:
    """Trains `head` on `lessons`; its checkpoint and log lie in `folder`, and are taken up if they are there."""

    def __init__(self, head: TrainedHead, lessons: Lessons, settings: TrainSettings, folder: Path) -> None:
        self.head, self.lessons, self.settings, self.folder = head, lessons, settings, folder
        parameters = [p for p in head.net.parameters() if p.requires_grad]
        matrices = [p for p in parameters if p.dim() > 1]
        vectors = [p for p in parameters if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=True)
        self._parameters = parameters
        self.steps = sum(len(lessons.epoch(number)) for number in range(settings.epochs))
        self.step = 0
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / CHECKPOINT).exists():
            self._load()
        self._cut_log()

    def run(self, on_step: Callable[[Progressed], None]) -> None:
        """Trains to the end."""
        every = max(EVALUATE_EVERY, self.steps // EVALUATIONS)
        for step, batch in self._batches():
            losses = self._one_step(step, batch)
            self.step = step + 1
            last = self.step == self.steps
            if last and self._rounds(step):
                round_(self.head.packed)
            held_out = self.evaluate() if last or self.step % every == 0 else None
            done = Progressed(
                self.step,
                self.steps,
                self._rate(step),
                float(losses.total.detach()),
                losses.agreement_by_position,
                losses.overlap_by_position,
                held_out,
            )
            with (self.folder / LOG).open("a", encoding="utf-8") as log:
                log.write(json.dumps(asdict(done)) + "\n")
            if last or self.step % SAVE_EVERY == 0:
                self._save()
            on_step(done)

    @torch.no_grad()
    def evaluate(self) -> dict[str, list[float]]:
        """On the held-out sequences, teacher-forced: agreement and overlap by draft position. With the weights as the
        latest step had them, rounded or not."""
        generator = self._generator(-1)
        found, weights = list[Losses](), list[int]()
        held_out = self.lessons.held_out
        for batch in self.lessons.in_batches(held_out[:: -(-len(held_out) // EVALUATED)]):
            lesson = self.lessons.lesson(batch, answers_only=True)
            found.append(self._loss(max(self.step - 1, 0), lesson, generator, 1.0))
            weights.append(int(lesson.counted_BT.sum()))
        return {
            "loss": _mean([losses.loss_by_position for losses in found], weights),
            "agreement": _mean([losses.agreement_by_position for losses in found], weights),
            "overlap": _mean([losses.overlap_by_position for losses in found], weights),
        }

    def _batches(self) -> Iterator[tuple[int, list[Place]]]:
        """The batches that are left, with their steps. Epochs need not have equally many."""
        every = chain.from_iterable(map(self.lessons.epoch, range(self.settings.epochs)))
        return islice(enumerate(every), self.step, None)

    def _one_step(self, step: int, batch: list[Place]) -> Losses:
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate(step)
        self._optimizer.zero_grad()
        losses = self._loss(step, self.lessons.lesson(batch), self._generator(step), step / self.steps)
        torch.nn.utils.clip_grad_norm_(self._parameters, self.settings.clip)
        self._optimizer.step()
        return losses

    def _loss(self, step: int, lesson: Lesson, generator: torch.Generator, progress: float) -> Losses:
        """The losses, and where gradients are wanted these, at the weights of the step."""
        working = self.settings.working_dtype
        with self.head.rounded() if self._rounds(step) else nullcontext():
            with torch.autocast(lesson.counted_BT.device.type, working, enabled=working != torch.float32):
                losses = self.head.loss(lesson, generator, progress)
            if losses.total.requires_grad:
                losses.total.backward()  # type: ignore[no-untyped-call]
            return losses

    def _rounds(self, step: int) -> bool:
        """Whether the weights are rounded in this step."""
        return step >= self.steps * (1 - self.settings.rounded)

    def _rate(self, step: int) -> float:
        warm = max(1, round(self.settings.warm_up * self.steps))
        if step < warm:
            return self.settings.lr * (step + 1) / warm
        along = (step - warm) / max(1, self.steps - warm)
        return self.settings.lr * 0.5 * (1 + math.cos(math.pi * along))

    def _generator(self, step: int) -> torch.Generator:
        return torch.Generator().manual_seed(fold_seed(self.settings.seed, step + 2))

    def _save(self) -> None:
        """Whole or not at all."""
        state = {
            "net": self.head.net.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "step": self.step,
            "draft_ids": self.head.vocab.ids_S,
        }
        write_whole(self.folder / CHECKPOINT, lambda path: torch.save(state, path))

    def _cut_log(self) -> None:
        """Forgets the lines of steps behind the checkpoint: they are made again."""
        path = self.folder / LOG
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            path.write_text("".join(lines[: self.step]), encoding="utf-8")

    def _load(self) -> None:
        state = read_checkpoint(self.folder)
        self.head.net.load_state_dict(state["net"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """What `Trainer` has saved. Raises ModelFileError for a damaged file."""
    path = folder / CHECKPOINT
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
        raise ModelFileError(f"{path} cannot be read ({reason}): delete it to train from the beginning") from None
    return state


def _mean(rows: list[list[float]], weights: list[int]) -> list[float]:
    """By column; a batch weighs as many positions as it teaches."""
    whole = max(1, sum(weights))
    return [sum(w * x for w, x in zip(weights, column, strict=True)) / whole for column in zip(*rows, strict=True)]
