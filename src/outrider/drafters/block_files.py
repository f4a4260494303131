"""Block heads (DFlash, DSpark) in the public layouts, read and written.

    layout       configuration                                               layer ids                    read from
    speculators  speculators_model_type, transformer_layer_config            aux_hidden_state_layer_ids   top
    deepspec     flat, Qwen3DSparkModel                                      target_layer_ids             top
    zlab         flat, DFlashDraftModel (SpecForge also DSparkDraftModel)    target_layer_ids             dflash_config

Layer ids of `speculators` mean the *inputs* of target layers, as in EAGLE-3: one more than those of the others, which
mean outputs. A head speaks from its anchor where the configuration says so, or is a DSpark one and says nothing. Copies
of the target's embedding and head may be in the file or not. `d2t` holds offsets. What a head was trained for is kept
under the key "outrider", which other readers pass over.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from outrider.core.json_file import JsonObject
from outrider.drafters.block_net import MARKOV_HEADS, BlockConfig, BlockNet
from outrider.drafters.head_files import (
    SAFETENSORS,
    HeadFiles,
    load_net,
    read_head,
    speculators_json,
    stated_target,
    target_json,
    write_head,
)
from outrider.drafters.head_layer import LayerShape
from outrider.errors import ConfigError, ModelFileError

LAYOUTS = ("speculators", "deepspec", "zlab")
IGNORED = ("verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")
"""Copies of the target's own tensors, and tables that follow from the configuration."""
OUTPUT_OF_INPUT = -1
"""What the input of a layer is the output of: the layer before."""
MOST_LAYERS, MOST_ROWS, MOST_RANK = 64, 1024, 2**16
WHAT = "a block head"


def read_block(path: str | Path) -> BlockNet:
    """The head of a folder or file, in the file's own precision (float16 becomes float32).

    Raises ModelNotFoundError or ModelFileError that names the file and what is wrong with it.
    """
    files = read_head(path)
    config = read_block_config(files)
    return load_net(files, WHAT, config, BlockNet, str, like="fc.weight", ignored=IGNORED)


def write_block(net: BlockNet, folder: str | Path, layout: str) -> None:
    """Writes config.json and the weights of `net` in one of LAYOUTS."""
    if layout not in LAYOUTS:
        raise ConfigError(f"layout {layout!r} is not allowed: choose one of {', '.join(LAYOUTS)}")
    tensors = dict(net.state_dict())
    if net.config.draft_vocab_size < net.config.vocab_size:
        tensors |= {"d2t": net.vocab.offsets(), "t2d": net.vocab.flags()}
    config = {"speculators": _speculators_json, "deepspec": _deepspec_json, "zlab": _zlab_json}[layout](net.config)
    ours = target_json(net.config.target_name, net.config.vocabulary_sha256)
    dtype = str(net.dtype).removeprefix("torch.")
    write_head(folder, config | ours | {"torch_dtype": dtype}, tensors, file=SAFETENSORS)


def read_block_config(files: HeadFiles) -> BlockConfig:
    """From any of the layouts; what the file's tensors show, they decide. Raises ModelFileError for what is no block
    head, or one of an unsupported kind."""
    top, inner = files.config, files.config
    spark = "DSpark" in str(top.values.get("architectures"))
    if (kind := top.values.get("speculators_model_type")) is not None:
        if kind not in ("dflash", "dspark"):
            raise ModelFileError(
                f"{top.path}: speculators_model_type is {str(kind)[:40]!r}, expected 'dflash' or 'dspark'"
            )
        inner, spark = top.child("transformer_layer_config"), kind == "dspark"
    method = top.child("dflash_config")
    said = JsonObject(top.path, {**method.values, **{k: v for k, v in top.values.items() if v is not None}})
    projector = said.text("projector_type", "dspark" if spark else "dflash")
    if projector not in ("dflash", "dspark"):
        raise ModelFileError(f"{top.path}: projector_type is {projector[:40]!r}, supported are dflash and dspark")
    spark = spark or projector == "dspark"
    names = files.tensors.keys()
    layer = replace(LayerShape.read(inner), qk_norm="layers.0.self_attn.q_norm.weight" in names)
    vocab_size = inner.whole("vocab_size")
    config = BlockConfig(
        layer=layer,
        n_layers=inner.whole("num_hidden_layers"),
        vocab_size=vocab_size,
        draft_vocab_size=said.whole("draft_vocab_size", vocab_size),
        target_hidden_size=said.whole("target_hidden_size", layer.hidden_size),
        block_size=said.whole("block_size"),
        mask_token_id=said.whole("mask_token_id"),
        layer_ids=_layer_ids(said, inputs=kind is not None),
        sample_from_anchor=said.boolean("sample_from_anchor", said.boolean("shift_label", spark)),
        markov_rank=said.whole("markov_rank", 0),
        markov_head_type=said.text("markov_head_type", "vanilla"),
        confidence=said.boolean("enable_confidence_head", "confidence_head.proj.weight" in names),
        confidence_with_markov=said.boolean("confidence_head_with_markov", said.whole("markov_rank", 0) > 0),
        own_embedding="embed_tokens.weight" in names,
        own_head="lm_head.weight" in names,
        **stated_target(top, top.child("speculators_config").child("verifier").values.get("name_or_path")),
    )
    _check(config, inner, said)
    return config


def _layer_ids(said: JsonObject, *, inputs: bool) -> tuple[int, ...]:
    """The layers whose outputs are read; -1 is the embedding."""
    name = "aux_hidden_state_layer_ids" if inputs else "target_layer_ids"
    ids = said.values.get(name)
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise ModelFileError(f"{said.path}: {name!r} is {str(ids)[:60]}, expected a list of layer numbers")
    return tuple(i + OUTPUT_OF_INPUT if inputs else i for i in ids)


def _check(config: BlockConfig, inner: JsonObject, said: JsonObject) -> None:
    """Raises ModelFileError for sizes that fit no network, and for what would compute something else."""
    path = said.path
    least = 1 if config.sample_from_anchor else 2
    ranges = {
        "num_hidden_layers": (config.n_layers, 1, MOST_LAYERS),
        "block_size": (config.block_size, least, MOST_ROWS),
        "draft_vocab_size": (config.draft_vocab_size, 1, config.vocab_size),
        "mask_token_id": (config.mask_token_id, 0, config.vocab_size - 1),
        "markov_rank": (config.markov_rank, 0, MOST_RANK),
        "target_hidden_size": (config.target_hidden_size, 1, 2**31 - 1),
    }
    for name, (value, low, high) in ranges.items():
        if not low <= value <= high:
            raise ModelFileError(f"{path}: {name} is {value}, allowed are {low} to {high}")
    if config.markov_rank and config.markov_head_type not in MARKOV_HEADS:
        raise ModelFileError(
            f"{path}: markov_head_type is {config.markov_head_type[:40]!r}, supported are {', '.join(MARKOV_HEADS)}"
        )
    if config.confidence and config.confidence_with_markov and not config.markov_rank:
        raise ModelFileError(f"{path}: the confidence head reads the Markov head's embedding, and markov_rank is 0")
    kinds = inner.values.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise ModelFileError(f"{path}: layer_types are {str(kinds)[:60]}, supported is full_attention alone")


def _speculators_json(config: BlockConfig) -> dict[str, object]:
    kind = "dspark" if config.markov_rank else "dflash"
    architecture = "DSparkSpeculator" if config.markov_rank else "DFlashSpeculator"
    fields: dict[str, object] = {
        **speculators_json(kind, architecture, config.target_name, config.n_drafts, _layers_json(config)),
        "aux_hidden_state_layer_ids": [layer - OUTPUT_OF_INPUT for layer in config.layer_ids],
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        **_sizes_json(config),
    }
    return fields | (_heads_json(config) if config.markov_rank or config.confidence else {})


def _deepspec_json(config: BlockConfig) -> dict[str, object]:
    """This layout's heads all speak from the anchor."""
    if not config.sample_from_anchor:
        raise ConfigError(
            "a head whose anchor does not speak cannot be written as deepspec: choose speculators or zlab"
        )
    fields: dict[str, object] = {"architectures": ["Qwen3DSparkModel"], **_layers_json(config)}
    fields |= {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.layer_ids)}
    return fields | {"num_anchors": 0, "tie_word_embeddings": False} | _sizes_json(config) | _heads_json(config)


def _zlab_json(config: BlockConfig) -> dict[str, object]:
    """DFlash's own layout has no sequential heads, and its anchor does not speak."""
    if config.sample_from_anchor or config.markov_rank or config.confidence:
        raise ConfigError(
            "a head that speaks from its anchor, or has a Markov or confidence head, cannot be written as zlab: choose "
            "speculators or deepspec"
        )
    method = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.layer_ids)}
    fields: dict[str, object] = {"architectures": ["DFlashDraftModel"], **_layers_json(config)}
    return fields | {"tie_word_embeddings": False, "dflash_config": method} | _sizes_json(config)


def _layers_json(config: BlockConfig) -> dict[str, object]:
    kinds = ["full_attention"] * config.n_layers
    return {
        **config.layer.to_json(),
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.n_layers,
        "layer_types": kinds,
    }


def _sizes_json(config: BlockConfig) -> dict[str, object]:
    sizes: dict[str, object] = {"block_size": config.block_size, "draft_vocab_size": config.draft_vocab_size}
    if config.target_hidden_size != config.layer.hidden_size:
        sizes["target_hidden_size"] = config.target_hidden_size
    return sizes


def _heads_json(config: BlockConfig) -> dict[str, object]:
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence and config.confidence_with_markov,
    }
