"""docs/reference/cli.md names every command, option and default, and the help pages' figures are the engine's."""

import re
from pathlib import Path

import pytest
from typer.main import get_command

from outrider.cli.main import COMMANDS, app_for, main
from outrider.cli.measuring import Setup
from outrider.core.registry import DRAFTERS, VERIFIERS
from outrider.engine.choosing import DEFAULT_K
from outrider.engine.shipped import DEFAULT_DRAFTER, PREFERRED, WITH_HEAD

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
TRAIN_PAGE = PAGE.with_name("train.md")
HELP_PAGES = [*([name] for name in COMMANDS), *(["models", name] for name in ("list", "pull", "info", "check"))]
RUN_A_MODEL = ("generate", "chat", "demo", "verify", "bench")


def help_page(capsys, *command):
    assert main([*command, "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", HELP_PAGES, ids=" ".join)
def test_the_reference_names_every_option(capsys, command):
    text = re.sub(r"(?<=[a-z]-)\n +", "", help_page(capsys, *command))  # an option that is broken at its hyphen
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - {"--help"}
    assert options or command == ["models"]
    page = TRAIN_PAGE if command == ["train"] else PAGE
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", page.read_text()))
    assert options <= named


def test_the_page_of_train_tells_its_defaults():
    rows = re.findall(r"^\| (.+?) \| (.*?) \|", TRAIN_PAGE.read_text().split("\n## ")[1], re.MULTILINE)
    told = {re.match(r"`(--[a-z-]+)", options)[1]: value for options, value in rows if options.startswith("`--")}
    real = {p.opts[0]: p.default for p in get_command(app_for(["train"])).commands["train"].params}
    for option in ("--model", "--max-tokens", "--temperatures", "--markov-head"):
        assert told[option] == str(real[option]), option
    for option, default in real.items():
        if isinstance(default, (int, float)) and not isinstance(default, bool):
            assert float(told[option]) == default, option


def table_of_defaults():
    """Command -> option -> what the page's table says; the options of commands that run a model."""
    section = PAGE.read_text().split("## Options and their defaults")[1].split("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")
    ]
    header, _, *rows = rows
    assert header == ["option", *RUN_A_MODEL]
    return {
        command: {re.match(r"`(--[a-z-]+)`", row[0])[1]: row[column] for row in rows if row[column]}
        for column, command in enumerate(RUN_A_MODEL, 1)
    }


def shown(default):
    """An option's default as the page writes it; None where the page may choose its words."""
    if default is None:
        return None
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, (int, float)) else default


@pytest.mark.parametrize("command", RUN_A_MODEL)
def test_the_reference_tells_the_defaults_of_every_option(command):
    written = table_of_defaults()[command]
    parameters = get_command(app_for([command])).commands[command].params
    real = {p.opts[0]: shown(p.default) for p in parameters if p.param_type_name == "option"}
    assert set(written) == set(real)
    for option, default in real.items():
        assert default is None or written[option] == default, option


def test_the_reference_tells_what_stands_in_for_no_value():
    written = table_of_defaults()
    setup = Setup.from_options(
        drafter=None,
        k=["1"],
        category=None,
        target="t",
        draft_model=None,
        rule="auto",
        prompts=None,
        limit=None,
        chat=None,
        dtype="auto",
        draft_dtype="auto",
        threads=None,
        offline=False,
    )
    for command in ("generate", "chat", "demo"):
        assert written[command]["--k"] == f"{DEFAULT_K} **"
        assert written[command]["--drafter"] == f"{DEFAULT_DRAFTER} *"
    assert written["bench"]["--k"] == f"{DEFAULT_K} **"
    for command in ("verify", "bench"):
        assert written[command]["--drafter"] == f"{','.join(setup.drafters)} *"


def test_help_tells_the_defaults_of_the_engine(capsys):
    text = " ".join(help_page(capsys, "generate").split())
    assert f"plain decoding. [default: what the head's card says, else {DEFAULT_K}]" in text
    by_default = f"{WITH_HEAD} with a head that comes with the package for this target ({', '.join(PREFERRED)})"
    assert f"{by_default}, else {DEFAULT_DRAFTER}]" in text


def test_help_of_bench_tells_the_k_that_is_served(capsys):
    text = " ".join(help_page(capsys, "bench").split())
    assert f"[default: what a head's card says, else {DEFAULT_K}]" in text


def test_help_names_every_drafter_and_rule(capsys):
    text = " ".join(help_page(capsys, "generate").split())
    for name in (*(set(DRAFTERS) - {"fixed"}), *VERIFIERS):
        assert re.search(rf"\b{name}\b", text), name
