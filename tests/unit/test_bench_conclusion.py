"""The verdict of `bench`: it says no more than the spread allows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider import LLM, SamplingParams
from outrider.bench.conclusion import Finding, conclude
from outrider.bench.lanes import Lane
from outrider.bench.measure import bench
from outrider.bench.summary import ALL, LaneSummary, Speedup, Spread, summarise
from outrider.core.stats import SpecStats
from outrider.drafters.ngram import NgramDrafter
from outrider.engine.prompt_file import Conversation
from tests.tiny import byte_tokenizer, cycle_model


@pytest.fixture(scope="module")
def summary() -> LaneSummary:
    llm = LLM.from_parts(cycle_model("abcabd "), {"ngram": NgramDrafter()}, tokenizer=byte_tokenizer(), k=4)
    params = SamplingParams(max_tokens=24)
    measured = bench(llm, [Conversation("1", "a", ("hello hello",))], params, [Lane("ngram", 4, "greedy")], raw=True)
    return next(s for s in summarise(measured) if s.lane == "ngram K=4" and s.category == ALL)


def with_speedup(summary: LaneSummary, q1: float, median: float, q3: float, rows: int = 6, lane: str = "ngram K=4"):
    return replace(summary, lane=lane, speedup=Speedup(Spread(median, q1, q3), median, median, rows), beyond=())


@pytest.mark.parametrize(
    ("spread", "found", "words"),
    [
        ((1.1, 1.2, 1.3), Finding.FASTER, "1.20 x plain on 6 prompts (IQR 1.10..1.30): worth it"),
        ((0.8, 0.9, 0.99), Finding.SLOWER, "0.90 x plain on 6 prompts (IQR 0.80..0.99): leave it off"),
        ((0.9, 1.2, 1.3), Finding.UNCLEAR, "the spread includes 1"),
        ((0.9, 0.95, 1.1), Finding.UNCLEAR, "the spread includes 1"),
        ((1.003, 1.07, 1.3), Finding.UNCLEAR, "the spread includes 1"),
        ((1.0, 1.0, 1.0), Finding.UNCLEAR, "the spread includes 1"),
        ((1.01, 1.015, 1.2), Finding.UNCLEAR, "too small to matter"),
    ],
)
def test_a_verdict_needs_the_spread_on_one_side(summary, spread, found, words):
    conclusion = conclude([with_speedup(summary, *spread)])
    assert conclusion.findings == {"ngram K=4": found}
    assert words in conclusion.sentence


@pytest.mark.parametrize(("rows", "where"), [(1, "one prompt"), (3, "3 prompts")])
def test_few_prompts_decide_nothing(summary, rows, where):
    conclusion = conclude([with_speedup(summary, 1.5, 1.5, 1.5, rows=rows)])
    assert conclusion.findings == {"ngram K=4": Finding.UNCLEAR}
    assert f"1.50 x plain on {where}: too few to decide" in conclusion.sentence


def test_a_busy_machine_decides_nothing_for_good(summary):
    fast = with_speedup(summary, 1.1, 1.2, 1.3)
    busy = conclude([fast], busy=True)
    assert "not decided: the machine was busy: measure again" in busy.sentence
    assert "worth it" not in busy.sentence
    assert busy.findings == {"ngram K=4": Finding.UNDECIDED}
    assert busy.to_json()["provisional"] is True
    assert "measure again" not in conclude([fast]).sentence


def test_what_cannot_be_a_speedup_is_none(summary):
    fast = with_speedup(summary, 1.5, 1.6, 1.7)
    for changed, found, words in (
        (replace(fast, diverged=2), Finding.DIVERGED, "do not use it"),
        (replace(fast, stats=SpecStats(rounds=9, emitted=9, own_tokens=9)), Finding.IDLE, "drafted nothing"),
        (with_speedup(summary, 50, 60, 70), Finding.UNDECIDED, "not decided: over all prompts the speed-up is more"),
        (replace(fast, beyond=("7", "9")), Finding.UNDECIDED, "not decided: on prompts 7, 9 the speed-up is more"),
        (replace(fast, speedup=None), Finding.UNMEASURED, "no advice"),
    ):
        conclusion = conclude([changed])
        assert conclusion.findings == {"ngram K=4": found}
        assert words in conclusion.sentence


@pytest.mark.parametrize(
    ("ratios", "decided"),
    [((1.2, 1.2, 1.2), True), ((1.2, 1.15, 1.25), True), ((1.2, 1.2, 1.34), False), ((1.03, 1.03, 0.98), False)],
)
def test_three_ratios_must_agree(summary, ratios, decided):
    by_prompt, of_medians, of_totals = ratios
    spread = Spread(by_prompt, 1.02, by_prompt + 0.1)
    conclusion = conclude([replace(summary, beyond=(), speedup=Speedup(spread, of_medians, of_totals, 6))])
    assert conclusion.findings == {"ngram K=4": Finding.FASTER if decided else Finding.UNDECIDED}
    assert ("not decided: it hangs on how one counts" in conclusion.sentence) != decided


def test_the_built_in_prompts_decide_nothing(summary):
    conclusion = conclude([with_speedup(summary, 1.1, 1.2, 1.3)], builtin=True)
    assert conclusion.findings == {"ngram K=4": Finding.UNDECIDED}
    assert conclusion.sentence.endswith(
        "not decided: the built-in prompts favour copying: decide on your own prompts (--prompts)."
    )


def test_categories_that_gain_and_lose_are_named(summary):
    lane = with_speedup(summary, 1.1, 1.2, 1.3)
    kinds = [
        replace(with_speedup(summary, *spread), category=category)
        for category, spread in (("edit", (1.3, 1.4, 1.5)), ("math", (0.7, 0.8, 0.9)), ("code", (0.9, 1.1, 1.2)))
    ]
    assert conclude([lane, *kinds]).sentence.endswith("worth it (gains on edit, loses on math).")
    few = [replace(kind, speedup=replace(kind.speedup, rows=3)) for kind in kinds]
    assert conclude([lane, *few]).sentence.endswith("worth it."), "three prompts of a kind decide nothing"


def test_what_pays_comes_first(summary):
    lanes = [with_speedup(summary, 0.9, m, m + 0.3, lane=lane) for lane, m in (("a", 0.95), ("b", 1.1))]
    lanes.append(with_speedup(summary, 1.01, 1.05, 1.1, lane="c"))
    sentence = conclude(lanes).sentence
    assert sentence.index("c is") < sentence.index("b is") < sentence.index("a is")
    assert list(conclude(lanes).findings) == ["a", "b", "c"]
    assert sentence.count("on 6 prompts") == 1
