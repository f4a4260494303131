"""Vocabularies for tests: small ones written out here, and those of the catalogue's GGUF files."""

import struct
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from hypothesis import settings

from outrider.models.loader.catalogue import DEFAULT_MODEL
from outrider.models.loader.sources import resolve
from outrider.models.tokenizer import Tokenizer

REPEATABLE = settings(deadline=None, derandomize=True, database=None)
SMOLLM2 = DEFAULT_MODEL
QWEN_TARGET = "qwen2.5-coder-1.5b"
QWEN_DRAFT = "qwen2.5-coder-0.5b"


@dataclass(frozen=True)
class ToyVocabulary:
    """The fields of a GGUF vocabulary."""

    model: str = "gpt2"
    pre: str = "gpt-2"
    tokens: list[str] = field(default_factory=list)
    token_types: list[int] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)
    scores: list[float] | None = None
    bos_id: int | None = None
    eos_id: int | None = None
    eot_id: int | None = None
    eom_id: int | None = None
    unk_id: int | None = None
    pad_id: int | None = None
    add_bos: bool = False
    add_space_prefix: bool = False


def byte_alphabet() -> list[str]:
    """The 256 characters that spell bytes in byte-level BPE, by byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, extra = [], 0
    for byte in range(256):
        letters.append(chr(byte) if byte in plain else chr(256 + extra))
        extra += byte not in plain
    return letters


def byte_level_vocabulary(pre: str = "gpt-2", *, extra: tuple[tuple[str, int], ...] = ()) -> ToyVocabulary:
    """256 bytes, a few merges (some inside UTF-8 characters), two control tokens, `extra` (token, type) pairs."""
    letters = byte_alphabet()
    joins = ["Ġ t", "h e", "Ġt he", "Ġ Ġ", "l l", "he ll", "hell o", "1 2", "12 3", "Ċ Ċ", "c a"]
    joins += [
        f"{letters[0xC3]} {letters[0xA9]}",
        f"{letters[0xE2]} {letters[0x82]}",
        f"{letters[0xF0]} {letters[0x9F]}",
    ]
    tokens = letters + [join.replace(" ", "") for join in joins]
    types = [1] * len(tokens)
    bos_id = len(tokens)
    for token, kind in (("<|begin|>", 3), ("<|im_end|>", 3), ("<tool_call>", 4), *extra):
        tokens.append(token)
        types.append(kind)
    return ToyVocabulary("gpt2", pre, tokens, types, joins, bos_id=bos_id, eos_id=bos_id + 1)


def sentencepiece_vocabulary(**changes: object) -> ToyVocabulary:
    """Unknown, bos, eos, 256 bytes, letters, and pieces whose scores order the merges."""
    pieces = ["▁t", "he", "▁the", "in", "er", "▁a", "▁▁", "▁w", "or", "ld", "▁wor", "▁world", "llo", "▁he", "▁hello"]
    pieces += ["ll", "aa", "aaaa"]
    letters = list("▁abcdefghijklmnopqrstuvwxyz.,!é")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *letters]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(pieces) + len(letters))]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces) + len(letters))]
    fields: dict[str, object] = {"bos_id": 1, "eos_id": 2, "unk_id": 0, "add_bos": True, "add_space_prefix": True}
    return ToyVocabulary("llama", "default", tokens, types, [], scores, **{**fields, **changes})  # type: ignore[arg-type]


def model_file(name: str) -> Path:
    """The file of a catalogue model, which `make test` and `make test-pair` fetch before the tests begin."""
    return resolve(name, offline=True)


@cache
def read_vocabulary(path: Path) -> ToyVocabulary:
    metadata = read_metadata(path)

    def get(key: str, otherwise: object = None) -> object:
        return metadata.get(f"tokenizer.ggml.{key}", otherwise)

    return ToyVocabulary(
        model=get("model"),
        pre=get("pre", "default"),
        tokens=get("tokens"),
        token_types=get("token_type"),
        merges=get("merges", []),
        scores=get("scores"),
        bos_id=get("bos_token_id"),
        eos_id=get("eos_token_id"),
        eot_id=get("eot_token_id"),
        eom_id=get("eom_token_id"),
        unk_id=get("unknown_token_id"),
        pad_id=get("padding_token_id"),
        add_bos=get("add_bos_token", False),
        add_space_prefix=get("add_space_prefix", False),
    )


@cache
def read_tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(read_vocabulary(path))


_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@cache
def read_metadata(path: Path) -> dict[str, object]:
    """The key-value part of a GGUF file; a second reader, independent of the one in the product."""
    with path.open("rb") as file:

        def scalar(code: str) -> object:
            return struct.unpack("<" + code, file.read(struct.calcsize("<" + code)))[0]

        def string() -> str:
            return file.read(scalar("Q")).decode("utf-8")

        def value(kind: int) -> object:
            if kind == 8:
                return string()
            if kind != 9:
                return scalar(_SCALARS[kind])
            inner, count = struct.unpack("<IQ", file.read(12))
            if inner in (8, 9):
                return [value(inner) for _ in range(count)]
            code = f"<{count}{_SCALARS[inner]}"
            return list(struct.unpack(code, file.read(struct.calcsize(code))))

        assert file.read(4) == b"GGUF"
        _, _, n_pairs = struct.unpack("<IQQ", file.read(20))
        return {string(): value(scalar("I")) for _ in range(n_pairs)}
