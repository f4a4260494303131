"""Streaming: any sequence of tokens gives the text that decoding the whole gives, and stops are found at any split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import RequestError
from outrider.models.detokenizer import IncrementalDetokenizer, StopMatcher
from outrider.models.tokenizer import Tokenizer
from tests.vocabulary import REPEATABLE, byte_level_vocabulary, sentencepiece_vocabulary

BYTES = Tokenizer.from_gguf(byte_level_vocabulary(extra=(("[PAD]", 5),)))
PIECES = Tokenizer.from_gguf(sentencepiece_vocabulary())
EVERY_ID = {
    "byte-level": (BYTES, st.integers(0, BYTES.vocab_size - 1)),
    # Mostly bytes from 0x80 on: beginnings, continuations and impossible bytes.
    "high bytes": (BYTES, st.integers(0x80, 0x110)),
    "sentencepiece": (PIECES, st.integers(0, PIECES.vocab_size - 1)),
}


@pytest.mark.parametrize("kind", EVERY_ID)
@REPEATABLE
@given(data=st.data(), skip=st.booleans(), continuation=st.booleans())
def test_pushes_and_flush_equal_decoding_the_whole(kind, data, skip, continuation):
    tokenizer, one_id = EVERY_ID[kind]
    ids = data.draw(st.lists(one_id, max_size=30))
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special=skip, continuation=continuation)
    text = "".join(detokenizer.push(index) for index in ids) + detokenizer.flush()
    assert text == tokenizer.decode(ids, skip_special=skip, continuation=continuation)


@REPEATABLE
@given(text=st.text(max_size=30))
def test_every_push_of_valid_text_is_a_prefix_without_replacement(text):
    detokenizer = IncrementalDetokenizer(BYTES)
    so_far = ""
    for index in BYTES.encode(text, add_special=False, parse_special=False):
        so_far += detokenizer.push(index)
        assert text.startswith(so_far)
    assert (so_far, detokenizer.flush()) == (text, "")


def test_a_character_comes_whole_with_its_last_byte():
    detokenizer = IncrementalDetokenizer(BYTES)
    assert [detokenizer.push(byte) for byte in "€😀".encode()] == ["", "", "€", "", "", "", "😀"]


def test_an_impossible_byte_is_replaced_at_once_and_an_unfinished_one_at_the_end():
    detokenizer = IncrementalDetokenizer(BYTES)
    assert detokenizer.push(0xFF) == "\ufffd"
    assert detokenizer.push(0xE2) == ""
    assert detokenizer.push(ord("a")) == "\ufffda"
    assert detokenizer.push(0xE2) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_only_the_artificial_leading_space_is_stripped():
    space, hello = PIECES.token_id("▁"), PIECES.token_id("▁hello")
    detokenizer = IncrementalDetokenizer(PIECES)
    assert [detokenizer.push(index) for index in (PIECES.bos_id, space, hello, hello)] == ["", "", " hello", " hello"]


def test_unknown_ids_are_refused():
    with pytest.raises(RequestError, match="-1"):
        IncrementalDetokenizer(BYTES).push(-1)


# Stop strings

SMALL = st.text(alphabet="ab", min_size=1, max_size=4)


def first_stop(text, stops):
    """(text before it, stop) for the stop that ends first, the longest of them; (text, None) without one."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def stream(parts, stops, *, include_stop=False):
    matcher, text = StopMatcher(stops, include_stop=include_stop), ""
    for part in parts:
        piece, stop = matcher.push(part)
        text += piece
        if stop is not None:
            return text, stop
    return text + matcher.flush(), None


@REPEATABLE
@given(parts=st.lists(st.text(alphabet="abc", max_size=5), max_size=8), stops=st.lists(SMALL, max_size=4))
def test_any_split_gives_what_a_search_of_the_whole_gives(parts, stops):
    text, stop = first_stop("".join(parts), stops)
    assert stream(parts, stops) == (text, stop)
    assert stream(parts, stops, include_stop=True) == (text + (stop or ""), stop)


@REPEATABLE
@given(text=st.text(alphabet="abc", max_size=14), stops=st.lists(SMALL, min_size=1, max_size=3))
def test_every_split_in_two_gives_the_same(text, stops):
    assert {stream([text[:cut], text[cut:]], stops) for cut in range(len(text) + 1)} == {first_stop(text, stops)}


@REPEATABLE
@given(text=st.text(alphabet="ab", max_size=12), stops=st.lists(SMALL, min_size=1, max_size=3))
def test_held_back_is_exactly_the_longest_beginning_of_a_stop(text, stops):
    matcher, shown = StopMatcher(stops), ""
    for end, letter in enumerate(text, 1):
        piece, stop = matcher.push(letter)
        if stop is not None:
            return
        shown += piece
        beginnings = {stop[:n] for stop in stops for n in range(len(stop))}
        held = max((tail for tail in beginnings if text[:end].endswith(tail)), key=len)
        assert shown + held == text[:end]


def test_the_earliest_end_wins_and_then_the_longest():
    assert stream(["xabcd"], ["abcd", "bc"]) == ("xa", "bc")
    assert stream(["x", "ab", "c"], ["c", "abc", "bc"]) == ("x", "abc")


def test_partial_stops_are_flushed_when_nothing_completes_them():
    matcher = StopMatcher(["\nUser:"])
    assert matcher.push("hi\nUs") == ("hi", None)
    assert matcher.push("e") == ("", None)
    assert matcher.flush() == "\nUse"
    assert matcher.flush() == ""


def test_without_stops_all_text_passes():
    assert StopMatcher([]).push("abc") == ("abc", None)


def test_an_empty_stop_is_refused_by_its_index():
    with pytest.raises(RequestError, match=r"stop\[1\]"):
        StopMatcher(["a", ""])
