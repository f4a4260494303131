"""Files of prompts: one JSON object a line, plain or gzipped."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import ConfigError, UserError

LINE_FORM = 'a JSON object with "prompt": text, or "turns": [text, ...]'
GZIP = b"\x1f\x8b"
MOST_ID = 200
"""Characters of a question's id."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the user says, turn by turn. `id` is a question id or the line number."""

    id: str
    category: str
    turns: tuple[str, ...]


def read_prompts(
    path: str | Path, *, limit: int | None = None, categories: Collection[str] = (), turns: int = 1
) -> list[Conversation]:
    """The first `limit` prompts of a file that are of one of `categories` (empty: any), at most `turns` turns each.

    A line has `prompt` or Spec-Bench's `turns`; `question_id` (or `id`) and `category` are kept, other fields ignored.
    No two lines may have the same id: answers are told apart by it. Raises UserError naming the file, the line and what
    is allowed.
    """
    require_positive("limit", limit)
    require_positive("turns", turns)
    prompts = list(_parse(Path(path), turns))
    if not prompts:
        raise UserError(f"{path}: no prompts in this file: give one a line, {LINE_FORM}")
    return of_categories(prompts, categories, str(path))[:limit]


def of_categories(prompts: list[Conversation], categories: Collection[str], where: str) -> list[Conversation]:
    """Those of one of the categories (empty: any). Raises ConfigError with the known ones."""
    known = sorted({prompt.category for prompt in prompts})
    unknown = sorted(set(categories) - set(known))
    if unknown:
        raise ConfigError(f"{where}: no prompts of category {', '.join(unknown)}: choose from {', '.join(known)}")
    return [prompt for prompt in prompts if not categories or prompt.category in categories]


def _parse(path: Path, turns: int) -> Iterator[Conversation]:
    try:
        data = path.read_bytes()
        lines = (gzip.decompress(data) if data[:2] == GZIP else data).decode("utf-8").split("\n")
    except FileNotFoundError:
        raise UserError(f"prompt file {path} does not exist: give a .jsonl file, one a line {LINE_FORM}") from None
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise UserError(f"prompt file {path} cannot be read as UTF-8 text: {error}") from None
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path}, line {number}"
            prompt = _prompt(_object(line, where), where, number, turns)
            if (first := line_of.setdefault(prompt.id, number)) != number:
                raise UserError(
                    f"{where}: its id {prompt.id!r} is that of line {first}: give every line a question_id of its own, "
                    "or none (a line without one has its number)"
                )
            yield prompt


def _object(line: str, where: str) -> Mapping[str, object]:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON ({error}): each line is {LINE_FORM}") from None
    except RecursionError:
        raise UserError(f"{where}: nested too deeply: each line is {LINE_FORM}") from None
    if not isinstance(data, dict):
        raise UserError(f"{where}: a {type(data).__name__}, not an object: each line is {LINE_FORM}")
    return data


def _prompt(data: Mapping[str, object], where: str, number: int, turns: int) -> Conversation:
    texts = data.get("turns") if "turns" in data else [data.get("prompt")]
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        found = "turns" if "turns" in data else "prompt" if "prompt" in data else f"fields {sorted(data)[:5]}"
        raise UserError(f"{where}: {found} gives no text: each line is {LINE_FORM}, none of them empty")
    identity, category = str(data.get("question_id", data.get("id", number))), str(data.get("category") or "other")
    if len(identity) > MOST_ID:
        raise UserError(f"{where}: its id has {len(identity)} characters, allowed are {MOST_ID}: shorten it")
    for what, said in (("id", identity), ("category", category), *(("text", text) for text in texts)):
        _require_unicode(what, said, where)
    return Conversation(identity, category, tuple(texts[:turns]))


def _require_unicode(what: str, text: str, where: str) -> None:
    """Refuses halves of a surrogate pair, which JSON can spell and no file or terminal can be given."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise UserError(
            f"{where}: its {what} has half of a surrogate pair ({half}) at character {error.start + 1}: write both "
            "halves, or the character itself"
        ) from None


def require_positive(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"{name} = {value} is not allowed: give an integer >= 1")
