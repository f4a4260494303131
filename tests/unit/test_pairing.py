"""Which draft vocabularies fit which targets."""

import dataclasses

import pytest

from outrider.errors import PairingError
from outrider.models.pairing import Compatibility, Difference, compare_tokenizers, require_compatible
from outrider.models.tokenizer import Tokenizer
from tests.vocabulary import byte_level_vocabulary, sentencepiece_vocabulary

BASE = byte_level_vocabulary()
N_BASE = len(BASE.tokens)
TARGET = Tokenizer.from_gguf(BASE)


def padded(n_rows, *, extra=()):
    vocabulary = byte_level_vocabulary(extra=extra)
    n_padding = n_rows - len(vocabulary.tokens)
    return Tokenizer.from_gguf(
        dataclasses.replace(
            vocabulary,
            tokens=vocabulary.tokens + [f"[PAD{i}]" for i in range(n_padding)],
            token_types=vocabulary.token_types + [5] * n_padding,
        )
    )


def test_equal_vocabularies_are_identical_whatever_the_pre_tokenizer():
    pairing = compare_tokenizers(TARGET, Tokenizer.from_gguf(byte_level_vocabulary("qwen2")))
    assert (pairing.verdict, pairing.n_common, pairing.overlap) == (Compatibility.IDENTICAL, N_BASE, 1.0)
    assert pairing.usable
    assert pairing.notes == ("texts are normalised differently; prompts are encoded by the target's tokenizer",)


@pytest.mark.parametrize(("target_rows", "draft_rows"), [(300, 320), (320, 300)])
def test_other_numbers_of_padding_rows_are_padded(target_rows, draft_rows):
    pairing = compare_tokenizers(padded(target_rows), padded(draft_rows))
    assert (pairing.verdict, pairing.n_common) == (Compatibility.PADDED, N_BASE)
    assert (pairing.target_rows, pairing.draft_rows) == (target_rows, draft_rows)
    assert str(target_rows) in pairing.sentence
    assert str(draft_rows) in pairing.sentence
    assert "masked" in pairing.sentence


def test_tokens_that_only_one_side_has_at_the_end_are_masked():
    pairing = compare_tokenizers(padded(300), padded(300, extra=(("<think>", 4),)))
    assert (pairing.verdict, pairing.n_common) == (Compatibility.PADDED, N_BASE)
    assert (pairing.target_used, pairing.draft_used) == (N_BASE, N_BASE + 1)


def test_one_swapped_token_makes_a_pair_partial_and_is_shown():
    tokens = list(BASE.tokens)
    tokens[65], tokens[66] = tokens[66], tokens[65]
    pairing = compare_tokenizers(TARGET, Tokenizer.from_gguf(dataclasses.replace(BASE, tokens=tokens)))
    assert (pairing.verdict, pairing.n_common, pairing.n_different) == (Compatibility.PARTIAL, 0, 2)
    assert pairing.overlap == 1.0
    assert pairing.differences == (Difference(65, b"A", b"B"), Difference(66, b"B", b"A"))
    assert "id 65: b'A' in the target, b'B' in the draft" in pairing.sentence
    assert not pairing.usable


def test_a_foreign_vocabulary_is_refused_with_names_and_ids():
    with pytest.raises(PairingError) as caught:
        require_compatible(
            Tokenizer.from_gguf(sentencepiece_vocabulary()),
            Tokenizer.from_gguf(dataclasses.replace(BASE, tokens=[f"{token}#" for token in BASE.tokens], merges=[])),
            target_name="big.gguf",
            draft_name="small.gguf",
        )
    message = str(caught.value)
    for part in ("small.gguf", "big.gguf", "incompatible", "id 0: b'<unk>'", "id 4:", "ngram"):
        assert part in message
    assert "id 5:" not in message
    assert "\n" not in message


def test_require_compatible_gives_the_pairing_of_a_usable_pair():
    pairing = require_compatible(TARGET, padded(300), target_name="a", draft_name="b")
    assert pairing.verdict is Compatibility.PADDED


def test_flags_and_end_ids_are_noted_without_refusing():
    types = list(BASE.token_types)
    types[-1] = 3
    draft = Tokenizer.from_gguf(dataclasses.replace(BASE, token_types=types, eos_id=65))
    pairing = compare_tokenizers(TARGET, draft)
    assert pairing.verdict is Compatibility.IDENTICAL
    assert "<tool_call>" in pairing.notes[0]
    assert "end-of-text" in pairing.notes[1]
