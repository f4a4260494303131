"""What the files of heads have in common that draft token by token: sizes, vocabularies, and what is shared.

A file without `embed_tokens` or `lm_head` shares the target's. What a head was trained for is kept under the key
"outrider", which other readers pass over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from outrider.core.json_file import JsonObject
from outrider.drafters.head_files import HeadFiles, stated_target, target_json
from outrider.drafters.head_layer import LayerShape
from outrider.drafters.recurrent_net import RecurrentConfig, RecurrentNet
from outrider.errors import ModelFileError


def common_fields(
    files: HeadFiles, inner: JsonObject, verifier: JsonObject, theirs: Callable[[str], str]
) -> dict[str, Any]:
    """Fields of `RecurrentConfig`. `inner` describes the layer, `verifier` the target; `theirs` is as in `load_net`.
    Raises ModelFileError."""
    config, layer = files.config, LayerShape.read(inner)
    vocab_size = inner.whole("vocab_size")
    draft_vocab_size = config.whole("draft_vocab_size", vocab_size)
    if not 1 <= draft_vocab_size <= vocab_size < 2**31:
        raise ModelFileError(f"{config.path}: draft_vocab_size {draft_vocab_size} of a vocabulary of {vocab_size}")
    target_hidden_size = config.whole("target_hidden_size", layer.hidden_size)
    if not 1 <= target_hidden_size < 2**31:
        raise ModelFileError(f"{config.path}: target_hidden_size is {target_hidden_size}, allowed are 1 to {2**31 - 1}")
    return {
        "layer": layer,
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "target_hidden_size": target_hidden_size,
        "own_embedding": theirs("embed_tokens.weight") in files.tensors,
        "own_head": theirs("lm_head.weight") in files.tensors,
        **stated_target(config, verifier.values.get("name_or_path")),
    }


def all_tensors(net: RecurrentNet) -> dict[str, Tensor]:
    """The network's and its vocabulary's."""
    return {**net.state_dict(), "d2t": net.vocab.offsets(), "t2d": net.vocab.flags()}


def dtype_name(net: RecurrentNet) -> str:
    """As configurations spell it."""
    return str(net.dtype).removeprefix("torch.")


def common_json(config: RecurrentConfig) -> dict[str, object]:
    """`target_hidden_size` is stated only where it differs: to some readers it means that no embedding is shared."""
    fields: dict[str, object] = {"draft_vocab_size": config.draft_vocab_size}
    if config.target_hidden_size != config.layer.hidden_size:
        fields["target_hidden_size"] = config.target_hidden_size
    return fields | target_json(config.target_name, config.vocabulary_sha256)


def layer_json(config: RecurrentConfig) -> dict[str, object]:
    """The layer, as the layout `speculators` states it."""
    return {**config.layer.to_json(), "vocab_size": config.vocab_size}
