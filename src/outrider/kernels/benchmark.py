"""`python -m outrider.kernels.benchmark`: time of a linear layer by rows, kernels and torch in turn.

Each round times every side once, in an order that turns, over several copies of the matrix: weights come from memory,
and a disturbance hits all sides alike. v(M) is the time of M rows over that of the fewest.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider import kernels
from outrider.kernels import ggml

COPIES_NBYTES = 96 << 20
"""Copies of a matrix take at least this much: more than the last-level cache of common machines."""


@dataclass(frozen=True, slots=True)
class Record:
    """One side at one number of rows: its weights' bytes and its multiply-adds over the median."""

    side: str
    rows: int
    median_ms: float
    best_ms: float
    gbps: float
    gmacs: float
    v: float


@dataclass(frozen=True, slots=True)
class Side:
    """Layers with copies of one matrix, called in turn."""

    name: str
    nbytes: int
    layers: Sequence[Callable[[Tensor], Tensor]]

    def time_s(self, x_MK: Tensor, turn: int) -> float:
        layer = self.layers[turn % len(self.layers)]
        start_s = time.perf_counter()
        layer(x_MK)
        return time.perf_counter() - start_s


class TorchLayer:
    """The product that torch has for the type of the weights."""

    def __init__(self, weight_NK: Tensor) -> None:
        self.weight_NK = weight_NK

    def __call__(self, x_MK: Tensor) -> Tensor:
        return F.linear(x_MK.to(self.weight_NK.dtype), self.weight_NK)


def read_gbps() -> float:
    """Gigabytes a second of a sum over 256 MB with all torch threads, best of seven."""
    block = torch.ones(64 << 20)
    best_s = math.inf
    for _ in range(7):
        start_s = time.perf_counter()
        block.sum()
        best_s = min(best_s, time.perf_counter() - start_s)
    return block.nbytes / best_s / 1e9


def sides_of(outputs: int, inputs: int, kind: str) -> list[Side]:
    """The kernel's side, and torch's for float weights."""
    if kind in ggml.FORMATS:
        raw = torch.zeros(outputs * ggml.FORMATS[kind].row_nbytes(inputs), dtype=torch.uint8)
        copies = -(-COPIES_NBYTES // raw.nbytes)
        packed = [kernels.pack_quantised(raw, kind, (outputs, inputs)) for _ in range(copies)]
        return [Side(kind, packed[0].nbytes, packed)]
    weight_NK = torch.zeros(outputs, inputs, dtype=torch.float32 if kind == "float32" else torch.bfloat16)
    copies = -(-COPIES_NBYTES // weight_NK.nbytes)
    plain = [TorchLayer(weight_NK.clone()) for _ in range(copies)]
    floats = [kernels.pack_linear(weight_NK) for _ in range(copies)]
    return [Side(kind, floats[0].nbytes, floats), Side(f"torch {kind}", weight_NK.nbytes, plain)]


def measure(outputs: int, inputs: int, rows: Sequence[int], kinds: Sequence[str], rounds: int) -> list[Record]:
    """One record a side and number of rows; the first of `rounds` + 1 rounds warms up."""
    sides = [side for kind in kinds for side in sides_of(outputs, inputs, kind)]
    records: list[Record] = []
    first_s: dict[str, float] = {}
    for count in rows:
        x_MK = torch.randn(count, inputs)
        times_s: dict[str, list[float]] = {side.name: [] for side in sides}
        for turn in range(rounds + 1):
            first = turn % len(sides)
            for side in sides[first:] + sides[:first]:
                times_s[side.name].append(side.time_s(x_MK, turn))
        for side in sides:
            timed_s = times_s[side.name][1:]
            median_s = statistics.median(timed_s)
            gbps, gmacs = side.nbytes / median_s / 1e9, count * outputs * inputs / median_s / 1e9
            v = median_s / first_s.setdefault(side.name, median_s)
            records.append(Record(side.name, count, median_s * 1e3, min(timed_s) * 1e3, gbps, gmacs, v))
    return sorted(records, key=lambda record: record.side)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table, then one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m outrider.kernels.benchmark", description=__doc__)
    parser.add_argument("--shape", type=int, nargs=2, default=(8960, 1536), metavar=("OUTPUTS", "INPUTS"))
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=list(range(1, 17)))
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=["bfloat16", "Q4_K", "Q6_K"])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=kernels.threads())
    options = parser.parse_args(arguments)
    outputs, inputs = options.shape
    torch.set_num_threads(options.threads)
    kernels.set_threads(options.threads)
    with torch.inference_mode():
        gbps = read_gbps()
        print(f"kernels: {kernels.why()}; {options.threads} threads; a sum over 256 MB reads {gbps:.1f} GB/s")
        records = measure(outputs, inputs, options.rows, options.kinds, options.rounds)
    print(f"{'side':16}{'rows':>5}{'median ms':>11}{'best ms':>9}{'GB/s':>7}{'GMAC/s':>8}{'v':>7}")
    for r in records:
        speeds = f"{r.median_ms:11.3f}{r.best_ms:9.3f}{r.gbps:7.1f}{r.gmacs:8.1f}{r.v:7.2f}"
        print(f"{r.side:16}{r.rows:5}{speeds}")
    report = {"level": kernels.active_level(), "threads": options.threads, "sum_gbps": round(gbps, 2)}
    print(json.dumps({**report, "shape": [outputs, inputs], "records": [asdict(record) for record in records]}))


if __name__ == "__main__":
    main()
