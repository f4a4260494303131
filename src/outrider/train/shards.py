"""What a target was seen to say and think: sequences with hidden states and likeliest tokens, in memory-mapped files.

A folder holds `harvest.json`, which says how it came about, and shards. A shard is a safetensors file of some finished
sequences, end to end:

    conversation [n], turn [n], prompt_len [n], learn_from [n], start [n + 1]   int64
                                                                sequence i is the tokens start[i] : start[i + 1]
    tokens [T] int32, features [T, F] bfloat16                  outputs of the layers of harvest.json, side by side
    likeliest [A, C] int32, logp [A, C] float16                 a row for each token from learn_from on

The hidden state of a sequence's last token is not known (nothing was generated behind it): its features are zeros.
Prompts are learned from too, all that is not the template's or an earlier turn's: what the target thinks behind each of
their tokens comes free with reading them.

Shapes: n sequences, T tokens, F features, A tokens to learn, C likeliest tokens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from outrider.core.json_file import JsonObject
from outrider.errors import ConfigError, ModelFileError

HARVEST = "harvest.json"
SHARDS = "shard-*.safetensors"


@dataclass(frozen=True, slots=True)
class Harvested:
    """One finished sequence."""

    conversation: int
    turn: int
    prompt_len: int
    learn_from: int
    tokens: list[int]
    features_TF: Tensor
    likeliest_AC: Tensor
    logp_AC: Tensor


def write_shard(folder: Path, number: int, sequences: Seq[Harvested]) -> None:
    """Writes a shard whole or not at all."""
    assert sequences, "a shard of nothing"
    lengths = [len(s.tokens) for s in sequences]
    tensors = {
        "conversation": torch.tensor([s.conversation for s in sequences]),
        "turn": torch.tensor([s.turn for s in sequences]),
        "prompt_len": torch.tensor([s.prompt_len for s in sequences]),
        "learn_from": torch.tensor([s.learn_from for s in sequences]),
        "start": torch.tensor([0, *accumulate(lengths)]),
        "tokens": torch.tensor([token for s in sequences for token in s.tokens], dtype=torch.int32),
        "features": torch.cat([s.features_TF for s in sequences]),
        "likeliest": torch.cat([s.likeliest_AC for s in sequences]),
        "logp": torch.cat([s.logp_AC for s in sequences]),
    }
    write_whole(folder / SHARDS.replace("*", f"{number:05}"), lambda path: save_file(tensors, path))


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` make a file beside `path` and puts it there when it is whole. Raises ConfigError where it cannot."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        write(partial)
        os.replace(partial, path)
    except (OSError, SafetensorError, RuntimeError) as error:
        partial.unlink(missing_ok=True)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
        raise ConfigError(f"{path} cannot be written ({reason}): make room, or give another folder") from None


def write_manifest(folder: Path, name: str, manifest: Mapping[str, object], may_lack: Seq[str] = ()) -> None:
    """Says in the file `name` what the folder's contents are, or checks it as `require_manifest` does."""
    require_manifest(folder, name, manifest, may_lack)
    folder.mkdir(parents=True, exist_ok=True)
    if not (path := folder / name).exists():
        path.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def require_manifest(folder: Path, name: str, manifest: Mapping[str, object], may_lack: Seq[str] = ()) -> None:
    """Checks that a folder which was begun is asked to go on with the same; of the keys `may_lack` only what it says.

    Raises ConfigError naming the first setting in which it differs.
    """
    if not (path := folder / name).exists():
        return
    begun = JsonObject.read(path).values
    asked = {key: value for key, value in as_json(manifest).items() if key in begun or key not in may_lack}
    for key, was, value in _differing(begun, asked):
        raise ConfigError(
            f"{folder} was begun with {key} = {was!r} and is asked to go on with {value!r}: give the same setting, or "
            "another folder"
        )


def as_json(manifest: Mapping[str, object]) -> dict[str, object]:
    """As it is read again: tuples are lists."""
    values: dict[str, object] = json.loads(json.dumps(manifest))
    return values


def _differing(
    begun: Mapping[str, object], asked: Mapping[str, object], within: str = ""
) -> Iterator[tuple[str, object, object]]:
    """(dotted key, what it was, what is asked for) wherever they differ."""
    for key, value in asked.items():
        was = begun.get(key)
        if isinstance(was, dict) and isinstance(value, dict):
            yield from _differing(was, value, f"{within}{key}.")
        elif was != value:
            yield f"{within}{key}", was, value


class Shard:
    """A memory-mapped shard: a sequence's rows are read when they are asked for."""

    def __init__(self, path: Path) -> None:
        try:
            self.path = path
            self._file = safe_open(str(path), framework="pt")
            self.conversations = self._numbers("conversation")
            self.turns = self._numbers("turn")
            self.prompt_lens = self._numbers("prompt_len")
            self.learn_from = self._numbers("learn_from")
            self.starts = self._numbers("start")
            self.n_features = self._rows("features", 0, 0).shape[1]
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelFileError(
                f"{path} cannot be read: {str(error).splitlines()[0][:120]}. Delete it: its conversations are then "
                "answered again"
            ) from None
        learned = (
            stop - start - n for start, stop, n in zip(self.starts, self.starts[1:], self.learn_from, strict=False)
        )
        self._learned_starts = [0, *accumulate(learned)]

    def __len__(self) -> int:
        return len(self.conversations)

    def length(self, i: int) -> int:
        """Tokens of sequence i."""
        return self.starts[i + 1] - self.starts[i]

    def sequence(self, i: int, most: int) -> Harvested:
        """Sequence i, at most its first `most` tokens."""
        start, stop = self.starts[i], min(self.starts[i + 1], self.starts[i] + most)
        first = self._learned_starts[i]
        last = first + max(stop - start - self.learn_from[i], 0)
        return Harvested(
            self.conversations[i],
            self.turns[i],
            self.prompt_lens[i],
            self.learn_from[i],
            self._rows("tokens", start, stop).tolist(),
            self._rows("features", start, stop),
            self._rows("likeliest", first, last),
            self._rows("logp", first, last),
        )

    def prompt(self, i: int) -> list[int]:
        """The prompt's tokens of sequence i."""
        tokens: list[int] = self._rows("tokens", self.starts[i], self.starts[i] + self.prompt_lens[i]).tolist()
        return tokens

    def likeliest(self, i: int) -> Tensor:
        """int32 [A]: the target's likeliest token wherever there is one to learn of sequence i."""
        return self._rows("likeliest", self._learned_starts[i], self._learned_starts[i + 1])[:, 0]

    def _numbers(self, name: str) -> list[int]:
        numbers: list[int] = self._rows(name).tolist()
        return numbers

    def _rows(self, name: str, start: int | None = None, stop: int | None = None) -> Tensor:
        rows: Tensor = self._file.get_slice(name)[start:stop]  # type: ignore[no-untyped-call]
        return rows


def read_shards(folder: Path) -> list[Shard]:
    """All shards of a folder, in the order of their numbers."""
    return [Shard(path) for path in sorted(folder.glob(SHARDS))]
