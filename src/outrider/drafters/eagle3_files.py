"""EAGLE-3 heads in the public layouts, read and written.

    layout       weights             configuration                                   the layer's tensors
    safeailab    pytorch_model.bin   flat, LlamaForCausalLM                          midlayer.*
    specforge    model.safetensors   flat, LlamaForCausalLMEagle3, eagle_config      midlayer.*
    speculators  model.safetensors   speculators_model_type, transformer_layer_config   layers.0.*

Reading goes by what is there, not by who wrote it: either name of the layer, either kind of file. `d2t` holds offsets.
Layer ids mean the *inputs* of target layers in all three.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from outrider.core.json_file import JsonObject
from outrider.drafters.eagle3_net import Eagle3Config, Eagle3Net
from outrider.drafters.head_files import (
    PICKLE,
    SAFETENSORS,
    HeadFiles,
    load_net,
    read_head,
    speculators_json,
    write_head,
)
from outrider.drafters.recurrent_files import all_tensors, common_fields, common_json, dtype_name, layer_json
from outrider.errors import ConfigError, ModelFileError

LAYOUTS = ("safeailab", "specforge", "speculators")
OURS, THEIRS = "midlayer.", "layers.0."
TABLES = tuple(f"{layer}self_attn.rotary_emb.inv_freq" for layer in (OURS, THEIRS))
IGNORED = ("verifier_norm.weight", "verifier_lm_head.weight", *TABLES)
"""Copies of the target's own tensors, and tables that follow from the configuration."""
SWITCHES = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")


def read_eagle3(path: str | Path) -> Eagle3Net:
    """The head of a folder or file, in the file's own precision (float16 becomes float32).

    Raises ModelNotFoundError or ModelFileError that names the file and what is wrong with it.
    """
    files = read_head(path)
    layer = next((name for name in (OURS, THEIRS) if any(t.startswith(name) for t in files.tensors)), OURS)

    def theirs(name: str) -> str:
        return layer + name.removeprefix(OURS) if name.startswith(OURS) else name

    config = _read_config(files, theirs)
    return load_net(files, "an EAGLE-3 head", config, Eagle3Net, theirs, like="norm.weight", ignored=IGNORED)


def write_eagle3(net: Eagle3Net, folder: str | Path, layout: str) -> None:
    """Writes config.json and the weights of `net` in one of LAYOUTS."""
    if layout not in LAYOUTS:
        raise ConfigError(f"layout {layout!r} is not allowed: choose one of {', '.join(LAYOUTS)}")
    tensors = all_tensors(net)
    if layout == "speculators":
        tensors = {name.replace(OURS, THEIRS, 1): tensor for name, tensor in tensors.items()}
        config = _speculators_json(net.config)
    else:
        config = _flat_json(net.config, "LlamaForCausalLM" if layout == "safeailab" else "LlamaForCausalLMEagle3")
    config["torch_dtype"] = dtype_name(net)
    write_head(folder, config, tensors, file=PICKLE if layout == "safeailab" else SAFETENSORS)


def _read_config(files: HeadFiles, theirs: Callable[[str], str]) -> Eagle3Config:
    """From a flat configuration or one of `speculators`. Raises ModelFileError for what is no EAGLE-3 head."""
    config = inner = files.config
    verifier = config.child("verifier")
    if (kind := config.values.get("speculators_model_type")) is not None:
        if kind != "eagle3":
            raise ModelFileError(f"{config.path}: speculators_model_type is {str(kind)[:40]!r}, expected 'eagle3'")
        inner = config.child("transformer_layer_config")
        verifier = config.child("speculators_config").child("verifier")
    if (n_layers := inner.whole("num_hidden_layers", 1)) != 1:
        raise ModelFileError(f"{config.path}: num_hidden_layers is {n_layers}; heads of one layer are supported")
    fields = common_fields(files, inner, verifier, theirs)
    eagle = config.child("eagle_config")
    if not eagle.boolean("use_aux_hidden_state", True):
        raise ModelFileError(f"{config.path}: use_aux_hidden_state is false: that head reads no layers of its target")
    switches: dict[str, Any] = {name: config.boolean(name, eagle.boolean(name, False)) for name in SWITCHES}
    if switches["fc_norm"] and switches["norm_before_fc"]:
        raise ModelFileError(f"{config.path}: fc_norm and norm_before_fc exclude each other, and both are true")
    return Eagle3Config(**fields, layer_ids=_layer_ids(config, eagle), **switches)


def _layer_ids(config: JsonObject, eagle: JsonObject) -> tuple[int, ...] | None:
    names = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
    stated = [source.values[name] for source in (config, eagle) for name in names if source.values.get(name)]
    if not stated:
        return None
    ids = stated[0]
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise ModelFileError(f"{config.path}: {names[0]} is {str(ids)[:60]}, expected a list of layer numbers >= 0")
    return tuple(ids)


def _flat_json(config: Eagle3Config, architecture: str) -> dict[str, object]:
    fields = {"architectures": [architecture], **config.layer.to_json(), **common_json(config), **_switches(config)}
    fields |= {"vocab_size": config.vocab_size, "tie_word_embeddings": False}
    if config.layer_ids is not None:
        ids = list(config.layer_ids)
        fields["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    return fields


def _speculators_json(config: Eagle3Config) -> dict[str, object]:
    fields = speculators_json("eagle3", "Eagle3DraftModel", config.target_name, 5, layer_json(config))
    fields |= {**common_json(config), **_switches(config)}
    if config.layer_ids is not None:
        fields["eagle_aux_hidden_state_layer_ids"] = list(config.layer_ids)
    return fields


def _switches(config: Eagle3Config) -> dict[str, object]:
    return {name: getattr(config, name) for name in SWITCHES}
