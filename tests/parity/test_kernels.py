"""Kernels against their twins, row by row and bit by bit, at every level that runs here."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from outrider import kernels
from outrider.errors import ConfigError
from outrider.kernels import dispatch, ggml, ops, quantised, reference

needs_extension = pytest.mark.skipif(not kernels.available(), reason=kernels.why())


def _levels() -> list[str]:
    if not kernels.available():
        return []
    from outrider.kernels import _kernels

    return list(_kernels.available_levels())


@pytest.fixture(params=_levels() or [pytest.param("none", marks=needs_extension)])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs the test at each level, whatever was chosen at import."""
    for module in (ops, quantised):
        monkeypatch.setattr(module, "_LEVEL", dispatch.choose(request.param).level)
    return str(request.param)


@pytest.fixture(autouse=True)
def _quiet_torch() -> Iterator[None]:
    """One seed, and one torch thread: the two pools would only disturb each other on tensors this small."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _ran(operation: str) -> int:
    return kernels.fast_calls().get(operation, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(100, 64), (33, 577), (1, 1), (192, 1536), (64, 256), (5, 257)])
def test_linear_matches_its_twin(level: str, dtype: torch.dtype, n: int, k: int) -> None:
    weight_NK, bias_N = torch.randn(n, k).to(dtype), torch.randn(n)
    before = _ran("linear")
    for rows, bias in itertools.product([1, 2, 3, 4, 5, 6, 7, 16, 17, 130], [None, bias_N]):
        x_MK = torch.randn(rows, k)
        y_MN = kernels.pack_linear(weight_NK, bias)(x_MK)
        expected_MN = x_MK.double() @ weight_NK.double().T + (0 if bias is None else bias.double())
        scale_MN = x_MK.double().abs() @ weight_NK.double().abs().T + 1
        assert ((y_MN - expected_MN).abs() <= 2e-6 * scale_MN).all()
        torch.testing.assert_close(y_MN, reference.linear(x_MK, weight_NK, bias), atol=1e-3, rtol=1e-5)
    assert _ran("linear") == before + 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_rows_do_not_depend_on_company(level: str, dtype: torch.dtype) -> None:
    packed = kernels.pack_linear(torch.randn(203, 700).to(dtype), torch.randn(203))
    x_MK = torch.randn(200, 700)
    alone_MN = torch.cat([packed(x_MK[m : m + 1]) for m in range(200)])
    for rows in [*range(1, 18), 31, 96, 97, 200]:
        assert torch.equal(packed(x_MK[:rows]), alone_MN[:rows]), f"{rows} rows"
    order = torch.randperm(200)
    assert torch.equal(packed(x_MK[order]), alone_MN[order])


def test_results_do_not_depend_on_threads(level: str) -> None:
    packed = kernels.pack_linear(torch.randn(2000, 300))
    x_MK, wide_MK = torch.randn(40, 300), torch.randn(40, 8448)
    quantised_layer = kernels.pack_quantised(_blocks("Q4_1", 300, 8448), "Q4_1", (300, 8448))
    q_MHD, keys_TGD, values_TGD = torch.randn(3, 4, 64), torch.randn(700, 2, 64), torch.randn(700, 2, 64)
    lengths_M = torch.tensor([698, 699, 700], dtype=torch.int32)
    threads = kernels.threads()
    results = []
    try:
        for count in (1, 2, 3):
            kernels.set_threads(count)
            attended_MHD = kernels.attention(q_MHD, keys_TGD, values_TGD, lengths_M)
            results.append((packed(x_MK), quantised_layer(wide_MK), attended_MHD))
    finally:
        kernels.set_threads(threads)
    assert all(torch.equal(a, b) for result in results[1:] for a, b in zip(results[0], result, strict=True))


def _blocks(kind: str, outputs: int, inputs: int) -> Tensor:
    """Random bytes are valid blocks, but for their f16 fields."""
    block = ggml.FORMATS[kind]
    raw_BX = torch.randint(0, 256, (outputs * inputs // block.inputs, block.nbytes), dtype=torch.uint8)
    fields = {"Q6_K": [208], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q4_1": [0, 2], "Q5_1": [0, 2]}.get(kind, [0])
    for at in fields:
        raw_BX[:, at : at + 2] = torch.randn(len(raw_BX), 1).mul(0.01).half().view(torch.uint8)
    return raw_BX.flatten()


@pytest.mark.parametrize("kind", ggml.FORMATS)
def test_blocks_decode_as_the_format_says(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    raw = _blocks(kind, 6, 512)
    theirs = gguf.quants.dequantize(raw.numpy().reshape(6, -1), gguf.GGMLQuantizationType[kind])
    assert torch.equal(ggml.dequantise(raw, kind, 512), torch.from_numpy(theirs))


@pytest.mark.parametrize("kind", ggml.FORMATS)
@pytest.mark.parametrize(("n", "k"), [(64, 256), (37, 768), (300, 512), (40, 8448)])
def test_quantised_linear_matches_its_twin(level: str, kind: str, n: int, k: int) -> None:
    raw, bias_N, x_MK = _blocks(kind, n, k), torch.randn(n), torch.randn(130, k)
    x_MK[1, :32] = 0
    before = kernels.fast_calls().get("quantised_linear", 0)
    packed = kernels.pack_quantised(raw, kind, (n, k), bias_N)
    codes_MK, scales_MG = ggml.quantise_activations(x_MK)
    rounded_MK = codes_MK.double() * scales_MG.double().repeat_interleave(32, dim=1)
    weight_NK = ggml.dequantise(raw, kind, k).double()
    exact_MN = rounded_MK @ weight_NK.T + bias_N.double()
    size_MN = rounded_MK.abs() @ weight_NK.abs().T + 1
    bound = 1.5e-6 + 6e-8 * k / 32  # a rounding for each group of the chain
    for rows in (1, 2, 3, 4, 5, 6, 7, 16, 17, 130):
        assert ((packed(x_MK[:rows]) - exact_MN[:rows]).abs() <= bound * size_MN[:rows]).all(), f"{rows} rows"
    torch.testing.assert_close(packed(x_MK), ggml.linear(x_MK, raw, kind, bias_N), atol=1e-3, rtol=1e-4)
    full_MN = x_MK.double() @ weight_NK.T + bias_N.double()
    assert (packed(x_MK) - full_MN).norm() < 0.01 * full_MN.norm()
    assert kernels.fast_calls()["quantised_linear"] == before + 12


@pytest.mark.parametrize("kind", ggml.FORMATS)
def test_every_packed_weight_is_in_its_place(level: str, kind: str) -> None:
    """One input of 127 alone is quantised without error, so its output is the weight, scale and code."""
    raw = _blocks(kind, 37, 512)
    weight_NK = kernels.pack_quantised(raw, kind, (37, 512))(127 * torch.eye(512)).T / 127
    exact_NK = ggml.dequantise(raw, kind, 512)
    torch.testing.assert_close(weight_NK, exact_NK, rtol=2e-6, atol=1e-6 * float(exact_NK.abs().max()))


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K"])
def test_stacked_rows_in_any_order_are_packed_as_their_copy_is(level: str, kind: str) -> None:
    first, second = (_blocks(kind, rows, 256).view(rows, -1) for rows in (19, 40))
    order = torch.randperm(40)[:30]
    sources = [kernels.BlockRows(first), kernels.BlockRows(second, order), kernels.BlockRows(first[3:7])]
    copied = torch.cat([first, second[order], first[3:7]])
    x_MK = torch.randn(3, 256)
    packed = kernels.pack_quantised_rows(sources, kind, 256)
    assert packed.out_features == 53
    assert torch.equal(packed(x_MK), kernels.pack_quantised(copied, kind, (53, 256))(x_MK))


def test_rows_that_are_not_there_are_refused(level: str) -> None:
    blocks = _blocks("Q4_1", 8, 32).view(8, -1)
    for order in ([8], [-1]):
        with pytest.raises(AssertionError, match="rows that are not there"):
            kernels.pack_quantised_rows([kernels.BlockRows(blocks, torch.tensor(order))], "Q4_1", 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [[64, 32, 11], [5, 40, 1, 1, 60], [3]])
def test_chunks_pack_as_the_whole_does(level: str, dtype: torch.dtype, sizes: list[int]) -> None:
    weight_NK, bias_N, x_MK = torch.randn(sum(sizes), 65).to(dtype), torch.randn(sum(sizes)), torch.randn(4, 65)
    packed = kernels.pack_linear_chunks(iter(weight_NK.split(sizes)), (sum(sizes), 65), dtype, bias_N)
    assert torch.equal(packed(x_MK), kernels.pack_linear(weight_NK, bias_N)(x_MK))
    with pytest.raises(AssertionError, match="rows of"):
        kernels.pack_linear_chunks(iter(weight_NK.split(sizes)), (sum(sizes) + 1, 65), dtype)


@pytest.mark.parametrize("kind", ggml.FORMATS)
def test_integer_sums_are_exact_at_the_extremes(level: str, kind: str) -> None:
    """All codes at an end of their range times activations of 127 or -127: no pair sum may saturate."""
    block = ggml.FORMATS[kind]
    one_half = torch.tensor([1.0]).half().view(torch.uint8)
    for fill in (0, 255):
        raw_BX = torch.full((8, block.nbytes), fill, dtype=torch.uint8)
        fields = {"Q6_K": [208], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q4_1": [0, 2], "Q5_1": [0, 2]}.get(kind, [0])
        for at in fields:
            raw_BX[:, at : at + 2] = one_half
        packed = kernels.pack_quantised(raw_BX.flatten(), kind, (8, block.inputs))
        x_MK = torch.cat([torch.full((1, block.inputs), 127.0), torch.full((1, block.inputs), -127.0)])
        exact_MN = x_MK.double() @ ggml.dequantise(raw_BX, kind, block.inputs).double().T
        torch.testing.assert_close(packed(x_MK).double(), exact_MN, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ggml.FORMATS)
def test_quantised_rows_do_not_depend_on_company(level: str, kind: str) -> None:
    packed = kernels.pack_quantised(_blocks(kind, 75, 512), kind, (75, 512))
    x_MK = torch.randn(100, 512)
    alone_MN = torch.cat([packed(x_MK[m : m + 1]) for m in range(100)])
    for rows in [*range(1, 18), 96, 97, 100]:
        assert torch.equal(packed(x_MK[:rows]), alone_MN[:rows]), f"{rows} rows"
    order = torch.randperm(100)
    assert torch.equal(packed(x_MK[order]), alone_MN[order])


def test_quantised_rows_hide_no_nan(level: str) -> None:
    packed = kernels.pack_quantised(_blocks("Q4_1", 8, 64), "Q4_1", (8, 64))
    for bad in (torch.nan, torch.inf):
        x_MK = torch.randn(3, 64)
        x_MK[1, 40] = bad
        finite_M = packed(x_MK).isfinite().all(1)
        assert finite_M.tolist() == [True, False, True]


@needs_extension
@pytest.mark.parametrize(
    ("kind", "bits"), [("Q4_0", 4.5), ("Q4_1", 5), ("Q5_0", 5.5), ("Q8_0", 8.5), ("Q4_K", 4.625), ("Q6_K", 6.5625)]
)
def test_quantised_weights_stay_small(kind: str, bits: float) -> None:
    packed = kernels.pack_quantised(_blocks(kind, 64, 512), kind, (64, 512))
    assert packed.nbytes == 64 * 512 * bits / 8
    assert packed.dtype == kind


@needs_extension
def test_packing_holds_no_second_copy() -> None:
    packed = kernels.pack_linear(torch.zeros(1600, 576, dtype=torch.bfloat16))
    assert packed.nbytes == 1600 * 576 * 2
    assert packed.dtype == torch.bfloat16


def _error(raw: Tensor, weight_NK: Tensor) -> Tensor:
    """Squared error of each Q4_0 block, over its energy."""
    lost_NK = ggml.dequantise(raw, "Q4_0", weight_NK.shape[1]) - weight_NK
    return lost_NK.square().reshape(-1, 32).sum(1) / weight_NK.square().reshape(-1, 32).sum(1)


def test_encoded_weights_lose_as_little_as_the_twin_s(level: str) -> None:
    weight_NK = torch.randn(37, 512) * torch.logspace(-6, 3, 37)[:, None]
    before = kernels.fast_calls().get("encode_q4_0", 0)
    found, expected = kernels.encode_q4_0(weight_NK), ggml.encode_q4_0(weight_NK)
    assert found.shape == expected.shape == (37, 512 // 32 * 18)
    assert (found == expected).float().mean() > 0.999
    normal_NK = weight_NK[8:]
    torch.testing.assert_close(_error(found[8:], normal_NK), _error(expected[8:], normal_NK), atol=1e-6, rtol=1e-3)
    assert float(_error(found[8:], normal_NK).max()) < 0.02
    assert kernels.fast_calls()["encode_q4_0"] == before + 1


def test_weights_that_four_bits_hold_are_encoded_exactly(level: str) -> None:
    """Whole multiples of a unit that uses all of -8 .. 7; a row of zeros; a lone weight of either sign."""
    codes_NK = torch.randint(-8, 8, (6, 64)).float()
    codes_NK[:, ::32] = -8
    codes_NK[3], codes_NK[4], codes_NK[5] = 0, 0, 0
    codes_NK[4, 5], codes_NK[5, 40] = 1, -1
    units_N1 = torch.tensor([1.0, 0.25, -2.0, 1.0, 3.0, 2.0**-20])[:, None]
    weight_NK = codes_NK * units_N1
    assert torch.equal(ggml.dequantise(kernels.encode_q4_0(weight_NK), "Q4_0", 64), weight_NK)


def test_q8_0_blocks_are_within_half_a_step_and_keep_what_is_not_finite_visible() -> None:
    weight_NK = torch.randn(5, 64, generator=torch.Generator().manual_seed(3))
    weight_NK[1, :32] = 0
    weight_NK[2, 40] = torch.inf
    back_NK = ggml.dequantise(kernels.encode_q8_0(weight_NK), "Q8_0", 64)
    unit_NG1 = weight_NK.reshape(5, 2, 32).abs().amax(2, keepdim=True) / 127
    off_NGX = (back_NK - weight_NK).reshape(5, 2, 32).abs()
    finite = unit_NG1.isfinite().expand_as(off_NGX)
    assert bool((off_NGX <= unit_NG1 * 0.6 + 1e-9)[finite].all())  # half a code, and the unit's rounding to f16
    assert bool(back_NK[2, 32:].isnan().all())


@pytest.mark.parametrize("encode", [kernels.encode_q4_0, ggml.encode_q4_0])
def test_encoding_hides_no_damaged_weight_and_makes_none(level: str, encode: Callable[[Tensor], Tensor]) -> None:
    weight_NK = torch.randn(6, 32)
    weight_NK[1, 3], weight_NK[2, 31], weight_NK[3, 0] = torch.nan, torch.inf, -torch.inf
    weight_NK[4], weight_NK[5] = 8e5, 1e-30
    finite_N = ggml.dequantise(encode(weight_NK), "Q4_0", 32).isfinite().all(1)
    assert finite_N.tolist() == [True, False, False, False, True, True]


def test_units_are_rounded_to_half_precision_as_torch_rounds(level: str) -> None:
    """Blocks of one weight each: the unit is that weight over -8, from below subnormal halves to infinity."""
    bits_N = torch.randint(0, 1 << 31, (20000,), dtype=torch.int32)
    units_N = torch.cat(
        [bits_N.view(torch.float32), 2.0 ** torch.linspace(-30, 20, 2001), torch.tensor([65519.0, 65520.0])]
    )
    units_N = units_N[units_N.isfinite() & (units_N < 65504) & (units_N > 1e-15)]
    weight_NK = torch.zeros(len(units_N), 32)
    weight_NK[:, 7] = units_N * -8
    found_N = kernels.encode_q4_0(weight_NK)[:, :2].contiguous().view(torch.float16)[:, 0]
    assert torch.equal(found_N, units_N.half())


@pytest.mark.parametrize("width", [16, 576, 1536, 37])
def test_norms_match_and_rows_are_independent(level: str, width: int) -> None:
    x_MK, delta_MK, weight_K = torch.randn(40, width), torch.randn(40, width), torch.randn(width)
    before = _ran("rms_norm"), _ran("add_rms_norm_")
    out_MK = kernels.rms_norm(x_MK, weight_K, 1e-5)
    torch.testing.assert_close(out_MK, reference.rms_norm(x_MK, weight_K, 1e-5), atol=2e-6, rtol=2e-6)
    assert torch.equal(torch.cat([kernels.rms_norm(row_K[None], weight_K, 1e-5) for row_K in x_MK]), out_MK)
    sum_MK = x_MK.clone()
    joint_MK = kernels.add_rms_norm_(sum_MK, delta_MK, weight_K, 1e-5)
    assert torch.equal(sum_MK, x_MK + delta_MK)
    assert torch.equal(joint_MK, kernels.rms_norm(sum_MK, weight_K, 1e-5))
    assert (_ran("rms_norm"), _ran("add_rms_norm_")) == (before[0] + 42, before[1] + 1)


@pytest.mark.parametrize("width", [16, 1536, 37])
def test_swiglu_matches_and_rows_are_independent(level: str, width: int) -> None:
    gate_up_M2I = torch.randn(9, 2 * width) * 8
    gate_up_M2I[0, :6] = torch.tensor([0.0, -0.0, 200.0, -200.0, 88.0, -88.0])
    before = _ran("swiglu")
    out_MI = kernels.swiglu(gate_up_M2I)
    torch.testing.assert_close(out_MI, reference.swiglu(gate_up_M2I), atol=1e-6, rtol=2e-6)
    assert torch.equal(torch.cat([kernels.swiglu(row[None]) for row in gate_up_M2I]), out_MI)
    assert _ran("swiglu") == before + 10


def test_nan_is_not_hidden(level: str) -> None:
    bad_MK = torch.full((1, 32), torch.nan)
    assert kernels.swiglu(bad_MK).isnan().all()
    assert kernels.rms_norm(bad_MK, torch.ones(32), 1e-5).isnan().all()
    assert kernels.pack_linear(torch.ones(8, 32))(bad_MK).isnan().all()
    keys_TGD = torch.full((4, 1, 32), torch.nan)
    lengths_M = torch.tensor([4], dtype=torch.int32)
    assert kernels.attention(torch.ones(1, 1, 32), keys_TGD, torch.ones(4, 1, 32), lengths_M).isnan().all()


@pytest.mark.parametrize("width", [64, 16, 10])
def test_rope_matches_in_slices_of_a_joint_projection(level: str, width: int) -> None:
    joint_MX = torch.randn(6, (4 + 2 + 2) * width)
    twin_MX = joint_MX.clone()
    angles_TR = torch.rand(50, width // 2) * 6
    positions_M = torch.tensor([3, 4, 5, 5, 49, 0])
    before = _ran("rope_")
    for run, store_MX in ((kernels.rope_, joint_MX), (reference.rope_, twin_MX)):
        q_MHD = store_MX[:, : 4 * width].view(6, 4, width)
        k_MGD = store_MX[:, 4 * width : 6 * width].view(6, 2, width)
        run(q_MHD, k_MGD, angles_TR.cos(), angles_TR.sin(), positions_M)
    torch.testing.assert_close(joint_MX, twin_MX, atol=1e-6, rtol=1e-6)
    assert _ran("rope_") == before + 1


def _cache(positions: int, kv_heads: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return (torch.randn(positions, kv_heads, width).to(dtype), torch.randn(positions, kv_heads, width).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(9, 3, 64), (12, 2, 128), (4, 4, 16), (5, 1, 48)])
@pytest.mark.parametrize(("rows", "length"), [(1, 0), (5, 3), (4, 126), (16, 700), (70, 0)])
def test_attention_matches_its_twin(
    level: str, dtype: torch.dtype, heads: int, kv_heads: int, width: int, rows: int, length: int
) -> None:
    keys_TGD, values_TGD = _cache(length + rows + 5, kv_heads, width, dtype)
    q_MHD = 2 * torch.randn(rows, heads, width)
    lengths_M = length + 1 + torch.arange(rows, dtype=torch.int32)
    starts_M = (lengths_M - 40).clamp(min=0)
    before = _ran("attention")
    for starts in (None, starts_M):
        out_MHD = kernels.attention(q_MHD, keys_TGD, values_TGD, lengths_M, starts_M=starts)
        expected_MHD = reference.attention(q_MHD, keys_TGD, values_TGD, lengths_M, starts_M=starts)
        # exponents up to about 10 are summed in an order of the level: weights are off by 1e-6, times values up to 5
        torch.testing.assert_close(out_MHD, expected_MHD, atol=6e-6, rtol=1e-5)
        for m in {0, rows // 2, rows - 1}:
            one = slice(m, m + 1)
            start_m = None if starts is None else starts[one]
            alone = kernels.attention(q_MHD[one], keys_TGD, values_TGD, lengths_M[one], starts_M=start_m)
            assert torch.equal(alone[0], out_MHD[m]), f"row {m}"
    assert _ran("attention") > before


@pytest.mark.parametrize("length", [0, 1, 125, 127, 300])
def test_a_tree_row_equals_the_chain_that_it_ends(level: str, length: int) -> None:
    parents = [-1, 0, 0, 1, 2, 3, 3]
    rows = len(parents)
    keys_TGD, values_TGD = _cache(length + rows, 3, 64, torch.float32)
    q_MHD = torch.randn(rows, 9, 64)
    ancestors_MS = torch.zeros(rows, rows, dtype=torch.bool)
    for m, parent in enumerate(parents):
        if parent >= 0:
            ancestors_MS[m] = ancestors_MS[parent]
        ancestors_MS[m, m] = True
    lengths_M = torch.full((rows,), length, dtype=torch.int32)
    tree_MHD = kernels.attention(q_MHD, keys_TGD, values_TGD, lengths_M, ancestors_MS)
    expected_MHD = reference.attention(q_MHD, keys_TGD, values_TGD, lengths_M, ancestors_MS)
    torch.testing.assert_close(tree_MHD, expected_MHD, atol=2e-6, rtol=1e-5)
    for m in range(rows):
        path = torch.cat([torch.arange(length), length + ancestors_MS[m].nonzero()[:, 0]])
        own_length = torch.tensor([len(path)], dtype=torch.int32)
        chain = kernels.attention(q_MHD[m : m + 1], keys_TGD[path], values_TGD[path], own_length)
        assert torch.equal(chain[0], tree_MHD[m]), f"row {m}"


@needs_extension
def test_reads_outside_a_tensor_are_refused() -> None:
    q_MHD, keys_TGD = torch.randn(1, 1, 16), torch.randn(4, 1, 16)
    for lengths, slots in (([5], 0), ([-1], 0), ([3], 2)):
        ancestors_MS = torch.ones(1, slots, dtype=torch.bool) if slots else None
        with pytest.raises(IndexError, match="length of row 0"):
            kernels.attention(q_MHD, keys_TGD, keys_TGD, torch.tensor(lengths, dtype=torch.int32), ancestors_MS)
    for position in (-1, 4):
        with pytest.raises(IndexError, match="position of row 0"):
            kernels.rope_(q_MHD, keys_TGD[:1], torch.ones(4, 8), torch.ones(4, 8), torch.tensor([position]))


def test_twins_run_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_LEVEL", None)
    before = kernels.fast_calls()
    x_MK, weight_NK = torch.randn(3, 32), torch.randn(8, 32)
    assert torch.equal(kernels.pack_linear(weight_NK)(x_MK), reference.linear(x_MK, weight_NK))
    assert torch.equal(kernels.swiglu(x_MK), reference.swiglu(x_MK))
    assert torch.equal(kernels.rms_norm(x_MK, torch.ones(32), 1e-5), reference.rms_norm(x_MK, torch.ones(32), 1e-5))
    monkeypatch.setattr(quantised, "_LEVEL", None)
    raw = _blocks("Q4_K", 3, 256)
    packed, x_MK = kernels.pack_quantised(raw, "Q4_K", (3, 256)), torch.randn(2, 256)
    assert torch.equal(packed(x_MK), ggml.linear(x_MK, raw, "Q4_K"))
    assert kernels.fast_calls() == before


def _level_in_a_new_process(wanted: str) -> str:
    code = "from outrider import kernels; print(kernels.active_level(), '|', kernels.why())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "OUTRIDER_CPU": wanted},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@needs_extension
def test_the_environment_forces_a_level() -> None:
    assert _level_in_a_new_process("portable").startswith("portable | portable: as OUTRIDER_CPU asks")
    assert dispatch.choose("torch").level is None
    assert dispatch.choose(None).level is not None
    for wanted in _levels():
        chosen = dispatch.choose(wanted).level
        assert chosen is not None
        assert chosen.name == wanted


def test_a_level_that_cannot_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="sse9 is unknown; allowed: portable, avx2, avx512, amx, torch"):
        dispatch.choose("sse9")
    monkeypatch.setitem(sys.modules, "outrider.kernels._kernels", None)
    with pytest.raises(ConfigError, match="needs the C\\+\\+ extension"):
        dispatch.choose("avx2")
    missing = dispatch.choose(None)
    assert missing.level is None
    assert "was not built" in missing.reason


@needs_extension
@pytest.mark.skipif("amx" in _levels(), reason="this processor runs every level")
def test_a_level_beyond_the_processor_names_those_that_run() -> None:
    with pytest.raises(ConfigError, match=r"amx cannot run.*; available: portable"):
        dispatch.choose("amx")


def test_thread_counts_are_checked() -> None:
    with pytest.raises(ConfigError, match="threads is 0"):
        kernels.set_threads(0)


FORKS = """
import os, sys, threading, time, torch
from outrider import kernels
torch.set_num_threads(1)
kernels.set_threads(3)
layer, x_MK = kernels.pack_linear(torch.randn(2048, 512)), torch.randn(4, 512)
expected = layer(x_MK)
stop = threading.Event()
def compute():
    while not stop.is_set():
        layer(x_MK)
if sys.argv[1] == "busy":
    threading.Thread(target=compute, daemon=True).start()
for turn in range(6):
    time.sleep(0.02)
    child = os.fork()
    if child == 0:
        same = all(torch.equal(layer(x_MK), expected) for _ in range(3) if time.sleep(0.01) is None)
        os._exit(0 if same and kernels.threads() == 3 else 3)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
stop.set()
assert torch.equal(layer(x_MK), expected)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.skipif(not kernels.available(), reason=kernels.why())
@pytest.mark.parametrize("parent", ["idle", "busy"])
def test_a_forked_child_has_a_pool_of_its_own(parent: str) -> None:
    """Idle workers sleep at a condition, busy ones hold locks; neither exists in the child."""
    run = subprocess.run([sys.executable, "-c", FORKS, parent], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
