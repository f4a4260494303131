"""Mutated headers: a ModelFileError or success, never another exception, and no memory to speak of."""

import json
import random
import struct
import tracemalloc
from pathlib import Path

import pytest

from outrider.errors import ModelFileError
from outrider.models.loader.checkpoint import open_checkpoint
from outrider.models.loader.safetensors import read_header
from tests.tiny_gguf import tiny_gguf, write

GIANTS = [0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]
MOST_BYTES = 4 << 20


def mutations(content: bytes, header: int, seed: int, count: int) -> list[bytes]:
    rng, out = random.Random(seed), []
    for cut in range(0, header, max(1, header // 150)):
        out.append(content[:cut])
    for at in range(0, min(header, 200), 4):
        out += [content[:at] + struct.pack("<Q", giant) + content[at + 8 :] for giant in (GIANTS[4], GIANTS[6])]
    for _ in range(count):
        data = bytearray(content)
        at = rng.randrange(header - 8)
        if rng.random() < 0.5:
            data[at : at + 8] = struct.pack("<Q", rng.choice(GIANTS))
        else:
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(header)] = rng.randrange(256)
        out.append(bytes(data))
    return out


def opened(open_it: object, path: Path) -> bool:
    assert callable(open_it)
    try:
        open_it(path)
    except ModelFileError as error:
        lines = str(error).splitlines()
    else:
        return True
    assert len(lines) == 1
    return False


def test_gguf(tmp_path: Path) -> None:
    content = tiny_gguf()
    assert opened(open_checkpoint, write(tmp_path, content))
    header = content.index(b"blk.1.ffn_down") + 60
    cases = mutations(content, header, seed=1, count=400)
    tracemalloc.start()
    refused = sum(not opened(open_checkpoint, write(tmp_path, case)) for case in cases)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused > len(cases) // 2
    assert peak < MOST_BYTES


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [-1, 4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 2**40]},
        {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]},
        {"dtype": "F8_E4M3", "shape": [16], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": "4", "data_offsets": [0, 16]},
        [],
    ],
)
def test_bad_safetensors_entries(tmp_path: Path, entry: object) -> None:
    head = json.dumps({"x": entry}).encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", len(head)) + head + bytes(16))
    assert not opened(read_header, file)


def test_safetensors(tmp_path: Path) -> None:
    entries = {n: {"dtype": "F32", "shape": [2, 2], "data_offsets": [16 * i, 16 * i + 16]} for i, n in enumerate("abc")}
    head = json.dumps(entries).encode()
    content = struct.pack("<Q", len(head)) + head + bytes(48)
    file = tmp_path / "x.safetensors"
    file.write_bytes(content)
    assert opened(read_header, file)
    cases = mutations(content, 8 + len(head), seed=2, count=400)
    cases.append(struct.pack("<Q", 100_000) + b"[" * 100_000)
    refused = 0
    for case in cases:
        file.write_bytes(case)
        refused += not opened(read_header, file)
    assert refused > len(cases) // 2
