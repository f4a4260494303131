"""The native decoder on random weights: roll-back, trees, batches, taps, shared layers, exact row invariance.

Shapes: m rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider import kernels
from outrider.core.protocols import EarlyExit, LanguageModel, Segment
from outrider.core.rope import RopeScaling, inverse_frequencies
from outrider.errors import ConfigError
from outrider.models.decoder import Decoder
from outrider.models.kv import DecoderCache
from outrider.models.linear import TorchLinear
from tests.tiny_decoder import TINY, VOCAB, random_tokens, tiny_decoder

VARIANTS = {
    "llama": tiny_decoder(),
    "window": tiny_decoder(sliding_window=5),
    "qwen2": tiny_decoder(qkv_bias=True, tie_embeddings=True),
    "qwen3": tiny_decoder(qk_norm=True, head_dim=32),
    "bfloat16": tiny_decoder(dtype=torch.bfloat16),
    "narrow-heads": tiny_decoder(head_dim=8),
}

TREE = [-1, 0, 0, 1, 1, 2, 4]
PATH = [0, 1, 4, 6]


@pytest.fixture(params=sorted(VARIANTS))
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return VARIANTS[request.param]


def exact(decoder: Decoder) -> bool:
    """Whether every row is bit-identical whatever the other rows: all kernels run."""
    return kernels.available() and decoder.config.head_dim % 16 == 0


def assert_same(decoder: Decoder, a_mV: Tensor, b_mV: Tensor) -> None:
    if exact(decoder):
        assert torch.equal(a_mV, b_mV)
    else:
        coarse = decoder is VARIANTS["bfloat16"]
        torch.testing.assert_close(a_mV, b_mV, rtol=0, atol=0.5 if coarse else 1e-4)


def filled(decoder: Decoder, tokens: list[int]) -> DecoderCache:
    cache = decoder.new_cache()
    decoder.forward([Segment(cache, tokens)], logits=False)
    cache.keep(range(len(tokens)))
    return cache


def logits(decoder: Decoder, *segments: Segment) -> Tensor:
    logits_MV = decoder.forward(segments).logits_MV
    assert logits_MV is not None
    return logits_MV


def test_it_is_a_language_model(decoder: Decoder) -> None:
    model: LanguageModel = decoder
    assert isinstance(model, EarlyExit)
    assert (model.vocab_size, model.context_length) == (VOCAB, 256)
    out = logits(decoder, Segment(decoder.new_cache(), [1, 2, 3]))
    assert out.dtype == torch.float32
    assert out.shape == (3, VOCAB)
    assert bool(out.isfinite().all())


def test_append_and_roll_back_leave_no_trace(decoder: Decoder) -> None:
    tokens = random_tokens(9)
    plain, drafted = filled(decoder, tokens), filled(decoder, tokens)
    before = plain.digest()
    assert drafted.digest() == before
    decoder.forward([Segment(drafted, [1, 2, 3, 4])])
    drafted.keep([0, 1, 2])
    assert drafted.digest() != before
    drafted.truncate(9)
    assert drafted.digest() == before
    decoder.forward([Segment(drafted, [5, 6, 7], [-1, -1, 0])])
    drafted.keep([])
    assert drafted.digest() == before
    step = [logits(decoder, Segment(cache, [8])) for cache in (plain, drafted)]
    assert torch.equal(*step)
    for cache in (plain, drafted):
        cache.keep([0])
        cache.check_integrity()
    assert plain.digest() == drafted.digest()


def test_keeping_a_tree_path_equals_running_the_path(decoder: Decoder) -> None:
    prefix, tree = random_tokens(7), random_tokens(len(TREE), seed=1)
    branched, straight = filled(decoder, prefix), filled(decoder, prefix)
    tree_mV = logits(decoder, Segment(branched, tree, TREE))
    branched.keep(PATH)
    path_mV = logits(decoder, Segment(straight, [tree[node] for node in PATH]))
    straight.keep(range(len(PATH)))
    assert_same(decoder, tree_mV[PATH], path_mV)
    if exact(decoder):
        assert branched.digest() == straight.digest()
    rest = [Segment(cache, [3, 4]) for cache in (branched, straight)]
    assert_same(decoder, logits(decoder, rest[0]), logits(decoder, rest[1]))


def test_a_batch_equals_its_members_alone(decoder: Decoder) -> None:
    prompts = [random_tokens(count, seed=count) for count in (4, 12, 1)]
    shapes = [([7, 8], None), ([1, 2, 3], [-1, 0, 0]), ([5], None)]
    together = [Segment(filled(decoder, p), t, parents) for p, (t, parents) in zip(prompts, shapes, strict=True)]
    alone = [Segment(filled(decoder, p), t, parents) for p, (t, parents) in zip(prompts, shapes, strict=True)]
    assert_same(decoder, logits(decoder, *together), torch.cat([logits(decoder, segment) for segment in alone]))


def test_taps_and_features(decoder: Decoder) -> None:
    tokens = random_tokens(6)
    out = decoder.forward([Segment(decoder.new_cache(), tokens)], taps=(2, 0))
    again = decoder.forward([Segment(decoder.new_cache(), tokens)], logits=False, taps=(0,))
    assert again.logits_MV is None
    assert out.features_MF is not None
    assert out.features_MF.shape == (6, 128)
    assert again.features_MF is not None
    assert torch.equal(out.features_MF[:, 64:], again.features_MF)
    assert decoder.forward([Segment(decoder.new_cache(), tokens)]).features_MF is None


def test_first_layers_share_the_weights(decoder: Decoder) -> None:
    short, tokens = decoder.first_layers(2), random_tokens(5)
    assert short.layers[1] is decoder.layers[1]
    assert (short.n_layers, decoder.n_layers) == (2, 3)
    assert len(short.new_cache().keys) == 2
    taps = [m.forward([Segment(m.new_cache(), tokens)], taps=(1,)).features_MF for m in (short, decoder)]
    assert taps[0] is not None
    assert taps[1] is not None
    assert torch.equal(taps[0], taps[1])
    whole = decoder.first_layers(3)
    rows = [logits(model, Segment(model.new_cache(), tokens)) for model in (whole, decoder)]
    assert torch.equal(*rows)
    with pytest.raises(ConfigError, match="give 1 to 3"):
        decoder.first_layers(4)


@pytest.mark.skipif(not kernels.available(), reason=f"no compiled kernels: {kernels.why()}")
@pytest.mark.parametrize("variant", ["llama", "window", "qwen2", "qwen3", "bfloat16"])
def test_rows_are_bit_identical_whatever_their_number(variant: str) -> None:
    decoder = VARIANTS[variant]
    prefix, tokens = random_tokens(11), random_tokens(40, seed=1)
    cache = filled(decoder, prefix)
    calls = kernels.fast_calls()
    whole_mV = logits(decoder, Segment(cache, tokens))
    assert kernels.fast_calls()["stack"] - calls["stack"] == 1
    assert kernels.fast_calls()["linear"] - calls["linear"] == 1
    for rows in range(1, 17):
        assert torch.equal(logits(decoder, Segment(cache, tokens[:rows])), whole_mV[:rows]), f"{rows} rows"
    stepped = []
    for token in tokens:
        stepped.append(logits(decoder, Segment(cache, [token])))
        cache.keep([0])
    assert torch.equal(torch.cat(stepped), whole_mV)


def test_the_context_ends(decoder: Decoder) -> None:
    cache = filled(decoder, random_tokens(255))
    logits(decoder, Segment(cache, [1]))
    logits(decoder, Segment(cache, [1, 2, 3], [-1, -1, -1]))
    with pytest.raises(AssertionError, match="position 256 of 256"):
        decoder.forward([Segment(cache, [1, 2])])


def test_a_shorter_context_can_be_asked_for() -> None:
    from tests.tiny_decoder import RandomCheckpoint

    model = Decoder.from_checkpoint(RandomCheckpoint(TINY), context_length=16)  # type: ignore[arg-type]
    assert model.context_length == 16
    cache = filled(model, random_tokens(16))
    assert cache.capacity == 16


@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_the_head_without_a_token_are_left_out(tied: bool) -> None:
    from tests.tiny_decoder import RandomCheckpoint

    checkpoint = RandomCheckpoint(replace(TINY, tie_embeddings=tied))
    whole, cut = (Decoder.from_checkpoint(checkpoint, vocab_size=size) for size in (None, 100))  # type: ignore[arg-type]
    assert (whole.vocab_size, cut.vocab_size) == (VOCAB, 100)
    rows = [logits(model, Segment(model.new_cache(), [1, 120, 2])) for model in (whole, cut)]
    torch.testing.assert_close(rows[1], rows[0][:, :100], rtol=0, atol=1e-4)


def test_the_cache_of_another_model_is_refused() -> None:
    from outrider.models.table import TableCache

    with pytest.raises(AssertionError, match="TableCache"):
        VARIANTS["llama"].forward([Segment(TableCache(), [1])])


def test_a_bfloat16_cache_is_close_to_a_float32_one() -> None:
    from tests.tiny_decoder import RandomCheckpoint

    tokens = random_tokens(20)
    exact_mV, half_mV = (
        logits(model, Segment(model.new_cache(), tokens))
        for model in (
            Decoder.from_checkpoint(RandomCheckpoint(TINY), kv_dtype=dtype)  # type: ignore[arg-type]
            for dtype in (torch.float32, torch.bfloat16)
        )
    )
    assert 0 < float((exact_mV - half_mV).abs().max()) < 0.02 * float(exact_mV.abs().max())


def test_memory_is_counted() -> None:
    wide, half = tiny_decoder(), VARIANTS["bfloat16"]
    matrices = 3 * (128 * 64 + 64 * 64 + 192 * 64 + 64 * 96) + 2 * VOCAB * 64
    assert wide.nbytes == pytest.approx(matrices * 4, rel=0.1)
    assert half.nbytes == pytest.approx(matrices * 2, rel=0.1)


@pytest.mark.parametrize(("rows", "tolerance"), [(3, 0.02), (20, 1e-6)])
def test_a_bfloat16_matrix_without_kernels(rows: int, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(24, 32, generator=generator), torch.randn(24, generator=generator)
    x = torch.randn(rows, 32, generator=generator)
    y = TorchLinear(weight.bfloat16(), bias)(x)
    expected = x @ weight.bfloat16().float().T + bias
    assert y.dtype == torch.float32
    assert float((y - expected).abs().max()) <= tolerance * float(expected.abs().max())


def test_rope_scaling_by_hand() -> None:
    plain = inverse_frequencies(4, 100.0, None)
    torch.testing.assert_close(plain, torch.tensor([1.0, 0.1]))
    torch.testing.assert_close(inverse_frequencies(4, 100.0, RopeScaling("linear", 4.0)), plain / 4)
    scaling = RopeScaling("llama3", 8.0, original_context=64, low_freq=1.0, high_freq=4.0)
    kept = (64 * 0.1 / (2 * torch.pi) - 1.0) / 3.0
    torch.testing.assert_close(
        inverse_frequencies(4, 100.0, scaling), torch.tensor([1.0, 0.1 * (kept + (1 - kept) / 8)])
    )
    long = replace(scaling, original_context=32)
    torch.testing.assert_close(inverse_frequencies(4, 100.0, long), torch.tensor([1.0, 0.1 / 8]))
