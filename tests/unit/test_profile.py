"""The figures of a profile, and that its measuring leaves models, caches and settings as they were."""

from __future__ import annotations

import pytest
import torch

from outrider.bench import bandwidth
from outrider.bench.bandwidth import Bandwidth, read_bandwidth
from outrider.bench.memory import Memory, file_nbytes, kv_nbytes, pass_nbytes, peak_rss, rss
from outrider.bench.profile import Profile, Times, parse_rows, profile, steps, time_passes
from outrider.bench.reading import break_even, nearly_free
from outrider.core.protocols import Segment
from outrider.engine.llm import LLM
from outrider.errors import ConfigError
from tests.tiny_decoder import TINY, tiny_decoder
from tests.tiny_folder import write_tiny_model


def constant(seconds):
    return Times.of([seconds])


def made(**changes):
    fields = {
        "context": 10,
        "repeat": 1,
        "passes": {1: constant(0.1), 5: constant(0.13)},
        "sampled": {1: constant(0.02), 5: constant(0.03)},
        "greedy": {1: constant(0.01), 5: constant(0.01)},
        "prefill_tokens": 512,
        "prefill": constant(2.0),
        "rounds": None,
        "overheads": None,
        "load_s": 1.0,
        "memory": Memory(file=1000, weights=1200, pass_weights=10**9, kv=10**8, peak_rss=5000, rss_before_load=2000),
        "bandwidth_before": Bandwidth(22.0, "test", 2),
        "bandwidth_after": Bandwidth(20.0, "test", 2),
    }
    return Profile(**(fields | changes))


def test_ratios():
    found = made()
    assert found.v(5) == pytest.approx(1.3)
    assert found.gbps(1) == pytest.approx(11.0)
    assert found.share(1) == pytest.approx(0.5)
    assert found.sampling_s(5) == pytest.approx(0.02)
    assert found.prefill_per_s == 256
    document = found.to_json()
    assert document["v"] == {"1": 1.0, "5": pytest.approx(1.3)}
    assert document["sampling_share"]["5"] == pytest.approx(0.02 / 0.13)
    assert document["peak_to_file"] == 5
    assert document["model_peak_to_file"] == 3
    assert document["overhead_seconds"] is document["round_seconds"] is None
    assert found.notes() == []


def test_what_is_not_known_is_null():
    memory = Memory(file=1000, weights=1200, pass_weights=None, kv=None, peak_rss=None, rss_before_load=None)
    found = made(memory=memory)
    document = found.to_json()
    assert document["achieved_gbps"] == document["bandwidth_share"] == {"1": None, "5": None}
    assert document["peak_to_file"] is document["model_peak_to_file"] is None
    assert document["bytes_per_pass"]["total"] is None
    assert found.notes() == []


def test_faster_than_memory_is_noted():
    slow = Bandwidth(10.0, "test", 2)
    [note] = made(bandwidth_before=slow, bandwidth_after=slow).notes()
    assert "over 1 rows read faster" in note


def test_without_a_steady_bandwidth_there_is_no_share():
    found = made(bandwidth_after=Bandwidth(18.0, "test", 2))
    assert found.share(1) is None
    assert found.gbps(1) == pytest.approx(11.0)
    assert found.to_json()["bandwidth_share"] == {"1": None, "5": None}
    [note] = found.notes()
    assert "22.0 GB/s before the passes and at 18.0 after" in note


@pytest.mark.parametrize(
    ("costs", "free", "even"),
    [({1: 1.0, 2: 1.0, 4: 1.1, 5: 1.3}, 4, 1.3), ({1: 1.0, 2: 1.2, 5: 1.05}, 1, 1.05), ({1: 1.0, 5: 0.9}, 5, 1.0)],
)
def test_what_is_nearly_free_and_where_drafts_pay(costs, free, even):
    found = made(passes={rows: constant(cost) for rows, cost in costs.items()})
    assert (nearly_free(found), break_even(found)) == (free, even)


def test_times():
    times = Times.of([0.4, 0.1, 0.2])
    assert (times.median_s, times.best_s) == (0.2, 0.1)
    assert times.to_json() == {"median": 0.2, "q1": pytest.approx(0.15), "q3": pytest.approx(0.3), "best": 0.1}


@pytest.mark.parametrize(("text", "rows"), [("1", (1,)), ("8,2,2", (1, 2, 8)), (" 3, 1", (1, 3))])
def test_rows(text, rows):
    assert parse_rows(text) == rows


@pytest.mark.parametrize("text", ["", "1,,2", "1.5", "0", "-1,4", "two"])
def test_rows_that_are_none(text):
    with pytest.raises(ConfigError, match="not allowed: give integers >= 1"):
        parse_rows(text)


class Spy:
    """A model that keeps the rows of its passes."""

    def __init__(self):
        self.rows = []

    def forward(self, segments, *, logits=True, taps=()):
        assert logits
        [segment] = segments
        self.rows.append(len(segment.tokens))


def test_rows_take_turns_and_the_first_round_is_not_counted():
    spy, calls = Spy(), []
    found = time_passes(spy, None, [7] * 4, (1, 2, 4), repeat=2, on_step=lambda: calls.append(1))
    assert spy.rows == [1, 2, 4, 2, 4, 1, 4, 1, 2]
    assert len(calls) == 9
    assert list(found) == [1, 2, 4]


def test_a_pass_leaves_the_cache_as_it_was():
    decoder = tiny_decoder()
    cache = decoder.new_cache()
    decoder.forward([Segment(cache, [1, 2, 3])], logits=False)
    cache.keep(range(3))
    before = cache.digest()
    time_passes(decoder, cache, [4, 5], (1, 2), repeat=1)
    assert (cache.length, cache.digest()) == (3, before)


def test_bytes_of_a_decoder():
    decoder = tiny_decoder()
    hidden, attended = TINY.hidden_size, TINY.n_heads * TINY.head_dim
    layer = hidden * (2 * attended + 2 * TINY.n_kv_heads * TINY.head_dim + 3 * TINY.ffn_size)
    least = 4 * (TINY.n_layers * layer + TINY.vocab_size * hidden)
    assert (
        least <= pass_nbytes(decoder) < least + 32 * 4 * hidden
    )  # the head fills panels of up to 32 outputs, by level
    cache = decoder.new_cache()
    decoder.forward([Segment(cache, [1, 2, 3])], logits=False)
    cache.keep(range(3))
    assert kv_nbytes(cache, 2) == 2 * TINY.n_layers * 2 * TINY.n_kv_heads * TINY.head_dim * 4


def test_bytes_of_files(tmp_path):
    for name, size in (("a.safetensors", 5), ("b.safetensors", 7), ("config.json", 100)):
        (tmp_path / name).write_bytes(bytes(size))
    assert file_nbytes(tmp_path) == 12
    assert file_nbytes(tmp_path / "a.safetensors") == 5


def test_the_peak_is_at_least_what_is_held():
    block = torch.ones(8 << 20)
    now, peak = rss(), peak_rss()
    if now is None or peak is None:
        pytest.skip("this system does not tell")
    assert peak >= now > block.nbytes


def test_bandwidth_puts_the_threads_back(monkeypatch):
    monkeypatch.setattr(bandwidth, "BLOCK_NBYTES", 1 << 16)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = read_bandwidth(rounds=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert found.gbps > 0
    assert found.threads >= 1


def test_a_profile_leaves_the_engine_as_it_was(monkeypatch, tmp_path):
    monkeypatch.setattr(bandwidth, "BLOCK_NBYTES", 1 << 16)
    llm = LLM(str(write_tiny_model(tmp_path / "m", context=128)), drafter="none", k=0, dtype="float32")
    target, drafters, calls = llm.engine.target, llm.engine.router.drafters, []
    found = profile(llm, (1, 3), context=20, repeat=2, on_step=lambda: calls.append(1))
    assert len(calls) == steps((1, 3), 2)
    assert llm.engine.target is target
    assert llm.engine.router.drafters is drafters
    llm.engine.check_integrity()
    assert llm.engine.idle
    assert list(found.passes) == list(found.sampled) == list(found.greedy) == [1, 3]
    assert found.rounds is not None
    assert found.overheads is not None
    assert found.overheads.best_s > 0
    assert found.prefill_tokens == 128
