"""Dequantisation against the `gguf` package, bit for bit."""

import numpy as np
import pytest
import torch

from outrider.models.loader.dequantise import FORMATS, dequantise

gguf = pytest.importorskip("gguf")

# Where the half-precision scales of a block are: random bytes there would be inf or NaN.
HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,)}
HALVES |= {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def random_blocks(number: int, count: int) -> np.ndarray:
    kind, rng = FORMATS[number], np.random.default_rng(number)
    if kind.inputs == 1:
        values = torch.from_numpy(rng.normal(size=(count, 256)).astype(np.float32))
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind.name]
        return values.to(dtype).view(torch.uint8).numpy()
    blocks = rng.integers(0, 256, size=(count, kind.nbytes), dtype=np.uint8)
    for at in HALVES[kind.name]:
        blocks[:, at : at + 2] = rng.normal(size=(count, 1)).astype(np.float16).view(np.uint8)
    return blocks


@pytest.mark.parametrize("number", FORMATS, ids=lambda number: FORMATS[number].name)
def test_bit_equal_to_the_reference(number: int) -> None:
    kind, blocks = FORMATS[number], random_blocks(number, 600)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(number)).astype(np.float32)
    actual = dequantise(torch.from_numpy(blocks).reshape(-1), kind, expected.shape, torch.float32).numpy()
    assert np.array_equal(actual.view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_round_once_and_rows_are_reordered(dtype: torch.dtype) -> None:
    kind, data = FORMATS[8], torch.from_numpy(random_blocks(8, 3000)).reshape(-1)
    exact = dequantise(data, kind, (1000, 96), torch.float32)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(dequantise(data, kind, (1000, 96), dtype, order), exact[order].to(dtype))
