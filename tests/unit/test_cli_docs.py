"""docs/reference/cli.md names every command and option, and the help pages' figures are the engine's."""

import re
from pathlib import Path

import pytest

from outrider.cli.main import COMMANDS, main
from outrider.core.registry import DRAFTERS, VERIFIERS
from outrider.engine.llm import DEFAULT_DRAFTER, DEFAULT_K

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
HELP_PAGES = [*([name] for name in COMMANDS), *(["models", name] for name in ("list", "pull", "info", "check"))]


def help_page(capsys, *command):
    assert main([*command, "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", HELP_PAGES, ids=" ".join)
def test_the_reference_names_every_option(capsys, command):
    page = PAGE.read_text()
    assert command[-1] in page
    for option in set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", help_page(capsys, *command))) - {"--help"}:
        assert option in page, option


def test_help_tells_the_defaults_of_the_engine(capsys):
    text = " ".join(help_page(capsys, "generate").split())
    assert f"plain decoding. [default: {DEFAULT_K}]" in text
    assert f"else {DEFAULT_DRAFTER}]" in text


def test_help_names_every_drafter_and_rule(capsys):
    text = " ".join(help_page(capsys, "generate").split())
    for name in (*(set(DRAFTERS) - {"fixed"}), *VERIFIERS):
        assert re.search(rf"\b{name}\b", text), name
