"""`outrider chat` through the real entry point, piped, on a tiny model."""

import io
import json
import signal

import pytest

from outrider.cli import chat as chat_command
from outrider.cli.main import main
from outrider.cli.terminal import TokenPrinter
from tests.tiny_folder import broken_model, write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture
def chat(folder, capsys, monkeypatch):
    """Runs the command on lines of input; returns (exit code, stdout, stderr)."""

    def run(lines, *args, model=folder):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
        length = [] if "-n" in args else ["-n", "12"]
        code = main(["chat", "--model", str(model), "--dtype", "float32", *length, *args])
        return code, *capsys.readouterr()

    return run


def document(outcome):
    code, out, _ = outcome
    assert code == 0
    assert out.count("\n") == 1
    return json.loads(out)


def test_each_line_is_a_turn_and_the_history_grows(chat):
    turns = document(chat(["hello", "", "and you?"], "--json"))["turns"]
    assert [turn["user"] for turn in turns] == ["hello", "and you?"]
    first, second = turns
    said = len("[user]hello\n[assistant]")
    assert first["prompt_tokens"] == said
    assert second["prompt_tokens"] == said + len(first["text"].encode()) + len("\n[user]and you?\n[assistant]")
    assert len(first["token_ids"]) == len(first["origins"]) == 12


def test_text_and_a_summary_a_turn(chat):
    code, out, err = chat(["hello", "again"])
    assert code == 0
    assert len(out.rstrip("\n").split("\n")) >= 2
    assert err.count("target passes") == 2
    assert "target: " in err


def test_json_sums_the_turns(chat):
    whole = document(chat(["one", "two"], "--json"))
    assert whole["usage"]["completion_tokens"] == 24
    assert whole["usage"]["prompt_tokens"] == sum(turn["prompt_tokens"] for turn in whole["turns"])
    metrics = whole["metrics"]["speculative_decoding"]
    accepted = sum(turn["origins"].count("accepted") for turn in whole["turns"])
    assert metrics["num_accepted_draft_tokens"] == accepted
    assert metrics["num_spec_steps"] == 24 - accepted


def test_reset_forgets_and_exit_leaves(chat):
    turns = document(chat(["hello", "/reset", "hello", "/exit", "never"], "--json"))["turns"]
    assert len(turns) == 2
    assert turns[0]["token_ids"] == turns[1]["token_ids"]


def test_system_message_by_option_and_by_command(chat):
    by_option = document(chat(["hello"], "--system", "be brief", "--json"))["turns"]
    by_command = document(chat(["/system be brief", "hello", "/system", "hello"], "--json"))["turns"]
    assert by_option[0]["token_ids"] == by_command[0]["token_ids"]
    assert by_command[1]["prompt_tokens"] == len("[user]hello\n[assistant]")


def test_stats_help_and_an_unknown_command(chat):
    code, _, err = chat(["hello", "/stats", "/nonsense"], "--quiet")
    assert code == 0
    assert "1 turns | 12 tokens" in err
    assert "/nonsense is no command" in err
    assert all(command in err for command in chat_command.COMMANDS)


def test_the_oldest_turns_go_when_the_context_is_full(chat, tmp_path):
    small = write_tiny_model(tmp_path / "small", context=128)
    code, out, err = chat(["a" * 30, "b" * 30, "c" * 30], "--json", model=small)
    turns = json.loads(out)["turns"]
    assert code == 0
    assert "oldest turn(s) were dropped" in err
    assert len(turns) == 3
    assert all(turn["prompt_tokens"] + 12 <= 128 for turn in turns)


def test_a_turn_that_never_fits_is_one_line(chat, tmp_path):
    small = write_tiny_model(tmp_path / "small", context=128)
    code, _, err = chat(["x" * 300], "--quiet", model=small)
    assert code == 2
    assert err.count("\n") == 1
    assert "holds 128" in err


def test_an_answer_that_ends_in_an_error_says_why_and_is_not_remembered(chat, tmp_path):
    broken = broken_model(tmp_path / "broken")
    code, _, err = chat(["hello", "again"], "--quiet", model=broken)
    assert code == 1
    assert err.splitlines() == ["error: the target's logits are NaN, or every token is forbidden"] * 2
    code, out, _ = chat(["hello", "again"], "--json", model=broken)
    assert code == 1
    first, second = json.loads(out)["turns"]
    assert first["finish_reason"].startswith("error: ")
    assert second["prompt_tokens"] == len("[user]again\n[assistant]")


def test_ctrl_c_stops_the_answer_and_not_the_program(chat, monkeypatch):
    show, seen = TokenPrinter.token, []

    def token(self, text, origin):
        show(self, text, origin)
        seen.append(text)
        if len(seen) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(TokenPrinter, "token", token)
    code, _, err = chat(["hello", "again"])
    assert code == 0
    assert "stopped | " in err
    assert 12 < len(seen) < 24  # the first answer was cut, the second was not


def test_json_after_ctrl_c_counts_the_rounds_of_the_cut_answer_too(chat, monkeypatch):
    from outrider.models.decoder import Decoder

    forward, calls = Decoder.forward, []

    def interrupted(self, *args, **options):
        calls.append(1)
        if len(calls) == 20:
            signal.raise_signal(signal.SIGINT)
        return forward(self, *args, **options)

    monkeypatch.setattr(Decoder, "forward", interrupted)
    code, out, _ = chat(["hello", "again"], "--json", "-n", "60")
    assert code == 0
    whole = json.loads(out)
    first, second = whole["turns"]
    assert first["finish_reason"] == "cancelled"
    assert len(first["token_ids"]) < 60 == len(second["token_ids"])
    metrics = whole["metrics"]["speculative_decoding"]
    accepted = [turn["origins"].count("accepted") for turn in whole["turns"]]
    assert all(accepted)
    assert sum(metrics["acceptance_histogram"]) == metrics["num_spec_steps"]
    kept = sum(j * n for j, n in enumerate(metrics["acceptance_histogram"]))
    assert kept == metrics["num_accepted_draft_tokens"] == sum(accepted)
    assert whole["usage"]["completion_tokens"] == len(first["token_ids"]) + 60


def test_ctrl_c_before_the_first_token_drops_the_turn(chat, monkeypatch):
    from outrider.models.decoder import Decoder

    forward, calls = Decoder.forward, []

    def interrupted(self, *args, **options):
        calls.append(1)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGINT)
        return forward(self, *args, **options)

    monkeypatch.setattr(Decoder, "forward", interrupted)
    code, out, err = chat(["hello", "again"], "--json")
    assert code == 0
    assert "stopped before the answer began" in err
    assert [turn["user"] for turn in json.loads(out)["turns"]] == ["again"]
