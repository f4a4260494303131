"""GGUF files as checkpoints: names, rotary order, configuration and vocabulary from the metadata."""

from __future__ import annotations

import mmap
import re
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from outrider.errors import ModelFileError
from outrider.models.loader.checkpoint import (
    DecoderConfig,
    RawTensor,
    check_layout,
    check_sizes,
    unknown_architecture,
)
from outrider.models.loader.dequantise import dequantise
from outrider.models.loader.gguf_header import MAGIC, GGUFTensor, Header, read_header
from outrider.models.loader.gguf_metadata import Metadata, read_rope_scaling, read_vocabulary
from outrider.models.loader.stored_rows import Place

ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPE_FACTORS = "rope_freqs.weight"
TOP = {"token_embd.weight": "embed.weight", "output_norm.weight": "norm.weight", "output.weight": "head.weight"}
PARTS = {
    "attn_norm": "attn_norm",
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_output": "o",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
}
BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.(weight|bias)")
FILE_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    32: "BF16",
}
# Keys of models that share a name with ours but compute something else.
FOREIGN_KEYS = ("expert_count", "logit_scale", "residual_scale", "embedding_scale", "attention.scale")


def is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == MAGIC


class GGUFCheckpoint:
    """A `Checkpoint` on a mapped GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = _map(path)
        header = read_header(path, self._data)
        metadata = Metadata(path, header.metadata)
        architecture = metadata.text("general.architecture")
        if architecture not in ARCHITECTURES:
            raise unknown_architecture(path, architecture)
        if metadata.whole("split.count", 1) > 1:
            raise ModelFileError(
                f"{path} is one part of a split GGUF. Join the parts with llama-gguf-split --merge first"
            )
        self._tensors, unknown = _canonical(header)
        self.config = _config(path, architecture, metadata, self._tensors, self._rope_factors(header))
        check_sizes(path, self.config, len(header.tensors))
        check_layout(path, self.config, {name: t.shape for name, t in self._tensors.items()}, unknown)
        self.tokenizer_source = read_vocabulary(metadata, self.config.vocab_size)
        self.chat_template = metadata.text("tokenizer.chat_template", "") or None
        self.size_bytes = sum(tensor.size_bytes for tensor in self._tensors.values())
        self.quantisation = FILE_TYPES.get(metadata.whole("general.file_type", -1)) or self._commonest_type()

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        stored = self._tensors[name]
        return dequantise(self._bytes(stored), stored.kind, stored.shape, dtype, self._row_order(name))

    def rows(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        stored, order = self._tensors[name], self._row_order(name)
        blocks = self._bytes(stored).view(stored.shape[0], -1)
        chosen = blocks[start:stop] if order is None else blocks[order[start:stop]]
        return dequantise(chosen.reshape(-1), stored.kind, (len(chosen), *stored.shape[1:]), dtype)

    def raw(self, name: str) -> RawTensor:
        stored = self._tensors[name]
        return RawTensor(
            stored.kind.name, stored.shape, self._bytes(stored), self._row_order(name), Place(self.path, stored.start)
        )

    def release(self) -> None:
        if hasattr(mmap, "MADV_DONTNEED"):  # pages stay in the system's file cache
            self._data.madvise(mmap.MADV_DONTNEED)

    def _bytes(self, stored: GGUFTensor) -> Tensor:
        return torch.frombuffer(self._data, dtype=torch.uint8, count=stored.size_bytes, offset=stored.start)

    def _row_order(self, name: str) -> Tensor | None:
        """GGUF stores the llama family's q and k with the two halves of a head interleaved; see `checkpoint`."""
        if self.config.architecture != "llama" or not name.endswith((".q.weight", ".k.weight", ".q.bias", ".k.bias")):
            return None
        rows, width = self._tensors[name].shape[0], self.config.head_dim
        return torch.arange(rows).view(-1, width // 2, 2).transpose(1, 2).reshape(-1)

    def _rope_factors(self, header: Header) -> list[float] | None:
        stored = header.tensors.get(ROPE_FACTORS)
        if stored is None:
            return None
        if stored.kind.name != "F32" or len(stored.shape) != 1 or stored.shape[0] > 4096:
            raise ModelFileError(
                f"{self.path}: {ROPE_FACTORS} is {stored.kind.name} {list(stored.shape)}, expected a short F32 vector"
            )
        return [float(factor) for factor in dequantise(self._bytes(stored), stored.kind, stored.shape, torch.float32)]

    def _commonest_type(self) -> str:
        sizes: Counter[str] = Counter()
        for tensor in self._tensors.values():
            sizes[tensor.kind.name] += tensor.size_bytes
        return sizes.most_common(1)[0][0]


def _map(path: Path) -> mmap.mmap:
    """The file's bytes; private and copy-on-write, because torch has no read-only tensors."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except ValueError:
        raise ModelFileError(f"{path} is empty. Fetch it again") from None
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from None


def _canonical(header: Header) -> tuple[dict[str, GGUFTensor], list[str]]:
    """The tensors by canonical name, and the stored names that have none."""
    tensors: dict[str, GGUFTensor] = {}
    unknown: list[str] = []
    for stored_name, tensor in header.tensors.items():
        match = BLOCK.fullmatch(stored_name)
        if stored_name in TOP:
            tensors[TOP[stored_name]] = tensor
        elif match is not None and match[2] in PARTS:
            tensors[f"layers.{match[1]}.{PARTS[match[2]]}.{match[3]}"] = tensor
        elif stored_name != ROPE_FACTORS:
            unknown.append(stored_name)
    return tensors, unknown


def _config(
    path: Path,
    architecture: str,
    metadata: Metadata,
    tensors: dict[str, GGUFTensor],
    rope_factors: list[float] | None,
) -> DecoderConfig:
    prefix = f"{architecture}."
    if found := [key for key in FOREIGN_KEYS if metadata.number(prefix + key, 0.0) != 0.0]:
        raise unknown_architecture(path, f"{architecture} with {prefix}{found[0]}")
    embed = tensors.get("embed.weight")
    if embed is None or len(embed.shape) != 2:
        raise ModelFileError(f"{path} has no matrix token_embd.weight, so it is no language model")
    hidden_size, n_heads = (
        metadata.whole(prefix + "embedding_length"),
        metadata.per_layer(prefix + "attention.head_count"),
    )
    head_dim = metadata.whole(prefix + "attention.key_length", hidden_size // max(n_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := metadata.whole(prefix + key, head_dim)) != head_dim:
            raise unknown_architecture(path, f"{architecture} with {prefix}{key} {other} at head width {head_dim}")
    context = metadata.whole(prefix + "context_length")
    window = metadata.whole(prefix + "attention.sliding_window", 0)
    return DecoderConfig(
        architecture=architecture,
        n_layers=metadata.whole(prefix + "block_count"),
        hidden_size=hidden_size,
        ffn_size=metadata.per_layer(prefix + "feed_forward_length"),
        n_heads=n_heads,
        n_kv_heads=metadata.per_layer(prefix + "attention.head_count_kv", n_heads),
        head_dim=head_dim,
        vocab_size=embed.shape[0],
        context_length=context,
        rope_theta=metadata.number(prefix + "rope.freq_base", 10000.0),
        rope_scaling=read_rope_scaling(metadata, prefix, head_dim, rope_factors),
        norm_eps=metadata.number(prefix + "attention.layer_norm_rms_epsilon"),
        qkv_bias="layers.0.q.bias" in tensors,
        qk_norm="layers.0.q_norm.weight" in tensors,
        tie_embeddings="head.weight" not in tensors,
        sliding_window=window if 0 < window < context else None,
    )
