"""`python -m outrider.core.benchmark`."""

from __future__ import annotations

import json

import pytest
import torch

from outrider.core import benchmark


def test_a_table_and_a_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        benchmark.main(["--rows", "1,3", "--vocab", "9000", "--rounds", "2"])
    finally:
        torch.set_num_threads(threads)
    *table, last = capsys.readouterr().out.splitlines()
    records = json.loads(last)["records"]
    assert len(table) == 1 + len(records) == 1 + 2 * len(benchmark.SETTINGS)
    assert all(0.0 < record["best_ms"] <= record["median_ms"] for record in records)
