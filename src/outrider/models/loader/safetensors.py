"""Hugging Face folders as checkpoints. Headers and shard names are checked here; `safetensors` reads the tensors."""

from __future__ import annotations

import re
import struct
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeGuard

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.core.json_file import JsonObject, parse_object
from outrider.errors import ModelFileError
from outrider.models.loader.checkpoint import RawTensor, TokenizerFolder, check_layout, check_sizes
from outrider.models.loader.hf_config import architecture, read_chat_template, read_config
from outrider.models.loader.stored_rows import Place

DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
MOST_HEADER_BYTES = 100_000_000
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOP = {"model.embed_tokens.weight": "embed.weight", "model.norm.weight": "norm.weight", "lm_head.weight": "head.weight"}
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": part for part in "qkvo"},
    **{f"self_attn.{part}_norm": f"{part}_norm" for part in "qk"},
    **{f"mlp.{part}_proj": part for part in ("gate", "up", "down")},
}
LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,5})\.([a-z_.]+)\.(weight|bias)")
DERIVED = re.compile(r"model\.(layers\.[0-9]+\.self_attn\.)?rotary_emb\.inv_freq")


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """A tensor's entry in a header; bytes [start, stop) of the file."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsCheckpoint:
    """A `Checkpoint` on a folder; `only` names the one file to read tensors from."""

    def __init__(self, folder: Path, *, only: str | None = None) -> None:
        self.path = folder if only is None else folder / only
        config = JsonObject.read(folder / "config.json")
        architecture(config)
        stored = [tensor for file in _files(folder, only) for tensor in read_header(file)]
        self._tensors, unknown = _canonical(folder, stored, config.boolean("tie_word_embeddings", False))
        self.config = read_config(
            config, qkv_bias="layers.0.q.bias" in self._tensors, qk_norm="layers.0.q_norm.weight" in self._tensors
        )
        check_sizes(self.path, self.config, len(stored))
        check_layout(self.path, self.config, {name: t.shape for name, t in self._tensors.items()}, unknown)
        self.tokenizer_source = TokenizerFolder(folder)
        self.chat_template = read_chat_template(folder)
        self.size_bytes = sum(tensor.stop - tensor.start for tensor in self._tensors.values())
        self.quantisation = Counter(tensor.dtype for tensor in self._tensors.values()).most_common(1)[0][0]

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._read(name).to(dtype, copy=True).contiguous()

    def rows(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        return self._read(name)[start:stop].to(dtype, copy=True).contiguous()

    def raw(self, name: str) -> RawTensor:
        stored = self._tensors[name]
        data = self._read(name).reshape(-1).view(torch.uint8)
        return RawTensor(stored.dtype, stored.shape, data, None, Place(stored.file, stored.start))

    def release(self) -> None:
        """Nothing to do: a file is mapped for as long as the tensor read from it lives."""

    def _read(self, name: str) -> Tensor:
        stored = self._tensors[name]
        try:
            with safe_open(stored.file, framework="pt") as file:
                tensor = file.get_tensor(stored.name)
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{stored.file}: tensor {stored.name} cannot be read: {error}") from None
        assert isinstance(tensor, Tensor)
        return tensor


def read_header(file: Path) -> list[SafetensorsEntry]:
    """Raises ModelFileError, one line, for anything in the header that does not hold."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            start = opened.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if 8 + length > size or length > MOST_HEADER_BYTES:
                raise _damaged(file, f"a header of {length} bytes announced in a file of {size}")
            header = parse_object(file, opened.read(length))
    except OSError as error:
        raise ModelFileError(f"{file} cannot be read: {error.strerror}") from None
    header.pop("__metadata__", None)
    tensors = sorted((_entry(file, *item, 8 + length, size) for item in header.items()), key=lambda t: t.start)
    for left, right in pairwise(tensors):
        if left.stop > right.start:
            raise _damaged(file, f"tensors {left.name[:80]!r} and {right.name[:80]!r} overlap")
    try:
        with safe_open(file, framework="pt"):
            return tensors
    except (SafetensorError, OSError) as error:
        raise _damaged(file, str(error).splitlines()[0][:120]) from None


def _entry(file: Path, name: str, entry: object, data_start: int, file_bytes: int) -> SafetensorsEntry:
    data_bytes = file_bytes - data_start
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise _damaged(file, f"tensor {name[:80]!r} lacks a sound dtype, shape or data_offsets")
    if dtype not in DTYPE_BYTES:
        raise ModelFileError(
            f"{file}: tensor {name[:80]!r} is stored as {dtype[:20]!r}, readable are {', '.join(DTYPE_BYTES)}. "
            "Take the bfloat16 folder of this model, or a GGUF file"
        )
    start, stop = offsets
    need = DTYPE_BYTES[dtype]
    for dim in shape:
        need *= dim
        if need > data_bytes:
            break
    if not start <= stop <= data_bytes or stop - start != need:
        raise _damaged(file, f"tensor {name[:80]!r} does not fill bytes {start} to {stop} of {data_bytes}")
    return SafetensorsEntry(file, name, dtype, tuple(shape), data_start + start, data_start + stop)


def _naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) <= 8 and all(type(v) is int and 0 <= v < 2**63 for v in value)


def _damaged(file: Path, what: str) -> ModelFileError:
    return ModelFileError(f"{file}: {what}. The file is damaged or incomplete; fetch it again")


def _files(folder: Path, only: str | None) -> list[Path]:
    """The files that hold the tensors: the one asked for, those of the index, or the single one."""
    if only is not None:
        return [folder / only]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        found = sorted(folder.glob("*.safetensors"))
        if len(found) == 1:
            return found
        raise ModelFileError(f"{folder} has {len(found)} safetensors files and no {INDEX}. Fetch the folder again")
    names = set(JsonObject.read(folder / INDEX).child("weight_map").values.values())
    files = []
    for name in sorted(names, key=str):
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelFileError(
                f"{folder / INDEX}: {str(name)[:80]!r} is no name of a safetensors file of this folder"
            )
        files.append(folder / name)
    if not files:
        raise ModelFileError(f"{folder / INDEX} names no files. Fetch the folder again")
    return files


def _canonical(
    folder: Path, stored: list[SafetensorsEntry], tied: bool
) -> tuple[dict[str, SafetensorsEntry], list[str]]:
    """The tensors by canonical name, and the stored names that have none. A tied head's copy is left out."""
    tensors: dict[str, SafetensorsEntry] = {}
    unknown: list[str] = []
    for tensor in stored:
        match = LAYER.fullmatch(tensor.name)
        if tensor.name in TOP:
            name = TOP[tensor.name]
        elif match is not None and match[2] in PARTS:
            name = f"layers.{match[1]}.{PARTS[match[2]]}.{match[3]}"
        else:
            unknown += [] if DERIVED.fullmatch(tensor.name) else [tensor.name]
            continue
        if name in tensors:
            raise ModelFileError(f"{folder}: tensor {tensor.name} is in two files. Fetch the folder again")
        if not (tied and name == "head.weight"):
            tensors[name] = tensor
    return tensors, unknown
