"""A suffix automaton that counts: every substring of a growing text, how often it occurred, and what followed it.

Construction after Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985), amortised O(1)
transitions a token. Occurrences are counted for substrings up to `max_depth` tokens: appending a token raises the
counts of the states on the suffix path of the last `max_depth` tokens, so a token costs at most `max_depth` steps,
whatever the text's length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq

ROOT = 0
BREAK = -1
"""A token that ends a text inside an automaton of several; never matched, never proposed."""


class SuffixAutomaton:
    """`count[s]` occurrences and `last[s]` latest end of the substrings of state s (exact up to `max_depth` tokens)."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.size = 0
        self.next: list[dict[int, int]] = [{}]
        self.link: list[int] = [-1]
        self.length: list[int] = [0]
        self.count: list[int] = [0]
        self.last: list[int] = [0]
        self._whole = ROOT
        self._tail, self._tail_len = ROOT, 0

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens to the text."""
        for token in tokens:
            self._append(token)
            self._count_tail(token)

    def _state(self, length: int, link: int, copy_of: int | None = None) -> int:
        self.length.append(length)
        self.link.append(link)
        self.next.append({} if copy_of is None else dict(self.next[copy_of]))
        self.count.append(0 if copy_of is None else self.count[copy_of])
        self.last.append(0 if copy_of is None else self.last[copy_of])
        return len(self.next) - 1

    def _append(self, token: int) -> None:
        self.size += 1
        state, self._whole = self._whole, self._state(self.length[self._whole] + 1, ROOT)
        while state != -1 and token not in self.next[state]:
            self.next[state][token] = self._whole
            state = self.link[state]
        if state == -1:
            return
        target = self.next[state][token]
        if self.length[target] != self.length[state] + 1:
            target = self._split(state, token, target)
        self.link[self._whole] = target

    def _split(self, state: int, token: int, target: int) -> int:
        """Parts the short substrings of `target` (those that end here too) from the long ones; returns their state."""
        clone = self._state(self.length[state] + 1, self.link[target], copy_of=target)
        self.link[target] = clone
        while state != -1 and self.next[state].get(token) == target:
            self.next[state][token] = clone
            state = self.link[state]
        return clone

    def _count_tail(self, token: int) -> None:
        """Moves the tail (the last max_depth tokens) on by a token and counts each of its suffixes."""
        self._tail, self._tail_len = self._shorten(self._tail, self._tail_len)
        self._tail, self._tail_len = self._shorten(self.next[self._tail][token], self._tail_len + 1)
        state = self._tail
        while state != ROOT:
            self.count[state] += 1
            self.last[state] = self.size
            state = self.link[state]

    def _shorten(self, state: int, length: int) -> tuple[int, int]:
        """The state of the last min(length, max_depth) tokens of the substring of `length` tokens in `state`."""
        length = min(length, self.max_depth)
        while state != ROOT and self.length[self.link[state]] >= length:
            state = self.link[state]
        return state, length

    def suffixes(self) -> Iterator[tuple[int, int]]:
        """(state, longest match in tokens) for the suffixes of the text itself, longest first."""
        return self._chain(self._tail, self._tail_len)

    def match(self, tokens: Seq[int]) -> Iterator[tuple[int, int]]:
        """The same for the suffixes of other `tokens` that occur in this text."""
        state, length = ROOT, 0
        for token in tokens[-self.max_depth :]:
            while state != ROOT and token not in self.next[state]:
                state = self.link[state]
                length = self.length[state]
            if token in self.next[state]:
                state, length = self.next[state][token], length + 1
        return self._chain(state, length)

    def _chain(self, state: int, length: int) -> Iterator[tuple[int, int]]:
        while state != ROOT:
            yield state, min(length, self.length[state])
            state = self.link[state]

    def likeliest(self, state: int) -> tuple[int, float, int] | None:
        """(token, its share, the state behind it) of what most often followed, the latest of equals; None: nothing."""
        total, best, best_rank = 0, None, (0, 0)
        for token, child in self.next[state].items():
            total += self.count[child]
            rank = (self.count[child], self.last[child])
            if token != BREAK and rank > best_rank:
                best, best_rank = (token, child), rank
        return None if best is None else (best[0], best_rank[0] / total, best[1])
