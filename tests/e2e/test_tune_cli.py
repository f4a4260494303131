"""`outrider tune` through the real entry point, on tiny models; its files; --config; the report in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from outrider.bench.result_file import prompts_digest
from outrider.cli.main import main
from outrider.engine.prompt_file import read_prompts
from outrider.tune.configuration import read_configuration
from tests.tiny_folder import write_tiny_model

PROMPTS = [
    {"question_id": 1, "category": "code", "turns": ["x = x = x = x"]},
    {"question_id": 2, "category": "prose", "turns": ["the cat and the cat"]},
]
PLOTS = ["acceptance", "map", "round", "roofline", "kinds"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    write_tiny_model(root / "target", context=256)
    write_tiny_model(root / "draft", layers=1, context=256)
    (root / "prompts.jsonl").write_text("\n".join(map(json.dumps, PROMPTS)))
    return root


@pytest.fixture(scope="module")
def options(folder):
    what = ["--draft-model", str(folder / "draft"), "--prompts", str(folder / "prompts.jsonl"), "--dtype", "float32"]
    return ["tune", str(folder / "target"), *what, "--k", "1,3", "-n", "12", "--warm-up", "0"]


@pytest.fixture(scope="module")
def tuned(folder, options, tmp_path_factory):
    """One run at two temperatures; returns the folder that it wrote."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE", str(tmp_path_factory.mktemp("cache")))
        out = folder / "out"
        assert main([*options, "--out", str(out), "--measure", "2", "-t", "0,1", "--quiet"]) == 0
    return out


@pytest.fixture(scope="module")
def document(tuned):
    return json.loads((tuned / "tune.json").read_text())


def test_every_candidate_is_predicted_and_the_best_are_measured(document):
    assert document["schema"] == "outrider.tune/1"
    assert [one["name"] for one in document["drafters"]] == ["ngram", "suffix", "draft_model", "cascade"]
    assert [one["rule"] for one in document["temperatures"]] == ["greedy", "coupled"]
    for found in document["temperatures"]:
        whole = [one for one in found["candidates"] if one["category"] == "all"]
        assert len(whole) == 4 * 2
        assert [one["ratio"] for one in whole] == sorted((one["ratio"] for one in whole), reverse=True)
        assert {one["category"] for one in found["candidates"]} == {"all", "code", "prose"}
        assert all(one["tokens"] == found["plain"]["all"]["tokens"] for one in whole)
    best = [f"{one['drafter']} K={one['k']}" for one in document["temperatures"][0]["candidates"][:2]]
    assert [check["lane"] for check in document["measured"]] == ["plain", *best]
    for check in document["measured"]:
        assert check["diverged"] == 0
        assert check["error"] == pytest.approx(check["predicted_tok_s"] / check["measured_tok_s"] - 1)


def test_a_bounded_run_says_what_it_was_over(options, folder, tmp_path, monkeypatch):
    """Prompts that did not fit are not in what the report calls its prompts."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "out"
    assert main([*options, "--out", str(out), "--measure", "1", "--time-budget", "0.001", "--quiet"]) == 0
    document = json.loads((out / "tune.json").read_text())
    [conversation] = read_prompts(folder / "prompts.jsonl", limit=1)
    settings = document["settings"]
    assert (settings["prompt_count"], settings["categories"]) == (1, ["code"])
    assert settings["prompts_digest"] == prompts_digest([conversation])
    assert "1 prompt at temperature 0" in " ".join((out / "report.html").read_text().split())
    assert "the time budget of 0.001 s holds 1 of 2 prompts" in document["notes"]


def test_the_configuration_says_what_the_verdict_does(tuned, document, folder):
    told, verdict = read_configuration(tuned / "outrider.toml"), document["verdict"]
    assert told["model"] == str(folder / "target")
    assert (told["drafter"], told["k"]) == (verdict["drafter"], verdict["k"])
    assert (verdict["k"] > 0) == verdict["speculate"]
    text = (tuned / "outrider.toml").read_text()
    assert text.startswith(f"# {verdict['sentence']}\n")
    assert all(json.dumps(reason) in text for reason in verdict["reasons"])


def test_the_report_is_whole_by_itself(tuned, document):
    page = (tuned / "report.html").read_text()
    answer, _, doubts = document["verdict"]["sentence"].partition(" Provisional: ")
    first_screen = page.split("<section")[0]
    assert f"{answer}<small>Provisional: {doubts}</small>" in first_screen
    assert re.findall(r'<svg viewBox="[^"]+" role="img" aria-labelledby="(\w+)-t \1-d">', page) == PLOTS
    for name in PLOTS:
        assert re.search(f'<title id="{name}-t">.+?</title><desc id="{name}-d">.+?</desc>', page)
    assert not re.search(r"https?:|<script|<link(?![^>]*data:)|@import|url\(", page)
    assert page.count("<table>") == len(PLOTS) + 2


def test_people_are_told_what_the_table_leaves_out_and_which_rule_runs(options, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    few = ["-d", "ngram,suffix", "-k", "1,2,3,4,5", "--measure", "0", "--limit", "1", "--out", str(tmp_path / "out")]
    assert main([option for option in options if option not in ("--k", "1,3")] + few) == 0
    out, err = capsys.readouterr()
    assert "the best 8 of 10 candidates; all are in the report" in out.splitlines()
    assert "greedy at temperature 0, coupled above (the text does not depend on what is drafted)" in err
    assert main(["tune", "--help"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "auto (greedy at temperature 0, coupled above)" in told
    assert "block above" not in told


def test_costs_of_a_busy_hour_make_the_verdict_provisional(options, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    few = ["-d", "ngram", "--measure", "0", "--limit", "1", "--out", str(tmp_path / "out"), "--json", "--quiet"]
    doubts = []
    for load in (5.8, 0.1):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0, 0))
        assert main([*options, *few]) == 0
        doubts.append(json.loads(capsys.readouterr().out)["verdict"]["doubts"][0])
    assert doubts == [
        "the machine was busy: measure again when it is idle",
        "the costs were measured while the machine was busy (load 5.8 on 2 cores): measure them again with --refresh",
    ]


def test_a_configuration_gives_defaults_that_options_go_before(folder, tmp_path, capsys):
    path = tmp_path / "c.toml"
    lines = [f"model = {json.dumps(str(folder / 'target'))}", 'drafter = "ngram"', "k = 3", 'dtype = "float32"']
    path.write_text("\n".join(lines))
    quiet = ["--config", str(path), "-n", "4", "--json", "--quiet"]
    assert main(["generate", "hello", *quiet]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["model"], told["drafter"], told["k"]) == (str(folder / "target"), "ngram", 3)
    assert main(["generate", "hello", *quiet, "-k", "2", "-d", "suffix"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["drafter"], told["k"]) == ("suffix", 2)
    assert main(["bench", *quiet, "--limit", "1"]) == 0
    lanes = json.loads(capsys.readouterr().out)["lanes"]
    assert [lane["lane"] for lane in lanes] == ["plain", "ngram K=3"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-k", "0"], "name at least one drafter other than 'none', and one K >= 1"),
        (["-d", "none"], "name at least one drafter other than 'none', and one K >= 1"),
        (["-t", "warm"], "--temperature 'warm' is not allowed"),
        (["-t", "0,1", "--rule", "block"], "use --rule coupled, or --temperature 0"),
        (["--measure", "-1"], "--measure -1 is not allowed: give a whole number >= 0"),
        (["--time-budget", "0"], "--time-budget 0 is not allowed: give seconds above 0"),
        (["--time-budget", "nan"], "seconds above 0"),
        (["-d", "sufix"], "did you mean 'suffix'"),
        (["--server", "localhost:8080"], "--server 'localhost:8080' is not allowed"),
        (["--prompts", "nowhere.jsonl"], "does not exist"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(options, capsys, args, message):
    changed = [arg for arg in options if args[0] != "-k" or arg not in ("--k", "1,3")]
    if args[0] == "--prompts":
        changed = [arg for arg in changed if arg != "--prompts" and not arg.endswith(".jsonl")]
    assert main([*changed, *args]) == 2
    assert message in capsys.readouterr().err


def test_a_dry_run_says_how_long_and_writes_nothing(options, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*options, "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == "outrider.tune_dry_run/1"
    assert (told["prompts"], told["candidates"], told["measured"]) == (2, 8, 3)
    assert told["tokens"] == 2 * (1 + 4) * 12
    assert told["seconds"] > 0
    assert main([*options, "--dry-run"]) == 0
    assert "or more where answers have their full length" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


class FourOfEight(BaseHTTPRequestHandler):
    """A server that answers everything with eight tokens in a fifth of a second, four of ten drafted ones kept."""

    def do_GET(self):
        self._send({"data": [{"id": "tiny"}]})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        timings = {"predicted_n": 8, "predicted_per_second": 40.0, "draft_n": 10, "draft_n_accepted": 4}
        self._send({"choices": [{"message": {"content": "hello"}, "finish_reason": "length"}], "timings": timings})

    def _send(self, document):
        data = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        return


def test_a_server_is_measured_as_far_as_it_tells(options, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    server = HTTPServer(("127.0.0.1", 0), FourOfEight)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    few = ["-d", "ngram", "--measure", "1", "--out", str(tmp_path / "out"), "--json", "--quiet"]
    try:
        assert main([*options, *few, "--server", f"http://127.0.0.1:{server.server_port}"]) == 0
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    told = json.loads(capsys.readouterr().out)["server"]
    assert told == {"tok_s": pytest.approx(40.0), "drafted": 20, "acceptance_rate": pytest.approx(0.4)}


CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--window-size=1100,900",
]


def shown(page, folder, theme):
    """(what the console said, the screenshot's pixels) of a page in a theme, 0 being dark."""
    image = pytest.importorskip("matplotlib.image")
    shot = folder / "shot.png"
    chosen = [f"--user-data-dir={folder / 'profile'}", f"--blink-settings=preferredColorScheme={theme}"]
    command = [CHROMIUM, *FLAGS, *chosen, f"--screenshot={shot}", page.as_uri()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = [line for line in run.stderr.splitlines() if "CONSOLE" in line]
    return said, (image.imread(shot)[..., :3] * 255).round().astype(int)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
@pytest.mark.parametrize(("theme", "paper"), [(1, (251, 251, 249)), (0, (20, 23, 27))], ids=["light", "dark"])
def test_a_browser_shows_the_report_in_both_themes(tuned, tmp_path, theme, paper):
    said, pixels = shown(tuned / "report.html", tmp_path, theme)
    assert said == []
    assert tuple(pixels[2, 2]) == paper
    assert len({tuple(pixel) for pixel in pixels[:, ::40].reshape(-1, 3)}) > 8, "there is text and colour"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_the_report_forbids_every_request(tuned, tmp_path):
    page = tmp_path / "loads.html"
    text = (tuned / "report.html").read_text()
    page.write_text(text.replace("<main>", '<main><img src="http://127.0.0.1:9/x.png" alt="">'))
    said, _ = shown(page, tmp_path, 1)
    assert any("Content Security Policy" in line for line in said)
