"""Reads the tokenizer files of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer as Backend

from outrider.core.json_file import JsonObject
from outrider.errors import ModelFileError

Spelling = Literal["byte_level", "sentencepiece"]


def part_state(part: object) -> str:
    """The JSON that describes a normaliser, pre-tokenizer or decoder of `tokenizers`; empty for None."""
    if part is None:
        return ""
    state = part.__getstate__()  # tokenizers' parts pickle themselves as JSON bytes
    return state.decode() if isinstance(state, bytes) else str(state)


def read_tokenizer_json(folder: Path) -> Backend:
    file = folder / "tokenizer.json"
    if not file.is_file():
        if (folder / "tokenizer.model").is_file():
            raise ModelFileError(
                f"{folder} has a tokenizer.model but no tokenizer.json. Convert it once: `pip install transformers "
                'sentencepiece protobuf`, then `python -c "from transformers import AutoTokenizer as T; '
                f'T.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"`'
            )
        raise ModelFileError(f"{folder} has no tokenizer.json, so it is no complete model folder. Download it again")
    try:
        return Backend.from_file(str(file))
    except Exception as error:  # the Rust side raises a bare Exception
        raise ModelFileError(f"{file} cannot be read: {error}. Download it again") from None


def decoder_kind(backend: Backend, folder: Path) -> tuple[Spelling, int]:
    """How tokens spell bytes, and how many leading spaces decoding strips."""
    state = part_state(backend.decoder)
    parts = list(_flatten(json.loads(state))) if state else []
    kinds = [str(part["type"]) for part in parts]
    if kinds == ["ByteLevel"]:
        return "byte_level", 0
    strip_left = 0
    for part in parts:
        replaces_mark = part["type"] == "Replace" and (part["pattern"], part["content"]) == ({"String": "▁"}, " ")
        if part["type"] == "Strip" and part["content"] == " " and part["stop"] == 0:
            strip_left = part["start"] if isinstance(part["start"], int) else 0
        elif part["type"] == "Metaspace" and part["replacement"] == "▁":
            strip_left = int(part["prepend_scheme"] != "never")
        elif not (replaces_mark or part["type"] in ("ByteFallback", "Fuse")):
            kinds.append("unsupported")
    if not {"Replace", "Metaspace"} & set(kinds) or "unsupported" in kinds:
        raise ModelFileError(
            f"{folder / 'tokenizer.json'} decodes with {state or 'nothing'}; supported: ByteLevel, and SentencePiece's "
            "Replace or Metaspace with ByteFallback, Fuse and Strip. Use a model of those families"
        )
    return "sentencepiece", strip_left


def _flatten(state: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    inner = state.get("decoders")
    if state["type"] != "Sequence" or not isinstance(inner, list):
        yield state
        return
    for part in inner:
        yield from _flatten(part)


def special_roles(folder: Path, vocabulary: Mapping[str, int], n_ids: int) -> tuple[int | None, list[int]]:
    """(bos id, end-of-text ids): generation_config.json, then config.json, then tokenizer_config.json."""
    ends: list[int] = []
    bos_id: int | None = None
    for name in ("generation_config.json", "config.json"):
        settings = JsonObject.read(folder / name, optional=True).values
        ends += _as_ids(settings.get("eos_token_id"))
        if bos_id is None:
            bos_id = next(iter(_as_ids(settings.get("bos_token_id"))), None)
    settings = JsonObject.read(folder / "tokenizer_config.json", optional=True).values
    bos_id = _named(settings, "bos_token", vocabulary, bos_id)
    end_id = _named(settings, "eos_token", vocabulary, None)
    ends += [] if end_id is None else [end_id]
    for value in (*ends, *(() if bos_id is None else (bos_id,))):
        if not 0 <= value < n_ids:
            raise ModelFileError(f"{folder}: special token id {value} is outside the vocabulary of {n_ids} ids")
    return bos_id, ends


def _as_ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool)]


def _named(
    settings: Mapping[str, object], key: str, vocabulary: Mapping[str, int], otherwise: int | None
) -> int | None:
    token = settings.get(key)
    text = token.get("content") if isinstance(token, dict) else token
    return vocabulary.get(text, otherwise) if isinstance(text, str) else otherwise
