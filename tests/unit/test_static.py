"""Passes of fixed shape: on the CPU they equal the ragged passes; recording is played by a stand-in with its rules.

Shapes: m rows, V vocabulary.
"""

from __future__ import annotations

import gc
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from outrider.core.protocols import Pass, Segment
from outrider.core.types import SamplingParams
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine.llm import LLM
from outrider.models.decoder import Decoder
from outrider.models.kv import DecoderCache
from outrider.models.loader.checkpoint import Checkpoint
from outrider.models.slots import SlotCache
from outrider.models.static import ROW_BUCKETS, CudaGraphs, Out, Run, StaticSize
from tests.tiny_decoder import TINY, VOCAB, RandomCheckpoint, random_tokens

TREE = [-1, 0, 0, 1, 1, 2, 4]
PATH = [0, 1, 4, 6]
VARIANTS: dict[str, dict] = {
    "llama": {},
    "window": {"sliding_window": 5},
    "qwen2": {"qkv_bias": True, "tie_embeddings": True},
    "qwen3": {"qk_norm": True, "head_dim": 32},
    "one-head": {"n_heads": 2, "n_kv_heads": 2},
}
SIZE = StaticSize(slots=4, length=100)


def decoders(variant: str = "llama", size: StaticSize = SIZE) -> tuple[Decoder, Decoder]:
    """The same weights: one with passes of fixed shape, one without."""
    checkpoint = cast(Checkpoint, RandomCheckpoint(replace(TINY, **VARIANTS[variant])))
    static, ragged = (Decoder.from_checkpoint(checkpoint, static=size) for size in (size, None))
    return static, ragged


def filled(decoder: Decoder, tokens: list[int]) -> DecoderCache:
    cache = decoder.new_cache()
    if tokens:
        decoder.forward([Segment(cache, tokens)], logits=False)
        cache.keep(range(len(tokens)))
    return cache


def assert_same(a: Pass, b: Pass) -> None:
    for one, other in ((a.logits_MV, b.logits_MV), (a.features_MF, b.features_MF)):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


def direct(decoder: Decoder) -> int:
    return decoder.static_calls.get("direct", 0)


def slot_of(cache: DecoderCache) -> int | None:
    assert isinstance(cache, SlotCache)
    return cache.slot


class Recorder:
    """Does what a CUDA graph does, slowly: runs at fixed addresses, results in the tensors of the first run."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, run: Run) -> Run:
        out = run()

        def replay() -> Out:
            self.replays += 1
            for kept, new in zip(out, run(), strict=True):
                if kept is not None and new is not None:
                    kept.copy_(new)
            return out

        return replay


def record(decoder: Decoder) -> Recorder:
    decoder.new_cache().free()
    assert decoder._static is not None
    recorder = Recorder()
    decoder._static._capture = recorder
    return recorder


@pytest.mark.parametrize("variant", VARIANTS)
def test_chains_trees_and_batches_equal_the_ragged_pass(variant: str) -> None:
    models = decoders(variant)
    rounds = [
        [(4, [7, 8], None)],
        [(0, [5], None), (12, [1, 2, 3], [-1, 0, 0]), (3, [9], None)],
        [(31, random_tokens(len(TREE), seed=1), TREE), (2, [4, 5, 6, 7, 8], None)],
        [(1, random_tokens(16, seed=2), None)],
    ]
    for number, shapes in enumerate(rounds):
        passes = [
            model.forward(
                [Segment(filled(model, random_tokens(n, seed=n)), t, parents) for n, t, parents in shapes], taps=(2, 0)
            )
            for model in models
        ]
        assert_same(*passes)
        assert direct(models[0]) > number
    assert models[1].static_calls == {}


def test_neither_logits_nor_features_unless_asked() -> None:
    static, _ = decoders()
    cache = filled(static, random_tokens(3))
    out = static.forward([Segment(cache, [1, 2])], logits=False)
    assert (out.logits_MV, out.features_MF) == (None, None)
    assert direct(static) == 2


@pytest.mark.parametrize("variant", ["llama", "window"])
def test_keep_truncate_and_roll_back(variant: str) -> None:
    """A generation with drafts of every width, kept in part, cut back, and gone on with: equal at every step."""
    static, ragged = decoders(variant)
    caches = filled(static, random_tokens(9)), filled(ragged, random_tokens(9))
    models = static, ragged

    def step(tokens: list[int], keep: list[int], parents: list[int] | None = None) -> None:
        pairs = zip(models, caches, strict=True)
        assert_same(*(model.forward([Segment(cache, tokens, parents)]) for model, cache in pairs))
        for cache in caches:
            cache.keep(keep)
            cache.check_integrity()

    for count in (1, 2, 3, 5, 8, 16):
        step(random_tokens(count, seed=count), list(range(count // 2)))
    step(random_tokens(len(TREE), seed=3), PATH, TREE)
    before = caches[0].digest()
    step([1, 2, 3, 4], [0, 1, 2])
    for cache in caches:
        cache.truncate(cache.length - 3)
    assert caches[0].digest() == before
    step([5, 6, 7], [], [-1, -1, 0])
    assert caches[0].digest() == before
    step([8], [0])
    assert slot_of(caches[0]) == 0


def test_every_bucket_and_every_length() -> None:
    static, ragged = decoders(size=StaticSize(slots=1, length=250))
    for length in (1, 20, 130, 230):
        for rows in range(1, ROW_BUCKETS[-1] + 1):
            tokens, new = random_tokens(length, seed=length), random_tokens(rows, seed=rows)
            caches = filled(static, tokens), filled(ragged, tokens)
            before = direct(static)
            outs = [model.forward([Segment(cache, new)]) for model, cache in zip((static, ragged), caches, strict=True)]
            assert direct(static) == before + 1
            assert_same(*outs)
            caches[0].free()


def test_what_does_not_fit_goes_the_ragged_way() -> None:
    static, ragged = decoders()
    wide, long = random_tokens(17), random_tokens(SIZE.length)
    pairs = [[filled(model, []) for model in (static, ragged)] for _ in range(2)]
    assert_same(*(m.forward([Segment(c, wide)]) for m, c in zip((static, ragged), pairs[0], strict=True)))
    assert_same(*(m.forward([Segment(c, long)]) for m, c in zip((static, ragged), pairs[1], strict=True)))
    assert direct(static) == 0
    for model, cache in zip((static, ragged), pairs[1], strict=True):
        cache.keep(range(len(long)))
        assert model.forward([Segment(cache, [3])]).logits_MV is not None
    assert slot_of(pairs[1][0]) is None
    assert direct(static) == 0
    assert_same(
        *(m.forward([Segment(a, [3]), Segment(b, [4])]) for m, a, b in zip((static, ragged), *pairs, strict=True))
    )


def test_a_text_that_outgrows_its_slot_moves_out_whole() -> None:
    static, ragged = decoders(size=StaticSize(slots=1, length=24))
    caches = filled(static, random_tokens(20)), filled(ragged, random_tokens(20))
    assert slot_of(caches[0]) == 0
    for token in range(12):
        outs = [model.forward([Segment(cache, [token])]) for model, cache in zip((static, ragged), caches, strict=True)]
        assert_same(*outs)
        for cache in caches:
            cache.keep([0])
            cache.check_integrity()
    assert slot_of(caches[0]) is None
    assert direct(static) == 4
    assert slot_of(static.new_cache()) == 0


def test_slots_are_lent_and_come_back() -> None:
    static, _ = decoders()
    caches = [static.new_cache() for _ in range(SIZE.slots + 1)]
    assert [slot_of(cache) for cache in caches] == [0, 1, 2, 3, None]
    caches[1].free()
    caches[1].free()
    assert slot_of(static.new_cache()) == 1
    assert static.forward([Segment(caches[4], [1, 2])]).logits_MV is not None
    del caches[3:]
    gc.collect()
    assert static._static is not None
    assert static._static.arena.free_slots == 2


def test_sequences_do_not_see_each_other_through_a_reused_slot() -> None:
    static, ragged = decoders()
    first = filled(static, random_tokens(40, seed=5))
    first.free()
    caches = filled(static, [1, 2]), filled(ragged, [1, 2])
    assert slot_of(caches[0]) == 0
    assert_same(*(m.forward([Segment(c, [3, 4])]) for m, c in zip((static, ragged), caches, strict=True)))


def test_a_pass_writes_its_own_rows_and_nothing_else() -> None:
    """Padding lands on the spare positions: all else in the block stays as it was, bit for bit."""
    static, _ = decoders()
    caches = [filled(static, random_tokens(n, seed=n)) for n in (5, 9, 2)]
    assert static._static is not None
    arena = static._static.arena
    before = arena.store.clone()
    static.forward([Segment(caches[0], [1, 2, 3]), Segment(caches[2], [4])])
    changed_ST = (arena.store != before).flatten(4).any(-1).any(1).any(1)
    changed_ST[:, arena.length] = False
    assert changed_ST.nonzero().tolist() == [[0, 5], [0, 6], [0, 7], [2, 2]]


def test_first_layers_and_narrow_heads_have_passes_of_their_own() -> None:
    static, ragged = decoders()
    tokens = random_tokens(5)
    for change in (lambda d: d.first_layers(2), lambda d: d.with_head_rows([3, 1, 7])):
        models = change(static), change(ragged)
        caches = [filled(model, tokens) for model in models]
        assert_same(*(m.forward([Segment(c, [1, 2])]) for m, c in zip(models, caches, strict=True)))
        assert direct(models[0]) == 2
    assert direct(static) == 0
    foreign = filled(static, tokens)
    assert static.with_head_rows([1, 2]).forward([Segment(foreign, [1])]).logits_MV is not None


def test_recorded_passes_equal_the_ragged_ones_and_are_recorded_once() -> None:
    static, ragged = decoders()
    recorder = record(static)
    caches = [[filled(model, random_tokens(n, seed=n)) for n in (20, 30)] for model in (static, ragged)]
    kept: list[tuple[Tensor, Tensor]] = []
    for round_ in range(5):
        outs = [
            model.forward([Segment(cache, random_tokens(3, seed=10 * round_ + i)) for i, cache in enumerate(own)])
            for model, own in zip((static, ragged), caches, strict=True)
        ]
        assert_same(*outs)
        assert outs[0].logits_MV is not None
        kept.append((outs[0].logits_MV, outs[0].logits_MV.clone()))
        for cache in (*caches[0], *caches[1]):
            cache.keep([0, 1])
    assert static.static_calls == {"recorded": 1, "replayed": 5}
    assert recorder.replays == 5
    assert all(torch.equal(now, then) for now, then in kept), "a result was overwritten by a later pass"


def test_a_recording_that_fails_is_said_and_done_without(caplog: pytest.LogCaptureFixture) -> None:
    static, ragged = decoders()
    record(static)
    assert static._static is not None

    def failing(run: Run) -> Run:
        raise RuntimeError("operation not permitted when stream is capturing")

    static._static._capture = failing
    caches = filled(static, random_tokens(20)), filled(ragged, random_tokens(20))
    with caplog.at_level(logging.WARNING, logger="outrider"):
        for _ in range(2):
            assert_same(*(m.forward([Segment(c, [3])]) for m, c in zip((static, ragged), caches, strict=True)))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "not permitted" in caplog.text
    assert static.static_calls["direct"] >= 1
    assert "recorded" not in static.static_calls


def test_greedy_text_is_the_same_through_the_engine() -> None:
    answers, used = [], []
    for model in decoders(size=StaticSize(slots=4, length=100)):
        llm = LLM.from_parts(model, {"suffix": SuffixDrafter()}, k=4)
        prompts = [random_tokens(n, seed=n) * 2 for n in (6, 11, 20)]
        results = llm.generate(prompts, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
        answers.append([result.token_ids for result in results])
        used.append(direct(model))
    assert used[0] > 20
    assert used[1] == 0
    assert answers[0] == answers[1]


class FakeCuda:
    """Stands in for torch.cuda's streams and graphs, and writes down in which order they are used."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.graph_signature = inspect.signature(torch.cuda.graph)
        for name in ("graph_pool_handle", "Stream", "device", "current_stream", "stream", "CUDAGraph", "graph"):
            assert hasattr(torch.cuda, name)
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def graph_pool_handle(self) -> str:
        return "pool"

    def Stream(self, device: torch.device | None = None) -> SimpleNamespace:
        return self._stream(f"side of {device}")

    def current_stream(self) -> SimpleNamespace:
        return self._stream("main")

    def _stream(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, wait_stream=lambda other: self.log.append(f"{name} waits for {other.name}"))

    def CUDAGraph(self) -> SimpleNamespace:
        return SimpleNamespace(replay=lambda: self.log.append("replay"))

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        yield

    @contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        self.log.append(f"on {stream.name}")
        yield

    @contextmanager
    def graph(self, *args: object, **options: Any) -> Iterator[None]:
        self.graph_signature.bind(*args, **options)
        self.log.append(f"record on {options['stream'].name}, memory of {options['pool']}")
        yield
        self.log.append("recorded")


def test_the_order_of_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-ups behind what is under way and on the stream that records; replays give the recorded results."""
    cuda = FakeCuda(monkeypatch)
    results = (torch.zeros(1), None)

    def run() -> Out:
        cuda.log.append("run")
        return results

    replay = CudaGraphs(torch.device("cuda:1"))(run)
    side = "side of cuda:1"
    warm = [f"{side} waits for main", f"on {side}", "run", "run", "run", f"main waits for {side}"]
    assert cuda.log == [*warm, f"record on {side}, memory of pool", "run", "recorded"]
    cuda.log.clear()
    assert replay() is results
    assert replay() is results
    assert cuda.log == ["replay", "replay"]


@pytest.mark.parametrize("variant", ["window", "qwen2", "qwen3"])
def test_no_pass_mixes_its_device_with_the_host(variant: str) -> None:
    """Both kinds of pass on torch's `meta` device, whose tensors have no content: what would need the host's is an
    error there, and so is reading a number back, which a recording forbids."""
    checkpoint = cast(Checkpoint, RandomCheckpoint(replace(TINY, **VARIANTS[variant])))
    model = Decoder.from_checkpoint(checkpoint, device="meta", dtype=torch.bfloat16, static=SIZE)
    caches = [model.new_cache() for _ in range(3)]
    assert model._static is not None
    with torch.inference_mode():
        out = model._forward_ragged([Segment(caches[0], random_tokens(20))], logits=True, taps=(1,))
        caches[0].keep(range(20))
        segments = [Segment(caches[0], [1, 2, 3], [-1, 0, 0]), Segment(caches[2], [4])]
        static = model._static.forward(segments, logits=True, taps=(0, 2))
        batch = model._forward_ragged(segments, logits=True, taps=())
    assert static is not None
    shapes = [[None if t is None else tuple(t.shape) for t in (p.logits_MV, p.features_MF)] for p in (out, static)]
    assert shapes == [[(20, VOCAB), (20, 64)], [(4, VOCAB), (4, 128)]]
    for part in (out, static, batch):
        assert part.logits_MV is not None
        assert (part.logits_MV.device.type, part.logits_MV.dtype) == ("meta", torch.float32)
    with pytest.raises(NotImplementedError, match="meta"):
        model.forward(segments)


def test_the_meta_device_tells_mixed_devices() -> None:
    """The condition under which the test above can fail."""
    with pytest.raises(RuntimeError, match="device"):
        torch.ones(3, device="meta") + torch.ones(3)
