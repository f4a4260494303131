"""Files of draft heads, whatever their kind: a configuration and named tensors, read, checked and written.

A head is a folder with config.json and model.safetensors (or another single .safetensors file), pytorch_model.bin or
medusa_lm_head.pt, or one of those files with config.json beside it. A .bin or .pt file is unpickled with
`weights_only=True`: tensors only.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from outrider.core.json_file import JsonObject
from outrider.drafters.head_card import CARD, read_card
from outrider.drafters.head_fit import same_model
from outrider.drafters.reduced_vocab import ReducedVocab
from outrider.errors import ConfigError, ModelFileError, ModelNotFoundError

CONFIG, SAFETENSORS, PICKLE, MEDUSA = "config.json", "model.safetensors", "pytorch_model.bin", "medusa_lm_head.pt"
PICKLED = (".bin", ".pt")
N_SHOWN = 6
MOST_TOKENS = 2**24
"""Of a vocabulary: far more than any has, and few enough to be listed."""
MAPS = ("d2t", "t2d")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
"""What weights, and what the MAPS between vocabularies, may hold: any other type would be cast to something else."""


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """A head as its files have it. `path` is the file with the tensors."""

    path: Path
    config: JsonObject
    tensors: dict[str, Tensor]


class Vocabularies(Protocol):
    """The sizes that every head's configuration states: of the target's vocabulary, and of the head's own."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def draft_vocab_size(self) -> int: ...


C = TypeVar("C", bound=Vocabularies)
N = TypeVar("N", bound=nn.Module)


def read_head(path: str | Path) -> HeadFiles:
    """Raises ModelNotFoundError for no file, ModelFileError for a bad one."""
    weights = _weights_file(Path(path).expanduser())
    config = JsonObject.read(weights.parent / CONFIG)
    return HeadFiles(weights, config, _load_pickle(weights) if weights.suffix in PICKLED else _load(weights))


def write_head(folder: str | Path, config: Mapping[str, object], tensors: Mapping[str, Tensor], *, file: str) -> None:
    """Writes config.json and the tensors as `file` (model.safetensors, pytorch_model.bin or medusa_lm_head.pt) into
    `folder`."""
    if file not in (SAFETENSORS, PICKLE, MEDUSA):
        raise ConfigError(f"weights file {file!r} is not allowed: give {SAFETENSORS}, {PICKLE} or {MEDUSA}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    if file != SAFETENSORS:
        torch.save(contiguous, folder / file)
    else:
        save_file(contiguous, folder / file, metadata={"format": "pt"})


def load_net(
    files: HeadFiles,
    what: str,
    config: C,
    make: Callable[[C, ReducedVocab], N],
    theirs: Callable[[str], str],
    *,
    like: str,
    ignored: Iterable[str] = (),
) -> N:
    """The network of `config`, in the precision of its tensor `like` in the file (float16 becomes float32).

    `theirs` turns our name of a tensor into the file's. `d2t` and `t2d` are as in `ReducedVocab`. Raises
    ModelFileError, in the file's names, for sizes of which there is no network, for tensors that do not fit the
    configuration, and for weights that are no finite numbers.
    """
    size, draft_size = config.vocab_size, config.draft_vocab_size
    if size > MOST_TOKENS:
        raise ModelFileError(f"{files.config.path}: vocab_size is {size}, allowed are 1 to {MOST_TOKENS}")
    unknown = ReducedVocab(torch.empty(draft_size, dtype=torch.int64, device="meta"), size)
    states = _without_storage(files, what, config, make, unknown).state_dict()
    ours = {theirs(name): (name, tuple(t.shape)) for name, t in states.items()}
    shapes = {name: shape for name, (_, shape) in ours.items()}
    d2t, t2d = {"d2t": (draft_size,)}, {"t2d": (size,)}
    required, optional = (shapes | d2t, t2d) if draft_size < size else (shapes, d2t | t2d)
    tensors = check_tensors(files, what, required, optional, ignored)
    vocab = ReducedVocab.whole(size)
    if "d2t" in tensors:
        vocab = ReducedVocab.from_tensors(str(files.path), tensors["d2t"], tensors.get("t2d"), size)
    dtype = tensors[theirs(like)].dtype
    dtype = dtype if dtype in (torch.float32, torch.bfloat16) else torch.float32
    weights = {name: tensors[their].to(dtype) for their, (name, _) in ours.items()}
    for their, (name, _) in ours.items():
        if not bool(weights[name].isfinite().all()):
            raise ModelFileError(f"{files.path}: tensor {their} holds NaN or infinite numbers. Fetch it again")
    net = _without_storage(files, what, config, make, vocab)
    net.load_state_dict(weights, assign=True)
    return net


def _without_storage(
    files: HeadFiles, what: str, config: C, make: Callable[[C, ReducedVocab], N], vocab: ReducedVocab
) -> N:
    """The network on the meta device. Raises ModelFileError for sizes of which torch makes no tensor."""
    try:
        with torch.device("meta"):
            return make(config, vocab)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0][:120]
        raise ModelFileError(
            f"{files.config.path}: {what} of these sizes cannot be made ({reason}). Fetch it again, or correct it"
        ) from None


def stated_target(config: JsonObject, elsewhere: object) -> dict[str, str | None]:
    """What a configuration says of its head's target, under the names of `TrainedFor`'s makers: `target_name` (ours, or
    the one found `elsewhere`) and `vocabulary_sha256`; where it is silent, what the card beside it says.

    Raises ModelFileError for a card that says something else.
    """
    ours, card = config.child("outrider"), read_card(config.path.parent)
    said = (ours.values.get("target") or elsewhere, ours.values.get("vocabulary_sha256"))
    name, vocabulary = (value if isinstance(value, str) else None for value in said)
    if card is not None:
        if name and card.target and not same_model(name, card.target):
            raise _contradicted(config, "target", card.target, name)
        if vocabulary and card.vocabulary_sha256 and vocabulary != card.vocabulary_sha256:
            raise _contradicted(config, "vocabulary_sha256", card.vocabulary_sha256, vocabulary)
        name, vocabulary = name or card.target, vocabulary or card.vocabulary_sha256
    return {"target_name": name, "vocabulary_sha256": vocabulary}


def _contradicted(config: JsonObject, key: str, told: str, stated: str) -> ModelFileError:
    return ModelFileError(
        f"{config.path.with_name(CARD)}: {key!r} is {told[:60]!r}, and {CONFIG} says {stated[:60]!r}: one of them "
        "belongs to another head. Fetch both again"
    )


def target_json(name: str | None, vocabulary_sha256: str | None) -> dict[str, object]:
    """The same as `stated_target` reads it; other readers pass over it."""
    return {"outrider": {"target": name, "vocabulary_sha256": vocabulary_sha256}}


def speculators_json(
    algorithm: str, architecture: str, target: str | None, tokens: int, layer: Mapping[str, object]
) -> dict[str, object]:
    """What the layout `speculators` states of every head; `layer` is its transformer_layer_config."""
    return {
        "architectures": [architecture],
        "speculators_model_type": algorithm,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": algorithm,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "transformer_layer_config": dict(layer),
    }


def check_tensors(
    files: HeadFiles,
    what: str,
    required: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, tuple[int, ...]],
    ignored: Iterable[str] = (),
) -> dict[str, Tensor]:
    """The tensors of `files` without those `ignored`. Raises ModelFileError that names what is missing, unexpected, or
    of another shape or type."""
    tensors = {name: tensor for name, tensor in files.tensors.items() if name not in set(ignored)}
    if missing := [name for name in required if name not in tensors]:
        raise ModelFileError(
            f"{files.path} lacks {_listed(missing)} that {what} of this {CONFIG} needs. Fetch it again, or correct it"
        )
    expected = {**required, **optional}
    if unexpected := [name for name in tensors if name not in expected]:
        raise ModelFileError(
            f"{files.path} has {_listed(unexpected)} that {what} of this {CONFIG} has no place for, so it would "
            "compute something else than it was trained for"
        )
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != expected[name]:
            shapes = f"shape {list(tensor.shape)}, and {CONFIG} says {list(expected[name])}"
            raise ModelFileError(f"{files.path}: tensor {name} has {shapes}")
        if tensor.dtype not in (allowed := WHOLE if name in MAPS else FLOATS):
            supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
            raise ModelFileError(
                f"{files.path}: tensor {name} holds {tensor.dtype}, supported are {supported}. Take the head in one of "
                "these"
            )
    return tensors


def _weights_file(path: Path) -> Path:
    if path.is_file():
        if path.suffix not in (".safetensors", *PICKLED):
            raise ModelFileError(
                f"{path} is no draft head: give a .safetensors, .bin or .pt file, or the folder that holds it"
            )
        return path
    if not path.is_dir():
        raise ModelNotFoundError(f"{path} does not exist. Give the folder of a draft head, or its weights file")
    found = sorted(path.glob("*.safetensors"))
    for candidate in (path / SAFETENSORS, path / PICKLE, path / MEDUSA, *(found if len(found) == 1 else [])):
        if candidate.is_file():
            return candidate
    raise ModelFileError(
        f"{path} holds neither {SAFETENSORS} nor {PICKLE} nor {MEDUSA}: give the folder of a draft head"
    )


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelFileError(f"{path} cannot be read: {str(error).splitlines()[0][:120]}. Fetch it again") from None


def _load_pickle(path: Path) -> dict[str, Tensor]:
    try:
        loaded: object = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
        raise ModelFileError(
            f"{path} is refused: it holds more than tensors, or is damaged ({reason}). Take a .safetensors file"
        ) from None
    if not isinstance(loaded, dict) or not all(isinstance(v, Tensor) for v in loaded.values()):
        raise ModelFileError(f"{path} holds no dictionary of tensors. Take a .safetensors file")
    if odd := [str(name) for name, tensor in loaded.items() if not _is_dense(tensor)]:
        raise ModelFileError(
            f"{path} lacks numbers of {_listed(odd)}: sparse, nested and quantised tensors are not supported, nor any "
            "without storage of their own. Take a .safetensors file"
        )
    return {str(name): tensor for name, tensor in loaded.items()}


def _is_dense(tensor: Tensor) -> bool:
    """Whether every one of its numbers is there, as it is."""
    plain = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)
    stored = plain and tensor.device.type == "cpu"
    return stored and tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - N_SHOWN} more" if len(names) > N_SHOWN else ""
    return f"the tensor{'s' if len(names) > 1 else ''} {', '.join(name[:80] for name in names[:N_SHOWN])}{more}"
