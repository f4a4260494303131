"""All layers in one call against one call an operation: bit-identical rows, features and caches, at every level.

Shapes: M rows, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import Tensor

from outrider import kernels
from outrider.core.protocols import Pass, Segment
from outrider.kernels import dispatch, ggml, ops, quantised
from outrider.models.decoder import Decoder
from outrider.models.kv import DecoderCache
from outrider.models.linear import Linear, StackedLinear, TorchLinear
from outrider.models.loader.checkpoint import Checkpoint
from outrider.models.weights import Layer
from tests.tiny_decoder import TINY, RandomCheckpoint, random_tokens, tiny_decoder

pytestmark = pytest.mark.skipif(not kernels.available(), reason=kernels.why())

TREE = [-1, 0, 0, 1, 1, 2, 4]
VARIANTS = {
    "llama": {},
    "window": {"sliding_window": 5},
    "qwen2": {"qkv_bias": True, "tie_embeddings": True},
    "qwen3": {"qk_norm": True, "head_dim": 32},
    "one-key-head": {"n_kv_heads": 1, "ffn_size": 97},
}


def _levels() -> list[str]:
    if not kernels.available():
        return []
    from outrider.kernels import _kernels

    return list(_kernels.available_levels())


@pytest.fixture(params=_levels() or ["none"])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Packs and runs at each level, whatever was chosen at import."""
    chosen = dispatch.choose(request.param).level
    for module in (ops, quantised):
        monkeypatch.setattr(module, "_LEVEL", chosen)
    return str(request.param)


@pytest.fixture(autouse=True)
def _quiet_torch() -> Iterator[None]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def twin_of(decoder: Decoder) -> Decoder:
    """The same weights, one call an operation."""
    twin = copy.copy(decoder)
    twin._stack = None
    return twin


def stacks() -> int:
    return kernels.fast_calls().get("stack", 0)


def run(decoder: Decoder, segments: list[Segment], taps: tuple[int, ...] = ()) -> Pass:
    """One pass that must have run as this decoder is meant to run."""
    before = stacks()
    result = decoder.forward(segments, taps=taps)
    assert stacks() - before == (decoder._stack is not None)
    return result


def assert_equal(a: Pass, b: Pass) -> None:
    assert a.logits_MV is not None
    assert b.logits_MV is not None
    assert torch.equal(a.logits_MV, b.logits_MV)
    assert (a.features_MF is None) == (b.features_MF is None)
    assert a.features_MF is None or torch.equal(a.features_MF, cast(Tensor, b.features_MF))


def assert_passes_agree(decoder: Decoder) -> None:
    """A prompt, single rows, a tree whose path is kept, taps, then a batch: as a session would run them."""
    sides = [decoder, twin_of(decoder)]
    assert decoder._stack is not None
    caches = [decoder.new_cache() for _ in sides]
    others = [decoder.new_cache() for _ in sides]

    def step(make: list[list[Segment]], taps: tuple[int, ...] = ()) -> None:
        assert_equal(*(run(side, segments, taps) for side, segments in zip(sides, make, strict=True)))

    step([[Segment(cache, random_tokens(19))] for cache in caches])
    keep(caches, range(19))
    for token in (3, 4):
        step([[Segment(cache, [token])] for cache in caches])
        keep(caches, [0])
    step([[Segment(cache, random_tokens(7), TREE)] for cache in caches], taps=(1, 0, 1))
    keep(caches, [0, 2, 5])
    batch = [
        [Segment(other, [9, 8, 7]), Segment(cache, [1, 2, 3], [-1, 0, 0])]
        for cache, other in zip(caches, others, strict=True)
    ]
    step(batch, taps=(2,))
    keep(caches, [0, 2])
    keep(others, range(3))
    assert caches[0].digest() == caches[1].digest()
    assert others[0].digest() == others[1].digest()


def keep(caches: list[DecoderCache], rows: range | list[int]) -> None:
    for cache in caches:
        cache.keep(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_the_stack_equals_its_twin(level: str, variant: str, dtype: torch.dtype) -> None:
    assert_passes_agree(tiny_decoder(dtype=dtype, **VARIANTS[variant]))


@pytest.mark.parametrize("variant", ["llama", "window", "qwen3"])
def test_a_bfloat16_cache(level: str, variant: str) -> None:
    checkpoint = RandomCheckpoint(tiny_decoder(**VARIANTS[variant]).config)
    decoder = Decoder.from_checkpoint(cast(Checkpoint, checkpoint), kv_dtype=torch.bfloat16)
    assert_passes_agree(decoder)


def packed(kind: str, outputs: int, inputs: int, bias: bool = False) -> Linear:
    """Random blocks of small scales."""
    block = ggml.FORMATS[kind]
    raw_BX = torch.randint(0, 256, (outputs * inputs // block.inputs, block.nbytes), dtype=torch.uint8)
    for at in {"Q6_K": [208], "Q4_K": [0, 2], "Q4_1": [0, 2]}.get(kind, [0]):
        raw_BX[:, at : at + 2] = torch.randn(len(raw_BX), 1).mul(0.003).half().view(torch.uint8)
    return kernels.pack_quantised(raw_BX.flatten(), kind, (outputs, inputs), torch.randn(outputs) if bias else None)


def quantised_decoder() -> Decoder:
    """Quantised blocks of several types; the parts of a stacked matrix differ in type, bias, and size."""
    decoder = tiny_decoder(hidden_size=256, ffn_size=256, n_heads=8)
    hidden, ffn = 256, 256

    def mixed(layer: Layer) -> Layer:
        wide = kernels.pack_linear(torch.randn(ffn, hidden).mul(0.05).bfloat16())
        return Layer(
            attn_norm_d=layer.attn_norm_d,
            qkv=StackedLinear([packed("Q4_K", 128, hidden, bias=True), packed("Q6_K", 64, hidden)]),
            q_norm_D=None,
            k_norm_D=None,
            o=packed("Q8_0", hidden, 128),
            ffn_norm_d=layer.ffn_norm_d,
            gate_up=StackedLinear([packed("Q4_1", ffn, hidden), wide]),
            down=packed("Q5_0", hidden, ffn),
        )

    decoder.layers = [mixed(layer) for layer in decoder.layers]
    return decoder.first_layers(3)


def test_quantised_blocks_of_several_types(level: str) -> None:
    assert_passes_agree(quantised_decoder())


def test_quantised_rows_do_not_depend_on_company_or_threads(level: str) -> None:
    decoder, tokens = quantised_decoder(), random_tokens(30)
    threads = kernels.threads()
    try:
        wholes = []
        for count in (1, 2, 3):
            kernels.set_threads(count)
            wholes.append(run(decoder, [Segment(decoder.new_cache(), tokens)]).logits_MV)
        cache = decoder.new_cache()
        rows = []
        for token in tokens:
            rows.append(cast(Tensor, run(decoder, [Segment(cache, [token])]).logits_MV))
            cache.keep([0])
    finally:
        kernels.set_threads(threads)
    assert all(torch.equal(cast(Tensor, whole), torch.cat(rows)) for whole in wholes)


def test_threads_share_a_stack() -> None:
    """Passes long enough to let other threads in."""
    decoder = tiny_decoder(hidden_size=256, ffn_size=1024, head_dim=64)
    texts = [random_tokens(64, seed=seed) for seed in range(4)]
    work_row = 3 * (512 * 256 + 256 * 256 + 3 * 1024 * 256)
    assert 64 * work_row > 1 << 27

    def logits_of(text: list[int]) -> Tensor:
        return cast(Tensor, decoder.forward([Segment(decoder.new_cache(), text)]).logits_MV)

    alone = [logits_of(text) for text in texts]
    before = stacks()
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(logits_of, texts * 3))
    assert stacks() == before + 12
    assert all(torch.equal(a, b) for a, b in zip(together, alone * 3, strict=True))


def test_more_rows_than_working_memory_is_kept_for(level: str) -> None:
    decoder = tiny_decoder()
    tokens = random_tokens(150)
    passes = [run(side, [Segment(side.new_cache(), tokens)]) for side in (decoder, twin_of(decoder))]
    assert_equal(*passes)


def test_a_cache_that_moves(level: str) -> None:
    decoder = tiny_decoder(context_length=1024)
    sides = [decoder, twin_of(decoder)]
    caches = [side.new_cache() for side in sides]
    for rows in (250, 5, 3, 1):
        tokens = random_tokens(rows, seed=rows)
        assert_equal(*(run(side, [Segment(cache, tokens)]) for side, cache in zip(sides, caches, strict=True)))
        keep(caches, range(rows))
    assert caches[0].capacity == 512
    assert caches[0].digest() == caches[1].digest()


def test_the_first_layers_have_a_stack_of_their_own(level: str) -> None:
    decoder = tiny_decoder()
    short = decoder.first_layers(2)
    assert_equal(*(run(side, [Segment(side.new_cache(), [1, 2, 3])], (1, 0)) for side in (short, twin_of(short))))
    narrow = decoder.first_layers(1)
    assert_equal(*(run(side, [Segment(decoder.new_cache(), [4])]) for side in (narrow, twin_of(narrow))))


def test_a_pass_over_no_token_of_the_head_still_fills_the_cache() -> None:
    decoder = tiny_decoder()
    caches = [decoder.new_cache() for _ in range(2)]
    for side, cache in zip((decoder, twin_of(decoder)), caches, strict=True):
        assert side.forward([Segment(cache, [1, 2])], logits=False).logits_MV is None
        cache.keep([0, 1])
    assert caches[0].digest() == caches[1].digest()


def test_what_the_kernels_cannot_hold_runs_one_by_one() -> None:
    assert tiny_decoder(head_dim=8)._stack is None
    decoder = tiny_decoder()
    plain = TorchLinear(torch.randn(TINY.hidden_size, TINY.n_heads * TINY.head_dim))
    decoder.layers[1] = replace(decoder.layers[1], o=plain)
    mixed = decoder.first_layers(3)
    assert mixed._stack is None
    run(mixed, [Segment(mixed.new_cache(), [1, 2])])
    assert decoder.first_layers(1)._stack is not None


def test_reads_and_writes_outside_a_tensor_are_refused() -> None:
    decoder = tiny_decoder()
    stack, config = decoder._stack, TINY
    assert stack is not None
    store = torch.zeros(3, 2, 8, config.n_kv_heads, config.head_dim)
    x_Md, table_UR = torch.zeros(2, config.hidden_size), torch.zeros(8, config.head_dim // 2)

    def call(position: int = 0, length: int = 0, rows: int = 2, first: int = 1, start: int | None = None) -> None:
        lengths_m = torch.arange(first, first + rows, dtype=torch.int32)
        starts_m = None if start is None else torch.full((rows,), start, dtype=torch.int32)
        span = kernels.CacheRows(rows, store, length, lengths_m, starts_m, None)
        stack.run(x_Md, torch.tensor([0, position]), table_UR, table_UR, [span])

    call()
    for wrong, what in (
        ({"position": 8}, "position of row 1"),
        ({"position": -1}, "position of row 1"),
        ({"length": 7}, "cache row of row 0"),
        ({"first": 8}, "length of row 1"),
        ({"first": -1}, "length of row 0"),
        ({"start": 2}, "start of row 0"),
        ({"rows": 1}, "span of row 1"),
    ):
        with pytest.raises(IndexError, match=what):
            call(**wrong)


@pytest.mark.parametrize("rows", [1, 5])
def test_what_the_first_attention_reads_can_be_given(level: str, rows: int) -> None:
    """Given the norm of x, it is the stack that makes it; wider matrices read wider rows."""
    torch.manual_seed(1)
    heads, d, ffn = (4, 2, 16), 64, 96
    norms = 1 + 0.2 * torch.randn(3, d)

    def matrix(outputs: int, inputs: int) -> kernels.PackedLinear:
        return kernels.pack_linear(0.2 * torch.randn(outputs, inputs))

    qkv = matrix(128, d)
    rest = (None, None, (matrix(d, 64),), norms[1], (matrix(2 * ffn, d),), (matrix(d, ffn),))
    layer = kernels.StackLayer(norms[0], (qkv,), *rest)
    x, angles, outs = torch.randn(rows, d), torch.outer(torch.arange(8.0), torch.rand(8)), []
    for reads in (None, d):
        stack = kernels.build_stack([layer], norms[2], heads=heads, eps=1e-5, cache_dtype=torch.float32, reads=reads)
        assert stack is not None
        store = torch.zeros(1, 2, 8, 2, 16)
        span = kernels.CacheRows(rows, store, 0, torch.arange(1, rows + 1, dtype=torch.int32), None, None)
        own, read = x.clone(), None if reads is None else kernels.rms_norm(x, norms[0], 1e-5)
        normed, _ = stack.run(own, torch.arange(rows), angles.cos(), angles.sin(), [span], read_MK=read)
        outs.append((normed, own, store))
    with pytest.raises(AssertionError, match="reads a norm of x, or what is given"):
        stack.run(x.clone(), torch.arange(rows), angles.cos(), angles.sin(), [span])
    with pytest.raises(AssertionError, match="qkv reads rows of another width than 128"):
        kernels.build_stack([layer], norms[2], heads=heads, eps=1e-5, cache_dtype=torch.float32, reads=128)
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))
