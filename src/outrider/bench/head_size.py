"""What a draft head takes in memory when it drafts on the CPU, from its files: read and checked as loading does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outrider.drafters.block_net import BlockConfig, BlockNet
from outrider.drafters.head_kernels import choose_dtype
from outrider.drafters.head_kinds import READERS
from outrider.drafters.head_layer import BLOCKS
from outrider.drafters.medusa_net import MedusaConfig
from outrider.drafters.token_rows import KEPT, RECENT
from outrider.errors import ConfigError
from outrider.kernels import can_encode
from outrider.models.footprint import packed_nbytes

FLOAT_NBYTES = 4


@dataclass(frozen=True, slots=True)
class Head:
    """A head's file or folder, and the bytes of its weights in the form `form`."""

    path: Path
    nbytes: int
    form: str

    @classmethod
    def open(cls, drafter: str, path: Path, dtype: str) -> Head:
        """The head of this drafter, its weights as `dtype` says. Raises ModelFileError for files that are no head of
        this kind, and ConfigError for a dtype that is not possible or a drafter whose heads are not known."""
        if drafter not in READERS:
            raise ConfigError(
                f"plan does not know the heads of drafter {drafter!r}: choose one of {', '.join(READERS)}"
            )
        net = READERS[drafter](path)
        activations, packed = choose_dtype(drafter, dtype, torch.device("cpu"), next(net.parameters()).dtype)
        if packed is None:
            nbytes = sum(weight.numel() for weight in net.parameters()) * activations.itemsize
            return cls(path, nbytes, str(activations).removeprefix("torch."))
        return cls(path, sum(_packed(net, packed)), packed)


def _packed(net: nn.Module, dtype: str) -> Iterator[int]:
    """Bytes of a network's parts for the kernels, and of what it copies from its target."""
    for name, module in net.named_modules():
        if isinstance(module, nn.Linear):
            of_markov = name.startswith("markov_head.") and dtype == "int4"
            yield _matrix(module.out_features, module.in_features, "int8" if of_markov else dtype)
        else:
            yield sum(weight.numel() for weight in module.parameters(recurse=False)) * FLOAT_NBYTES
    yield from _shared(net.config, dtype)
    if isinstance(net, BlockNet):  # keys and values of the text are made by one matrix more, of all layers
        shape = net.config.layer
        yield _matrix(2 * net.config.n_layers * shape.n_kv_heads * shape.head_dim, shape.hidden_size, dtype)


def _shared(config: Any, dtype: str) -> Iterator[int]:
    """The target's head, packed once more, and the embeddings of the tokens that are drafted."""
    if isinstance(config, MedusaConfig):
        width, own_head, own_embedding = config.hidden_size, config.own_heads, True
    else:
        width, own_head = config.layer.hidden_size, config.own_head
        own_embedding = config.own_embedding or isinstance(config, BlockConfig)
    if not own_head:
        yield _matrix(config.draft_vocab_size, width, dtype)
    if not own_embedding:
        yield min(config.vocab_size, min(config.draft_vocab_size, KEPT) + RECENT) * width * FLOAT_NBYTES


def _matrix(rows: int, inputs: int, dtype: str) -> int:
    """As `pack_matrix` makes it."""
    if dtype in BLOCKS and can_encode(inputs):
        return packed_nbytes(rows, inputs, BLOCKS[dtype][1])
    return packed_nbytes(rows, inputs, torch.float32 if dtype == "float32" else torch.bfloat16)
