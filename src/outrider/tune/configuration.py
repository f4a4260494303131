"""The configuration that `outrider tune` writes and that commands take with --config: a TOML file.

Its keys are the names of options; [reasons] and [figures] are for people and are not read. Imports no torch.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path

from outrider.core.json_file import JsonObject
from outrider.errors import ConfigError, ModelFileError

SCHEMA = "outrider.config/1"
FIELDS: Mapping[str, type] = {
    "model": str,
    "drafter": str,
    "draft_model": str,
    "k": int,
    "rule": str,
    "dtype": str,
    "draft_dtype": str,
    "threads": int,
}
"""What a configuration may say, each as its option takes it."""
FOR_PEOPLE = ("schema", "reasons", "figures")


def write_configuration(
    path: Path, values: Mapping[str, str | int | None], sentence: str, reasons: Seq[str], figures: Mapping[str, float]
) -> None:
    """`values` by option; None is left out."""
    assert set(values) <= set(FIELDS), f"{set(values) - set(FIELDS)} are no fields"
    lines = [f"# {' '.join(text.split())}" for text in (sentence, "Use it with: outrider generate --config FILE")]
    lines += ["", f"schema = {_quoted(SCHEMA)}"]
    lines += [f"{key} = {_value(value)}" for key, value in values.items() if value is not None]
    lines += ["", "[reasons]", f"answer = {_quoted(sentence)}", "because = [", *(f"  {_quoted(r)}," for r in reasons)]
    lines += ["]", "", "[figures]", *(f"{key} = {figure:.6g}" for key, figure in figures.items())]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_configuration(path: Path) -> dict[str, str | int]:
    """Its options. Raises ConfigError for anything but such a file."""
    try:
        told = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"--config {path} cannot be read: {reason}; give a file that outrider tune wrote") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {path} is no TOML file ({error}): give a file that outrider tune wrote") from None
    schema = told.get("schema", SCHEMA)
    if schema != SCHEMA:
        raise ConfigError(f"--config {path} has schema {str(schema)[:40]!r}: this reads {SCHEMA!r}")
    keys = [key for key in told if key not in FOR_PEOPLE]
    for key in keys:
        if key not in FIELDS:
            raise ConfigError(f"--config {path} has {key!r}, which is no option here: allowed are {', '.join(FIELDS)}")
    values = JsonObject(path, told)  # what TOML tells are values as JSON's
    try:
        return {key: values.whole(key) if FIELDS[key] is int else values.text(key) for key in keys}
    except ModelFileError as error:
        raise ConfigError(f"--config {error}") from None


def _value(value: str | int) -> str:
    return _quoted(value) if isinstance(value, str) else str(value)


def _quoted(text: str) -> str:
    """A TOML basic string; JSON's escapes are among TOML's."""
    return json.dumps(text).replace("\x7f", "\\u007f")
