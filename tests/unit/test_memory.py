"""What a loaded model costs in memory: the packed weights once, and none of the file that they came from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from outrider import kernels
from outrider.kernels import Room
from outrider.kernels.room import LARGE_PAGE
from outrider.models.load import load_model
from outrider.models.loader.catalogue import DEFAULT_MODEL
from outrider.models.loader.checkpoint import open_checkpoint
from outrider.models.loader.sources import resolve
from tests.tiny_folder import write_tiny_model
from tests.tiny_gguf import tiny_gguf, write

needs_kernels = pytest.mark.skipif(not kernels.available(), reason=kernels.why())
MIB = 1 << 20

PEAK = """
import json, resource, sys
from outrider.core.protocols import Segment
from outrider.models.load import load_model

def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

before = peak_bytes()
loaded = load_model(sys.argv[1], dtype=sys.argv[2])
cache, ids = loaded.model.new_cache(), [1, 2, 3]
for _ in range(8):
    logits = loaded.model.forward([Segment(cache, ids)]).logits_MV
    cache.keep(range(len(ids)))
    ids = [int(logits[-1].argmax())]
print(json.dumps({"grown": peak_bytes() - before, "weights": loaded.size_bytes, "kv": cache.nbytes}))
"""


def _peak(path: Path, dtype: str) -> dict[str, int]:
    pytest.importorskip("resource")
    done = subprocess.run([sys.executable, "-c", PEAK, str(path), dtype], capture_output=True, text=True, check=True)
    measured: dict[str, int] = json.loads(done.stdout)
    return measured


@needs_kernels
@pytest.mark.model
def test_loading_and_generating_takes_little_more_than_the_file() -> None:
    file = resolve(DEFAULT_MODEL)
    peak = _peak(file, "quantised")
    assert peak["grown"] <= 1.4 * file.stat().st_size + peak["kv"] + 60 * MIB, f"{peak} for {file.stat().st_size}"


@needs_kernels
@pytest.mark.model
def test_converting_holds_no_second_copy_of_the_weights() -> None:
    peak = _peak(resolve(DEFAULT_MODEL), "bfloat16")
    assert peak["grown"] <= 1.3 * peak["weights"] + peak["kv"] + 90 * MIB, f"{peak}"


@needs_kernels
def test_no_tensor_as_large_as_a_matrix_is_joined_or_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacked matrices are packed from where their parts lie; only addresses and biases are joined."""
    joined: list[int] = []
    cat = torch.cat

    def watched(tensors: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
        joined.append(sum(tensor.nbytes for tensor in tensors))
        return cat(tensors, dim=dim)

    monkeypatch.setattr(torch, "cat", watched)
    loaded = load_model(write_tiny_model(tmp_path / "tiny"), dtype="float32")
    assert max(joined, default=0) < 1024, joined
    assert loaded.size_bytes > 0


def test_room_is_aligned_disjoint_and_moves_on_when_full() -> None:
    room = Room(block_bytes=4096)
    taken = [room.take(nbytes) for nbytes in (100, 64, 4000, 10_000, 1)]
    assert [len(piece) for piece in taken] == [100, 64, 4000, 10_000, 1]
    assert all(piece.data_ptr() % 64 == 0 for piece in taken)
    for number, piece in enumerate(taken):
        piece.fill_(number)
    assert all((piece == number).all() for number, piece in enumerate(taken))
    assert taken[1].data_ptr() == taken[0].data_ptr() + 128
    assert taken[0].data_ptr() % LARGE_PAGE == 0


def test_reading_after_release_gives_the_same_bytes(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path, tiny_gguf()))
    before = {name: checkpoint.raw(name).data.clone() for name in checkpoint.names()}
    kept = {name: checkpoint.raw(name).data for name in checkpoint.names()}
    checkpoint.release()
    assert all(torch.equal(kept[name], data) for name, data in before.items())
