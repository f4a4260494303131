"""What `outrider bench` writes and compares: result files, Spec-Bench's form, Markdown, costs, baselines, dry runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from outrider.bench.baseline import draft_counts, unchecked
from outrider.bench.result_file import ResultFile
from outrider.cli.main import main
from tests.tiny_folder import write_tiny_model

QUESTIONS = 5
TURNS = 2
LANES = ["plain", "ngram K=3", "draft_model K=3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    write_tiny_model(root / "target", context=4096)
    write_tiny_model(root / "draft", layers=1, context=4096)
    prompts = [
        {"question_id": i, "category": "code" if i % 2 else "prose", "turns": ["x = " * i + "the cat and", "again"]}
        for i in range(81, 81 + QUESTIONS)
    ]
    (root / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    (root / "answers").mkdir()
    return root


@pytest.fixture(scope="module")
def options(folder):
    drafters = ["-d", "ngram,draft_model", "--draft-model", str(folder / "draft"), "-k", "3", "--quiet", "--json"]
    what = ["--prompts", str(folder / "prompts.jsonl"), "--turns", str(TURNS), "--chat", "-n", "12"]
    return [str(folder / "target"), *drafters, *what, "--dtype", "float32"]


@pytest.fixture(scope="module")
def measured(folder, options):
    """One run with everything written; returns the file's document."""
    files = [
        "--out",
        str(folder / "a.json"),
        "--markdown",
        str(folder / "a.md"),
        "--spec-bench",
        str(folder / "answers"),
    ]
    assert main(["bench", *options, *files, "--repeat", "2", "--price-per-hour", "3.6", "--watts", "72"]) == 0
    return json.loads((folder / "a.json").read_text())


@pytest.fixture
def changed(measured, tmp_path):
    """A copy of the result file with something changed in it."""

    def write(change, name="changed.json"):
        document = json.loads(json.dumps(measured))
        change(document)
        (tmp_path / name).write_text(json.dumps(document))
        return str(tmp_path / name)

    return write


def figures(document, lane="ngram K=3"):
    return next(one["all"] for one in document["lanes"] if one["lane"] == lane)


def test_the_file_holds_every_answer(measured):
    assert measured["schema"] == "outrider.bench/1"
    assert len(measured["runs"]) == len(LANES) * QUESTIONS * TURNS * 2
    for lane in LANES:
        mine = [run for run in measured["runs"] if run["lane"] == lane and run["repetition"] == 0]
        assert sum(run["tokens"] for run in mine) == figures(measured, lane)["tokens"]
        assert sum(run["rounds"] for run in mine) == figures(measured, lane)["target_passes"]
    assert {run["question"] for run in measured["runs"]} == {str(i) for i in range(81, 81 + QUESTIONS)}
    assert {run["turn"] for run in measured["runs"]} == {0, 1}


def test_speedups_have_intervals(measured):
    assert figures(measured, "plain")["speedup"] is None
    for lane in LANES[1:]:
        speedup = figures(measured, lane)["speedup"]
        low, high = speedup["interval"]["median"]
        assert low <= speedup["by_prompt"]["median"] <= high
        low, high = speedup["interval"]["of_totals"]
        assert low <= speedup["of_totals"] <= high
        assert figures(measured, lane)["time"]["draft_in_plain_steps"] > 0
    two_questions = measured["lanes"][1]["categories"]["prose"]["speedup"]["interval"]
    assert two_questions == {"level": 0.95, "median": None, "of_totals": None}


def test_costs_follow_from_the_speed_with_the_prompt(measured):
    assert measured["price"] == {"per_hour": 3.6, "watts": 72.0}
    for lane in LANES:
        tok_s, cost = figures(measured, lane)["tok_s_with_prefill_total"], figures(measured, lane)["cost"]
        assert cost["money_per_million"] == pytest.approx(1000 / tok_s)
        assert cost["kwh_per_million"] == pytest.approx(20 / tok_s)


def test_answers_are_written_as_spec_bench_reads_them(folder, measured):
    names = {lane: f"target-{lane.replace(' ', '-').replace('=', '')}-temperature-0" for lane in LANES}
    assert {file.stem for file in (folder / "answers").iterdir()} == set(names.values())
    turns = {}
    for lane, name in names.items():
        lines = [json.loads(line) for line in (folder / "answers" / f"{name}.jsonl").read_text().splitlines()]
        assert [line["question_id"] for line in lines] == list(range(81, 81 + QUESTIONS))
        assert set(lines[0]) == {"question_id", "category", "answer_id", "model_id", "choices", "tstamp"}
        for line in lines:
            assert line["model_id"] == name
            assert [choice["index"] for choice in line["choices"]] == [0, 1]
            for choice in line["choices"]:
                assert len(choice["turns"]) == len(choice["wall_time"]) == TURNS
                assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"])
                assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
        turns[lane] = [line["choices"][0]["turns"] for line in lines]
        lengths = [length for line in lines for length in line["choices"][0]["accept_lengths"]]
        assert sum(lengths) / len(lengths) == pytest.approx(figures(measured, lane)["acceptance_length"])
    assert turns["plain"] == turns["ngram K=3"] == turns["draft_model K=3"]


def test_the_markdown_table_has_every_lane_in_every_category(folder, measured):
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in (folder / "a.md").read_text().splitlines()
    ]
    header, rule, *rows = rows
    assert header[:4] == ["category", "lane", "prompts", "length"]
    assert set(rule) == {"---", "---:"}
    assert [row[:2] for row in rows] == [[c, lane] for c in ("all", "code", "prose") for lane in LANES]
    row = dict(zip(header, rows[1], strict=True))
    assert row["length"] == f"{figures(measured)['acceptance_length']:.2f}"
    assert row["x plain"] == f"{figures(measured)['speedup']['by_prompt']['median']:.2f}"
    assert row["answers"] == f"{QUESTIONS * TURNS} equal"


def test_a_file_compared_with_itself_shows_no_change(folder, measured, capsys):
    assert main(["compare", str(folder / "a.json"), str(folder / "a.json"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "outrider.compare/1"
    assert [(c["lane"], c["category"]) for c in document["changes"]] == [
        (lane, category) for lane in LANES[1:] for category in ("all", "code", "prose")
    ]
    whole = document["changes"][0]
    assert (whole["factor"], whole["interval"], whole["finding"]) == (1.0, [1.0, 1.0], "no change shown")
    assert document["changes"][2]["finding"] == "not decided", "two questions are too few"


def test_a_faster_lane_and_another_machine_are_told(folder, changed, capsys):
    def faster(document):
        document["machine"]["cpu"] = "another"
        document["settings"]["max_tokens"] = 13
        document["model"]["dtype"] = "int4"
        for lane in document["lanes"]:
            lane["rule"] = "coupled"
        for run in document["runs"]:
            run["decode_s"] /= 2 if run["lane"] == "ngram K=3" else 1
            run["answer"] = "other" if run["prompt"] == "81" else run["answer"]

    assert main(["compare", str(folder / "a.json"), changed(faster)]) == 0
    out = capsys.readouterr().out
    [line] = [line for line in out.splitlines() if line.startswith("ngram K=3") and " all " in line]
    cells = [cell.strip() for cell in line.split("  ") if cell.strip()]
    assert cells[-4:] == ["+100.0 %", "+100.0 % to +100.0 %", str(QUESTIONS * TURNS), "faster"]
    assert "  faster (+), slower (-)  " in out.splitlines()[0]
    assert "\nfaster (+), slower (-): by how many percent of BEFORE's speed-up over plain AFTER's is larger" in out
    assert "processor: " in out
    assert "max_tokens: 12 before, 13 after" in out
    assert "rule: 'greedy' before, 'coupled' after" in out
    assert "dtype: float32 before, int4 after" in out
    assert f"plain's own answer is another one on 1 of {QUESTIONS * TURNS} prompts" in out


def test_a_run_equal_to_its_baseline_passes(folder, measured, options, capsys):
    code = main(["bench", *options, "--baseline", str(folder / "a.json"), "--min-speed-ratio", "0"])
    document = json.loads(capsys.readouterr().out)
    assert code == 0
    assert document["baseline"]["falls"] == []


def longer(document):
    for lane in document["lanes"][1:2]:
        lane["all"]["acceptance_length"] *= 1.01


def faster(document):
    document["lanes"][2]["all"]["speedup"]["by_prompt"]["median"] *= 1000


@pytest.mark.parametrize(
    ("change", "lane", "figure", "words"),
    [
        (longer, "ngram K=3", "acceptance length", "0.990 of the baseline's"),
        (faster, "draft_model K=3", "speed", "at least 0.5 of it is allowed (--min-speed-ratio)"),
    ],
)
def test_a_fall_is_one_line_and_exit_code_1(changed, options, capsys, change, lane, figure, words):
    ratio = "0.5" if figure == "speed" else "0"
    assert main(["bench", *options, "--baseline", changed(change), "--min-speed-ratio", ratio]) == 1
    out, err = capsys.readouterr()
    falls = json.loads(out)["baseline"]["falls"]
    assert (lane, figure) in [(fall["lane"], fall["figure"]) for fall in falls]
    [line] = [line for line in err.splitlines() if line.startswith(f"outrider: bench: {lane}: {figure} fell to")]
    assert words in line


def test_a_small_fall_may_be_allowed(changed, options):
    allowed = ["--min-speed-ratio", "0", "--min-acceptance-ratio", "0.98"]
    assert main(["bench", *options, "--baseline", changed(longer), *allowed]) == 0


def other_prompts(document):
    document["settings"]["prompts_digest"] = "0"


def other_seed(document):
    document["settings"]["seed"] = 7


def other_form(document):
    document["settings"]["form"] = "raw"


def other_rule(document):
    for lane in document["lanes"]:
        lane["rule"] = "coupled"


def other_draft(document):
    document["model"]["draft"] = "another"


def no_schema(document):
    del document["schema"]


def other_schema(document):
    document["schema"] = "outrider.bench/0"


def no_lanes(document):
    document["lanes"] = document["lanes"][:1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_prompts, "was measured with other prompts"),
        (other_seed, "was measured with seed 7, this run has 0"),
        (other_form, "was measured with form 'raw', this run has 'chat'"),
        (other_rule, "was measured with rule 'coupled', this run has 'greedy'"),
        (other_draft, "was measured with draft 'another', this run has "),
        (no_schema, "is no document of outrider bench: give"),
        (other_schema, "has schema 'outrider.bench/0', readable is 'outrider.bench/1'"),
        (no_lanes, "there is nothing to compare"),
    ],
)
def test_what_cannot_be_compared_is_refused(changed, options, capsys, change, words):
    assert main(["bench", *options, "--baseline", changed(change)]) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert err.count("\n") == 1
    assert not out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--price-per-hour", "0"], "--price-per-hour 0.0 is not allowed"),
        (["--watts", "nan"], "--watts nan is not allowed"),
        (["--min-speed-ratio", "-1"], "--min-speed-ratio -1.0 is not allowed"),
        (["--out", "/no/such/folder/a.json"], "--out /no/such/folder/a.json cannot be written"),
        (["--spec-bench", "/no/such/folder"], "is no folder"),
        (["--baseline", "/no/such/file"], "--baseline /no/such/file cannot be read"),
    ],
)
def test_bad_files_and_figures_are_refused_before_anything_runs(options, capsys, monkeypatch, args, words):
    monkeypatch.setattr("outrider.engine.llm.open_model", None)
    assert main(["bench", *options, *args]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_an_id_without_end_is_refused_before_anything_runs(options, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("outrider.engine.llm.open_model", None)
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"question_id": "9" * 5000, "prompt": "x"}))
    assert main(["bench", options[0], "--prompts", str(path), "--spec-bench", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "line 1: its id has 5000 characters, allowed are 200" in err
    assert err.count("\n") == 1


def test_a_draft_counts_only_in_lanes_that_use_it(changed):
    baseline = ResultFile(Path(changed(other_draft)), "--baseline")
    assert draft_counts(baseline, LANES)
    assert not draft_counts(baseline, ["ngram K=3"])


def test_another_dtype_than_the_baselines_is_told(folder, measured):
    baseline, model = ResultFile(folder / "a.json", "--baseline"), measured["model"]
    assert unchecked(baseline, LANES[1:], {"model": model}) == []
    [note] = unchecked(baseline, LANES[1:], {"model": model | {"draft_dtype": "other"}})
    assert note == f"the baseline was measured with draft dtype {model['draft_dtype']}, this run with other"


def test_the_document_is_printed_whatever_becomes_of_the_files(options, tmp_path, capsys, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("outrider.bench.result_file.write_result", full)
    assert main(["bench", *options, "--limit", "1", "--out", str(tmp_path / "a.json")]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["schema"] == "outrider.bench/1"
    assert "no space left on device; make room" in err.splitlines()[-1]


def test_a_file_that_may_not_be_written_is_refused_before_anything_runs(options, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("outrider.engine.llm.open_model", None)
    monkeypatch.setattr("os.access", lambda path, mode: mode != os.W_OK or Path(path) != tmp_path / "a.json")
    (tmp_path / "a.json").write_text("kept")
    assert main(["bench", *options, "--out", str(tmp_path / "a.json")]) == 2
    assert "a.json cannot be written" in capsys.readouterr().err


def test_compare_refuses_what_is_no_result(folder, measured, tmp_path, capsys):
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "text.json").write_text("lanes")
    printed = {key: value for key, value in measured.items() if key != "runs"}
    (tmp_path / "printed.json").write_text(json.dumps(printed))
    for name, words in (
        ("list", "is no JSON object"),
        ("text", "is no JSON object"),
        ("printed", "'runs' is no list of objects"),
    ):
        assert main(["compare", str(folder / "a.json"), str(tmp_path / f"{name}.json")]) == 2
        assert words in capsys.readouterr().err


def test_a_dry_run_of_bench_says_what_it_would_do_and_loads_nothing(options, capsys, monkeypatch):
    monkeypatch.setattr("outrider.engine.llm.open_model", None)
    assert main(["bench", *options, "--dry-run", "--repeat", "3", "--warm-up", "2"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["lanes"] == LANES
    assert (document["prompts"], document["turns"]) == (QUESTIONS, QUESTIONS * TURNS)
    assert document["answers"] == 3 * QUESTIONS * TURNS * len(LANES)
    assert document["tokens_at_most"] == 12 * document["answers"] + 2 * 12 * len(LANES)
    assert main(["bench", *options, "--dry-run", "-d", "eagle3,draft_model"]) == 2
    assert "read different things" in capsys.readouterr().err


def test_a_dry_run_of_verify(folder, capsys, monkeypatch):
    monkeypatch.setattr("outrider.engine.llm.open_model", None)
    assert main(["verify", str(folder / "target"), "--dry-run", "-k", "1,2", "-n", "8", "--limit", "3"]) == 0
    out = capsys.readouterr().out
    assert "would answer 3 prompts (3 turns; prose, code, repetition), 1 time(s) each, in 5 lanes" in out
    assert "15 answers of at most 8 tokens" in out
    assert main(["verify", str(folder / "target"), "--dry-run", "-d", "draft_model"]) == 2
    assert "needs a draft model" in capsys.readouterr().err
