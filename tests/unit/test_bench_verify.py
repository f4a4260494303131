"""`verify`: what is identical, what is a tie, and what is a bug, on exact models."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from outrider import LLM, SamplingParams, Speculation
from outrider.bench.compare import Outcome, compare, compare_completions, oracle_for, precision, worst
from outrider.bench.lanes import Lane, comparable_rules, lanes, parse_ks
from outrider.bench.oracle import Ending, Gap, PlainOracle
from outrider.bench.verification import verify
from outrider.core.types import Decision
from outrider.core.verdict import Origin, Verdict
from outrider.drafters.fixed import FixedDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.errors import ConfigError
from outrider.models.table import TableModel
from outrider.verify.coupled import CoupledVerifier
from tests.naive import naive_tokens
from tests.tiny import random_table, tiny_llm

V = 7
GREEDY = SamplingParams(max_tokens=40, seed=3)
SAMPLED = SamplingParams(max_tokens=40, temperature=0.8, seed=3)
PROMPTS = [("a", [1, 2, 3]), ("b", [4])]


class WidthSensitive(TableModel):
    """Adds `shift` to the logits of one token in passes over several rows: arithmetic that depends on the width."""

    token, shift = 0, 0.0

    def forward(self, segments, *, logits=True, taps=()):
        out = super().forward(segments, logits=logits, taps=taps)
        if logits and len(segments[0].tokens) > 1:
            out.logits_MV[:, self.token] += self.shift
        return out


def near_tie(shift: float, *, margin: float = 1e-5) -> WidthSensitive:
    """Token 1 leads token 0 by `margin` when the context's length is a multiple of 5; else the order is clear."""

    def row(context):
        logits = torch.linspace(0.0, 3.0, V, dtype=torch.float64)
        logits[(3 * context[-1] + len(context)) % V] += 5.0
        if len(context) % 5 == 0:
            logits[0], logits[1] = 20.0, 20.0 + margin
        return logits

    model = WidthSensitive(row, V)
    model.shift = shift
    return model


def adversary() -> FixedDrafter:
    """Drafts something, mostly wrong."""
    return FixedDrafter(script=lambda seq, budget: [(seq.tokens[-1] + i) % V for i in range(budget)])


def llm_of(model: TableModel) -> LLM:
    return LLM.from_parts(model, {"ngram": NgramDrafter(), "fixed": adversary()}, k=8)


def report_of(model: TableModel, params: SamplingParams, *, tolerance: float | None = None, method: str = "fixed"):
    llm = llm_of(model)
    rule = "greedy" if params.greedy else "coupled"
    report = verify(llm, PROMPTS, params, [Lane(method, k, rule) for k in (1, 3)], relative_tolerance=tolerance)
    llm.engine.check_integrity()
    return report


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("method", ["ngram", "fixed"])
def test_correct_speculation_is_identical(params, method):
    report = report_of(random_table(V, seed=5, sharpness=1.0), params, method=method)
    assert report.outcome is Outcome.IDENTICAL
    for lane in report.lanes:
        assert lane.count(Outcome.IDENTICAL) == len(PROMPTS)
        assert lane.stats.drafted > 0
        assert not lane.notes


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_the_oracle_resumes_the_naive_answer_from_any_prefix(params):
    model, stop = random_table(V, order=2, seed=2, sharpness=1.0), frozenset({0})
    expected = naive_tokens(model, [1, 2], params, stop_ids=stop)
    oracle = PlainOracle(model, [1, 2], params, seed=3, stop_ids=stop)
    for cut in range(len(expected) + 1):
        assert oracle.resume(expected[:cut]).token_ids == expected
    for cut, token in enumerate(expected):
        assert oracle.gap(expected[:cut], token, token).behind == 0.0


def test_a_width_dependent_near_tie_is_a_tie_and_the_comparison_goes_on_behind_it():
    report = report_of(near_tie(2e-5), GREEDY, tolerance=1e-5)
    assert report.outcome is Outcome.TIE
    found = [tie for lane in report.lanes for _, tie in lane.ties()]
    assert found
    for tie in found:
        assert (tie.plain_token, tie.speculative_token) == (1, 0)
        assert tie.gap == pytest.approx(1e-5, rel=1e-3)
        assert tie.tolerance == pytest.approx(20 * 1e-5, rel=1e-3)
    assert report.lanes[0].largest_gap == pytest.approx(1e-5, rel=1e-3)


def test_the_same_near_tie_diverges_when_the_tolerance_is_narrower():
    report = report_of(near_tie(2e-5), GREEDY)
    assert report.outcome is Outcome.DIVERGED
    assert report.lanes[0].divergences()[0][1].gap == pytest.approx(1e-5, rel=1e-3)


def test_wide_passes_that_are_wrong_by_more_than_rounding_diverge():
    assert report_of(near_tie(4.0, margin=2.0), GREEDY, tolerance=1e-3).outcome is Outcome.DIVERGED


class AcceptsAnything:
    """A broken rule: the first draft token is kept, right or wrong."""

    name, lossless, trees = "greedy", True, True
    laws = CoupledVerifier.laws

    def verify(self, draft, p, rng, seed, position):
        path = [0] if draft.size else []
        return Verdict(path, p[len(path)].only, Origin.BONUS)


class RacesElsewhere(CoupledVerifier):
    """A broken rule: with a draft, the noise is that of the next position."""

    def verify(self, draft, p, rng, seed, position):
        return super().verify(draft, p, rng, seed, position + bool(draft.size))


def test_a_broken_greedy_rule_diverges(monkeypatch):
    monkeypatch.setattr("outrider.verify.greedy.GreedyVerifier", AcceptsAnything)
    report = report_of(random_table(V, seed=5), GREEDY, tolerance=1e-2)
    assert report.outcome is Outcome.DIVERGED
    assert report.lanes[0].count(Outcome.DIVERGED) == len(PROMPTS)


def test_a_broken_coupled_rule_diverges(monkeypatch):
    monkeypatch.setattr("outrider.verify.coupled.CoupledVerifier", RacesElsewhere)
    assert report_of(random_table(V, seed=5, sharpness=1.0), SAMPLED, tolerance=1e-3).outcome is Outcome.DIVERGED


class Scripted:
    """An oracle that calls every difference at an even position a tie, and goes on with `rest`."""

    def __init__(self, rest: list[int]) -> None:
        self.rest = rest

    def gap(self, prefix, first, second):
        return Gap(0.1 if len(prefix) % 2 == 0 else 9.0, 1.0)

    def resume(self, prefix):
        return Ending([*prefix, *self.rest[len(prefix) :]], "length")


def ending(*tokens: int, reason: str = "length") -> Ending:
    return Ending(list(tokens), reason)


def test_a_bug_behind_a_tie_is_still_found():
    found = compare(ending(1, 1, 1, 1), ending(2, 1, 1, 5), Scripted([2, 1, 1, 1]))
    assert found.outcome is Outcome.DIVERGED
    assert [tie.position for tie in found.ties] == [0]
    assert found.divergence is not None
    assert (found.divergence.position, found.divergence.plain_token, found.divergence.speculative_token) == (3, 1, 5)


@pytest.mark.parametrize(("plain", "speculative"), [([1, 2], [1, 2, 3]), ([1, 2, 3], [1, 2]), ([1], [])])
def test_an_answer_that_ends_elsewhere_diverges(plain, speculative):
    found = compare(ending(*plain), ending(*speculative), Scripted([]))
    assert found.outcome is Outcome.DIVERGED
    assert "tokens here" in found.divergence.reason


def test_another_finish_reason_diverges_also_behind_a_tie():
    for plain in (ending(2, 1), ending(1, 1)):
        found = compare(plain, ending(2, 1, reason="stop"), Scripted([2, 1]))
        assert found.outcome is Outcome.DIVERGED
        assert found.divergence.reason == "plain ended with 'length', speculative with 'stop'"


def completions_of(model: TableModel, params: SamplingParams, *, rule: str, method: str = "fixed"):
    """An LLM, and a plain and a speculative answer of it."""
    llm = llm_of(model)
    speculations = (Speculation("none", rule=rule), Speculation(method, 3, rule))
    ours, theirs = (llm.generate([1, 2, 3], params, speculation=s)[0].completions[0] for s in speculations)
    return llm, ours, theirs


def test_completions_are_compared_with_the_oracle_that_fits_them():
    model = random_table(V, seed=5, sharpness=1.0)
    for params, rule in ((GREEDY, "greedy"), (SAMPLED, "coupled")):
        llm, plain, answer = completions_of(model, params, rule=rule)
        assert compare_completions(llm, [1, 2, 3], params, plain, answer).outcome is Outcome.IDENTICAL
        other = replace(answer, token_ids=[*answer.token_ids[:-1], (answer.token_ids[-1] + 1) % V])
        found = compare_completions(llm, [1, 2, 3], params, plain, other)
        assert (found.outcome, found.divergence.position) == (Outcome.DIVERGED, 39)
        ended = replace(answer, finish_reason="stop")
        assert compare_completions(llm, [1, 2, 3], params, plain, ended).outcome is Outcome.DIVERGED
    llm, plain, answer = completions_of(near_tie(2e-5), GREEDY, rule="greedy")
    prompt = [1, 2, 3]
    assert compare_completions(llm, prompt, GREEDY, plain, answer, relative_tolerance=1e-5).outcome is Outcome.TIE
    assert compare_completions(llm, prompt, GREEDY, plain, answer).outcome is Outcome.DIVERGED


def test_another_draw_is_not_comparable():
    llm, plain, answer = completions_of(random_table(V, seed=5, sharpness=1.0), SAMPLED, rule="block")
    assert plain.token_ids != answer.token_ids
    found = compare_completions(llm, [1, 2, 3], SAMPLED, plain, answer)
    assert found.outcome is Outcome.NOT_COMPARABLE
    assert "'block' keeps the distribution" in found.sentence
    assert compare_completions(llm, [1, 2, 3], SAMPLED, plain, plain).outcome is Outcome.IDENTICAL


def test_outcomes_are_ordered_by_gravity():
    assert worst([]) is Outcome.IDENTICAL
    assert worst([Outcome.TIE, Outcome.IDENTICAL]) is Outcome.TIE
    assert worst([Outcome.NOT_COMPARABLE, Outcome.TIE]) is Outcome.NOT_COMPARABLE
    assert worst([Outcome.DIVERGED, Outcome.NOT_COMPARABLE]) is Outcome.DIVERGED


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_oracle_ends_answers_as_the_engine_does(temperature):
    """Stop strings, stop tokens, schemas and lengths: from any prefix, the oracle ends where plain ended."""
    llm = tiny_llm(random_table(257, seed=1, sharpness=1.5))
    [free] = llm.generate("x", SamplingParams(temperature=temperature, seed=3, max_tokens=30))
    for extra in (
        {"stop": (bytes(free.token_ids[4:6]).decode("utf-8", "replace"),), "max_tokens": 30},
        {"stop_token_ids": (free.token_ids[6],), "max_tokens": 30},
        {"json_schema": {"enum": ["yes", "no"]}, "max_tokens": 30},
        {"max_tokens": 9},
    ):
        params = SamplingParams(temperature=temperature, seed=3, **extra)
        [result] = llm.generate("x", params, speculation=Speculation(rule="coupled"))
        [plain] = result.completions
        oracle = oracle_for(llm, result.prompt_ids, params, seed=plain.seed, tolerance=1e-9)
        for cut in range(len(plain.token_ids)):
            assert oracle.resume(plain.token_ids[:cut]) == Ending(plain.token_ids, plain.finish_reason)


def test_a_lane_that_never_drafts_says_that_nothing_was_verified():
    llm = LLM.from_parts(random_table(V, seed=1), {"fixed": FixedDrafter(script=())}, k=4)
    report = verify(llm, PROMPTS, GREEDY, [Lane("fixed", 4, "greedy")])
    assert report.lanes[0].notes == ["nothing was drafted, so nothing was verified"]
    assert report.outcome is Outcome.UNVERIFIED


def test_a_drafter_that_fails_is_noted():
    def fails(seq, budget):
        raise RuntimeError("broken")

    llm = LLM.from_parts(random_table(V, seed=1), {"fixed": FixedDrafter(script=fails)}, k=4)
    report = verify(llm, PROMPTS, GREEDY, [Lane("fixed", 4, "greedy")])
    assert report.outcome is Outcome.UNVERIFIED
    assert any("drafter fixed failed" in note for note in report.lanes[0].notes)


def test_rules_that_cannot_be_compared_are_refused_with_what_to_use_instead():
    assert comparable_rules(["auto", "block"], GREEDY) == ["greedy"]
    assert comparable_rules(["auto", "coupled"], SAMPLED) == ["coupled"]
    with pytest.raises(ConfigError, match="use --rule coupled, or --temperature 0"):
        comparable_rules(["block"], SAMPLED)
    with pytest.raises(ConfigError, match="cannot be compared"):
        verify(llm_of(random_table(V)), PROMPTS, SAMPLED, [Lane("ngram", 3, "chain")])


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ({}, "float64"),
        ({"dtype": "bfloat16", "kernels": "avx2"}, "float32"),
        ({"dtype": "bfloat16", "kernels": "torch"}, "bfloat16"),
        ({"dtype": "float32", "kernels": "torch"}, "float32"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "int8", "kernels": "torch"}, "bfloat16"),
    ],
)
def test_the_tolerance_follows_the_arithmetic(plan, expected):
    llm = llm_of(random_table(V))
    llm.plan = [Decision(field, value, "") for field, value in plan.items()]
    assert precision(llm) == expected


def test_lanes_name_what_is_allowed():
    llm = llm_of(random_table(V))
    assert [lane.name for lane in lanes(llm, {"ngram": [1, 2], "none": [1]}, ["greedy"])] == ["ngram K=1", "ngram K=2"]
    with pytest.raises(ConfigError, match="'sufix' is not loaded"):
        lanes(llm, {"sufix": [1]}, ["greedy"])
    with pytest.raises(ConfigError, match="nothing to compare"):
        lanes(llm, {"none": [1]}, ["greedy"])
    for text in ("-1", "1,-2"):
        with pytest.raises(ConfigError, match=r"K = -\d is not allowed"):
            parse_ks(text)
    for text in ("", "a", "1,,2", "1.5"):
        with pytest.raises(ConfigError, match="as in 1,2,5"):
            parse_ks(text)


def test_the_report_is_json_even_where_a_gap_is_infinite(monkeypatch):
    monkeypatch.setattr("outrider.verify.greedy.GreedyVerifier", AcceptsAnything)
    model = TableModel(lambda context: torch.tensor([0.0, *[-torch.inf] * (V - 1)], dtype=torch.float64), V)
    report = report_of(model, GREEDY)
    documents = [lane.to_json() for lane in report.lanes]
    assert json.loads(json.dumps(documents, allow_nan=False))[0]["divergence_list"][0]["gap"] is None
