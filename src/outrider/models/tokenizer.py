"""Text to token ids and back, and the exact bytes of every token."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer as Backend

from outrider.errors import ModelFileError, RequestError
from outrider.models import tokenizer_gguf as gguf
from outrider.models.loader.checkpoint import Checkpoint, GGUFVocabulary, TokenizerFolder
from outrider.models.tokenizer_folder import decoder_kind, part_state, read_tokenizer_json, special_roles

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the other 68 bytes for U+0100 and up (Radford et
    al. 2019, section 2.2). Characters of no byte map to one outside Latin-1, so that encoding them fails."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = dict.fromkeys(range(256), "\uffff")
    table.update({code: chr(code) for code in plain})
    others = [byte for byte in range(256) if byte not in set(plain)]
    table.update({0x100 + i: chr(byte) for i, byte in enumerate(others)})
    return table


_ALPHABET = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return token.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode("utf-8")


def _sentencepiece_bytes(token: str) -> bytes:
    if (match := _BYTE_TOKEN.fullmatch(token)) is not None:
        return bytes([int(match[1], 16)])
    return token.replace(gguf.WORD_MARK, " ").encode("utf-8")


def used_size(source: GGUFVocabulary | TokenizerFolder) -> int | None:
    """`Tokenizer.used_size` without building the tokenizer, where the source says so at once."""
    if isinstance(source, TokenizerFolder):
        return None
    kinds = source.token_types
    return next((i + 1 for i in reversed(range(len(kinds))) if kinds[i] != gguf.UNUSED), 0)


class Tokenizer:
    """One tokenizer. Immutable, safe to share between threads.

    Ids run from 0 to `vocab_size - 1`. Ids of that range that stand for no token (`unused_ids`: padding rows of the
    embedding, holes) have empty bytes and are never produced by `encode`.
    """

    def __init__(
        self,
        backend: Backend,
        token_bytes: Sequence[bytes],
        *,
        special_ids: Iterable[int] = (),
        unused_ids: Iterable[int] = (),
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        strip_left: int = 0,
    ) -> None:
        """`strip_left`: how many leading spaces of a whole decoded text are an artefact of encoding (SentencePiece: 1).
        `eos_ids`: in order, the one that the model file names first."""
        self._backend = backend
        self._bytes = tuple(token_bytes)
        self._lock = threading.Lock()
        self._digest: str | None = None
        self.special_ids = frozenset(special_ids)
        self.unused_ids = frozenset(unused_ids)
        self.bos_id = bos_id
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.strip_left = strip_left

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Tokenizer:
        """The tokenizer that belongs to an open checkpoint. Raises `ModelFileError`."""
        source = checkpoint.tokenizer_source
        if isinstance(source, GGUFVocabulary):
            return cls.from_gguf(source)
        return cls.from_folder(source.path, vocab_size=checkpoint.config.vocab_size)

    @classmethod
    def from_gguf(cls, vocab: gguf.Vocabulary) -> Tokenizer:
        """Raises `ModelFileError` if the vocabulary is inconsistent or of an unsupported kind."""
        backend = gguf.build_backend(vocab)
        spell = _byte_level_bytes if vocab.model == "gpt2" else _sentencepiece_bytes
        literal = {gguf.CONTROL, gguf.USER_DEFINED, gguf.UNKNOWN}
        table, special, unused = [], [], []
        for index, (token, kind) in enumerate(zip(vocab.tokens, vocab.token_types, strict=True)):
            if kind == gguf.UNUSED:
                unused.append(index)
                table.append(b"")
                continue
            table.append(token.encode("utf-8") if kind in literal else spell(token))
            if kind in (gguf.CONTROL, gguf.UNKNOWN):
                special.append(index)
        return cls(
            backend,
            table,
            special_ids=special,
            unused_ids=unused,
            bos_id=vocab.bos_id,
            eos_ids=gguf.end_ids(vocab),
            strip_left=int(vocab.model == "llama" and vocab.add_space_prefix),
        )

    @classmethod
    def from_folder(cls, path: str | Path, *, vocab_size: int | None = None) -> Tokenizer:
        """Reads `tokenizer.json`, and the end-of-text ids from `generation_config.json`, `config.json` and
        `tokenizer_config.json` of a Hugging Face folder. `vocab_size`: rows of the model's embedding, if more than the
        tokenizer has ids. Raises `ModelFileError`."""
        folder = Path(path)
        backend = read_tokenizer_json(folder)
        spelling, strip_left = decoder_kind(backend, folder)
        spell = _byte_level_bytes if spelling == "byte_level" else _sentencepiece_bytes
        added = backend.get_added_tokens_decoder()
        vocabulary = backend.get_vocab(with_added_tokens=True)
        n_ids = max([*vocabulary.values(), *added], default=-1) + 1
        if vocab_size is not None and vocab_size < n_ids:
            raise ModelFileError(
                f"{folder}: the tokenizer has {n_ids} ids, the model only {vocab_size} rows: tokenizer.json is not "
                "this model's. Take the one from the model's own repository"
            )
        table = [b""] * max(n_ids, vocab_size or 0)
        for token, index in vocabulary.items():
            table[index] = spell(token)
        for index, token_info in added.items():
            table[index] = token_info.content.encode("utf-8")
        bos_id, eos_ids = special_roles(folder, vocabulary, len(table))
        return cls(
            backend,
            table,
            special_ids=[index for index, token_info in added.items() if token_info.special],
            unused_ids=set(range(len(table))) - set(vocabulary.values()) - set(added),
            bos_id=bos_id,
            eos_ids=eos_ids,
            strip_left=strip_left,
        )

    @property
    def vocab_size(self) -> int:
        return len(self._bytes)

    @property
    def vocabulary(self) -> tuple[bytes, ...]:
        """The bytes of every id, as `token_bytes` gives them."""
        return self._bytes

    @property
    def used_size(self) -> int:
        """1 + the highest id that stands for a token."""
        return next((i + 1 for i in reversed(range(len(self._bytes))) if i not in self.unused_ids), 0)

    @property
    def normalizer(self) -> str:
        """What is done to a text before it is cut, as JSON; empty if nothing."""
        return part_state(self._backend.normalizer)

    @property
    def digest(self) -> str:
        """SHA-256 over every id's bytes and the special ids: equal digests mean that ids may be exchanged."""
        if self._digest is None:
            hasher = hashlib.sha256()
            hasher.update(b"".join(len(piece).to_bytes(4, "little") + piece for piece in self._bytes))
            hasher.update(json.dumps([sorted(self.special_ids), sorted(self.unused_ids)]).encode())
            self._digest = hasher.hexdigest()
        return self._digest

    def encode(self, text: str, *, add_special: bool, parse_special: bool = True) -> list[int]:
        """`add_special`: put in what the model wants around a text (often a bos token); False for a text rendered from
        a chat template, which writes its own. `parse_special`: a special token spelled in the text becomes that token,
        as in llama.cpp's and transformers' generation; False makes it plain text. User-defined tokens, which are not
        special, are always recognised. Bytes for which a byte-level vocabulary has no token (SmolLM2: 8 rare ones) are
        dropped, as in both of these. Raises `RequestError` if `text` is no valid Unicode."""
        try:
            with self._lock:
                self._backend.encode_special_tokens = not parse_special
                return list(self._backend.encode(text, add_special_tokens=add_special).ids)
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(
                f"the text cannot be tokenized: {error}. Allowed: a str of Unicode characters without lone surrogates"
            ) from None

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, continuation: bool = False) -> str:
        """Bytes that are no UTF-8 give U+FFFD, one for each maximal ill-formed part (Unicode 15, section 3.9).
        `continuation`: `ids` follow other text, so a leading space is kept. Raises `RequestError` for an unknown id."""
        pieces = [self.token_bytes(index) for index in ids if not (skip_special and index in self.special_ids)]
        text = b"".join(pieces).decode("utf-8", "replace")
        for _ in range(0 if continuation else self.strip_left):
            text = text.removeprefix(" ")
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token; of a special token its text, of an unused id none."""
        if not 0 <= token_id < len(self._bytes):
            raise RequestError(f"token id {token_id} does not exist; allowed: 0 to {len(self._bytes) - 1}")
        return self._bytes[token_id]

    def token_id(self, text: str) -> int | None:
        """The id of the token spelled exactly `text` in the vocabulary (special tokens: their text), or None."""
        return self._backend.token_to_id(text)

    def is_special(self, token_id: int) -> bool:
        """True for control tokens (bos, end of turn, ...). Tokens such as `<tool_call>` are added but not special."""
        return token_id in self.special_ids

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size}, special={len(self.special_ids)}, eos_ids={self.eos_ids})"
