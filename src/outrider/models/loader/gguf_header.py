"""Reads the header of a GGUF file. Untrusted input: every count and offset is checked before it is used.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from outrider.errors import ModelFileError
from outrider.kernels.ggml import BlockFormat
from outrider.models.loader.dequantise import FORMATS

Value = int | float | bool | str | list["Value"]

MAGIC = b"GGUF"
STRING, ARRAY = 8, 9
BOOL = 7
SCALARS: dict[int, str] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    BOOL: "?",
    10: "Q",
    11: "q",
    12: "d",
}
LEAST_KEY_BYTES, LEAST_TENSOR_BYTES = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8
DEEPEST_ARRAY, MOST_DIMENSIONS, MOST_ALIGNMENT = 3, 4, 1 << 16

# Stored types that exist elsewhere but are not read here: only to name them.
OTHER_TYPES = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor's place in the file. `shape` is in torch's order: rows first."""

    name: str
    kind: BlockFormat
    shape: tuple[int, ...]
    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    metadata: dict[str, Value]
    tensors: dict[str, GGUFTensor]


class _Cursor:
    """A position in the mapped bytes that never leaves them."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.size, self.at = path, data, len(data), 0

    def fail(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {what}. The file is damaged or incomplete; fetch it again")

    def need(self, count: int, least_bytes: int, what: str) -> None:
        """Checks that `count` things of at least `least_bytes` each can still follow."""
        if count * least_bytes > self.size - self.at:
            raise self.fail(f"{count} {what} announced at byte {self.at}, but the file ends at {self.size}")

    def scalar(self, code: str) -> int | float | bool:
        size = struct.calcsize("<" + code)
        self.need(size, 1, "bytes")
        if code == "?" and self.data[self.at] > 1:
            raise self.fail(f"a boolean at byte {self.at} is {self.data[self.at]}")
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += size
        assert isinstance(value, (int, float))
        return value

    def count(self, code: str = "Q") -> int:
        return int(self.scalar(code))

    def string(self) -> str:
        length = self.count()
        self.need(length, 1, "bytes of text")
        start, self.at = self.at, self.at + length
        return self._decode(start, self.at)

    def strings(self, count: int) -> list[Value]:
        """`string` in a loop, written out because vocabularies have hundreds of thousands of entries."""
        self.need(count, 8, "strings")
        data, at, size = self.data, self.at, self.size
        unpack = struct.Struct("<Q").unpack_from
        out: list[Value] = []
        start = at
        try:
            for _ in range(count):
                if at + 8 > size:
                    raise self.fail(f"a string is cut off at byte {at}")
                start = at + 8
                at = start + unpack(data, at)[0]
                if at > size:
                    length = at - start
                    raise self.fail(f"a string of {length} bytes starts at byte {start}, but the file ends at {size}")
                out.append(data[start:at].decode())
        except UnicodeDecodeError:
            raise self.fail(f"the text at byte {start} is no UTF-8") from None
        self.at = at
        return out

    def _decode(self, start: int, stop: int) -> str:
        try:
            return self.data[start:stop].decode()
        except UnicodeDecodeError:
            raise self.fail(f"the text at byte {start} is no UTF-8") from None

    def value(self, kind: int, key: str, depth: int = 0) -> Value:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array(key, depth + 1)
        if kind not in SCALARS:
            raise self.fail(f"metadata {key[:80]!r} has type {kind}, allowed are 0 to 12")
        return self.scalar(SCALARS[kind])

    def array(self, key: str, depth: int) -> list[Value]:
        if depth > DEEPEST_ARRAY:
            raise self.fail(f"metadata {key[:80]!r} nests arrays more than {DEEPEST_ARRAY} deep")
        kind, count = self.count("I"), self.count()
        if kind == STRING:
            return self.strings(count)
        if kind == ARRAY:
            self.need(count, 12, "arrays")
            return [self.array(key, depth + 1) for _ in range(count)]
        if kind not in SCALARS:
            raise self.fail(f"metadata {key[:80]!r} is an array of type {kind}, allowed are 0 to 12")
        size = struct.calcsize("<" + SCALARS[kind])
        self.need(count, size, "array items")
        start, self.at = self.at, self.at + count * size
        code = "B" if kind == BOOL else SCALARS[kind]
        items: list[Value] = list(struct.unpack_from(f"<{count}{code}", self.data, start))
        return items


def read_header(path: Path, data: mmap.mmap) -> Header:
    """Raises ModelFileError, one line, for anything that does not hold."""
    cursor = _Cursor(path, data)
    if len(data) < 24 or data[:4] != MAGIC:
        raise cursor.fail(f"starts with {bytes(data[:4])!r} in {len(data)} bytes, a GGUF file starts with {MAGIC!r}")
    cursor.at = 4
    version = cursor.count("I")
    if version in (2 << 24, 3 << 24):
        raise ModelFileError(f"{path} is a big-endian GGUF file; only little-endian ones are read. Fetch that variant")
    if version not in (2, 3):
        raise ModelFileError(f"{path} has GGUF version {version}; versions 2 and 3 are read. Convert it anew")
    n_tensors, n_keys = cursor.count(), cursor.count()
    cursor.need(n_keys, LEAST_KEY_BYTES, "metadata entries")
    cursor.need(n_tensors, LEAST_TENSOR_BYTES, "tensors")
    metadata: dict[str, Value] = {}
    for _ in range(n_keys):
        key = cursor.string()
        if key in metadata:
            raise cursor.fail(f"metadata {key[:80]!r} appears twice")
        metadata[key] = cursor.value(cursor.count("I"), key)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= MOST_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.fail(f"alignment is {str(alignment)[:80]}, allowed are powers of two from 8 to {MOST_ALIGNMENT}")
    return Header(metadata, _tensors(cursor, n_tensors, alignment))


def _tensors(cursor: _Cursor, n_tensors: int, alignment: int) -> dict[str, GGUFTensor]:
    cursor.need(n_tensors, LEAST_TENSOR_BYTES, "tensors")
    entries = [_entry(cursor) for _ in range(n_tensors)]
    data_start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, kind, shape, offset, size_bytes in entries:
        if name in tensors:
            raise cursor.fail(f"tensor {name[:80]!r} appears twice")
        if offset % alignment:
            raise cursor.fail(f"tensor {name[:80]!r} is at offset {offset}, which is no multiple of {alignment}")
        if data_start + offset + size_bytes > cursor.size:
            raise cursor.fail(
                f"tensor {name[:80]!r} needs bytes {data_start + offset} to {data_start + offset + size_bytes}, "
                f"but the file ends at {cursor.size}"
            )
        tensors[name] = GGUFTensor(name, kind, shape, data_start + offset, size_bytes)
    in_order = sorted(tensors.values(), key=lambda tensor: tensor.start)
    for left, right in pairwise(in_order):
        if left.start + left.size_bytes > right.start:
            raise cursor.fail(f"tensors {left.name[:80]!r} and {right.name[:80]!r} overlap")
    return tensors


def _entry(cursor: _Cursor) -> tuple[str, BlockFormat, tuple[int, ...], int, int]:
    name = cursor.string()
    n_dims = cursor.count("I")
    if not 1 <= n_dims <= MOST_DIMENSIONS:
        raise cursor.fail(f"tensor {name[:80]!r} has {n_dims} dimensions, allowed are 1 to {MOST_DIMENSIONS}")
    dims = [cursor.count() for _ in range(n_dims)]
    number, offset = cursor.count("I"), cursor.count()
    kind = FORMATS.get(number)
    if kind is None:
        raise ModelFileError(
            f"{cursor.path}: tensor {name[:80]!r} is stored as {OTHER_TYPES.get(number, f'type {number}')}; "
            f"readable are {', '.join(known.name for known in FORMATS.values())}. Take a Q4_K_M file"
        )
    values = 1
    for dim in dims:
        if not 1 <= dim <= cursor.size * kind.inputs:
            raise cursor.fail(f"tensor {name[:80]!r} has a dimension of {dim}")
        values *= dim
    if dims[0] % kind.inputs:
        raise cursor.fail(
            f"tensor {name[:80]!r} has rows of {dims[0]} values, {kind.name} needs multiples of {kind.inputs}"
        )
    return name, kind, tuple(reversed(dims)), offset, values // kind.inputs * kind.nbytes
