"""Tokenizers from vocabularies written out in the tests."""

import dataclasses
import json
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from outrider.errors import ModelFileError, RequestError
from outrider.models.tokenizer import Tokenizer
from outrider.models.tokenizer_gguf import supported_pre_tokenizers
from tests.vocabulary import REPEATABLE, ToyVocabulary, byte_alphabet, byte_level_vocabulary, sentencepiece_vocabulary

TOY = Tokenizer.from_gguf(byte_level_vocabulary())
TOKENIZERS = {pre: Tokenizer.from_gguf(byte_level_vocabulary(pre)) for pre in supported_pre_tokenizers()}
PIECES = Tokenizer.from_gguf(sentencepiece_vocabulary())


def pieces(tokenizer, ids):
    return [tokenizer.token_bytes(index) for index in ids]


@pytest.mark.parametrize("pre", sorted(TOKENIZERS))
@REPEATABLE
@given(text=st.text(max_size=60))
def test_byte_level_text_survives_the_round_trip(pre, text):
    expected = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
    tokenizer = TOKENIZERS[pre]
    assert tokenizer.decode(tokenizer.encode(text, add_special=True, parse_special=False)) == expected


def test_merges_apply_in_order():
    assert pieces(TOY, TOY.encode("hello the", add_special=False)) == [b"hello", b" the"]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", [b"123"]),
        ("smollm", [b"1", b"2", b"3"]),
        ("qwen2", [b"1", b"2", b"3"]),
        ("llama-bpe", [b"123"]),
        ("deepseek-coder", [b"1", b"2", b"3"]),
    ],
)
def test_pre_tokenizers_treat_digits_as_their_models_do(pre, expected):
    assert pieces(TOKENIZERS[pre], TOKENIZERS[pre].encode("123", add_special=False)) == expected


def test_a_file_that_names_no_pre_tokenizer_gets_the_default_one():
    unnamed = Tokenizer.from_gguf(byte_level_vocabulary(""))
    for text in ("hello, the 12345 <= x", "1234"):
        assert unnamed.encode(text, add_special=True) == TOKENIZERS["default"].encode(text, add_special=True)


def test_a_whole_word_in_the_vocabulary_needs_no_merges_for_llama_3_only():
    extra = (("cab", 1),)
    for pre, expected in (("llama-bpe", [b"cab"]), ("gpt-2", [b"ca", b"b"])):
        tokenizer = Tokenizer.from_gguf(byte_level_vocabulary(pre, extra=extra))
        assert pieces(tokenizer, tokenizer.encode("cab", add_special=False)) == expected


def test_special_tokens_in_text_are_parsed_unless_told_otherwise():
    begin = TOY.token_id("<|begin|>")
    assert TOY.encode("<|begin|>", add_special=False) == [begin]
    plain = TOY.encode("<|begin|>", add_special=False, parse_special=False)
    assert begin not in plain
    assert TOY.decode(plain) == "<|begin|>"
    assert TOY.encode("<|begin|>", add_special=False) == [begin]


def test_user_defined_tokens_are_always_parsed_and_shown():
    call = TOY.token_id("<tool_call>")
    for parse in (True, False):
        assert TOY.encode("<tool_call>", add_special=False, parse_special=parse) == [call]
    assert not TOY.is_special(call)
    assert TOY.decode([call]) == "<tool_call>"


def test_special_tokens_are_shown_only_on_request():
    ids = [TOY.token_id("<|begin|>"), TOY.token_id("hello")]
    assert TOY.decode(ids) == "hello"
    assert TOY.decode(ids, skip_special=False) == "<|begin|>hello"


def test_add_special_puts_bos_only_where_the_model_wants_it():
    vocabulary = byte_level_vocabulary()
    with_bos = Tokenizer.from_gguf(dataclasses.replace(vocabulary, add_bos=True))
    assert TOY.encode("hello", add_special=True) == TOY.encode("hello", add_special=False)
    assert with_bos.encode("hello", add_special=True) == [with_bos.bos_id, with_bos.token_id("hello")]
    assert with_bos.encode("", add_special=True) == [with_bos.bos_id]
    assert with_bos.encode("hello", add_special=False) == [with_bos.token_id("hello")]


def test_end_ids_hold_the_stated_one_first_and_every_known_end_marker():
    vocabulary = byte_level_vocabulary(extra=(("<|endoftext|>", 3), ("<|eot_id|>", 1)))
    tokenizer = Tokenizer.from_gguf(vocabulary)
    assert tokenizer.eos_ids == (vocabulary.eos_id, tokenizer.token_id("<|endoftext|>"))


def test_the_ends_of_turn_and_message_that_a_file_states_are_ends_however_they_are_spelled():
    toy = byte_level_vocabulary(extra=(("<turn>", 3), ("<message>", 3), ("<|endoftext|>", 3)))
    turn, message, text = range(len(toy.tokens) - 3, len(toy.tokens))
    vocabulary = dataclasses.replace(toy, eot_id=turn, eom_id=message)
    assert Tokenizer.from_gguf(vocabulary).eos_ids == (toy.eos_id, turn, message, text)
    with pytest.raises(ModelFileError, match="eot_id is 99999"):
        Tokenizer.from_gguf(dataclasses.replace(vocabulary, eot_id=99999))


def test_unused_ids_have_no_bytes_and_are_never_encoded():
    vocabulary = byte_level_vocabulary("llama-bpe", extra=(("[PAD0]", 5), ("pad", 5)))
    tokenizer = Tokenizer.from_gguf(vocabulary)
    assert tokenizer.unused_ids == {len(vocabulary.tokens) - 2, len(vocabulary.tokens) - 1}
    assert (tokenizer.vocab_size, tokenizer.used_size) == (len(vocabulary.tokens), len(vocabulary.tokens) - 2)
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1) == b""
    assert tokenizer.decode([tokenizer.vocab_size - 1]) == ""
    assert not tokenizer.unused_ids & set(tokenizer.encode("[PAD0]pad", add_special=True))


def test_token_bytes_cover_every_byte():
    assert pieces(TOY, range(256)) == [bytes([byte]) for byte in range(256)]


def test_ill_formed_utf8_decodes_to_replacement_characters():
    assert TOY.decode([0xE2, 0x82]) == "\ufffd"
    assert TOY.decode([0xFF, 0xFE, ord("a")]) == "\ufffd\ufffda"
    assert TOY.decode([0xE2, 0x82, 0xAC]) == "€"


@pytest.mark.parametrize("token_id", [-1, 10**6])
def test_unknown_ids_are_refused_with_the_allowed_range(token_id):
    with pytest.raises(RequestError, match=rf"{token_id}.*0 to {TOY.vocab_size - 1}"):
        TOY.decode([token_id])


def test_lone_surrogates_are_refused():
    with pytest.raises(RequestError, match="surrogates"):
        TOY.encode("a\ud800", add_special=False)


def test_digest_depends_on_bytes_and_on_special_ids():
    base = byte_level_vocabulary()
    renamed = dataclasses.replace(base, tokens=[*base.tokens[:-1], "<tool_cull>"])
    retyped = dataclasses.replace(base, token_types=[*base.token_types[:-1], 3])
    digests = {Tokenizer.from_gguf(vocabulary).digest for vocabulary in (base, renamed, retyped)}
    assert len(digests) == 3
    assert Tokenizer.from_gguf(byte_level_vocabulary("qwen2")).digest == TOY.digest


def test_threads_with_different_settings_do_not_disturb_each_other():
    expected = {parse: TOY.encode("<|begin|>hello", add_special=False, parse_special=parse) for parse in (True, False)}

    def encode(index):
        parse = index % 2 == 0
        return TOY.encode("<|begin|>hello", add_special=False, parse_special=parse) == expected[parse]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(encode, range(400)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert"}, "'bert'.*'gpt2'.*'llama'"),
        ({"pre": "viking"}, "'viking'.*supported: .*default.*qwen2.*smollm"),
        ({"tokens": [], "token_types": []}, "empty"),
        ({"token_types": [1]}, "1 entries"),
        ({"bos_id": 10**6}, "bos_id is 1000000"),
        ({"eos_id": -3}, "eos_id is -3"),
        ({"merges": ["qq zz"]}, "inconsistent"),
        ({"merges": ["nospace"]}, "inconsistent"),
        ({"model": "llama", "scores": None}, "none scores"),
        ({"model": "llama", "scores": [1.0]}, "1 scores"),
    ],
)
def test_bad_vocabularies_are_refused_by_name(change, message):
    with pytest.raises(ModelFileError, match=message):
        Tokenizer.from_gguf(dataclasses.replace(byte_level_vocabulary(), **change))


# SentencePiece


def naive_sentencepiece(vocabulary: ToyVocabulary, text: str) -> list[bytes]:
    """Join the adjacent pair whose joined piece scores highest, leftmost first, until none is a piece."""
    score = {
        token: value
        for token, value, kind in zip(vocabulary.tokens, vocabulary.scores, vocabulary.token_types, strict=True)
        if kind == 1
    }
    parts = list(("▁" + text if text else "").replace(" ", "▁"))
    while True:
        joins = [(-score[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in score]
        if not joins:
            break
        _, index = min(joins)
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    result = []
    for part in parts:
        data = part.replace("▁", " ").encode()
        result += [data] if part in score else [bytes([byte]) for byte in data]
    return result


@REPEATABLE
@given(text=st.text(alphabet="abehlnortwd  .é€", max_size=40))
def test_sentencepiece_equals_the_naive_algorithm(text):
    assert pieces(PIECES, PIECES.encode(text, add_special=False)) == naive_sentencepiece(
        sentencepiece_vocabulary(), text
    )


@REPEATABLE
@given(text=st.text(max_size=40))
def test_sentencepiece_text_survives_the_round_trip(text):
    expected = text.replace("▁", " ")
    assert PIECES.decode(PIECES.encode(text, add_special=True, parse_special=False)) == expected


def test_sentencepiece_adds_bos_and_a_space_that_decoding_strips():
    ids = PIECES.encode("hello world", add_special=True)
    assert pieces(PIECES, ids) == [b"<s>", b" hello", b" world"]
    assert PIECES.decode(ids) == "hello world"
    assert PIECES.decode(ids, continuation=True) == " hello world"
    assert PIECES.decode(PIECES.encode(" hello", add_special=True)) == " hello"


def test_sentencepiece_without_a_space_prefix_strips_nothing():
    tokenizer = Tokenizer.from_gguf(sentencepiece_vocabulary(add_space_prefix=False))
    assert pieces(tokenizer, tokenizer.encode("hello", add_special=False)) == [b"he", b"llo"]
    assert tokenizer.decode(tokenizer.encode(" hello", add_special=False)) == " hello"


# Hugging Face folders


def write_folder(folder, **configs):
    letters = byte_alphabet()
    backend = Backend(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True), AddedToken("<é>")])
    backend.save(str(folder / "tokenizer.json"))
    for name, content in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_a_folder_gives_bytes_roles_and_padding(tmp_path):
    write_folder(
        tmp_path,
        generation_config={"eos_token_id": [257, 10]},
        config={"eos_token_id": 11},
        tokenizer_config={"bos_token": {"content": "<s>"}, "eos_token": "</s>"},
    )
    tokenizer = Tokenizer.from_folder(tmp_path, vocab_size=300)
    assert (tokenizer.vocab_size, tokenizer.used_size, len(tokenizer.unused_ids)) == (300, 259, 41)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.special_ids) == (256, (257, 10, 11), {256, 257})
    assert tokenizer.token_bytes(258) == "<é>".encode()
    ids = tokenizer.encode("é<é><s>", add_special=True)
    assert (ids, tokenizer.decode(ids)) == ([0xC3, 0xA9, 258, 256], "é<é>")


def test_a_folder_with_sentencepiece_decoding(tmp_path):
    backend = Backend(models.BPE(vocab={"▁": 0, "a": 1, "<0xC3>": 2, "<0xA9>": 3}, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode([0, 1, 2, 3]) == backend.decode([0, 1, 2, 3]) == "aé"
    assert tokenizer.decode([0, 0, 1]) == backend.decode([0, 0, 1]) == " a"


def test_a_folder_whose_decoder_is_unknown_is_refused(tmp_path):
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelFileError, match=r"WordPiece.*supported: ByteLevel"):
        Tokenizer.from_folder(tmp_path)


def test_a_folder_without_tokenizer_json_says_how_to_get_one(tmp_path):
    with pytest.raises(ModelFileError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ModelFileError, match=r"tokenizer\.model.*save_pretrained"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelFileError, match="cannot be read"):
        Tokenizer.from_folder(tmp_path)


def test_a_folder_with_too_few_rows_or_bad_roles_is_refused(tmp_path):
    write_folder(tmp_path, config={"eos_token_id": 4000})
    with pytest.raises(ModelFileError, match=r"259 ids.*100 rows"):
        Tokenizer.from_folder(tmp_path, vocab_size=100)
    with pytest.raises(ModelFileError, match="4000 is outside"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(ModelFileError, match="JSON cannot be read"):
        Tokenizer.from_folder(tmp_path)
