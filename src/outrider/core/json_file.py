"""Objects of JSON files, read by type: what any reader of a model's or a head's configuration needs."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from outrider.errors import ModelFileError

MOST_JSON_BYTES = 64 << 20
MOST_DIGITS = 9
"""Of a whole number that is a key."""


class TypedValues(ABC):
    """Values of a file by key, read by type. Raises ModelFileError for a missing value or one of another type."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def whole(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if type(value) is not int:
            raise self._wrong(key, value, "a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1e300 < value < 1e300:
            raise self._wrong(key, value, "a finite number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "text")
        return value

    @abstractmethod
    def _get(self, key: str, default: object) -> object:
        """The value, else the default; raises ModelFileError where there is neither."""

    @abstractmethod
    def _wrong(self, key: str, value: object, wanted: str) -> ModelFileError: ...


class JsonObject(TypedValues):
    """An object of a JSON file."""

    def __init__(self, path: Path, values: Mapping[str, object]) -> None:
        super().__init__(path)
        self.values = values

    @classmethod
    def read(cls, path: Path, *, optional: bool = False) -> JsonObject:
        if optional and not path.is_file():
            return cls(path, {})
        try:
            if path.stat().st_size > MOST_JSON_BYTES:
                raise ModelFileError(f"{path} has {path.stat().st_size} bytes, allowed are {MOST_JSON_BYTES}")
            return cls(path, parse_object(path, path.read_bytes()))
        except OSError as error:
            raise ModelFileError(f"{path} cannot be read: {error.strerror}. A model folder needs it") from None

    def child(self, key: str) -> JsonObject:
        """The object under `key`; empty if there is none."""
        value = self.values.get(key)
        if value is None:
            return JsonObject(self.path, {})
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return JsonObject(self.path, value)

    def objects(self, key: str) -> list[JsonObject]:
        """The objects in the list under `key`."""
        found = self.values.get(key)
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            raise ModelFileError(f"{self.path}: {key!r} is no list of objects")
        return [JsonObject(self.path, one) for one in found]

    def whole_keys(self) -> list[int]:
        """Its keys, at least one, where all are whole numbers, each written in one way only."""
        keys = list(self.values)
        if not keys or not all(key.isdecimal() and len(key) <= MOST_DIGITS and str(int(key)) == key for key in keys):
            raise ModelFileError(f"{self.path}: a table by numbers is empty, or has a key that is no whole number")
        return [int(key) for key in keys]

    def _get(self, key: str, default: object) -> object:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelFileError(f"{self.path}: {key!r} is missing")
        return value

    def _wrong(self, key: str, value: object, wanted: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {key!r} is {str(value)[:60]!r}, expected {wanted}")


def parse_object(path: Path, data: bytes) -> dict[str, object]:
    """Raises ModelFileError, one line, unless `data` is one JSON object."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0][:100]
        raise ModelFileError(f"{path}: its JSON cannot be read ({reason}). Fetch the file again") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: its JSON is a {type(value).__name__}, expected an object")
    return value
