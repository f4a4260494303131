"""Drafter `suffix`: what most often followed the longest suffix that was seen before (SuffixDecoding).

After Oliaro et al. 2024, 2411.04975: for every suffix of the text that occurred earlier, follow the most frequent
continuation; the draft may be longer where the match is longer; of all candidates the one with the most expected
tokens wins. Counts come from a suffix automaton over the sequence's own text and, where given, over a corpus.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from outrider.core.draft import Draft, DraftLaw, SeqDraft
from outrider.core.protocols import Committed
from outrider.core.rng import Rng
from outrider.core.types import Sequence
from outrider.drafters.options import require_int, require_number, until_stop
from outrider.drafters.suffix_automaton import BREAK, SuffixAutomaton
from outrider.errors import ConfigError


class SuffixCorpus:
    """Texts shared by all requests, at most `max_tokens` of them; the oldest go first.

    Two generations of half that size: a full young one becomes the old one, and the old one is forgotten. Text of
    one request can so become a draft of another, which changes no answer but can be seen in its speed.
    """

    def __init__(self, *, max_tokens: int = 1_000_000, max_depth: int = 64) -> None:
        self.max_tokens = require_int("suffix corpus", "max_tokens", max_tokens, 2)
        self.max_depth = require_int("suffix corpus", "max_depth", max_depth, 1)
        self._young, self._old = SuffixAutomaton(max_depth), SuffixAutomaton(max_depth)

    def add(self, tokens: Seq[int]) -> None:
        """Adds a text; of one longer than a generation only the end."""
        half = self.max_tokens // 2
        tokens = tokens[-(half - 1) :] if half > 1 else ()
        if not tokens:
            return
        if self._young.size + len(tokens) + 1 > half:
            self._young, self._old = SuffixAutomaton(self.max_depth), self._young
        self._young.extend([*tokens, BREAK])

    def __len__(self) -> int:
        """Tokens held, counting one at the end of each text."""
        return self._young.size + self._old.size

    def generations(self) -> tuple[SuffixAutomaton, SuffixAutomaton]:
        """The automata to search, the younger first."""
        return self._young, self._old


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A path and the estimated probability that each node of it is reached and right."""

    tokens: list[int] = field(default_factory=list)
    survival: list[float] = field(default_factory=list)

    @property
    def expected(self) -> float:
        return sum(self.survival)


class SuffixDrafter:
    """Drafts chains from counts.

    corpus           a SuffixCorpus, to which every finished answer is added; or texts (token ids) that stay as they are
    max_depth        longest suffix that is matched, in tokens
    max_spec_factor, max_spec_offset   a match of m tokens allows a draft of m * factor + offset
    min_token_prob   a draft ends before its estimated probability falls under this
    `confidence` is the product of the shares along the path: the estimated probability that the node is accepted.
    """

    name = "suffix"
    laws = frozenset({DraftLaw.POINT})
    trees = False
    wants: tuple[int, ...] = ()

    def __init__(
        self,
        *,
        corpus: SuffixCorpus | Seq[Seq[int]] | None = None,
        max_depth: int = 64,
        max_spec_factor: float = 1.0,
        max_spec_offset: float = 0.0,
        min_token_prob: float = 0.1,
    ) -> None:
        self.max_depth = require_int(self.name, "max_depth", max_depth, 1)
        self.max_spec_factor = require_number(self.name, "max_spec_factor", max_spec_factor, 0)
        self.max_spec_offset = require_number(self.name, "max_spec_offset", max_spec_offset, 0)
        self.min_token_prob = require_number(self.name, "min_token_prob", min_token_prob, 0, 1)
        self._learns = isinstance(corpus, SuffixCorpus)
        self.corpus = corpus if isinstance(corpus, SuffixCorpus) else _corpus_of(corpus or (), self.max_depth)
        self._texts: dict[int, SuffixAutomaton] = {}

    def open(self, seq: Sequence) -> None:
        self._texts[seq.id] = SuffixAutomaton(self.max_depth)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int], rng: Rng) -> Draft:
        return Draft([self._draft(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)])

    def _draft(self, seq: Sequence, budget: int) -> SeqDraft:
        if not budget:
            return SeqDraft.empty(self.name)
        text = self._texts[seq.id]
        text.extend(seq.tokens[text.size :])
        best = self._best(text, text.suffixes(), budget, _Candidate())
        for automaton in self.corpus.generations():
            best = self._best(automaton, automaton.match(seq.tokens), budget, best)
        tokens = until_stop(best.tokens, budget, seq)
        return SeqDraft.chain(tokens, confidence=best.survival[: len(tokens)], source=self.name)

    def _best(
        self, automaton: SuffixAutomaton, matches: Iterator[tuple[int, int]], budget: int, best: _Candidate
    ) -> _Candidate:
        """The candidate with the most expected tokens; of equals the one found first, which has the longer match."""
        for state, length in matches:
            limit = min(budget, int(length * self.max_spec_factor + self.max_spec_offset + 1e-6))
            if limit <= best.expected:
                continue
            candidate = self._follow(automaton, state, limit)
            if candidate.expected > best.expected:
                best = candidate
        return best

    def _follow(self, automaton: SuffixAutomaton, state: int, limit: int) -> _Candidate:
        path, survival = _Candidate(), 1.0
        while len(path.tokens) < limit:
            step = automaton.likeliest(state)
            if step is None:
                break
            token, share, state = step
            survival *= share
            if survival < self.min_token_prob:
                break
            path.tokens.append(token)
            path.survival.append(survival)
        return path

    def commit(self, seq: Sequence, committed: Committed) -> None:
        """Nothing to do: `propose` reads the sequence itself."""

    def close(self, seq: Sequence) -> None:
        if self._texts.pop(seq.id, None) is not None and self._learns:
            self.corpus.add(seq.tokens[seq.prompt_len :])


def _corpus_of(texts: Seq[Seq[int]], max_depth: int) -> SuffixCorpus:
    """A corpus that holds all of `texts`."""
    if isinstance(texts, str) or any(isinstance(text, (str, int)) for text in texts):
        raise ConfigError("suffix: corpus holds no token ids: give a SuffixCorpus, or a list of lists of token ids")
    corpus = SuffixCorpus(max_tokens=2 * sum(len(text) + 1 for text in texts) + 4, max_depth=max_depth)
    for text in texts:
        corpus.add(text)
    return corpus
