"""The documents of commands, read from files that an option names."""

from __future__ import annotations

import json
from pathlib import Path

from outrider.core.json_file import MOST_JSON_BYTES, JsonObject
from outrider.errors import ConfigError


def read_document(path: Path, option: str, schema: str) -> JsonObject:
    """The document of a file: the whole file, or its last line. Raises ConfigError for anything else."""
    command = schema.split("/")[0].replace(".", " ")
    remedy = f"give a file with the document of {command}"
    try:
        if path.stat().st_size > MOST_JSON_BYTES:
            raise ConfigError(f"{option} {path} has more than {MOST_JSON_BYTES} bytes: {remedy}")
        text = path.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be read: {(error.strerror or str(error)).lower()}") from None
    values = _parsed(text)
    if values is None:
        values = _parsed(text.rstrip().rpartition("\n")[2])
    if not isinstance(values, dict):
        raise ConfigError(f"{option} {path} is no JSON object: {remedy}")
    if values.get("schema") is None:
        raise ConfigError(f"{option} {path} is no document of {command}: {remedy}")
    if values["schema"] != schema:
        found = str(values["schema"])[:40]
        raise ConfigError(f"{option} {path} has schema {found!r}, readable is {schema!r}: {remedy}")
    return JsonObject(path, values)


def _parsed(text: str) -> object:
    """None where it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
