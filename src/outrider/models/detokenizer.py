"""Text from tokens as they come: never half a character, never half a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from outrider.errors import RequestError
from outrider.models.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns ids into text piece by piece: all pushes and one flush together equal `tokenizer.decode(all ids)`.

    At most three bytes are held back, the beginning of one UTF-8 character.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, continuation: bool = False) -> None:
        """`continuation`: the ids follow other text, so a leading space is kept (as in `Tokenizer.decode`)."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._n_to_strip = 0 if continuation else tokenizer.strip_left
        self._pending = b""

    def push(self, token_id: int) -> str:
        """The text that became final with this token; often empty. Raises `RequestError` for an unknown id."""
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        return self._decode(self._tokenizer.token_bytes(token_id), final=False)

    def flush(self) -> str:
        """The rest: U+FFFD for a character that was begun and not completed. Afterwards nothing is held."""
        return self._decode(b"", final=True)

    def _decode(self, piece: bytes, *, final: bool) -> str:
        data = self._pending + piece
        text, n_read = codecs.utf_8_decode(data, "replace", final)
        self._pending = data[n_read:]
        while self._n_to_strip and text:
            if not text.startswith(" "):
                self._n_to_strip = 0
                break
            text = text[1:]
            self._n_to_strip -= 1
        return text


class Streamed(NamedTuple):
    """`text` is final; `stop` is the stop string that ended the stream, or None."""

    text: str
    stop: str | None


class StopMatcher:
    """Finds stop strings in streamed text, however it is cut into pieces.

    The match that ends earliest wins; of several that end together, the longest. Held back is only the longest end of
    the text that begins a stop string. Pushing after a match is an error of the caller.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """`include_stop`: the matched stop string stays in the text. Raises `RequestError` for an empty stop string."""
        for index, stop in enumerate(stops):
            if not stop:
                raise RequestError(f"stop[{index}] is an empty string; allowed: strings of one character or more")
        self._stops = tuple(sorted(set(stops), key=lambda stop: (-len(stop), stop)))
        self._include_stop = include_stop
        self._held = ""
        self._matched = False

    def push(self, text: str) -> Streamed:
        """Takes the next piece; gives the text that no stop string can claim any more."""
        assert not self._matched, "the stream ended with a stop string"
        window = self._held + text
        found = min(
            ((start + len(stop), start, stop) for stop in self._stops if (start := window.find(stop)) >= 0),
            default=None,
        )
        if found is not None:
            end, start, stop = found
            self._matched, self._held = True, ""
            return Streamed(window[: end if self._include_stop else start], stop)
        n_held = self._n_held(window)
        self._held = window[len(window) - n_held :]
        return Streamed(window[: len(window) - n_held], None)

    def flush(self) -> str:
        """What was held back; call at the end of a stream that no stop string ended."""
        text, self._held = self._held, ""
        return text

    def _n_held(self, window: str) -> int:
        if not self._stops:
            return 0
        longest = min(len(self._stops[0]) - 1, len(window))
        for length in range(longest, 0, -1):
            tail = window[len(window) - length :]
            if any(stop.startswith(tail) for stop in self._stops if len(stop) > length):
                return length
        return 0
