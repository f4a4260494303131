"""Prompt files: what is read, and one clear line for everything that cannot be."""

from __future__ import annotations

import gzip
import json

import pytest

from outrider.bench.prompts import builtin_prompts
from outrider.engine.prompt_file import read_prompts
from outrider.errors import UserError

LINES = [
    {"prompt": "one"},
    {"question_id": 82, "category": "writing", "turns": ["first", "second"], "reference": ["ignored"]},
    {"id": "x", "category": "coding", "prompt": "three"},
]


@pytest.fixture
def prompt_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n\n".join(json.dumps(line) for line in LINES) + "\n", encoding="utf-8")
    return path


def test_both_forms_are_read_and_only_the_first_turn_is_taken(prompt_file):
    prompts = read_prompts(prompt_file)
    assert [(p.id, p.category, p.turns) for p in prompts] == [
        ("1", "other", ("one",)),
        ("82", "writing", ("first",)),
        ("x", "coding", ("three",)),
    ]


def test_more_turns_when_asked(prompt_file):
    assert read_prompts(prompt_file, turns=2)[1].turns == ("first", "second")


def test_limit_counts_after_the_category(prompt_file):
    assert [p.id for p in read_prompts(prompt_file, categories=["coding", "writing"], limit=1)] == ["82"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no prompts in this file"),
        ("\n\n", "no prompts in this file"),
        ('{"prompt": "a"}\n{"prompt": ', "line 2: not valid JSON"),
        ('["a"]', "line 1: a list, not an object"),
        ('{"text": "a"}', r"line 1: fields \['text'\] gives no text"),
        ('{"prompt": ""}', "line 1: prompt gives no text"),
        ('{"turns": []}', "line 1: turns gives no text"),
        ('{"turns": ["a", 3]}', "line 1: turns gives no text"),
        ("[" * 100_000, "line 1: "),
    ],
)
def test_a_bad_file_is_named_with_the_line_and_what_is_allowed(tmp_path, text, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message) as caught:
        read_prompts(path)
    assert str(path) in str(caught.value)
    assert "turns" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"question_id": 7, "prompt": "a"}, {"prompt": "b"}, {"id": "7", "prompt": "c"}], "line 3: its id '7'"),
        ([{"id": 3, "prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}], "line 3: its id '3'"),
    ],
)
def test_an_id_that_two_lines_have_is_refused_with_both(tmp_path, lines, message):
    path = tmp_path / "twice.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    with pytest.raises(UserError, match=f"{message} is that of line 1: give every line"):
        read_prompts(path, limit=1)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ({"prompt": "hi \ud800"}, r"text has half of a surrogate pair \(\\ud800\) at character 4"),
        ({"turns": ["hi", "\udfff"]}, "text has half"),
        ({"prompt": "hi", "category": "\ud800"}, "category has half"),
        ({"prompt": "hi", "id": "\ud83d"}, "id has half"),
    ],
)
def test_text_that_no_file_can_hold_is_refused(tmp_path, line, what):
    path = tmp_path / "half.jsonl"
    path.write_text('{"prompt": "\\ud83d\\ude00"}\n' + json.dumps(line), encoding="utf-8")
    with pytest.raises(UserError, match=f"line 2: its {what}"):
        read_prompts(path)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        read_prompts(tmp_path / "nowhere.jsonl")
    with pytest.raises(UserError, match="cannot be read"):
        read_prompts(tmp_path)
    (tmp_path / "latin").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(UserError, match="cannot be read as UTF-8"):
        read_prompts(tmp_path / "latin")


def test_an_unknown_category_lists_the_known_ones(prompt_file):
    with pytest.raises(UserError, match=r"category poetry: choose from coding, other, writing"):
        read_prompts(prompt_file, categories=["poetry", "coding"])


@pytest.mark.parametrize("option", [{"limit": 0}, {"turns": 0}, {"limit": -3}])
def test_counts_must_be_positive(prompt_file, option):
    with pytest.raises(UserError, match="give an integer >= 1"):
        read_prompts(prompt_file, **option)


def test_the_built_in_prompts_are_of_several_kinds():
    prompts = builtin_prompts()
    assert {"prose", "code", "repetition", "edit"} <= {p.category for p in prompts}
    assert len(builtin_prompts(limit=2)) == 2


def test_a_gzipped_file_reads_the_same_and_a_cut_one_is_refused(prompt_file, tmp_path):
    packed = tmp_path / "prompts.jsonl.gz"
    packed.write_bytes(gzip.compress(prompt_file.read_bytes()))
    assert read_prompts(packed) == read_prompts(prompt_file)
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"prompts\.jsonl\.gz cannot be read"):
        read_prompts(packed)


def test_only_newlines_end_a_line(tmp_path):
    """JSON text may hold other characters that Python takes for line ends."""
    path = tmp_path / "odd.jsonl"
    path.write_bytes('{"prompt": "a\u2028b\x85c"}\r\n{"prompt": "d"}\n'.encode())
    assert [p.turns[0] for p in read_prompts(path)] == ["a\u2028b\x85c", "d"]
