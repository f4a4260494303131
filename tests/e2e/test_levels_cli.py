"""OUTRIDER_CPU through the command line: every level answers alike or says why it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.kernels.dispatch import LEVELS, VARIABLE, usable_processors
from tests.tiny_folder import write_tiny_model

TWICE = """
import sys
from outrider.cli.main import main
threads, command = sys.argv[1].split(","), sys.argv[2:]
sys.exit(max([main([*command, "--threads", count]) for count in threads]))
"""


def _has_extension() -> bool:
    try:
        import outrider.kernels._kernels  # noqa: F401
    except ImportError:
        return False
    return True


def _levels() -> list[str]:
    if not _has_extension():
        return ["torch"]
    from outrider.kernels._kernels import available_levels

    return [*available_levels(), "torch"]


def _process(level: str | None, *command: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != VARIABLE}
    if level is not None:
        env[VARIABLE] = level
    return subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("levels") / "tiny")


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, list[dict]]:
    """By level: the documents of two runs. One has two threads, but on torch, whose sums depend on the number."""
    options = ["--model", str(folder), "--max-tokens", "40", "--logprobs", "1", "--dtype", "float32", "--json", "-q"]
    documents = {}
    for level in _levels():
        threads = "1,1" if level == "torch" or usable_processors() == 1 else "1,2"
        done = _process(level, "-c", TWICE, threads, "generate", "hello there", *options)
        assert done.returncode == 0, done.stderr
        documents[level] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return documents


def test_the_level_asked_for_is_the_one_that_runs(answers: dict[str, list[dict]]) -> None:
    for level, documents in answers.items():
        plan = {line["field"]: line for line in documents[0]["plan"]}
        assert plan["kernels"]["value"] == level
        assert VARIABLE in plan["kernels"]["reason"]


def test_all_levels_give_the_same_greedy_text(answers: dict[str, list[dict]]) -> None:
    texts = {level: documents[0]["choices"][0]["text"] for level, documents in answers.items()}
    assert len(set(texts.values())) == 1, texts
    assert len(next(iter(texts.values()))) > 10


def test_a_level_repeats_itself_bit_for_bit(answers: dict[str, list[dict]]) -> None:
    """Log probabilities included."""
    for level, (first, second) in answers.items():
        assert first["choices"] == second["choices"], level
        assert first["choices"][0]["logprobs"], level


@pytest.mark.parametrize("level", [*LEVELS, "sse9"])
def test_a_level_that_cannot_run_is_one_line_and_exit_2(folder: Path, level: str) -> None:
    if level in _levels():
        pytest.skip(f"this processor has {level}: its answers are compared above")
    done = _process(level, "-m", "outrider.cli.main", "generate", "hello", "--model", str(folder), "--quiet")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert f"{VARIABLE}={level}" in done.stderr
    if level == "sse9":
        assert "is unknown; allowed: portable, avx2, avx512, amx, torch" in done.stderr
    elif _has_extension():
        assert f"{level} cannot run" in done.stderr
        assert f"; available: {', '.join(_levels())}" in done.stderr
    else:
        assert "needs the C++ extension" in done.stderr
