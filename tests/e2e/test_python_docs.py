"""docs/reference/python.md: its examples run, and it names every field, error and variable."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

import outrider
from outrider import LLM, Completion, Result, SamplingParams, Speculation, StepTrace, TokenEvent, errors
from outrider.core.stats import SpecStats
from outrider.core.trace import TracedDraw, TracedNode
from outrider.engine.request import Timings, TokenLogprob
from outrider.kernels.dispatch import LEVELS, VARIABLE
from outrider.models.loader import sources
from tests.tiny_folder import write_tiny_model

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "reference" / "python.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_examples_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    write_tiny_model(tmp_path / "my-model")
    write_tiny_model(tmp_path / "my-draft", layers=1)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for example in EXAMPLES:
        exec(compile(example, "python.md", "exec"), names)
    out = capsys.readouterr().out
    assert "tokens a target pass" in out
    assert "top_p = 0 is not allowed: give a number in (0, 1]" in out
    assert "drafter: draft_model, suffix" in out


def test_every_public_name_is_on_the_page():
    for name in outrider.__all__:
        assert f"`{name}`" in PAGE


@pytest.mark.parametrize(
    "cls",
    [
        SamplingParams,
        Speculation,
        Result,
        Completion,
        TokenEvent,
        TokenLogprob,
        Timings,
        SpecStats,
        StepTrace,
        TracedNode,
        TracedDraw,
    ],
)
def test_every_field_is_on_the_page(cls):
    words = set(re.findall(r"`(\w+)(?:\(\))?`", PAGE))
    assert {field.name for field in fields(cls)} <= words


def test_the_arguments_of_llm_and_their_defaults():
    section = PAGE.split("## LLM")[1].split("### generate")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", section, re.MULTILINE))
    arguments = list(inspect.signature(LLM.__init__).parameters.values())[2:]
    for argument in arguments:
        written = rows[argument.name]
        if isinstance(argument.default, str):
            assert written == f'`"{argument.default}"`'
        elif argument.default is not None:
            assert written.strip("`") == str(argument.default)
    for argument in inspect.signature(LLM.generate).parameters:
        assert argument == "self" or argument in PAGE


def test_every_error_is_on_the_page():
    tree = {
        name for name, cls in vars(errors).items() if inspect.isclass(cls) and issubclass(cls, errors.OutriderError)
    }
    assert tree == set(re.findall(r"\b[A-Z]\w+Error\b", PAGE)) - {"ValueError"}


def test_the_variables_are_the_ones_that_are_read(monkeypatch, tmp_path):
    assert set(re.findall(r"OUTRIDER_[A-Z]+", PAGE)) == {"OUTRIDER_CACHE", "OUTRIDER_MODELS", VARIABLE}
    assert all(f"`{level}`" in PAGE for level in (*LEVELS, "torch"))
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.delenv("OUTRIDER_MODELS", raising=False)
    assert sources.models_folder() == tmp_path / "models"
    monkeypatch.setenv("OUTRIDER_MODELS", str(tmp_path / "elsewhere"))
    assert sources.models_folder() == tmp_path / "elsewhere"


def test_the_index_links_the_page():
    assert "(reference/python.md)" in (DOCS / "README.md").read_text()
