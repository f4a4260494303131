"""Builds a `tokenizers.Tokenizer` from the vocabulary that a GGUF file carries.

Two families: byte-level BPE (`tokenizer.ggml.model` = "gpt2", with the pre-tokenizer named by `tokenizer.ggml.pre`)
and SentencePiece BPE (`"llama"`, scores instead of merges, bytes as fallback).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from outrider.errors import ModelFileError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
WORD_MARK = "▁"

# End-of-turn and end-of-text markers by name: many files state one end id, chat models use several.
END_TOKENS = frozenset(
    {
        "<|endoftext|>",
        "<|im_end|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<end_of_turn>",
        "<｜end▁of▁sentence｜>",
    }
)


class Vocabulary(Protocol):
    """What is read here from a GGUF file's `tokenizer.ggml.*` metadata. `eos_id` ends a text, `eot_id` a turn, `eom_id`
    a message."""

    @property
    def model(self) -> str: ...
    @property
    def pre(self) -> str: ...
    @property
    def tokens(self) -> Sequence[str]: ...
    @property
    def token_types(self) -> Sequence[int]: ...
    @property
    def merges(self) -> Sequence[str]: ...
    @property
    def scores(self) -> Sequence[float] | None: ...
    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_id(self) -> int | None: ...
    @property
    def eot_id(self) -> int | None: ...
    @property
    def eom_id(self) -> int | None: ...
    @property
    def unk_id(self) -> int | None: ...
    @property
    def pad_id(self) -> int | None: ...
    @property
    def add_bos(self) -> bool: ...
    @property
    def add_space_prefix(self) -> bool: ...


def _byte_level(*, use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    parts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*parts, _byte_level(use_regex=False)])


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return _byte_level(use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level(use_regex=True)])


def _word_pattern(digits: str) -> str:
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _qwen2() -> pre_tokenizers.PreTokenizer:
    return _split(_word_pattern(r"\p{N}"))


def _llama3() -> pre_tokenizers.PreTokenizer:
    return _split(_word_pattern(r"\p{N}{1,3}"))


def _deepseek_coder() -> pre_tokenizers.PreTokenizer:
    return _split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")


def _default() -> pre_tokenizers.PreTokenizer:
    return _split(
        r"[\p{P}\$\+<=>\^~\|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\p{N}+",
        r"[0-9][0-9][0-9]",
    )


# name in tokenizer.ggml.pre -> (pre-tokenizer, NFC first?, a whole word that is a token skips the merges?)
_PRE: dict[str, tuple[Callable[[], pre_tokenizers.PreTokenizer], bool, bool]] = {
    "default": (_default, False, False),
    "gpt-2": (_gpt2, False, False),
    "mpt": (_gpt2, False, False),
    "olmo": (_gpt2, False, False),
    "smollm": (_single_digits, False, False),
    "starcoder": (_single_digits, False, False),
    "refact": (_single_digits, False, False),
    "codeshell": (_single_digits, False, False),
    "qwen2": (_qwen2, True, False),
    "deepseek-r1-qwen": (_qwen2, False, False),
    "deepseek-coder": (_deepseek_coder, False, False),
    "llama-bpe": (_llama3, False, True),
    "llama3": (_llama3, False, True),
    "llama-v3": (_llama3, False, True),
}


def supported_pre_tokenizers() -> tuple[str, ...]:
    return tuple(sorted(_PRE))


def build_backend(vocab: Vocabulary) -> Backend:
    """A `tokenizers` pipeline for `vocab`. Raises `ModelFileError` for an inconsistent or unsupported vocabulary.

    Ids marked unused get no entry: encoding never yields them.
    """
    _check(vocab)
    try:
        return _assemble(vocab)
    except ModelFileError:
        raise
    except Exception as error:  # the Rust side raises a bare Exception, for one for merges outside the vocabulary
        raise ModelFileError(f"the GGUF vocabulary is inconsistent: {error}. Download or convert it again") from None


def _assemble(vocab: Vocabulary) -> Backend:
    backend = _byte_level_bpe(vocab) if vocab.model == "gpt2" else _sentencepiece_bpe(vocab)
    special = {UNKNOWN: True, CONTROL: True, USER_DEFINED: False}
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=special[kind])
            for token, kind in zip(vocab.tokens, vocab.token_types, strict=True)
            if token and kind in special
        ]
    )
    if vocab.add_bos and vocab.bos_id is not None:
        bos = vocab.tokens[vocab.bos_id]
        backend.post_processor = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, vocab.bos_id)])
    return backend


def end_ids(vocab: Vocabulary) -> list[int]:
    """The ids that end an answer: those that the file states, then the control tokens spelled like end markers."""
    stated = (vocab.eos_id, vocab.eot_id, vocab.eom_id)
    pairs = enumerate(zip(vocab.tokens, vocab.token_types, strict=True))
    spelled = [index for index, (token, kind) in pairs if kind == CONTROL and token in END_TOKENS]
    return [index for index in stated if index is not None] + spelled


def _check(vocab: Vocabulary) -> None:
    if vocab.model not in ("gpt2", "llama"):
        raise ModelFileError(
            f"tokenizer.ggml.model is {vocab.model!r}; supported: 'gpt2' (byte-level BPE) and 'llama' (SentencePiece "
            "BPE). Use a Hugging Face folder of this model, which carries a tokenizer.json"
        )
    if vocab.model == "gpt2" and (vocab.pre or "default") not in _PRE:
        raise ModelFileError(
            f"tokenizer.ggml.pre is {vocab.pre!r}; supported: {', '.join(supported_pre_tokenizers())}. Use a Hugging "
            "Face folder of this model, which carries a tokenizer.json"
        )
    n_tokens = len(vocab.tokens)
    if n_tokens == 0:
        raise ModelFileError("tokenizer.ggml.tokens is empty: the file carries no vocabulary. Convert the model again")
    if len(vocab.token_types) != n_tokens:
        raise ModelFileError(
            f"tokenizer.ggml.token_type has {len(vocab.token_types)} entries for {n_tokens} tokens: the file is corrupt"
        )
    for name in ("bos_id", "eos_id", "eot_id", "eom_id", "unk_id", "pad_id"):
        value: int | None = getattr(vocab, name)
        if value is not None and not 0 <= value < n_tokens:
            raise ModelFileError(f"tokenizer.ggml {name} is {value}, outside the vocabulary of {n_tokens} tokens")


def _ids(vocab: Vocabulary) -> dict[str, int]:
    if UNUSED not in vocab.token_types:
        return dict(zip(vocab.tokens, range(len(vocab.tokens)), strict=True))
    pairs = zip(vocab.tokens, range(len(vocab.tokens)), vocab.token_types, strict=True)
    return {token: index for token, index, kind in pairs if kind != UNUSED}


def _byte_level_bpe(vocab: Vocabulary) -> Backend:
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in vocab.merges)]
    make_pre, nfc, whole_words = _PRE[vocab.pre or "default"]
    backend = Backend(models.BPE(vocab=_ids(vocab), merges=merges, ignore_merges=whole_words))
    if nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = make_pre()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(vocab: Vocabulary) -> Backend:
    if vocab.scores is None or len(vocab.scores) != len(vocab.tokens):
        found = "none" if vocab.scores is None else str(len(vocab.scores))
        raise ModelFileError(
            f"a SentencePiece vocabulary needs one score a token: {len(vocab.tokens)} tokens, {found} scores in "
            "tokenizer.ggml.scores"
        )
    unknown = None if vocab.unk_id is None else vocab.tokens[vocab.unk_id]
    backend = Backend(
        models.BPE(
            vocab=_ids(vocab), merges=merges_from_scores(vocab), unk_token=unknown, fuse_unk=True, byte_fallback=True
        )
    )
    marks = normalizers.Replace(" ", WORD_MARK)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(WORD_MARK), marks]) if vocab.add_space_prefix else marks
    )
    steps = [decoders.Replace(WORD_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocab.add_space_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def merges_from_scores(vocab: Vocabulary) -> list[tuple[str, str]]:
    """The merge list that a scored vocabulary implies: SentencePiece joins the adjacent pair whose joined token scores
    highest (Kudo and Richardson 2018, section 3.2), so pairs are ranked by the score of what they make."""
    assert vocab.scores is not None
    if vocab.merges:
        return [(left, right) for left, _, right in (merge.partition(" ") for merge in vocab.merges)]
    normal = {
        token: index
        for index, (token, kind) in enumerate(zip(vocab.tokens, vocab.token_types, strict=True))
        if kind == NORMAL
    }
    ranked = []
    for token, index in normal.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                ranked.append((-vocab.scores[index], normal[left], normal[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]
