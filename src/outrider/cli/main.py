"""The `outrider` program: finds the command, runs it, and turns every error into one line and an exit code.

Exit codes: 0 done; 1 a check failed or a download did; 2 the request cannot be done as asked; 70 a bug of Outrider;
130 interrupted.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import MappingProxyType
from typing import Annotated, cast

import typer

from outrider.cli.once import OnceCommand
from outrider.errors import OutriderError, UserError

EXIT_FAILED = 1
EXIT_USER = 2
EXIT_BUG = 70
EXIT_INTERRUPTED = 130

COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "generate": ("outrider.cli.generate:generate", "Answer a prompt, with the origin of every token."),
        "chat": ("outrider.cli.chat:chat", "Talk with a model, turn by turn."),
        "verify": ("outrider.cli.verify:verify", "Check that speculation changes no answer."),
        "bench": ("outrider.cli.bench:bench", "Measure plain and speculative decoding on your prompts."),
        "compare": ("outrider.cli.compare:compare", "Compare two results of bench."),
        "plan": ("outrider.cli.plan:plan", "What two models take in memory, before anything is loaded."),
        "profile": ("outrider.cli.profile:profile", "Measure a target pass by its number of rows."),
        "tune": ("outrider.cli.tune:tune", "Which drafter and K pay on your prompts, if any."),
        "sim": ("outrider.cli.sim:sim", "What another drafter, K or machine would give."),
        "doctor": ("outrider.cli.doctor:doctor", "What was detected, what is used, and whether it computes right."),
        "train": ("outrider.cli.train:train", "Train a draft head on what a target says and thinks."),
        "models": ("outrider.cli.models:app", "List, fetch, inspect and pair models."),
        "demo": ("outrider.cli.demo:demo", "Plain and speculative, side by side, on a small model."),
    }
)
"""Command -> where it lives, and its line in `outrider --help`."""

_UsageMistake = cast(type[Exception], typer.BadParameter.__mro__[2])  # typer brings its own click, or uses click
assert _UsageMistake.__name__ == "ClickException"


def main(args: list[str] | None = None) -> int:
    """Runs one command line (default: the process's own) and returns the exit code."""
    given = list(sys.argv[1:] if args is None else args)
    cut = given.index("--") if "--" in given else len(given)
    debug = "--debug" in given[:cut]
    given = [arg for i, arg in enumerate(given) if arg != "--debug" or i > cut]
    try:
        with _warnings_on_stderr(debug):
            code = _run(given)
        sys.stdout.flush()
        return code
    except UserError as error:
        return _fail(error, EXIT_USER, debug)
    except OutriderError as error:
        return _fail(error, EXIT_FAILED, debug)
    except KeyboardInterrupt:
        _say("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _forget_stdout()
        return EXIT_FAILED
    except Exception as error:
        if debug:
            raise
        _say(
            f"outrider: this is a bug: {_described(error)}; run it again with --debug for the traceback, and report it"
        )
        return EXIT_BUG


def app_for(args: list[str]) -> typer.Typer:
    """The program's commands. Only the one that `args` names is imported; the others are known by their help line."""
    app = typer.Typer(
        name="outrider",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Generate text faster with speculative decoding, without changing what is generated.",
    )
    app.callback()(_program)
    chosen = next((arg for arg in args if not arg.startswith("-")), None)
    for name, (home, line) in COMMANDS.items():
        if name != chosen:
            app.command(name, help=line)(_unloaded)
            continue
        module, _, attribute = home.partition(":")
        command = getattr(import_module(module), attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, help=line)
        else:
            app.command(name, cls=OnceCommand)(command)
    return app


def _run(args: list[str]) -> int:
    try:
        code = app_for(args)(args, prog_name="outrider", standalone_mode=False)
    except SystemExit as stop:
        code = stop.code
    except _UsageMistake as mistake:
        return _explain(mistake)
    return code if isinstance(code, int) else 0


def _explain(mistake: Exception) -> int:
    """A wrong option or argument, in one line; the help page when nothing was asked for."""
    context = getattr(mistake, "ctx", None)
    text = str(mistake.format_message()) if hasattr(mistake, "format_message") else str(mistake)
    if type(mistake).__name__ == "NoArgsIsHelpError":
        print(text)
        return EXIT_USER
    where = context.command_path if context is not None else "outrider"
    _say(f"{where}: {' '.join(text.split()).rstrip('.')}; see {where} --help")
    return EXIT_USER


def _print_version(asked: bool) -> None:
    if asked:
        import outrider

        print(f"outrider {outrider.__version__}")
        raise typer.Exit


def _program(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    return


def _unloaded() -> None:
    raise AssertionError("a command that was not asked for cannot run")


class _OneLine(logging.Handler):
    """Writes the library's warnings as lines on stderr; their tracebacks only when debugging."""

    def __init__(self, debug: bool) -> None:
        super().__init__(logging.WARNING)
        self._debug = debug

    def emit(self, record: logging.LogRecord) -> None:
        _say(f"{record.levelname.lower()}: {' '.join(record.getMessage().split())}")
        if self._debug and record.exc_info is not None:
            _say(logging.Formatter().formatException(record.exc_info))


@contextmanager
def _warnings_on_stderr(debug: bool) -> Iterator[None]:
    log, handler = logging.getLogger("outrider"), _OneLine(debug)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def _fail(error: OutriderError, code: int, debug: bool) -> int:
    if debug:
        raise error
    _say(f"outrider: {' '.join(str(error).split())}")
    return code


def _described(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _forget_stdout() -> None:
    """Nobody reads stdout any more: what is still buffered must not raise again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def entry() -> None:
    """What `python -m outrider.cli.main` runs."""
    raise SystemExit(main())


if __name__ == "__main__":
    entry()
