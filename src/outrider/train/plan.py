"""What a run will take, said before it starts: conversations, disk, steps, the head's size, the trial at the end."""

from __future__ import annotations

import shutil
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path

from outrider.core.types import Decision
from outrider.errors import ConfigError
from outrider.train.finish import ANSWER, PROMPTS
from outrider.train.harvest import unanswered
from outrider.train.lessons import HELD_OUT_EVERY, is_held_out
from outrider.train.run import TrainRun
from outrider.train.shards import Shard, read_shards

SCHEMA = "outrider.train_dry_run/1"
BYTES_PER_PARAMETER = 16
"""Weight, gradient and the two moments of the optimiser, in float32."""
STEP_BYTES = 200_000_000
"""Rows of a step, about."""
PROMPT_TOKENS = 100
"""Of a sequence, where nothing was harvested yet; answers are then taken to be as long as they may."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is foretold of a run.

    `left` conversations are still to be harvested; `harvested` counts sequences so far. `harvest_bytes` are those of
    the whole harvest at most; `steps` rest on the sequences so far, or on the longest answers where there are none.
    `parameters` are the head's own.
    """

    kind: str
    layers: tuple[int, ...]
    data: str
    conversations: int
    left: int
    harvested: int
    harvested_bytes: int
    harvest_bytes: int
    bytes_per_token: int
    epochs: int
    batch_tokens: int
    steps: int
    parameters: int
    memory_bytes: int
    k: int
    trial_prompts: int
    trial_tokens: int

    def decisions(self) -> list[Decision]:
        """For people."""
        taken = "the sequences so far" if self.harvested else "answers as long as they may be, so at most"
        done = self.conversations - self.left
        return [
            Decision(
                "conversations",
                f"{self.conversations}, of which {self.left} are left to harvest",
                f"{done} were answered or left out: {self.harvested} sequences, {self.harvested_bytes / 1e9:.2f} GB in "
                f"{self.data}",
            ),
            Decision(
                "harvest",
                f"about {self.harvest_bytes / 1e9:.2f} GB",
                f"{self.bytes_per_token} bytes a token; layers {', '.join(map(str, self.layers))}",
            ),
            Decision(
                "training",
                f"about {self.steps} steps",
                f"{self.epochs} times through the harvest, {self.batch_tokens} tokens a step; by {taken}",
            ),
            Decision(
                "head",
                f"{self.parameters / 1e6:.3g} M parameters, {2 * self.parameters / 1e6:.3g} MB as bfloat16",
                f"{self.kind}: what is trained, not what it shares with the target",
            ),
            Decision(
                "memory",
                f"{self.memory_bytes / 1e6:.0f} MB",
                "beside the target: its embedding as numbers, the head with its gradient and moments, a step's rows",
            ),
            Decision(
                "trial",
                f"{self.trial_prompts} held-out prompts at K = {self.k}",
                f"answers of at most {self.trial_tokens} tokens through the engine: greedy as trained, then as it will "
                "be served, greedy and at temperature 1; what is accepted goes into its card and decides the verdict",
            ),
        ]

    def to_json(self) -> dict[str, object]:
        return {"schema": SCHEMA, **asdict(self)}


def foretell(run: TrainRun) -> Plan:
    """The plan of a run that may have been begun. Raises ConfigError for a disk that is too small."""
    settings, harvest, train = run.settings, run.settings.harvest, run.settings.train
    shards = read_shards(run.data)
    per_token = harvest.bytes_per_token(run.target.hidden_size)
    sequences = harvest.conversations * (1 + harvest.follow_ups)
    tokens = sequences * (harvest.max_tokens * (1 + harvest.written) + PROMPT_TOKENS)
    left = unanswered(run.data, shards, harvest.conversations)
    held = sum(shard.path.stat().st_size for shard in shards)
    _require_room(run, round(tokens * per_token), held)
    rows = run.target.embedding_rows + (settings.head.draft_vocab or run.target.vocab_size)
    parameters = sum(parameter.numel() for parameter in run.head([]).net.parameters())
    return Plan(
        kind=settings.kind,
        layers=harvest.layers,
        data=str(run.data),
        conversations=harvest.conversations,
        left=len(left),
        harvested=sum(map(len, shards)),
        harvested_bytes=held,
        harvest_bytes=round(tokens * per_token),
        bytes_per_token=per_token,
        epochs=train.epochs,
        batch_tokens=train.batch_tokens,
        steps=round(train.epochs * _batches(run, shards, left, tokens)),
        parameters=parameters,
        memory_bytes=4 * rows * run.target.hidden_size + BYTES_PER_PARAMETER * parameters + STEP_BYTES,
        k=settings.k,
        trial_prompts=min(PROMPTS, harvest.conversations // HELD_OUT_EVERY),
        trial_tokens=ANSWER,
    )


def _batches(run: TrainRun, shards: Seq[Shard], left: Seq[int], tokens: float) -> float:
    """Of an epoch, about: conversations that are `left` are taken to be like those so far; else `tokens` say."""
    more = [shard for folder in run.settings.more_data for shard in read_shards(Path(folder))]
    others = len(run.lessons(more, ()).epoch(0)) if more else 0
    done = {c for shard in shards for c in shard.conversations if not is_held_out(c)}
    if not done:
        return others + tokens / run.settings.train.batch_tokens
    to_come = sum(not is_held_out(c) for c in left)
    return others + len(run.lessons(shards, ()).epoch(0)) * (1 + to_come / len(done))


def _require_room(run: TrainRun, wanted: int, held: int) -> None:
    free = shutil.disk_usage(_existing(run.data)).free
    if wanted - held > free:
        raise ConfigError(
            f"the harvest may take {wanted / 1e9:.1f} GB and {run.data} has {free / 1e9:.1f} GB free: ask for "
            f"fewer conversations than {run.settings.harvest.conversations}, shorter answers, or give another folder"
        )


def _existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    folder = folder.absolute()
    return folder if folder.exists() else _existing(folder.parent)
