"""One training from prompts to a head that was tried as it will be served: harvest, train, evaluate, export.

Every stage lies in the run's folder and is taken up where it stopped:

    harvest/            shards, unless another folder was given
    run.json            what was asked for, and with what it is made
    checkpoint.pt       see `Trainer`
    log.jsonl           a line a step
    plot.svg            loss, and acceptance by position
    head/               the finished head, with card.json
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path

import torch

from outrider.control.fixed import check_k
from outrider.core.json_file import JsonObject
from outrider.drafters.options import require_int
from outrider.drafters.reduced_vocab import ReducedVocab
from outrider.engine.opening import identity_of
from outrider.engine.prompt_file import Conversation
from outrider.errors import ConfigError
from outrider.models.decoder import Decoder
from outrider.models.load import LoadedModel
from outrider.train.harvest import OLDER_LACK, Harvester, HarvestSettings, manifest_of
from outrider.train.heads import HeadSettings, TargetParts, TrainedHead, require_own
from outrider.train.lessons import HELD_OUT_EVERY, Lessons, frequent_tokens
from outrider.train.recipes import RECIPES, start_from
from outrider.train.shards import HARVEST, Shard, as_json, read_shards, require_manifest, write_manifest
from outrider.train.trainer import CHECKPOINT, Trainer, TrainSettings, read_checkpoint

RUN = "run.json"
HEAD = "head"
SAME_HARVEST = ("vocabulary_sha256", "hidden_size", "weights", "layers", "likeliest")
"""What harvests must have in common to be learned from together."""
MASK_NAMES = ("reserved", "unused", "empty_output", "extra_id", "file_sep", "fim_pad")
"""Parts of the names of special tokens that no text holds, in the order in which they are preferred."""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Everything that a run is asked for. `k` is the draft length of the evaluation and of the card; `more_data` are
    folders of finished harvests of the same target and layers, from which the head learns too."""

    kind: str
    harvest: HarvestSettings
    head: HeadSettings
    train: TrainSettings
    k: int = 5
    more_data: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_k(self.k)
        require_int("train", "k", self.k, 1)
        require_own(self.kind, self.head)
        if (self.kind == "draft_model") != bool(self.head.draft_model):
            raise ConfigError("train: --draft-model names the model that draft_model trains: give both, or neither")
        why = f", for one in {HELD_OUT_EVERY} is held out to try the head on (prompts are taken again and again)"
        require_int("train", "conversations", self.harvest.conversations, HELD_OUT_EVERY, why)


class TrainRun:
    """A run in `folder`: `begin`, then all that `harvester` and `trainer` do, then `finish` (finish.py).

    What is given is tried before anything is written. Raises ConfigError for a folder that was begun with other
    settings, a target that cannot be trained on, a draft vocabulary that is larger than the target's, a harvest of
    another target, and a head of other settings to start from; ModelNotFoundError, ModelFileError or PairingError for
    such a head or a draft model that cannot be used.
    """

    def __init__(
        self, opened: LoadedModel, prompts: Seq[Conversation], settings: RunSettings, folder: Path, data: Path
    ) -> None:
        self.opened, self.target = opened, native(opened)
        if settings.head.draft_vocab > self.target.vocab_size:
            raise ConfigError(
                f"train: draft_vocab = {settings.head.draft_vocab} is not allowed: the target has "
                f"{self.target.vocab_size} tokens; give 0 (all) or fewer"
            )
        for option, given in (("--out", folder), ("--data", data)):
            if given.exists() and not given.is_dir():
                raise ConfigError(f"train: {option} {given} is a file: give a folder, or a name that is free")
        self.settings, self.folder, self.data = settings, folder, data
        self.identity = identity_of(opened)
        self._prompts = prompts
        self._require_harvests(manifest_of(opened, self.identity, prompts, settings.harvest))
        require_manifest(folder, RUN, self._manifest)
        if settings.head.draft_model or (settings.head.start and not self._begun):
            self.head([])

    @property
    def _begun(self) -> bool:
        """Whether a head was trained here for some steps."""
        return (self.folder / CHECKPOINT).exists()

    @property
    def _manifest(self) -> dict[str, object]:
        """What run.json says of the run."""
        asked = {"target": self.identity.names[0], **asdict(self.settings)}
        return asked | {"made_with": _made_with(self.folder / RUN, self.settings.train)}

    def begin(self) -> None:
        """Writes down what is asked for."""
        write_manifest(self.folder, RUN, self._manifest)

    def harvester(self) -> Harvester:
        """Of the answers that are still missing."""
        return Harvester(self.opened, self.identity, self._prompts, self.settings.harvest, self.data)

    def trainer(self) -> Trainer:
        """At the step that was reached."""
        shards = self._shards()
        head, train = self.head(shards), self.settings.train
        lessons = self.lessons(shards, head.wants)
        if not lessons.held_out:
            raise ConfigError(
                f"{self.data} has no conversation to try the head on (one in {HELD_OUT_EVERY} is held out; their "
                "prompts may be too long): harvest more conversations, in another folder"
            )
        return Trainer(head, lessons, train, self.folder)

    def head(self, shards: list[Shard]) -> TrainedHead:
        """New, or with the draft vocabulary of the checkpoint, which more shards would change."""
        settings = self.settings.head
        torch.manual_seed(self.settings.train.seed)
        parts = TargetParts(self.opened, self.target, self.identity, self._mask_token())
        rows = self.target.embedding_rows
        if settings.start and not self._begun:
            return start_from(self.settings.kind, settings.start, parts, settings)
        if self._begun:
            vocab = ReducedVocab(read_checkpoint(self.folder)["draft_ids"], rows)
        else:
            vocab = frequent_tokens(shards, settings.draft_vocab, self.target.vocab_size, rows=rows)
        return RECIPES[self.settings.kind](parts, vocab, settings)

    def lessons(self, shards: Seq[Shard], wants: Seq[int]) -> Lessons:
        """What there is to learn in the shards, for a head that reads the layers `wants`."""
        train = self.settings.train
        return Lessons(
            shards,
            self.settings.harvest.layers,
            wants,
            longest=train.longest,
            batch_tokens=train.batch_tokens,
            seed=train.seed,
        )

    def harvests(self) -> list[dict[str, object]]:
        """How the harvests came about that the head learns from."""
        return [dict(JsonObject.read(folder / HARVEST).values) for folder in self._folders]

    @property
    def _folders(self) -> list[Path]:
        """Of the harvests: the run's own, and the others."""
        return [self.data, *map(Path, self.settings.more_data)]

    def _require_harvests(self, manifest: Mapping[str, object]) -> None:
        """Raises ConfigError for a harvest that was begun with other settings, a folder of more data that is no harvest
        of this target and these layers, and hidden states of another width in any."""
        require_manifest(self.data, HARVEST, manifest, OLDER_LACK)
        asked = as_json(manifest)
        for folder in self._folders[1:]:
            if not (folder / HARVEST).is_file():
                raise ConfigError(
                    f"{folder} is no harvest, for it holds no {HARVEST}: give the folder of a finished one"
                )
            told = JsonObject.read(folder / HARVEST).values
            for key in SAME_HARVEST:
                if told.get(key) != asked[key] and (key in told or key not in OLDER_LACK):
                    raise ConfigError(
                        f"{folder} is a harvest with {key} = {told.get(key)!r}, and this run's is one with "
                        f"{asked[key]!r}: give harvests of one target with the same layers"
                    )
            _require_some(folder, read_shards(folder))
        width = self.target.hidden_size * len(self.settings.harvest.layers)
        for shard in chain.from_iterable(map(read_shards, self._folders)):
            if shard.n_features != width:
                raise ConfigError(
                    f"{shard.path} holds hidden states of {shard.n_features} numbers a token, and this run's are of "
                    f"{width}: give harvests of one target with the same layers"
                )

    def _shards(self) -> list[Shard]:
        shards = [read_shards(folder) for folder in self._folders]
        for folder, found in zip(self._folders, shards, strict=True):
            _require_some(folder, found)
        return list(chain.from_iterable(shards))

    def _mask_token(self) -> int:
        """A special token that no text holds."""
        tokenizer = self.opened.tokenizer
        special = sorted(tokenizer.special_ids - set(tokenizer.eos_ids))
        names = {index: tokenizer.token_bytes(index).decode("utf-8", "replace") for index in special}
        for part in MASK_NAMES:
            if found := [index for index, name in names.items() if part in name]:
                return found[0]
        return special[-1] if special else self.target.embedding_rows - 1


def native(opened: LoadedModel) -> Decoder:
    """The target as the native decoder that it must be."""
    if not isinstance(opened.model, Decoder):
        raise ConfigError(
            f"{opened.name} runs through transformers, and heads are trained on natively loaded models: give a "
            "GGUF file, or a folder of an architecture that the native decoder knows"
        )
    return opened.model


def _require_some(folder: Path, shards: Seq[Shard]) -> None:
    if not shards:
        raise ConfigError(f"{folder} has no shards: nothing was harvested")


def _made_with(path: Path, train: TrainSettings) -> dict[str, object]:
    """Versions and machine; those of a run that was begun stay."""
    if path.exists():
        begun = JsonObject.read(path).values.get("made_with")
        if isinstance(begun, dict):
            return begun
    return {
        "outrider": version("outrider"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "products": str(train.working_dtype).removeprefix("torch."),
    }
