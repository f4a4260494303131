"""`outrider bench` through the real entry point, on a tiny model; and on the default model where marked."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from outrider import LLM
from outrider.bench import measure, measured_costs
from outrider.cli.main import main
from outrider.core.stats import SpecStats
from outrider.engine.choosing import DEFAULT_K
from outrider.engine.shipped import shipped_heads
from tests.tiny_folder import write_tiny_model

PROMPTS = [
    {"question_id": 1, "category": "code", "turns": ["x = x = x = x", "again"]},
    {"question_id": 2, "category": "prose", "turns": ["the cat and the cat"]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    write_tiny_model(root / "target", context=4096)
    write_tiny_model(root / "draft", layers=1, context=4096)
    (root / "prompts.jsonl").write_text("\n".join(json.dumps(prompt) for prompt in PROMPTS))
    return root


@pytest.fixture
def bench(folder, capsys):
    """Runs the command on the tiny target; returns (exit code, stdout, stderr)."""

    def run(*args):
        options = ["--dtype", "float32", "--max-tokens", "8", "--prompts", str(folder / "prompts.jsonl")]
        code = main(["bench", str(folder / "target"), *options, *args])
        return code, *capsys.readouterr()

    return run


class CountingPeer(BaseHTTPRequestHandler):
    """A server that lists one model and answers everything with eight tokens."""

    def do_GET(self):
        self._send({"data": [{"id": "tiny"}]})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        timings = {"predicted_n": 8, "predicted_per_second": 40.0}
        self._send({"choices": [{"message": {"content": "hello"}, "finish_reason": "length"}], "timings": timings})

    def _send(self, document):
        data = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        return


@pytest.fixture
def peer_url():
    server = HTTPServer(("127.0.0.1", 0), CountingPeer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_table_then_one_json_line(bench, folder):
    drafters = ["--drafter", "ngram,draft_model", "--draft-model", str(folder / "draft")]
    code, out, _ = bench(*drafters, "--k", "3", "--repeat", "2")
    assert code == 0
    *table, last = out.splitlines()
    assert any("speed-up" in line for line in table)
    assert any("category" in line for line in table)
    document = json.loads(last)
    assert document["schema"] == "outrider.bench/1"
    assert [lane["lane"] for lane in document["lanes"]] == ["plain", "ngram K=3", "draft_model K=3"]
    for lane in document["lanes"]:
        assert lane["all"]["prompts"] == 2
        assert lane["all"]["answers"]["diverged"] == 0
        assert set(lane["categories"]) == {"code", "prose"}
    assert document["lanes"][0]["all"]["speedup"] is None
    assert document["lanes"][2]["all"]["draft_passes"] > 0
    assert document["measurement"]["repeat"] == 2
    assert document["settings"]["seed"] == 0
    assert document["machine"]["cpu"]
    assert list(document["verdict"]["lanes"]) == ["ngram K=3", "draft_model K=3"]
    assert table[-1] == f"verdict: {document['verdict']['sentence']}"
    assert "draft_model K=3 is " in table[-1]


def test_with_json_the_table_goes_to_stderr(bench):
    code, out, err = bench("--drafter", "suffix", "--json", "--quiet", "--limit", "1")
    assert code == 0
    assert out.count("\n") == 1
    assert json.loads(out)["settings"]["prompt_count"] == 1
    assert "speed-up" in err


def test_the_help_says_that_the_last_line_is_json(capsys):
    assert main(["bench", "--help"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "one JSON document as the last line of stdout (with --json the table goes to stderr)" in told
    assert "which is its last line in any case" in told


def test_repeated_options_add_up(bench):
    code, out, _ = bench("-d", "ngram", "-d", "suffix", "-k", "1", "-k", "2", "--json", "--quiet", "--limit", "1")
    assert code == 0
    lanes = [lane["lane"] for lane in json.loads(out)["lanes"]]
    assert lanes == ["plain", "ngram K=1", "ngram K=2", "suffix K=1", "suffix K=2"]


def test_two_turns(bench):
    code, out, _ = bench("--drafter", "suffix", "--json", "--quiet", "--turns", "2", "--chat")
    assert code == 0
    assert json.loads(out)["lanes"][0]["all"]["prompts"] == 3


def test_a_peer_is_measured_beside_our_lanes(bench, peer_url):
    code, out, _ = bench("--drafter", "ngram", "--json", "--quiet", "--peer-url", peer_url)
    assert code == 0
    document = json.loads(out)
    assert document["peer"] == {"url": peer_url, "model": "tiny", "figures_from": ["timings"]}
    assert document["lanes"][-1]["all"]["tok_s"]["median"] == pytest.approx(40.0)


def test_the_governor_takes_its_turn_among_fixed_lanes(bench, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(measured_costs, "CONTEXTS", (64,))
    asked = ["-d", "ngram", "-k", "2", "--controller", "governor", "--json", "--quiet"]
    code, _, err = bench(*asked)
    assert (code, err.count("\n")) == (2, 1)
    assert "controller 'governor' needs measured costs" in err
    measured_costs.update_costs(LLM(str(folder / "target"), drafter="ngram", dtype="float32"))
    result = str(tmp_path / "a.json")
    code, out, err = bench(*asked, "--out", result)
    assert code == 0, err
    document = json.loads(out)
    assert [lane["lane"] for lane in document["lanes"]] == ["plain", "ngram K=2", "governor"]
    fixed, governor = document["lanes"][1:]
    assert (fixed["drafter"], fixed["k"], fixed["controller"]) == ("ngram", 2, "fixed")
    assert (governor["drafter"], governor["k"], governor["controller"]) == (None, None, "governor")
    assert (governor["all"]["prompts"], governor["all"]["answers"]["diverged"]) == (2, 0)
    assert governor["all"]["speedup"]["rows"] == 2
    assert list(document["verdict"]["lanes"]) == ["ngram K=2", "governor"]
    assert main(["compare", result, result, "--json"]) == 0
    changes = json.loads(capsys.readouterr().out)["changes"]
    assert {change["lane"] for change in changes} == {"ngram K=2", "governor"}
    code, out, _ = bench(*asked, "--dry-run")
    assert json.loads(out)["lanes"] == ["plain", "ngram K=2", "governor"]


def test_without_a_k_each_drafter_has_the_one_that_is_served(tmp_path, capsys):
    def lanes(*args):
        assert main(["bench", *args, "--dry-run", "--json"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)["lanes"]

    shipped = {head.drafter: head for head in shipped_heads() if head.model == "smollm2-135m"}
    k = shipped["eagle3"].card.k
    assert k not in (None, DEFAULT_K), "the card tells another one"
    found = lanes("smollm2-135m", "-d", "ngram,eagle3,cascade")
    assert found == ["plain", f"ngram K={DEFAULT_K}", f"eagle3 K={k}", f"cascade K={k}"]
    assert lanes("smollm2-135m", "-d", "eagle3", "-k", "4") == ["plain", "eagle3 K=4"]
    test = {"prompts": [[1]], "max_tokens": 4, "k": 2, "acceptance_length": 1.5}
    (tmp_path / "card.json").write_text(json.dumps({"k": 7, "test": test}))
    own = ["-d", "eagle3,suffix", "--draft-model", str(tmp_path)]
    assert lanes("another", *own) == ["plain", "eagle3 K=7", f"suffix K={DEFAULT_K}"]


def test_a_drafter_that_never_drafts_is_named(bench):
    code, out, _ = bench("--drafter", "suffix", "--k", "0")
    assert code == 0
    assert "speculation never happened" in out
    assert any("speculation never happened" in note for note in json.loads(out.splitlines()[-1])["notes"])


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--peer-url", "http://127.0.0.1:9"], 1, "no connection"),
        (["--peer-url", "localhost:8080"], 2, "give http://host:port"),
        (["--repeat", "0"], 2, "--repeat 0 is not allowed: give an integer >= 1"),
        (["--warm-up", "-1"], 2, "--warm-up -1 is not allowed: give an integer >= 0"),
        (["--min-speed-ratio", "2"], 2, "--min-speed-ratio 2 is a share of a baseline's figure and no --baseline"),
        (["--min-acceptance-ratio", "1"], 2, "--min-acceptance-ratio 1 is a share of a baseline's figure"),
        (["--controller", "govenor"], 2, "controller 'govenor' is unknown (did you mean 'governor'?)"),
        (["--k", "-1"], 2, "K = -1 is not allowed"),
        (["--k", "5,500"], 2, "K = 500 is not allowed: give an integer from 0 to 64"),
        (["--repeat", "2", "--repeat", "3"], 2, "--repeat was given 2 times"),
        (["--seed", "2", "--seed", "3"], 2, "--seed was given 2 times"),
        (["--category", "coding"], 2, "no prompts of category coding: choose from code, prose"),
        (["--temperature", "-1"], 2, "temperature = -1.0 is not allowed"),
        (["--turns", "2", "--raw"], 2, "a raw prompt is one text"),
        (["--drafter", "draft_model"], 2, "needs a draft model"),
    ],
)
def test_what_cannot_be_done_is_one_line(bench, args, code, message):
    found, out, err = bench("--quiet", *args)
    assert found == code
    assert message in err
    assert err.count("\n") == 1
    assert not out


def test_categories_of_the_built_in_prompts(folder, capsys):
    options = ["-d", "ngram", "--dtype", "float32", "-n", "4", "--json", "--quiet"]
    assert main(["bench", str(folder / "target"), *options, "--category", "edit,code"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["categories"] == ["code", "edit"]
    assert main(["bench", str(folder / "target"), *options, "--category", "coding"]) == 2
    err = capsys.readouterr().err
    assert "the built-in prompts: no prompts of category coding: choose from code, edit, extraction, prose" in err


@pytest.fixture
def verdict(folder, capsys, monkeypatch, tmp_path):
    """Runs the command on prompts whose speeds are made up (by category, in turn); returns the verdict's document."""
    whole = measure.bench

    def run(speeds, *, load=0.0, built_in=False):
        lines = [{"id": f"{kind}{i}", "category": kind, "prompt": "x = x"} for kind in speeds for i in range(4)]
        (tmp_path / "made.jsonl").write_text("\n".join(map(json.dumps, lines)))

        def made_up(*args, **options):
            found, runs = whole(*args, **options), []
            for turn, one in enumerate(found.runs):
                speed = 1.0
                if one.lane != "plain":
                    speeds_here = speeds.get(one.category, [1.5])
                    speed = speeds_here[turn // 2 % len(speeds_here)]
                stats = SpecStats(rounds=4, drafted=8, accepted=4, own_tokens=4, emitted=8)
                seconds = one.tokens / (10 * speed)
                runs.append(replace(one, decode_s=seconds, total_s=seconds, stats=stats))
            return replace(found, runs=runs, differences={})

        monkeypatch.setattr("outrider.bench.measure.bench", made_up)
        monkeypatch.setattr("os.getloadavg", lambda: (load, 0, 0))
        prompts = [] if built_in else ["--prompts", str(tmp_path / "made.jsonl")]
        options = ["-d", "ngram", "-n", "4", "--ignore-eos", "--json", "--quiet", "--dtype", "float32"]
        assert main(["bench", str(folder / "target"), *options, *prompts]) == 0
        found = json.loads(capsys.readouterr().out)["verdict"]
        return found["sentence"], found["lanes"]["ngram K=5"], found["provisional"]

    return run


def test_the_verdict_names_the_categories_that_gain_and_lose(verdict):
    sentence, found, provisional = verdict({"edit": [1.5], "code": [1.4]})
    assert (found, provisional) == ("faster", False)
    assert sentence.endswith("worth it (gains on edit, code).")
    sentence, found, _ = verdict({"edit": [1.0], "math": [0.9]})
    assert found == "unclear"
    assert sentence.endswith("(loses on math).")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"load": 99.0}, "not decided: the machine was busy"),
        ({"built_in": True}, "not decided: the built-in prompts favour copying: decide on your own prompts"),
        (
            {"speeds": {"edit": [1.5, 1.5, 1.5, 2.5]}},
            "not decided: on prompt edit3 the speed-up is more than the tokens",
        ),
        ({"speeds": {"edit": [1.02, 1.02, 2.1, 2.1]}}, "not decided: it hangs on how one counts (1.56 x by prompt"),
    ],
)
def test_the_verdict_decides_nothing_on_doubtful_figures(verdict, options, reason):
    sentence, found, _ = verdict(**({"speeds": {"edit": [1.5], "code": [1.4]}} | options))
    assert reason in sentence
    assert found == "not decided"
    assert "worth it" not in sentence


HOW_TO = (Path(__file__).parents[2] / "docs" / "how-to" / "bench.md").read_text()
EXAMPLES = [line for line in HOW_TO.split("```")[1].splitlines() if line and "--peer-url" not in line]


@pytest.mark.parametrize("line", EXAMPLES)
def test_the_examples_of_the_guide_run(folder, capsys, line):
    root = Path(__file__).parents[2]
    words = {
        "TARGET": str(folder / "target"),
        "DRAFT": str(folder / "draft"),
        "my_prompts.jsonl": str(folder / "prompts.jsonl"),
        "examples/tasks.jsonl": str(root / "examples" / "tasks.jsonl"),
        "256": "8",
    }
    program, *args = [words.get(word, word) for word in line.split()]
    assert program == "outrider"
    assert main([*args, "--limit", "1", "--raw", "--json", "--quiet"]) == 0, capsys.readouterr().err


@pytest.mark.model
def test_the_default_model(capsys):
    from outrider.models.loader.catalogue import DEFAULT_MODEL

    options = ["--drafter", "suffix", "--k", "3", "--limit", "2", "--max-tokens", "16", "--json", "--quiet"]
    assert main(["bench", DEFAULT_MODEL, *options]) == 0
    document = json.loads(capsys.readouterr().out)
    plain, suffix = document["lanes"]
    assert suffix["all"]["answers"]["diverged"] == 0
    assert plain["all"]["target_passes"] >= suffix["all"]["target_passes"]
    assert 0 < suffix["all"]["time"]["target_share"] <= 1
