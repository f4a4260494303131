"""What drafts cost is what rounds with them take longer than rounds of as many rows, on whatever day that is found."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from outrider import LLM
from outrider.bench import measured_costs, timing
from outrider.control.cost_model import CostModel
from outrider.core.draft import SeqDraft
from tests.e2e.test_batch import Scripted
from tests.given_costs import one_context
from tests.tiny import byte_tokenizer, cycle_model

PASS = {rows: 0.9 + 0.1 * rows for rows in range(1, 40)}
COSTS = one_context(PASS, {})
SLOWER_DAY = 1.25


class Clock:
    """A day on which everything takes so much longer than when `COSTS` were measured, and a draft token 0.05; behind a
    draft the pass takes 0.3 longer."""

    def __init__(self) -> None:
        self.now, self.behind_a_draft = 0.0, False

    def perf_counter(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += SLOWER_DAY * seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    for module in (timing, measured_costs):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=made.perf_counter))
    return made


def timed_llm(clock: Clock, extra_s: float) -> LLM:
    def draft(seq, k):
        clock.spend(0.05 * k)
        clock.behind_a_draft = k > 0
        return SeqDraft.chain([1] * k)

    target = cycle_model("abcd")
    forward = target.forward

    def timed_forward(segments, *, logits=True, taps=()):
        if logits:
            clock.spend(PASS[sum(len(segment.tokens) for segment in segments)] + extra_s * clock.behind_a_draft)
            clock.behind_a_draft = False
        return forward(segments, logits=logits, taps=taps)

    target.forward = timed_forward
    return LLM.from_parts(target, {"timed": Scripted("timed", draft)}, tokenizer=byte_tokenizer())


def measured(clock: Clock, extra_s: float):
    return measured_costs.measure_drafter(timed_llm(clock, extra_s), "timed", COSTS)


def test_a_draft_costs_what_it_takes_and_what_it_slows_down(clock):
    cost = measured(clock, 0.3)
    for greedy in (True, False):
        assert cost.share_s(1, 1, greedy=greedy) == pytest.approx(0.05 + 0.3)
        assert cost.share_s(8, 1, greedy=greedy) == pytest.approx(0.40 + 0.3)
        assert cost.share_s(8, 4, greedy=greedy) == pytest.approx(0.40 + 0.3 / 4)


def test_a_draft_costs_no_less_than_it_takes(clock):
    cost = measured(clock, -0.3)
    assert cost.share_s(4, 1, greedy=True) == pytest.approx(0.20)
    assert cost.catch_up_s == 0.0


def test_the_pace_is_what_plain_rounds_take_now(clock):
    llm = timed_llm(clock, 0.0)
    now = measured_costs.pace(llm, COSTS, 50)
    assert now.slower == pytest.approx(SLOWER_DAY)
    assert now.read_s == pytest.approx(SLOWER_DAY * PASS[1] / 50), "the prompt is free here, and its round has one row"
    dearer = CostModel.measured({0: {1: 1.0}, 100: {1: 2.0}}, {1: 0.0}, {1: 0.0}, 0.0, {})
    for context, behind in ((20, 20), (50, 50), (10**6, llm.engine.target.context_length - 34)):
        usual = 1 + (behind + 16) / 100
        assert measured_costs.pace(llm, dearer, context).slower == pytest.approx(SLOWER_DAY / usual)
    llm.engine.check_integrity()
