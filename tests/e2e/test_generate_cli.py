"""`outrider generate` through the real entry point, on a tiny model whose answers are gibberish."""

import io
import json
import signal

import pytest

from outrider import StepTrace, kernels
from outrider.cli.main import main
from outrider.cli.terminal import TokenPrinter
from tests.tiny_folder import broken_model, write_tiny_model

METRICS = {
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "acceptance_histogram",
    "num_spec_steps",
    "num_accepted_draft_tokens",
    "num_draft_tokens",
}
TIMINGS = {
    "prompt_n",
    "prompt_ms",
    "predicted_n",
    "predicted_ms",
    "predicted_per_second",
    "draft_n",
    "draft_n_accepted",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    write_tiny_model(root / "target")
    write_tiny_model(root / "draft", layers=1)
    write_tiny_model(root / "raw", template=None)
    return root


@pytest.fixture
def generate(folder, capsys):
    """Runs the command on the tiny target; returns (exit code, stdout, stderr)."""

    def run(*args, model="target"):
        code = main(["generate", "--model", str(folder / model), "--dtype", "float32", *args])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def document(generate):
    """Runs the command with --json and returns the document."""

    def run(*args, **options):
        code, out, _ = generate("--json", *args, **options)
        assert code == 0
        assert out.count("\n") == 1
        return json.loads(out)

    return run


def test_text_plan_and_summary(generate, document):
    code, out, err = generate("hello", "-n", "40")
    assert code == 0
    assert out == document("hello", "-n", "40")["text"] + "\n"
    assert "target: " in err
    assert "drafter: suffix" in err
    last = err.splitlines()[-1]
    for part in ("40 tokens", "tok/s", "acceptance", "tokens a pass", "target passes"):
        assert part in last


def test_quiet_leaves_the_text_alone(generate):
    code, out, err = generate("hello", "-n", "5", "--quiet")
    assert (code, err) == (0, "")
    assert out


def test_json_is_one_document_with_the_names_of_the_field(document):
    answer = document("hello", "-n", "40")
    assert answer["token_ids"] == answer["choices"][0]["token_ids"]
    assert len(answer["token_ids"]) == len(answer["origins"]) == 40
    assert set(answer["origins"]) <= {"accepted", "recovered", "bonus"}
    assert answer["finish_reason"] == "length"
    usage = answer["usage"]
    assert usage["completion_tokens"] == 40
    assert usage["total_tokens"] == usage["prompt_tokens"] + 40
    assert set(answer["timings"]) == TIMINGS
    metrics = answer["metrics"]["speculative_decoding"]
    assert set(metrics) == METRICS
    assert metrics["num_accepted_draft_tokens"] == answer["origins"].count("accepted")
    assert metrics["num_spec_steps"] == 40 - answer["origins"].count("accepted")
    assert sum(metrics["acceptance_histogram"]) == metrics["num_spec_steps"]
    assert {"field", "value", "reason"} == set(answer["plan"][0])
    assert isinstance(answer["seed"], int)
    assert answer["warnings"] == []


@pytest.mark.parametrize("drafter", ["ngram", "suffix", "layer_skip", "draft_model"])
@pytest.mark.parametrize("k", ["1", "5"])
def test_every_drafter_gives_the_text_of_plain(document, folder, drafter, k):
    args = ["--draft-model", str(folder / "draft")] if drafter == "draft_model" else []
    plain = document("hello", "-n", "40", "--k", "0")
    answer = document("hello", "-n", "40", "--drafter", drafter, "--k", k, *args)
    assert answer["token_ids"] == plain["token_ids"]
    assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0


@pytest.mark.skipif(not kernels.available(), reason=f"no compiled kernels: {kernels.why()}")
def test_every_pass_is_one_call_of_the_compiled_decoder(document):
    before = kernels.fast_calls()
    answer = document("hello", "-n", "20")
    calls = {name: count - before.get(name, 0) for name, count in kernels.fast_calls().items()}
    prefill = 1
    assert calls["stack"] == answer["metrics"]["speculative_decoding"]["num_spec_steps"] + prefill


@pytest.mark.skipif(not kernels.available(), reason=f"no compiled kernels: {kernels.why()}")
def test_the_plan_says_that_int4_encodes_a_target_anew(folder, capsys):
    line = ["generate", "hello", "-n", "1", "--model", str(folder / "target")]
    assert main([*line, "--dtype", "int4"]) == 0
    err = capsys.readouterr().err
    [said] = [text for text in err.splitlines() if text.startswith("dtype: int4")]
    assert "weights were encoded anew" in said
    assert "the answers are those of the encoded model" in said
    assert main([*line, "--dtype", "bfloat16"]) == 0
    assert "anew" not in capsys.readouterr().err


def test_compare_runs_plain_too(generate, document):
    compared = document("hello", "-n", "40", "--compare")["compare"]
    assert (compared["outcome"], compared["equal"]) == ("IDENTICAL", True)
    assert compared["plain_timings"]["draft_n"] == 0
    assert compared["plain_timings"]["predicted_n"] == 40
    _, _, err = generate("hello", "-n", "40", "--compare")
    assert "plain: the same text" in err
    assert "(plain " in err.splitlines()[-1]


def test_compare_says_when_texts_cannot_be_compared(document):
    args = ("hello", "-n", "30", "--temperature", "1", "--seed", "3", "--compare")
    assert document(*args, "--rule", "block")["compare"]["outcome"] in ("IDENTICAL", "NOT COMPARABLE")
    assert document(*args, "--rule", "coupled")["compare"]["outcome"] == "IDENTICAL"


def test_a_reported_seed_gives_the_answer_again(document):
    first = document("hello", "-n", "20", "--temperature", "1")
    again = document("hello", "-n", "20", "--temperature", "1", "--seed", str(first["seed"]))
    other = document("hello", "-n", "20", "--temperature", "1", "--seed", str(first["seed"] + 1))
    assert again["token_ids"] == first["token_ids"] != other["token_ids"]


def test_several_answers(generate, document):
    answer = document("hello", "-n", "10", "--n", "3", "--temperature", "1", "--seed", "1")
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) == 3
    assert answer["usage"]["completion_tokens"] == 30
    _, out, err = generate("hello", "-n", "10", "--n", "3", "--temperature", "1", "--seed", "1")
    assert out == "".join(choice["text"] + "\n" for choice in answer["choices"])
    assert "answer 3 of 3" in err


def test_logprobs(generate, document):
    entries = document("hello", "-n", "8", "--logprobs", "2")["logprobs"]
    assert len(entries) == 8
    assert all(entry["top"][0]["token_id"] == entry["token_id"] for entry in entries)  # greedy
    assert all(entry["logprob"] < 0 and len(entry["top"]) == 2 for entry in entries)
    _, out, _ = generate("hello", "-n", "8", "--logprobs", "2", "--quiet")
    assert f"{entries[7]['logprob']:.3f}" in out.splitlines()[-1]


def test_stop_is_repeatable_and_ends_the_answer(document):
    plain = document("hello", "-n", "30")
    letters = [chr(i) for i in plain["token_ids"] if 32 < i < 127]
    first = letters[2]
    answer = document("hello", "-n", "30", "--stop", "never", "--stop", first)
    assert answer["finish_reason"] == "stop"
    assert answer["stop_reason"] == first
    assert answer["text"] == plain["text"][: plain["text"].index(first)]


def test_json_schema_from_a_file_and_as_text(document, tmp_path):
    schema = {"enum": ["yes", "no"]}
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema))
    by_text = document("hello", "--json-schema", json.dumps(schema))
    by_file = document("hello", "--json-schema", str(file))
    assert by_text["token_ids"] == by_file["token_ids"]
    assert json.loads(by_text["text"]) in ("yes", "no")


def test_prediction_drafts_from_a_file(document, tmp_path):
    plain = document("hello", "-n", "30")
    file = tmp_path / "prediction.txt"
    file.write_text("the text that was expected")
    answer = document("hello", "-n", "30", "--prediction", str(file))
    assert answer["drafter"] == "prediction"
    assert answer["token_ids"] == plain["token_ids"]


def test_prompt_from_file_and_stdin(document, tmp_path, monkeypatch):
    wanted = document("hello", "-n", "5")["token_ids"]
    file = tmp_path / "prompt.txt"
    file.write_text("hello\n")
    assert document("--file", str(file), "-n", "5")["token_ids"] == wanted
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert document("-n", "5")["token_ids"] == wanted


def test_chat_is_the_default_where_there_is_a_template(document):
    chat, raw = document("hello", "-n", "5", "--chat"), document("hello", "-n", "5", "--raw")
    assert raw["usage"]["prompt_tokens"] == 5 < chat["usage"]["prompt_tokens"]
    assert document("hello", "-n", "5")["usage"] == chat["usage"]
    assert document("hello", "-n", "5", model="raw")["usage"] == raw["usage"]
    assert (
        document("hello", "-n", "5", "--system", "be brief")["usage"]["prompt_tokens"] > chat["usage"]["prompt_tokens"]
    )


def test_trace_has_every_round_of_the_speculative_run_only(document, tmp_path):
    file = tmp_path / "trace.jsonl"
    answer = document("hello", "-n", "30", "--trace", str(file), "--compare")
    steps = [StepTrace.from_json(line) for line in file.read_text().splitlines()]
    assert len(steps) == answer["metrics"]["speculative_decoding"]["num_spec_steps"]
    assert sum(step.emitted for step in steps) == 30


def test_ctrl_c_ends_the_answer_with_what_there_is(generate, monkeypatch):
    whole = generate("hello", "-n", "40", "--quiet")[1]
    show, seen = TokenPrinter.token, []

    def token(self, text, origin):
        show(self, text, origin)
        seen.append(text)
        if len(seen) == 5:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(TokenPrinter, "token", token)
    code, out, err = generate("hello", "-n", "40")
    assert code == 130
    assert out == "".join(seen) + "\n"
    assert 5 <= len(seen) < 40
    assert whole.startswith(out[:-1].rstrip("\ufffd"))
    last = err.splitlines()[-1]
    assert last.startswith(f"interrupted | {len(seen)} tokens")
    assert "Traceback" not in err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def interrupted_at(monkeypatch, call):
    from outrider.models.decoder import Decoder

    forward, calls = Decoder.forward, []

    def interrupted(self, *args, **options):
        calls.append(1)
        if len(calls) == call:
            signal.raise_signal(signal.SIGINT)
        return forward(self, *args, **options)

    monkeypatch.setattr(Decoder, "forward", interrupted)


@pytest.mark.parametrize("call", [1, 8])
def test_json_after_ctrl_c_is_the_answer_so_far(generate, monkeypatch, document, call):
    whole = document("hello", "-n", "60", "--logprobs", "1")
    interrupted_at(monkeypatch, call)
    code, out, err = generate("hello", "-n", "60", "--logprobs", "1", "--json")
    assert code == 130
    assert "interrupted" in err
    assert out.count("\n") == 1
    partial = json.loads(out)
    assert set(partial) == set(whole)
    assert partial["finish_reason"] == partial["choices"][0]["finish_reason"] == "cancelled"
    n = len(partial["token_ids"])
    assert (n == 0) if call == 1 else (0 < n < 60)
    assert partial["token_ids"] == whole["token_ids"][:n]
    assert len(partial["logprobs"]) == n == partial["usage"]["completion_tokens"] == partial["timings"]["predicted_n"]
    assert partial["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert partial["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] == partial["origins"].count(
        "accepted"
    )


def test_ctrl_c_before_the_first_token(generate, monkeypatch):
    from outrider.models.decoder import Decoder

    def forward(self, *args, **options):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Decoder, "forward", forward)
    code, out, err = generate("hello")
    assert (code, out.strip()) == (130, "")
    assert "Traceback" not in err


def test_a_lossy_rule_is_labelled(document, generate):
    answer = document("hello", "-n", "5", "--rule", "typical", "--temperature", "1")
    assert answer["lossless"] is False
    assert any("lossy" in warning for warning in answer["warnings"])
    assert "lossy" in generate("hello", "-n", "5", "--rule", "typical", "--quiet")[2]


def test_an_answer_that_ends_in_an_error_says_so_and_exits_with_1(tmp_path, capsys):
    broken = broken_model(tmp_path / "broken")
    assert main(["generate", "-m", str(broken), "hello", "-n", "5", "--quiet"]) == 1
    assert "NaN" in capsys.readouterr().err
    assert main(["generate", "-m", str(broken), "hello", "-n", "5", "--quiet", "--json"]) == 1
    assert "error: " in capsys.readouterr().out
