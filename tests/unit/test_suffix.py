"""The counting suffix automaton against brute force, and what drafter `suffix` makes of it."""

from __future__ import annotations

import random

import pytest

from outrider.core.draft import SeqDraft
from outrider.core.rng import CounterRng
from outrider.core.types import SamplingParams, Sequence
from outrider.drafters.suffix import SuffixCorpus, SuffixDrafter
from outrider.drafters.suffix_automaton import BREAK, ROOT, SuffixAutomaton
from outrider.errors import ConfigError


def occurrences(text: list[int], word: list[int]) -> list[int]:
    """Ends (exclusive) of the places where `word` stands."""
    return [i + len(word) for i in range(len(text) - len(word) + 1) if text[i : i + len(word)] == word]


def walk(automaton: SuffixAutomaton, word: list[int]) -> int:
    state = ROOT
    for token in word:
        state = automaton.next[state][token]
    return state


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("depth", [1, 2, 5, 64])
def test_counts_are_exact_up_to_the_depth(seed: int, depth: int) -> None:
    dice = random.Random(seed)
    alphabet = dice.choice([1, 2, 3, 6])
    text = [dice.randrange(alphabet) for _ in range(40)]
    if seed % 3 == 0:
        text = (text[:5] * 20)[:40]
    automaton = SuffixAutomaton(depth)
    cut = dice.randrange(40)
    automaton.extend(text[:cut])
    automaton.extend(text[cut:])
    for start in range(len(text)):
        for end in range(start + 1, min(len(text), start + depth) + 1):
            ends = occurrences(text, text[start:end])
            state = walk(automaton, text[start:end])
            assert (automaton.count[state], automaton.last[state]) == (len(ends), ends[-1])


@pytest.mark.parametrize("seed", range(8))
def test_matches_are_the_suffixes_that_occur(seed: int) -> None:
    dice = random.Random(seed)
    text = [dice.randrange(3) for _ in range(60)]
    other = [dice.randrange(4) for _ in range(10)]
    automaton = SuffixAutomaton(8)
    automaton.extend(text)
    lengths = [n for n in range(1, 9) if occurrences(text, other[-n:])]
    assert max((m for _, m in automaton.match(other)), default=0) == max(lengths, default=0)
    own = [m for _, m in automaton.suffixes()]
    assert own[0] == 8
    assert own == sorted(own, reverse=True)


def test_construction_is_linear() -> None:
    automaton = SuffixAutomaton(4)
    automaton.extend([1] * 3000)
    automaton.extend(range(3000))
    assert len(automaton.next) <= 2 * automaton.size
    assert sum(map(len, automaton.next)) <= 3 * automaton.size


def draft(drafter: SuffixDrafter, tokens: list[int], budget: int = 8, **options: frozenset[int]) -> SeqDraft:
    seq = Sequence(0, tokens, SamplingParams(), seed=0, **options)
    drafter.open(seq)
    proposed = drafter.propose([seq], [budget], CounterRng()).seqs[0]
    drafter.close(seq)
    return proposed


def test_follows_the_most_frequent_continuation_and_says_how_sure_it_is() -> None:
    text = [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2]
    proposed = draft(SuffixDrafter(), text, 1)
    assert proposed.tokens == [3]
    assert proposed.confidence == [pytest.approx(2 / 3)]


def test_of_equally_frequent_continuations_the_latest_wins() -> None:
    assert draft(SuffixDrafter(), [1, 2, 3, 0, 1, 2, 4, 0, 1, 2], 1).tokens == [4]


def test_a_longer_match_allows_a_longer_draft() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert draft(SuffixDrafter(), [*text, 0, 1]).tokens == [2]
    assert draft(SuffixDrafter(), [*text, 0, 1, 2, 3]).tokens == [4, 5, 6]
    assert draft(SuffixDrafter(max_spec_factor=2.0), [*text, 0, 1, 2, 3]).tokens == [4, 5, 6, 7, 8, 9]
    assert draft(SuffixDrafter(max_spec_offset=1.0), [*text, 0, 1]).tokens == [2, 3]


def test_a_draft_ends_before_it_gets_too_unlikely() -> None:
    text = [5, 1, 5, 2, 5, 3, 5, 4, 5]
    assert draft(SuffixDrafter(), text, 1).tokens == [4]
    assert draft(SuffixDrafter(min_token_prob=0.3), text, 1).tokens == []


def test_nothing_is_drafted_behind_the_end_of_the_answer() -> None:
    text = [1, 2, 3, 9, 4, 5, 0, 1, 2, 3]
    proposed = draft(SuffixDrafter(max_spec_factor=3.0), text, 4, stop_ids=frozenset({9}))
    assert proposed.tokens == [9]
    assert len(proposed.confidence) == 1


def test_a_corpus_of_texts_is_searched_but_does_not_grow() -> None:
    drafter = SuffixDrafter(corpus=[[1, 2, 3, 4, 5], [7, 8]])
    size = len(drafter.corpus)
    assert draft(drafter, [1, 2, 3]).tokens == [4, 5]
    assert draft(drafter, [9, 7, 8]).tokens == []
    assert len(drafter.corpus) == size


def test_the_better_of_own_text_and_corpus_is_taken() -> None:
    drafter = SuffixDrafter(corpus=[[4, 1, 2, 3, 6, 6, 6]])
    assert draft(drafter, [2, 3, 7, 4, 1, 2, 3]).tokens == [6, 6, 6]
    assert draft(drafter, [1, 2, 3, 7, 7, 7, 1, 2, 3]).tokens == [7, 7, 7]


def test_finished_answers_join_a_shared_corpus_without_their_prompts() -> None:
    corpus = SuffixCorpus(max_tokens=100)
    drafter, other = SuffixDrafter(corpus=corpus), SuffixDrafter(corpus=corpus)
    seq = Sequence(1, [50, 51, 52], SamplingParams(), seed=0)
    drafter.open(seq)
    seq.tokens += [10, 11, 12, 13, 14]
    drafter.close(seq)
    drafter.close(seq)
    assert len(corpus) == 6
    assert draft(other, [10, 11, 12]).tokens == [13, 14]
    assert draft(other, [50, 51]).tokens == []


def test_a_match_never_crosses_from_one_text_to_the_next() -> None:
    drafter = SuffixDrafter(corpus=[[1, 2, 3], [4, 5, 6]], max_spec_offset=5.0)
    proposed = draft(drafter, [0, 2, 3])
    assert BREAK not in proposed.tokens
    assert proposed.tokens == []
    assert draft(drafter, [0, 1, 2]).tokens == [3]


def test_the_corpus_is_bounded_and_forgets_the_oldest() -> None:
    corpus = SuffixCorpus(max_tokens=40)
    for i in range(50):
        corpus.add([100 + i, 200 + i, 300 + i])
        assert len(corpus) <= 40
    found = [bool(list(a.match([149, 249]))) for a in corpus.generations()]
    assert any(found)
    assert not any(list(a.match([100, 200])) for a in corpus.generations())
    corpus.add(range(1000))
    assert len(corpus) <= 40
    assert any(list(a.match([998, 999])) for a in corpus.generations())


@pytest.mark.parametrize(
    "options",
    [
        {"max_depth": 0},
        {"max_spec_factor": -1},
        {"min_token_prob": 1.5},
        {"min_token_prob": float("nan")},
        {"corpus": "text"},
        {"corpus": [1, 2, 3]},
    ],
)
def test_options_are_checked(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        SuffixDrafter(**options)  # type: ignore[arg-type]


def test_corpus_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="max_tokens = 0"):
        SuffixCorpus(max_tokens=0)
