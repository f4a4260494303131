"""EAGLE-3 heads in the public layouts, read and written.

    layout       weights             configuration                                   the layer's tensors
    safeailab    pytorch_model.bin   flat, LlamaForCausalLM                          midlayer.*
    specforge    model.safetensors   flat, LlamaForCausalLMEagle3, eagle_config      midlayer.*
    speculators  model.safetensors   speculators_model_type, transformer_layer_config   layers.0.*

Reading goes by what is there, not by who wrote it: either name of the layer, either kind of file. `d2t` holds offsets.
Layer ids mean the *inputs* of target layers in all three. What a head was trained for is kept under the key "outrider",
which other readers pass over.
"""

from __future__ import annotations

from pathlib import Path

import torch

from outrider.core.json_file import JsonObject
from outrider.drafters.eagle3_net import Eagle3Config, Eagle3Net
from outrider.drafters.head_files import PICKLE, SAFETENSORS, HeadFiles, check_tensors, read_head, write_head
from outrider.drafters.head_layer import LayerShape
from outrider.drafters.reduced_vocab import ReducedVocab
from outrider.errors import ConfigError, ModelFileError

LAYOUTS = ("safeailab", "specforge", "speculators")
OURS, THEIRS = "midlayer.", "layers.0."
IGNORED = ("verifier_norm.weight", "verifier_lm_head.weight", f"{OURS}self_attn.rotary_emb.inv_freq")
"""Copies of the target's own tensors, and tables that follow from the configuration."""
OPTIONAL = {"embedding": "embed_tokens", "head": "lm_head"}
"""What a file may leave out: a head without them shares the target's, of lm_head the rows of the ids of d2t."""
SWITCHES = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")
WHAT = "an EAGLE-3 head"


def read_eagle3(path: str | Path) -> Eagle3Net:
    """The head of a folder or file, in the file's own precision (float16 becomes float32).

    Raises ModelNotFoundError or ModelFileError that names the file and what is wrong with it.
    """
    files = _canonical(read_head(path))
    own = {f"own_{part}": f"{name}.weight" in files.tensors for part, name in OPTIONAL.items()}
    config = read_eagle3_config(files.config, **own)
    with torch.device("meta"):
        shapes = {name: tuple(t.shape) for name, t in Eagle3Net(config, _placeholder(config)).state_dict().items()}
    reduced = config.draft_vocab_size < config.vocab_size
    d2t, t2d = {"d2t": (config.draft_vocab_size,)}, {"t2d": (config.vocab_size,)}
    required, optional = (shapes | d2t, t2d) if reduced else (shapes, d2t | t2d)
    tensors = check_tensors(files, WHAT, required, optional, IGNORED)
    vocab = ReducedVocab.whole(config.vocab_size)
    if "d2t" in tensors:
        vocab = ReducedVocab.from_tensors(str(files.path), tensors["d2t"], tensors.get("t2d"), config.vocab_size)
    dtype = tensors["fc.weight"].dtype
    dtype = dtype if dtype in (torch.float32, torch.bfloat16) else torch.float32
    with torch.device("meta"):
        net = Eagle3Net(config, vocab)
    net.load_state_dict({name: tensors[name].to(dtype) for name in shapes}, assign=True)
    return net


def write_eagle3(net: Eagle3Net, folder: str | Path, layout: str) -> None:
    """Writes config.json and the weights of `net` in one of LAYOUTS."""
    if layout not in LAYOUTS:
        raise ConfigError(f"layout {layout!r} is not allowed: choose one of {', '.join(LAYOUTS)}")
    tensors = dict(net.state_dict())
    tensors |= {"d2t": net.vocab.offsets(), "t2d": net.vocab.flags()}
    if layout == "speculators":
        tensors = {name.replace(OURS, THEIRS, 1): tensor for name, tensor in tensors.items()}
        config = _speculators_json(net.config)
    else:
        config = _flat_json(net.config, "LlamaForCausalLM" if layout == "safeailab" else "LlamaForCausalLMEagle3")
    dtype = str(net.dtype).removeprefix("torch.")
    write_head(folder, config | {"torch_dtype": dtype}, tensors, file=PICKLE if layout == "safeailab" else SAFETENSORS)


def read_eagle3_config(config: JsonObject, *, own_embedding: bool, own_head: bool) -> Eagle3Config:
    """From a flat configuration or one of `speculators`. Raises ModelFileError for what is no EAGLE-3 head."""
    inner, verifier = config, config.child("verifier")
    if (kind := config.values.get("speculators_model_type")) is not None:
        if kind != "eagle3":
            raise ModelFileError(f"{config.path}: speculators_model_type is {str(kind)[:40]!r}, expected 'eagle3'")
        inner = config.child("transformer_layer_config")
        verifier = config.child("speculators_config").child("verifier")
    if (n_layers := inner.whole("num_hidden_layers", 1)) != 1:
        raise ModelFileError(f"{config.path}: num_hidden_layers is {n_layers}; heads of one layer are supported")
    layer = LayerShape.read(inner)
    eagle, ours = config.child("eagle_config"), config.child("outrider")
    if not eagle.boolean("use_aux_hidden_state", True):
        raise ModelFileError(f"{config.path}: use_aux_hidden_state is false: that head reads no layers of its target")
    switches = {name: config.boolean(name, eagle.boolean(name, False)) for name in SWITCHES}
    if switches["fc_norm"] and switches["norm_before_fc"]:
        raise ModelFileError(f"{config.path}: fc_norm and norm_before_fc exclude each other, and both are true")
    vocab_size = inner.whole("vocab_size")
    draft_vocab_size = config.whole("draft_vocab_size", vocab_size)
    if not 1 <= draft_vocab_size <= vocab_size < 2**31:
        raise ModelFileError(f"{config.path}: draft_vocab_size {draft_vocab_size} of a vocabulary of {vocab_size}")
    said = ours.values.get("target") or verifier.values.get("name_or_path")
    vocabulary = ours.values.get("vocabulary_sha256")
    return Eagle3Config(
        layer=layer,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=config.whole("target_hidden_size", layer.hidden_size),
        layer_ids=_layer_ids(config, eagle),
        own_embedding=own_embedding,
        own_head=own_head,
        **switches,
        target_name=said if isinstance(said, str) else None,
        vocabulary_sha256=vocabulary if isinstance(vocabulary, str) else None,
    )


def _layer_ids(config: JsonObject, eagle: JsonObject) -> tuple[int, ...] | None:
    names = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
    stated = [source.values[name] for source in (config, eagle) for name in names if source.values.get(name)]
    if not stated:
        return None
    ids = stated[0]
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise ModelFileError(f"{config.path}: {names[0]} is {str(ids)[:60]}, expected a list of layer numbers >= 0")
    return tuple(ids)


def _canonical(files: HeadFiles) -> HeadFiles:
    """The layer's tensors under the name `midlayer`."""
    if any(name.startswith(OURS) for name in files.tensors):
        return files
    tensors = {
        OURS + name.removeprefix(THEIRS) if name.startswith(THEIRS) else name: tensor
        for name, tensor in files.tensors.items()
    }
    return HeadFiles(files.path, files.config, tensors)


def _placeholder(config: Eagle3Config) -> ReducedVocab:
    return ReducedVocab(torch.empty(config.draft_vocab_size, dtype=torch.int64), config.vocab_size)


def _flat_json(config: Eagle3Config, architecture: str) -> dict[str, object]:
    fields = {"architectures": [architecture], **config.layer.to_json(), **_common_json(config)}
    fields |= {"vocab_size": config.vocab_size, "tie_word_embeddings": False}
    if config.layer_ids is not None:
        ids = list(config.layer_ids)
        fields["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    return fields


def _speculators_json(config: Eagle3Config) -> dict[str, object]:
    fields: dict[str, object] = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": config.target_name, "architectures": []},
        },
        "transformer_layer_config": {**config.layer.to_json(), "vocab_size": config.vocab_size},
        **_common_json(config),
    }
    if config.layer_ids is not None:
        fields["eagle_aux_hidden_state_layer_ids"] = list(config.layer_ids)
    return fields


def _common_json(config: Eagle3Config) -> dict[str, object]:
    """`target_hidden_size` is stated only where it differs: to some readers it means that no embedding is shared."""
    fields: dict[str, object] = {"draft_vocab_size": config.draft_vocab_size}
    fields |= {name: getattr(config, name) for name in SWITCHES}
    if config.target_hidden_size != config.layer.hidden_size:
        fields["target_hidden_size"] = config.target_hidden_size
    fields["outrider"] = {"target": config.target_name, "vocabulary_sha256": config.vocabulary_sha256}
    return fields
