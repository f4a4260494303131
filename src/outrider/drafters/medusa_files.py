"""Medusa heads in the public layout, read and written.

    medusa_lm_head.pt     {head}.{block}.linear.{weight, bias}, and {head}.{n_layers}.weight: that head's lm_head
    config.json           medusa_num_heads, medusa_num_layers, base_model_name_or_path

The same names in a .safetensors file are read too. Sizes are those of the tensors, and `vocab_size` where the heads
have no lm_heads: they share the target's, of a reduced vocabulary (`d2t`, `t2d`, as in `ReducedVocab`) its rows. What
heads were trained for is kept under the key "outrider", which other readers pass over.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from torch import Tensor

from outrider.core.json_file import JsonObject
from outrider.drafters.head_files import MEDUSA, HeadFiles, load_net, read_head, stated_target, target_json, write_head
from outrider.drafters.medusa_net import MedusaConfig, MedusaNet
from outrider.errors import ModelFileError

MOST = 64
"""Heads, and blocks of a head, that a file may ask for."""


def read_medusa(path: str | Path) -> MedusaNet:
    """The heads of a folder or file, in the file's own precision (float16 becomes float32).

    Raises ModelNotFoundError or ModelFileError that names the file and what is wrong with it.
    """
    files = read_head(path)
    config = _read_config(files)
    return load_net(files, "Medusa heads", config, MedusaNet, partial(_theirs, config), like="blocks.0.0.weight")


def write_medusa(net: MedusaNet, folder: str | Path) -> None:
    """Writes config.json and medusa_lm_head.pt."""
    config, first = net.config, next(net.parameters())
    tensors: dict[str, Tensor] = {_theirs(config, name): tensor for name, tensor in net.state_dict().items()}
    if config.draft_vocab_size < config.vocab_size:
        tensors |= {"d2t": net.vocab.offsets(), "t2d": net.vocab.flags()}
    fields = {
        "model_type": "medusa",
        "medusa_num_heads": config.n_heads,
        "medusa_num_layers": config.n_layers,
        "base_model_name_or_path": config.target_name,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "torch_dtype": str(first.dtype).removeprefix("torch."),
        **target_json(config.target_name, config.vocabulary_sha256),
    }
    write_head(folder, fields, tensors, file=MEDUSA)


def _theirs(config: MedusaConfig, name: str) -> str:
    """Our name of a tensor as the public layout spells it."""
    parts = name.split(".")
    if parts[0] == "lm_heads":
        return f"{parts[1]}.{config.n_layers}.weight"
    return f"{parts[1]}.{parts[2]}.linear.{parts[3]}"


def _read_config(files: HeadFiles) -> MedusaConfig:
    config, first = files.config, files.tensors.get("0.0.linear.weight")
    if first is None or first.dim() != 2:
        raise ModelFileError(f"{files.path} holds no Medusa heads: the tensor 0.0.linear.weight is not there")
    present = len({name.split(".")[0] for name in files.tensors if re.fullmatch(r"\d+\.0\.linear\.weight", name)})
    n_heads = _count(config, "medusa_num_heads", present)
    n_layers = _count(config, "medusa_num_layers", 1)
    lm_head = files.tensors.get(f"0.{n_layers}.weight")
    rows = lm_head.shape[0] if lm_head is not None and lm_head.dim() else None
    vocab_size = config.whole("vocab_size", rows if "d2t" not in files.tensors else None)
    draft_vocab_size = config.whole("draft_vocab_size", vocab_size if rows is None else rows)
    if not 1 <= draft_vocab_size <= vocab_size < 2**31:
        raise ModelFileError(f"{config.path}: draft_vocab_size {draft_vocab_size} of a vocabulary of {vocab_size}")
    return MedusaConfig(
        hidden_size=first.shape[1],
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        n_heads=n_heads,
        n_layers=n_layers,
        own_heads=lm_head is not None,
        **stated_target(config, config.values.get("base_model_name_or_path")),
    )


def _count(config: JsonObject, name: str, default: int) -> int:
    if not 1 <= (count := config.whole(name, default)) <= MOST:
        raise ModelFileError(f"{config.path}: {name} is {count}, allowed are 1 to {MOST}")
    return count
