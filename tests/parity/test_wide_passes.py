"""AMX tiles: wide passes give the bits of narrow ones, and a system that refuses tiles is obeyed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from outrider import kernels
from outrider.kernels import dispatch, ggml, quantised, selfcheck
from tests.parity.test_kernels import _blocks, _levels

needs_amx = pytest.mark.skipif("amx" not in _levels(), reason="no AMX here")

SHAPES = [(75, 512), (64, 256), (1, 1024), (300, 768), (33, 2560)]
"""Whole panels and edges of one; one turn of the kernel, whole turns and uneven ones."""


def _layers(
    monkeypatch: pytest.MonkeyPatch, kind: str, shape_NK: tuple[int, int], bias_N: Tensor | None = None
) -> tuple[kernels.QuantisedLinear, kernels.QuantisedLinear]:
    """The same weights at levels amx and avx512."""
    raw = _blocks(kind, *shape_NK)
    made = []
    for level in ("amx", "avx512"):
        monkeypatch.setattr(quantised, "_LEVEL", dispatch.choose(level).level)
        made.append(kernels.pack_quantised(raw, kind, shape_NK, bias_N))
    return made[0], made[1]


def _bits(y_MN: Tensor) -> Tensor:
    """A zero's sign counts."""
    return y_MN.view(torch.int32)


@needs_amx
def test_the_level_says_from_where_on_it_is_wide() -> None:
    rows = {}
    for name in _levels():
        level = dispatch.choose(name).level
        assert level is not None
        rows[name] = level.wide_rows
    assert rows.pop("amx") in range(16, 49)
    assert set(rows.values()) == {0}


@needs_amx
@pytest.mark.parametrize("kind", ggml.FORMATS)
@pytest.mark.parametrize("shape_NK", SHAPES)
def test_every_number_of_rows_gives_the_bits_of_the_level_below(
    monkeypatch: pytest.MonkeyPatch, kind: str, shape_NK: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    x_MK = torch.randn(131, shape_NK[1])
    x_MK[40] = 0
    x_MK[41, 32:] = 0
    for bias_N in (None, torch.randn(shape_NK[0])):
        wide, narrow = _layers(monkeypatch, kind, shape_NK, bias_N)
        expected_MN = _bits(narrow(x_MK))
        for rows in [*range(1, 71), 95, 96, 97, 131]:
            assert torch.equal(_bits(wide(x_MK[:rows])), expected_MN[:rows]), f"{rows} rows"


@needs_amx
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_activations_beyond_the_cache_are_cut(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    wide, narrow = _layers(monkeypatch, kind, (70, 8448))
    x_MK = torch.randn(300, 8448)
    assert torch.equal(_bits(wide(x_MK)), _bits(narrow(x_MK)))


@needs_amx
def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, narrow = _layers(monkeypatch, "Q4_1", (2000, 576))
    x_MK = torch.randn(67, 576)
    expected_MN = _bits(narrow(x_MK))
    threads = kernels.threads()
    try:
        for count in (1, 2, 3):
            kernels.set_threads(count)
            for _ in range(5):
                assert torch.equal(_bits(wide(x_MK)), expected_MN), f"{count} threads"
    finally:
        kernels.set_threads(threads)


@needs_amx
@pytest.mark.parametrize("kind", ggml.FORMATS)
def test_sums_of_tiles_are_exact_at_the_extremes(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """All codes at an end of their range times activations of 127 or -127."""
    for fill in (0, 255):
        raw = torch.full((40 * ggml.FORMATS[kind].row_nbytes(256),), fill, dtype=torch.uint8)
        raw_BX = raw.view(-1, ggml.FORMATS[kind].nbytes)
        for at in selfcheck._F16_AT.get(kind, (0,)):
            raw_BX[:, at : at + 2] = torch.tensor([1.0]).half().view(torch.uint8)
        monkeypatch.setattr(quantised, "_LEVEL", dispatch.choose("amx").level)
        packed = kernels.pack_quantised(raw, kind, (40, 256))
        x_MK = torch.full((48, 256), 127.0)
        x_MK[::2] = -127
        exact_MN = x_MK.double() @ ggml.dequantise(raw, kind, 256).double().T
        torch.testing.assert_close(packed(x_MK).double(), exact_MN, rtol=1e-6, atol=0)


@needs_amx
def test_a_row_that_is_not_finite_stays_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, _ = _layers(monkeypatch, "Q4_1", (40, 64))
    for bad in (torch.nan, torch.inf):
        x_MK = torch.randn(50, 64)
        x_MK[17, 40] = bad
        finite_M = wide(x_MK).isfinite().all(1)
        assert finite_M.logical_not().nonzero().flatten().tolist() == [17]


REFUSAL = """
import ctypes
class Stack(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
room = ctypes.create_string_buffer(4096)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(room), 0, 4096)), None) == 0
from outrider import kernels
from outrider.errors import ConfigError
from outrider.kernels import dispatch
print(kernels.why())
try:
    dispatch.choose("amx")
except ConfigError as error:
    print(error)
from outrider.cli import doctor
print(doctor._wide_passes(doctor._examine()))
"""
"""Linux refuses tiles to a process with a signal stack that has no room for them."""


@needs_amx
def test_a_refusal_is_said_and_the_level_below_runs() -> None:
    env = {name: value for name, value in os.environ.items() if name != dispatch.VARIABLE}
    done = subprocess.run([sys.executable, "-c", REFUSAL], env=env, capture_output=True, text=True, check=True)
    why, error, wide = done.stdout.splitlines()
    assert why == f"avx512: the best of portable, avx2, avx512 on this processor; no amx: {dispatch.REFUSED}"
    assert error == f"OUTRIDER_CPU=amx cannot run: {dispatch.REFUSED}; available: portable, avx2, avx512, torch"
    assert wide == "as narrow ones: no AMX at level avx512"
