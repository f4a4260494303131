"""What is shown on a terminal."""

import io
from types import SimpleNamespace

from outrider.cli import progress, terminal
from outrider.core.stats import SpecStats
from outrider.core.verdict import Origin
from outrider.engine.request import Timings


class Terminal(io.StringIO):
    def isatty(self):
        return True


def printed(monkeypatch, stream, tokens):
    monkeypatch.setattr("sys.stdout", stream)
    printer = terminal.TokenPrinter()
    for text, origin in tokens:
        printer.token(text, origin)
    printer.end()
    return stream.getvalue()


TOKENS = [("one", "accepted"), (" two", "recovered"), (" three", "bonus")]


def test_plain_text_where_there_is_no_terminal(monkeypatch):
    assert printed(monkeypatch, io.StringIO(), TOKENS) == "one two three\n"


def test_colours_by_origin_on_a_terminal(monkeypatch, capsys):
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = printed(monkeypatch, Terminal(), TOKENS)
    for text, origin in TOKENS:
        assert f"{terminal.ORIGIN_STYLE[origin]}{text}\x1b[0m" in out
    assert capsys.readouterr().err.count("accepted: ") == 1


def test_no_color_is_respected(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert printed(monkeypatch, Terminal(), TOKENS) == "one two three\n"


def test_every_origin_has_a_colour_and_a_meaning():
    assert set(terminal.ORIGIN_STYLE) == set(terminal.ORIGIN_MEANING) == {origin.value for origin in Origin}


def test_a_model_cannot_command_the_terminal(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert printed(monkeypatch, Terminal(), [("a\x1b[2Jb\tc\n", "bonus")]) == "a␛[2Jb\tc\n"


def test_a_pipe_gets_the_text_unchanged(monkeypatch):
    assert printed(monkeypatch, io.StringIO(), [("a\x1b[2J\n", "bonus")]) == "a\x1b[2J\n"


def stats_of(*rounds):
    """Stats of rounds given as (drafted, accepted), none cut."""
    stats = SpecStats()
    for drafted, accepted in rounds:
        stats.record(range(drafted), accepted, own_tokens=1, cut=0)
    return stats


def test_summary_names_everything():
    stats = stats_of((4, 2), (4, 4), (0, 0))
    plain = Timings(1, 1.0, 10, 1000.0, 0, 0)
    line = terminal.summary(stats, 25.0, plain)
    for part in (
        "9 tokens",
        "25.0 tok/s",
        "plain 10.0 tok/s",
        "2.50 x",
        "75% (6 of 8",
        "3.00 tokens a pass",
        "3 target",
    ):
        assert part in line


def test_summary_without_drafts():
    assert terminal.summary(stats_of((0, 0)), 5.0) == "1 tokens, 5.0 tok/s | nothing drafted | 1 target passes"


def test_table_aligns():
    assert terminal.table([("a", "1"), ("long", "22")], ("x", "y")) == "x     y\na     1\nlong  22"


def test_off_a_terminal_a_line_now_and_then_says_how_far_it_is(monkeypatch, capsys):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock.now))
    for quiet in (True, False):
        clock.now = 0.0
        with progress.counted_bar("answers", 10, quiet=quiet) as step:
            for _ in range(10):
                clock.now += 20.0
                step()
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "answers: 2 of 10, about 3 min left",
        "answers: 4 of 10, about 2 min left",
        "answers: 6 of 10, about 80 s left",
        "answers: 8 of 10, about 40 s left",
    ]
