"""Peers: a tiny HTTP server plays llama.cpp, an engine that only counts, and several kinds of trouble."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from outrider import LLM, SamplingParams
from outrider.bench.lanes import Lane
from outrider.bench.measure import bench
from outrider.bench.peer import Peer, PeerError
from outrider.bench.summary import summarise
from outrider.bench.tables import bench_json
from outrider.drafters.ngram import NgramDrafter
from outrider.engine.prompt_file import Conversation
from outrider.errors import ConfigError
from tests.tiny import byte_tokenizer, cycle_model

PARAMS = SamplingParams(max_tokens=8, temperature=0.5, seed=7)
MESSAGES = [{"role": "user", "content": "hi"}]
USAGE = {"prompt_tokens": 4, "completion_tokens": 8}
CHOICE = {"message": {"content": "hello"}, "finish_reason": "length"}
TIMINGS = {"predicted_n": 8, "predicted_ms": 400.0, "predicted_per_second": 20.0, "draft_n": 6, "draft_n_accepted": 3}


class Server:
    """Answers POSTs with `reply` (status, document or text) after `delay_s`, and keeps what it was sent."""

    def __init__(self) -> None:
        self.reply, self.status, self.delay_s = {"choices": [CHOICE], "usage": USAGE}, 200, 0.0
        self.models: object = {"data": [{"id": "tiny"}]}
        self.refuses: set[str] = set()
        self.seen: list[tuple[str, dict]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self._send(200, outer.models)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.seen.append((self.path, body))
                time.sleep(outer.delay_s)
                if outer.refuses & set(body):
                    self._send(400, {"error": {"message": "unknown field"}})
                else:
                    self._send(outer.status, outer.reply)

            def _send(self, status, document):
                data = document.encode() if isinstance(document, str) else json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args):
                return

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def server():
    made = Server()
    thread = threading.Thread(target=made.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.http.shutdown()
    thread.join()
    made.http.server_close()


@pytest.fixture
def peer(server):
    made = Peer(server.url + "/v1/")
    yield made
    made.close()


def test_timings_are_preferred_to_the_wall_clock(server, peer):
    server.reply = {"choices": [CHOICE], "usage": USAGE, "timings": TIMINGS}
    answer = peer.answer(MESSAGES, None, PARAMS)
    assert (answer.source, answer.tokens, answer.decode_s) == ("timings", 8, pytest.approx(0.4))
    assert (answer.draft_n, answer.draft_n_accepted, answer.prompt_tokens) == (6, 3, 4)
    [(path, body)] = server.seen
    assert path == "/v1/chat/completions"
    assert body | {"messages": MESSAGES, "max_tokens": 8, "temperature": 0.5, "seed": 7, "model": "tiny"} == body


@pytest.mark.parametrize("speed", [5e-324, 10**400, -1.0, "fast"])
def test_a_speed_that_is_none_is_not_taken(server, peer, speed):
    server.reply = {"choices": [CHOICE], "usage": USAGE, "timings": {"predicted_per_second": speed}}
    answer = peer.answer(MESSAGES, None, PARAMS)
    assert (answer.source, answer.decode_s) == ("usage and wall time", answer.total_s)


def test_usage_and_wall_time_stand_in(server, peer):
    server.delay_s = 0.05
    answer = peer.answer(None, "raw text", PARAMS)
    assert answer.source == "usage and wall time"
    assert answer.decode_s == answer.total_s >= 0.05
    assert server.seen[0][0] == "/v1/completions"
    assert server.seen[0][1]["prompt"] == "raw text"


def test_a_server_that_refuses_the_extra_field_is_asked_without_it(server, peer):
    server.refuses = {"cache_prompt"}
    assert peer.answer(MESSAGES, None, PARAMS).tokens == 8
    peer.answer(MESSAGES, None, PARAMS)
    assert ["cache_prompt" in body for _, body in server.seen] == [True, False, False]


@pytest.mark.parametrize(
    ("reply", "status", "message"),
    [
        ({"error": {"message": "no such model"}}, 404, "HTTP 404: .*no such model"),
        ("<html>", 200, "not JSON: '<html>'"),
        ([1], 200, "a list, not a JSON object"),
        ({"choices": []}, 200, "without choices"),
        ({"choices": [CHOICE]}, 200, "counts no tokens"),
        ({"choices": [CHOICE], "usage": {"completion_tokens": "many"}}, 200, "counts no tokens"),
        ("", 500, "HTTP 500: no message"),
    ],
)
def test_trouble_is_one_line_that_names_the_server(server, peer, reply, status, message):
    server.reply, server.status = reply, status
    with pytest.raises(PeerError, match=message) as caught:
        peer.answer(MESSAGES, None, PARAMS)
    assert server.url in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nobody_there_and_nobody_in_time(server):
    with pytest.raises(PeerError, match="no connection"):
        Peer("http://127.0.0.1:9").connect()
    server.delay_s = 0.3
    slow = Peer(server.url, timeout_s=0.05)
    with pytest.raises(PeerError, match="no answer within"):
        slow.answer(MESSAGES, None, PARAMS)


def test_a_server_without_models_needs_a_name(server):
    server.models = {"data": []}
    with pytest.raises(PeerError, match="--peer-model"):
        Peer(server.url).connect()
    named = Peer(server.url, model="mine")
    named.connect()
    named.answer(MESSAGES, None, PARAMS)
    assert server.seen[0][1]["model"] == "mine"


@pytest.mark.parametrize("url", ["localhost:8080", "ftp://host", "http://", ""])
def test_a_bad_url_is_refused_before_anything_runs(url):
    with pytest.raises(ConfigError, match="--peer-url"):
        Peer(url)


def test_a_peer_takes_turns_with_the_lanes_and_is_reported(server, peer):
    server.reply = {"choices": [{"text": "hello"}], "usage": USAGE, "timings": TIMINGS}
    llm = LLM.from_parts(cycle_model("ab"), {"ngram": NgramDrafter()}, tokenizer=byte_tokenizer(), k=2)
    prompts = [Conversation(str(i), "a", ("text",)) for i in range(3)]
    params = SamplingParams(max_tokens=8)
    measured = bench(llm, prompts, params, [Lane("ngram", 2, "greedy")], raw=True, peer=peer, warm_up=0)
    assert [run.lane for run in measured.runs[::3]] == ["plain", "ngram K=2", "peer"]
    document = bench_json(measured, summarise(measured), {}, [])
    assert document["peer"] == {"url": server.url, "model": "tiny", "figures_from": ["timings"]}
    row = document["lanes"][-1]
    assert row["lane"] == "peer"
    assert row["all"]["tok_s"]["median"] == pytest.approx(20.0)
    assert row["all"]["acceptance_rate"] == 0.5
    assert row["all"]["answers"]["differing"] is None
    assert row["all"]["speedup"]["rows"] == 3
