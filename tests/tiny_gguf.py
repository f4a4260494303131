"""A tiny GGUF model, written byte by byte."""

import struct
from pathlib import Path
from typing import Any

D, LAYERS, HEADS, KV, WIDTH, FFN, VOCAB = 32, 2, 2, 1, 16, 32, 5
TOKENS = ["<unk>", "<s>", "</s>", "a", "b"]


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def value(item: Any) -> bytes:
    """Type number and value: bool, int (uint32), float (float32), str, list of str, list of int."""
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    if isinstance(item, int):
        return struct.pack("<II", 4, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if isinstance(item, str):
        return struct.pack("<I", 8) + text(item)
    if item and isinstance(item[0], str):
        return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(text(part) for part in item)
    return struct.pack(f"<IIQ{len(item)}i", 9, 5, len(item), *item)


def metadata(architecture: str = "llama", **changes: Any) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "general.architecture": architecture,
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": 64,
        f"{architecture}.embedding_length": D,
        f"{architecture}.feed_forward_length": FFN,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 1,
    }
    keys |= {key.replace("__", "."): item for key, item in changes.items()}
    return {key: item for key, item in keys.items() if item is not None}


def shapes() -> dict[str, tuple[int, ...]]:
    out: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, D), "output_norm.weight": (D,)}
    for layer in range(LAYERS):
        parts: dict[str, tuple[int, ...]] = {"attn_norm": (D,), "ffn_norm": (D,), "attn_q": (HEADS * WIDTH, D)}
        parts |= {"attn_k": (KV * WIDTH, D), "attn_v": (KV * WIDTH, D), "attn_output": (D, HEADS * WIDTH)}
        parts |= {"ffn_gate": (FFN, D), "ffn_up": (FFN, D), "ffn_down": (D, FFN)}
        out |= {f"blk.{layer}.{name}.weight": shape for name, shape in parts.items()}
    return out


def tiny_gguf(
    keys: dict[str, Any] | None = None,
    tensors: dict[str, tuple[int, ...]] | None = None,
    *,
    version: int = 3,
    kind: int = 0,
    shift: int = 0,
) -> bytes:
    """The whole file. Value i of a tensor is i, in float32; `shift` moves every offset, `kind` lies about the type."""
    keys, tensors = metadata() if keys is None else keys, shapes() if tensors is None else tensors
    head = struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(keys))
    head += b"".join(text(key) + value(item) for key, item in keys.items())
    data = b""
    for name, shape in tensors.items():
        count = 1
        for dim in shape:
            count *= dim
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, len(data) + shift)
        data += struct.pack(f"<{count}f", *range(count))
        data += bytes(-len(data) % 32)
    return head + bytes(-len(head) % 32) + data


def write(folder: Path, content: bytes) -> Path:
    path = folder / "tiny.gguf"
    path.write_bytes(content)
    return path
