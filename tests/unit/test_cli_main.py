"""The entry point: exit codes, one line an error, nothing heavy imported for a help page."""

import subprocess
import sys

import pytest
import typer

from outrider.cli import main as program
from outrider.cli.main import COMMANDS, main
from outrider.errors import ConfigError, FetchError, ModelFileError


def app_that(action):
    app = typer.Typer(rich_markup_mode=None)

    @app.command()
    def command() -> None:
        action()

    return lambda args: app


def raising(error):
    def action():
        raise error

    return action


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            ConfigError("K = -1 is not allowed: give an integer >= 0"),
            2,
            "outrider: K = -1 is not allowed: give an integer >= 0",
        ),
        (ModelFileError("two\nlines"), 2, "outrider: two lines"),
        (FetchError("no network"), 1, "outrider: no network"),
        (KeyboardInterrupt(), 130, None),
        (BrokenPipeError(32, "Broken pipe"), 1, ""),
        (typer.Exit(5), 5, ""),
        (typer.BadParameter("bad"), 2, None),
    ],
)
def test_exit_codes(monkeypatch, capfd, error, code, line):
    monkeypatch.setattr(program, "app_for", app_that(raising(error)))
    monkeypatch.setattr(program, "_forget_stdout", lambda: None)
    assert main([]) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert err.count("\n") <= 1
    if line is not None:
        assert err.strip() == line


def test_a_bug_is_one_line_and_debug_shows_it_whole(monkeypatch, capsys):
    monkeypatch.setattr(program, "app_for", app_that(raising(ZeroDivisionError("division\nby zero"))))
    assert main([]) == 70
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "ZeroDivisionError: division by zero" in err
    assert "--debug" in err
    with pytest.raises(ZeroDivisionError):
        main(["--debug"])


def test_debug_raises_user_errors_too(monkeypatch):
    monkeypatch.setattr(program, "app_for", app_that(raising(ConfigError("x"))))
    with pytest.raises(ConfigError):
        main(["--debug"])


def test_debug_after_two_dashes_is_an_argument(monkeypatch):
    seen = []
    monkeypatch.setattr(program, "_run", lambda args: seen.append(args) or 0)
    main(["generate", "--", "--debug"])
    main(["generate", "--debug", "--", "x"])
    assert seen == [["generate", "--", "--debug"], ["generate", "--", "x"]]


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["nonsense"], "nonsense"),
        (["--nonsense"], "--nonsense"),
        (["generate", "x", "--nonsense"], "outrider generate: "),
        (["generate", "x", "--k", "many"], "--k"),
    ],
)
def test_usage_errors_are_one_line(capsys, args, part):
    assert main(args) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert part in err
    assert "--help" in err


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, (_, line) in COMMANDS.items():
        assert f"  {name} " in out
        assert line in out


def test_no_arguments_show_the_help(capsys):
    assert main([]) == 2
    assert "Commands:" in capsys.readouterr().out


def test_version(capsys):
    import outrider

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"outrider {outrider.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_page(capsys, command):
    assert main([command, "--help"]) == 0
    assert "Usage: outrider" in capsys.readouterr().out


@pytest.mark.parametrize("args", [["--help"], ["generate", "--help"], ["chat", "--help"], ["models", "--help"]])
def test_help_imports_no_torch(args):
    code = f"import sys; from outrider.cli.main import main; sys.exit(main({args!r}) or 'torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
