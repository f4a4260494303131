"""Next-token modules in the public layouts, read and written.

    layout       the module's tensors                                                 configuration
    speculators  mtp_layers.0.{token_layernorm, hidden_layernorm, input_proj,         speculators_model_type "mtp",
                 final_layernorm, self_attn.*, ...}                                   transformer_layer_config
    qwen         mtp.{pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm},           flat
                 mtp.layers.0.*
    deepseek     model.layers.N.{enorm, hnorm, eh_proj, shared_head.norm,             flat
                 shared_head.head, self_attn.*, ...}

Reading goes by the tensors' names, and passes over the rest of a model that a module lies in. The embedding comes first
in what input_proj, fc and eh_proj read. Only dense layers are computed: mixtures of experts, latent attention and the
gated layers of Qwen3-Next are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from outrider.core.json_file import JsonObject
from outrider.drafters.head_files import SAFETENSORS, HeadFiles, load_net, read_head, speculators_json, write_head
from outrider.drafters.mtp_net import MtpConfig, MtpNet
from outrider.drafters.recurrent_files import all_tensors, common_fields, common_json, dtype_name, layer_json
from outrider.errors import ConfigError, ModelFileError

NAMES = {
    "speculators": {
        "embed_norm.": "mtp_layers.0.token_layernorm.",
        "hidden_norm.": "mtp_layers.0.hidden_layernorm.",
        "fc.": "mtp_layers.0.input_proj.",
        "norm.": "mtp_layers.0.final_layernorm.",
        "midlayer.": "mtp_layers.0.",
    },
    "qwen": {
        "embed_norm.": "mtp.pre_fc_norm_embedding.",
        "hidden_norm.": "mtp.pre_fc_norm_hidden.",
        "fc.": "mtp.fc.",
        "norm.": "mtp.norm.",
        "midlayer.": "mtp.layers.0.",
    },
    "deepseek": {
        "embed_norm.": "{}.enorm.",
        "hidden_norm.": "{}.hnorm.",
        "fc.": "{}.eh_proj.",
        "norm.": "{}.shared_head.norm.",
        "lm_head.": "{}.shared_head.head.",
        "embed_tokens.": "{}.embed_tokens.",
        "midlayer.": "{}.",
    },
}
"""Our names and theirs; the longer of two that fit is meant."""
LAYOUTS = ("speculators", "qwen")
SHARED = ("lm_head.weight", "embed_tokens.weight", "d2t", "t2d")
UNKNOWN = {
    "mixtures of experts": re.compile(r"\.experts\.|mlp\.gate\.|shared_expert"),
    "latent attention": re.compile(r"kv_a_proj|kv_b_proj|q_a_proj"),
    "linear attention": re.compile(r"linear_attn"),
}


def read_mtp(path: str | Path) -> MtpNet:
    """The module of a folder or file, in the file's own precision (float16 becomes float32).

    Raises ModelNotFoundError or ModelFileError that names the file and what is wrong with it.
    """
    given = read_head(path)
    layout, names = _layout(given)
    files = HeadFiles(given.path, given.config, _own(given.tensors, names, whole=layout != "deepseek"))
    for what, pattern in UNKNOWN.items():
        if found := next((name for name in files.tensors if pattern.search(name)), None):
            raise ModelFileError(
                f"{given.path}: tensor {found}: modules with {what} are not supported, only dense ones"
            )

    def theirs(name: str) -> str:
        return _renamed(name, names) or name

    config = _read_config(files, layout, theirs)
    return load_net(files, "a next-token module", config, MtpNet, theirs, like="norm.weight")


def write_mtp(net: MtpNet, folder: str | Path, layout: str) -> None:
    """Writes config.json and the weights of `net` in one of LAYOUTS."""
    if layout not in LAYOUTS:
        raise ConfigError(f"layout {layout!r} is not allowed: choose one of {', '.join(LAYOUTS)}")
    tensors = {_renamed(name, NAMES[layout]) or name: tensor for name, tensor in all_tensors(net).items()}
    if layout == "speculators":
        config = speculators_json("mtp", "MTPDraftModel", net.config.target_name, 4, layer_json(net.config))
        config |= {"num_nextn_predict_layers": 1}
    else:
        config = {**net.config.layer.to_json(), "vocab_size": net.config.vocab_size, "mtp_num_hidden_layers": 1}
    config |= {**common_json(net.config), "torch_dtype": dtype_name(net)}
    write_head(folder, config, tensors, file=SAFETENSORS)


def _layout(files: HeadFiles) -> tuple[str, dict[str, str]]:
    """Which layout the tensors are in, and its names by ours."""
    for layout, names in NAMES.items():
        pattern = re.escape(names["fc."] + "weight").replace(r"\{\}", r"(model\.layers\.\d+)")
        found = sorted({match for name in files.tensors if (match := re.fullmatch(pattern, name))}, key=str)
        if len(found) > 1:
            raise ModelFileError(f"{files.path} holds {len(found)} next-token modules; files of one are supported")
        if found:
            prefix = found[0].group(1) if found[0].groups() else ""
            return layout, {ours: theirs.format(prefix) for ours, theirs in names.items()}
    expected = ", ".join(names["fc."].format("model.layers.N") + "weight" for names in NAMES.values())
    raise ModelFileError(f"{files.path} is no next-token module: it holds none of {expected}")


def _own(tensors: dict[str, Tensor], names: dict[str, str], *, whole: bool) -> dict[str, Tensor]:
    """The module's tensors, as the file names them; `whole`: the file's embedding and lm_head are the module's own."""
    shared, prefixes = SHARED if whole else (), tuple(names.values())
    return {name: tensor for name, tensor in tensors.items() if name.startswith(prefixes) or name in shared}


def _renamed(name: str, names: dict[str, str]) -> str | None:
    """`name` with the longest of the prefixes `names` replaced; None where none fits."""
    prefix = max((prefix for prefix in names if name.startswith(prefix)), key=len, default=None)
    return None if prefix is None else names[prefix] + name.removeprefix(prefix)


def _read_config(files: HeadFiles, layout: str, theirs: Callable[[str], str]) -> MtpConfig:
    config = inner = files.config
    verifier = config.child("verifier")
    if layout == "speculators":
        if (kind := config.values.get("speculators_model_type")) != "mtp":
            raise ModelFileError(f"{config.path}: speculators_model_type is {str(kind)[:40]!r}, expected 'mtp'")
        inner = config.child("transformer_layer_config")
        verifier = config.child("speculators_config").child("verifier")
    elif "text_config" in config.values:
        inner = config.child("text_config")
    _require_dense(inner)
    fields = common_fields(files, inner, verifier, theirs)
    if (width := fields["layer"].hidden_size) != fields["target_hidden_size"]:
        raise ModelFileError(f"{config.path}: target_hidden_size is {fields['target_hidden_size']}, the module {width}")
    return MtpConfig(**fields)


def _require_dense(inner: JsonObject) -> None:
    kind = inner.text("model_type", "llama")
    if kind.startswith(("qwen3_next", "qwen3_5", "qwen3_6", "qwen3_8")):
        raise ModelFileError(f"{inner.path}: layers of model_type {kind[:40]!r} are gated, which is not supported")
    for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
        if (count := inner.whole(key, 1)) != 1:
            raise ModelFileError(f"{inner.path}: {key} is {count}; modules of one layer are supported")
