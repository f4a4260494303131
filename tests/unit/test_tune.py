"""`tune`: replayed rounds are the engine's own, predictions follow from given costs, the verdict from the figures."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest

from outrider import LLM, SamplingParams
from outrider.bench.interval import Interval
from outrider.bench.lanes import Lane
from outrider.bench.measure import bench
from outrider.bench.measured_costs import Pace
from outrider.bench.summary import ALL, between, summarise
from outrider.core.draft import SeqDraft
from outrider.drafters.block_files import write_block
from outrider.drafters.cascade import CascadeDrafter
from outrider.drafters.draft_model import DraftModelDrafter
from outrider.drafters.eagle3_files import LAYOUTS as EAGLE3_LAYOUTS
from outrider.drafters.eagle3_files import write_eagle3
from outrider.drafters.fixed import FixedDrafter
from outrider.drafters.medusa_files import write_medusa
from outrider.drafters.mtp_files import LAYOUTS as MTP_LAYOUTS
from outrider.drafters.mtp_files import write_mtp
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine.prompt_file import Conversation
from outrider.errors import ConfigError
from outrider.sim.theory import Cost
from outrider.tune.budget import Load, fit, load_of, spread
from outrider.tune.configuration import read_configuration, write_configuration
from outrider.tune.drafters import possible_drafters
from outrider.tune.predict import Candidate, OnPaper, on_paper, predict, profiles
from outrider.tune.record import Answer, Asked, Record, record
from outrider.tune.replay import replay, rounds
from outrider.tune.run import Wanted, tune
from outrider.tune.verdict import Check, decide
from tests.given_costs import one_context, uneven
from tests.tiny import byte_tokenizer, cycle_model, random_table
from tests.tiny_block import DFLASH, DSPARK, random_block
from tests.tiny_folder import write_tiny_model
from tests.tiny_head import random_head, random_medusa, random_module

PROMPTS = [
    Conversation("1", "code", ("abcab",)),
    Conversation("2", "prose", ("the cat",)),
    Conversation("3", "prose", ("x",)),
]
TEXT = "abcabd "
FLAT = one_context({1: 1.0, 2: 1.0, 16: 1.0}, {"good": [0.0] * 8, "bad": [0.1 * k for k in range(1, 9)]})


@contextmanager
def no_bar(what, steps):
    yield lambda: None


HEADS = {
    **{f"eagle3 {layout}": partial(write_eagle3, random_head(vocab=64), layout=layout) for layout in EAGLE3_LAYOUTS},
    **{f"mtp {layout}": partial(write_mtp, random_module(vocab=64), layout=layout) for layout in MTP_LAYOUTS},
    "medusa": partial(write_medusa, random_medusa(vocab=64)),
    "dflash zlab": partial(write_block, random_block(vocab=64, **DFLASH), layout="zlab"),
    "dflash speculators": partial(write_block, random_block(vocab=64, **DFLASH), layout="speculators"),
    "dspark deepspec": partial(write_block, random_block(vocab=64, **DSPARK), layout="deepspec"),
    "dspark speculators": partial(write_block, random_block(vocab=64, **DSPARK), layout="speculators"),
}


@pytest.mark.parametrize("head", HEADS)
def test_a_head_without_a_card_is_known_by_its_configuration(tmp_path, head):
    HEADS[head](folder=tmp_path)
    [weights] = [path for path in tmp_path.iterdir() if path.name != "config.json"]
    for given in (tmp_path, weights):
        assert possible_drafters("target", str(given), []).names == ["ngram", "suffix", head.split()[0], "cascade"]


def test_a_model_is_no_head_and_what_lies_here_is_not_a_name(tmp_path, monkeypatch):
    models = ["ngram", "suffix", "draft_model", "cascade"]
    assert possible_drafters("target", str(write_tiny_model(tmp_path / "model")), []).names == models
    HEADS["medusa"](folder=tmp_path)
    monkeypatch.chdir(tmp_path)
    assert possible_drafters("target", "smollm2-135m", []).names == models


def encoded(llm):
    return [(prompt, llm.encode_prompt(prompt.turns[0])) for prompt in PROMPTS]


def scripted(right):
    """Continues TEXT; a token where `right(position)` is false is wrong."""

    def script(seq, budget):
        places = range(len(seq.tokens), len(seq.tokens) + budget)
        wanted = [TEXT.encode()[(place - 1) % len(TEXT)] for place in places]
        return [t if right(p - seq.prompt_len) else 0 for t, p in zip(wanted, places, strict=True)]

    return FixedDrafter(script=script)


def llm_of(**drafters):
    return LLM.from_parts(cycle_model(TEXT), drafters, tokenizer=byte_tokenizer(), k=8)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_a_replay_has_the_engines_own_counts(k, temperature):
    target = random_table(257, sharpness=1.5) if temperature else cycle_model(TEXT, eos_after=50)
    draft = random_table(257, seed=1, sharpness=1.5) if temperature else cycle_model("abcabc ")
    drafters = {
        "ngram": NgramDrafter(),
        "suffix": SuffixDrafter(),
        "draft_model": DraftModelDrafter(model=draft),
        "good": scripted(lambda position: position % 7 not in (2, 3)),
    }
    llm = LLM.from_parts(target, drafters, tokenizer=byte_tokenizer(), k=6)
    rule = "coupled" if temperature else "greedy"
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=3)
    recorded = record(llm, encoded(llm), params, list(drafters), 6, rule)
    assert not recorded.failed
    measured = bench(llm, PROMPTS, params, [Lane(name, k, rule) for name in drafters], raw=True, warm_up=0)
    for summary in summarise(measured):
        if summary.category != ALL or summary.lane == "plain":
            continue
        name = summary.lane.split()[0]
        costs = one_context({1: 1.0, 8: 1.0}, {name: [0.0] * 8})
        assert replay(recorded.answers, name, k, costs, greedy=True).stats.to_json() == {
            **summary.stats.to_json(),
            "draft_passes": 0,
        }, summary.lane
    llm.engine.check_integrity()


def test_a_tree_keeps_its_longest_right_path():
    asked = Asked.of(SeqDraft([5, 6, 7, 8, 9], [-1, -1, 1, 2, 0]), [6, 7, 9])
    assert asked.kept == (0, 0, 1, 2, 2, 2)


def test_a_draft_of_a_cascade_costs_what_its_maker_takes():
    llm = llm_of(cascade=CascadeDrafter(drafters=[scripted(lambda position: True)]))
    recorded = record(llm, encoded(llm), SamplingParams(max_tokens=12), ["cascade"], 3, "greedy")
    maker = recorded.answers[0].asked["cascade"][0].source
    assert maker not in ("", "cascade")
    costs = one_context({1: 1.0, 8: 1.0}, {"cascade": [0.0] * 8, maker: [0.5] * 8})
    replayed = replay(recorded.answers, "cascade", 3, costs, greedy=True)
    assert replayed.draft_s == pytest.approx(0.5 * replayed.drafting)


def test_a_drafter_that_raises_is_left_out_and_named():
    def broken(seq, budget):
        raise ValueError("no")

    llm = llm_of(good=scripted(lambda position: True), bad=FixedDrafter(script=broken))
    recorded = record(llm, encoded(llm), SamplingParams(max_tokens=6), ["good", "bad"], 4, "greedy")
    assert recorded.failed == {"bad": "ValueError: no"}
    assert set(recorded.answers[0].asked) == {"good"}
    assert [p.candidate.drafter for p in predict(recorded, ["good", "bad"], [2], FLAT).candidates] == ["good"]


def test_predictions_are_tokens_over_given_costs():
    llm = llm_of(good=scripted(lambda position: True), bad=scripted(lambda position: False))
    recorded = record(llm, encoded(llm), SamplingParams(max_tokens=24), ["good", "bad"], 8, "greedy")
    predicted = predict(recorded, ["good", "bad"], [1, 3, 8], FLAT)
    assert predicted.plain[ALL].tok_s == pytest.approx(1.0)
    good = predicted.of(Candidate("good", 3))
    assert good.replayed.stats.rounds == 3 * 6
    assert good.ratio == pytest.approx(4.0)
    bad = predicted.of(Candidate("bad", 3))
    drafting = sum(FLAT.draft_s("bad", one.steps, greedy=True) for one in rounds(recorded.answers[0], "bad", 3))
    assert bad.ratio == pytest.approx(24 / (24 + drafting))
    assert predicted.candidates[0].candidate == Candidate("good", 8)
    assert set(predicted.by_category) == {"code", "prose"}
    assert next(p.by_position[:2] for p in profiles(recorded, ["good"])) == [1.0, 1.0]


@pytest.mark.parametrize("greedy", [True, False])
def test_a_round_has_every_cost_that_there_is(greedy):
    """Two rounds: a draft of two, of which one is kept, behind 10 tokens; and one of one that is kept, behind 12."""
    answer = Answer("1", "prose", 10, 4, 4, {"good": (Asked((0, 1, 1)),) * 4})
    made = replay([answer], "good", 2, uneven("good"), greedy=greedy)
    passes = [(1 + 0.2 * 2) * 1.10, (1 + 0.2) * 1.12]
    judged = [0.03, 0.02] if greedy else [0.12, 0.08]
    drafted = [0.2, 0.1] if greedy else [0.6, 0.3]
    assert made.pass_s == pytest.approx(sum(passes))
    assert made.other_s == pytest.approx(sum(judged) + 2 * 0.25)
    assert made.draft_s == pytest.approx(sum(drafted) + 10 * 0.05)
    assert (made.stats.rounds, made.stats.emitted, made.kept) == (2, 4, 2)
    for rule, own in (("greedy", greedy), ("coupled", not greedy)):
        predicted = predict(Record(0.0, rule, 2, (answer,), {}), ["good"], [2], uneven("good"))
        assert (predicted.of(Candidate("good", 2)).replayed.draft_s == made.draft_s) is own
        assert (predicted.plain[ALL].other_s == replay([answer], "none", 0, uneven(), greedy=greedy).other_s) is own


def test_who_drafts_reads_what_was_committed_before():
    """A draft model reads the prompt before its first draft, and after an idle spell what came meanwhile."""
    dear = replace(FLAT.drafters["good"], catch_up_s=0.5)
    costs = replace(FLAT, drafters={"good": dear, "bad": FLAT.drafters["bad"]})
    llm = llm_of(good=scripted(lambda position: True))
    recorded = record(llm, encoded(llm)[:1], SamplingParams(max_tokens=24), ["good"], 3, "greedy")
    [answer] = recorded.answers
    alone = replay([answer], "good", 3, costs, greedy=True)
    assert alone.draft_s == pytest.approx(0.5 * answer.prompt_tokens)
    other = [replace(one, source="bad") if at < 12 else one for at, one in enumerate(answer.asked["good"])]
    turns = replay([replace(answer, asked={"good": other})], "good", 3, costs, greedy=True)
    others_s = 3 * FLAT.draft_s("bad", 3, greedy=True)
    assert turns.draft_s == pytest.approx(0.5 * (answer.prompt_tokens + 12) + others_s)


@pytest.fixture
def predicted():
    """Of a drafter that is always right, with 2 and 4 draft tokens."""
    llm = llm_of(good=scripted(lambda position: True))
    recorded = record(llm, encoded(llm), SamplingParams(max_tokens=24), ["good"], 4, "greedy")
    return predict(recorded, ["good"], [2, 4], FLAT)


def measured(lane, ratio, *, differing=0, diverged=0, **more):
    """A check of this lane, its prediction far off."""
    return Check(lane, 3, ratio, 3, ratio, differing, diverged, **({"prompts": 20} | more))


def decided(predicted, found, doubts=(), *, between=None):
    paper = on_paper(predicted.candidates[0], FLAT, 10, greedy=True)
    return decide(predicted, found, lambda one: paper, lambda lane, other: (between or {}).get(other), doubts)


def test_the_verdict_is_the_fastest_that_was_measured(predicted):
    found = [measured("plain", 1.0), measured("good K=4", 1.2), measured("good K=2", 1.5)]
    verdict = decided(predicted, found)
    assert (verdict.chosen, verdict.ratio, verdict.measured) == (Candidate("good", 2), 1.5, True)
    assert verdict.sentence == "Use good with 2 draft tokens a round: 1.50 x plain (measured on 20 prompts)."
    wrong = [*found[:2], measured("good K=2", 9.5, implausible=True)]
    verdict = decided(predicted, wrong, ["the machine was busy"])
    assert (verdict.chosen, verdict.ratio) == (Candidate("good", 4), 1.2)
    assert any("measured at 9.50 x, more than its tokens a round can give" in reason for reason in verdict.reasons)
    assert verdict.sentence.endswith("Provisional: the machine was busy.")
    changed = [*found[:2], measured("good K=2", 1.5, differing=1, diverged=1)]
    verdict = decided(predicted, changed)
    assert verdict.chosen == Candidate("good", 4)
    assert any("changed 1 answer" in reason for reason in verdict.reasons)


def test_what_changed_answers_is_never_recommended(predicted):
    found = [measured("plain", 1.0), measured("good K=4", 1.5, differing=1, diverged=1)]
    verdict = decided(predicted, found)
    assert (verdict.chosen, verdict.measured) == (Candidate("good", 2), False)
    verdict = decided(predicted, [*found, measured("good K=2", 1.4, differing=2, diverged=2)])
    assert (verdict.chosen, verdict.about) == (None, None)
    assert verdict.sentence == "Leave speculation off: every candidate changed answers."
    assert [reason.split(":")[0] for reason in verdict.reasons] == [
        "good K=4 changed 1 answer(s)",
        "good K=2 changed 2 answer(s)",
    ]


def test_a_lane_that_drafted_nothing_wins_nothing(predicted):
    found = [measured("plain", 1.0), measured("good K=4", 1.08, drafted=False), measured("good K=2", 1.05)]
    assert decided(predicted, found).chosen == Candidate("good", 2)
    assert not decided(predicted, found[:2]).measured


def test_where_plain_decoding_fails_nothing_is_said_of_drafters(predicted):
    failed = {"differing": 3, "diverged": 3}
    verdict = decided(predicted, [measured("plain", 1.0, **failed), measured("good K=4", 1.0, **failed)])
    assert (verdict.chosen, verdict.reasons) == (None, ())
    assert verdict.answer == "Leave speculation off: plain decoding itself gave no usable answer to 3 prompts."


def test_a_verdict_is_no_firmer_than_its_figures(predicted):
    found = [measured("plain", 1.0), measured("good K=4", 1.2), measured("good K=2", 1.25, interval=Interval(1.1, 1.4))]
    verdict = decided(predicted, found, between={"good K=4": Interval(0.9, 1.2)})
    figures = "1.25 x plain (measured on 20 prompts, 95 % interval 1.10..1.40)"
    assert verdict.sentence == f"Use good with 2 draft tokens a round: {figures}; good K=4 is equal here."
    assert (verdict.equal, verdict.doubts) == (("good K=4",), ())
    assert verdict.to_json()["interval"] == [1.1, 1.4]
    apart = decided(predicted, found, between={"good K=4": Interval(1.01, 1.2)})
    assert (apart.equal, "equal" in apart.sentence) == ((), False)
    wide = decided(predicted, [*found[:2], measured("good K=2", 1.25, prompts=5, interval=Interval(0.98, 1.6))])
    doubt = "the interval includes 1, so neither a gain nor a loss is shown; more prompts or --repeat 3 may tell"
    assert (wide.chosen, wide.doubts) == (Candidate("good", 2), (doubt,))
    few = decided(predicted, [*found[:2], measured("good K=2", 1.25, prompts=3)])
    assert few.sentence.endswith("Provisional: 3 prompts are too few to decide, give 4 or more.")
    hung = decided(predicted, [*found[:2], measured("good K=2", 1.25, undecided="it hangs on how one counts")])
    assert hung.sentence.endswith("Provisional: it hangs on how one counts.")
    off = decided(predicted, [found[0], measured("good K=2", 0.9, interval=Interval(0.7, 0.99))])
    assert (off.chosen, off.doubts) == (None, ())
    off = decided(predicted, [found[0], measured("good K=2", 0.9, interval=Interval(0.7, 1.2))])
    assert (off.chosen, off.doubts) == (None, (doubt,))


def test_reasons_are_measured_where_something_was():
    llm = llm_of(good=scripted(lambda position: True), bad=scripted(lambda position: False))
    recorded = record(llm, encoded(llm), SamplingParams(max_tokens=24), ["good", "bad"], 4, "greedy")
    predicted = predict(recorded, ["good", "bad"], [2, 4], FLAT)
    round_ = {"tokens_per_round": 3.0, "target_share": 0.7, "draft_share": 0.1}
    found = [measured("plain", 1.0), measured("good K=4", 1.5, **round_), measured("bad K=4", 0.8)]
    reasons = decided(predicted, found).reasons
    assert reasons == (
        "good K=4 gives 3.00 tokens a round, and its round costs 2.00 plain rounds (measured: 70% target pass, 10% "
        "drafting, 20% sampling and Python)",
        "bad K=4, the best of bad, was measured at 0.80 x",
    )
    reasons = decided(predicted, []).reasons
    assert "plain rounds (predicted: " in reasons[0]
    assert reasons[1].startswith("bad K=2, the best of bad, is predicted at 0.")


def wanted(measure=0):
    return Wanted(["good", "bad"], [1, 2, 4], [0.0], ["greedy"], measure, repeat=1, warm_up=0, time_budget=None)


def test_a_useless_drafter_is_left_off_with_the_figures_that_would_pay():
    llm = llm_of(good=scripted(lambda position: False), bad=scripted(lambda position: False))
    costs = one_context({1: 1.0, 2: 1.5, 5: 3.0}, {"good": [0.2 * k for k in range(1, 5)], "bad": [1.0, 2.0, 3.0, 4.0]})
    tuned = tune(llm, PROMPTS, SamplingParams(max_tokens=12), wanted(), costs, raw=True, bar=no_bar)
    verdict = tuned.verdict
    assert verdict.chosen is None
    assert verdict.sentence.startswith("Leave speculation off: the best candidate, good K=1, is 0.6")
    missing = (
        "each draft token were kept with probability 0.70 or more (here 0.00); a draft that costs nothing would not"
    )
    assert any(missing in reason for reason in verdict.reasons)
    assert any("not one draft token would have been kept" in note for note in tuned.notes())


def test_what_neither_sureness_nor_cheapness_would_repay_is_said_with_both():
    llm = llm_of(bad=scripted(lambda position: False))
    recorded = record(llm, encoded(llm), SamplingParams(max_tokens=24), ["bad"], 2, "greedy")
    paper = OnPaper(0.1, 2, Cost(c=12.4), 1.1, None, None)
    verdict = decide(predict(recorded, ["bad"], [2], FLAT), [], lambda one: paper, lambda lane, other: None)
    assert verdict.reasons[-1] == (
        "a draft token costs 12.40 passes over one row and checking 3 rows 1.00: neither drafts that are always right "
        "nor drafts that cost nothing, of which 10% are kept, would do"
    )


def test_the_best_are_measured_beside_plain_and_compared_with_their_prediction():
    llm = llm_of(good=scripted(lambda position: True), bad=scripted(lambda position: False))
    tuned = tune(llm, PROMPTS, SamplingParams(max_tokens=12), wanted(measure=2), FLAT, raw=True, bar=no_bar)
    assert [check.lane for check in tuned.checks] == ["plain", "good K=4", "good K=2"]
    for check in tuned.checks:
        assert check.differing == 0
        assert check.error == pytest.approx(check.predicted_tok_s / check.measured_tok_s - 1)
    assert tuned.checks[1].predicted_ratio == pytest.approx(12 / 3)
    assert tuned.verdict.measured
    assert tuned.checks[1].tokens_per_round == 4
    assert [check.prompts for check in tuned.checks] == [0, 3, 3]
    assert "3 prompts are too few to decide, give 4 or more" in tuned.verdict.doubts
    assert tuned.verdict.interval is None


def test_predictions_are_at_the_pace_of_now():
    llm = llm_of(good=scripted(lambda position: True), bad=scripted(lambda position: False))
    tuned = tune(llm, PROMPTS, SamplingParams(max_tokens=12), wanted(measure=1), FLAT, raw=True, bar=no_bar)
    assert tuned.costs == FLAT.times(tuned.pace)
    assert tuned.first.plain[ALL].tok_s == pytest.approx(1 / tuned.pace)
    assert tuned.first.candidates[0].ratio == pytest.approx(4.0)


@pytest.mark.parametrize(("pace", "noted"), [(0.7, True), (0.8, False), (1.25, False), (1.4, True)])
def test_a_machine_that_is_another_than_when_costs_were_kept_gets_a_note(monkeypatch, pace, noted):
    monkeypatch.setattr("outrider.tune.run.pace", lambda llm, costs, context: Pace(pace, 0.0))
    llm = llm_of(good=scripted(lambda position: True), bad=scripted(lambda position: False))
    tuned = tune(llm, PROMPTS, SamplingParams(max_tokens=12), wanted(), FLAT, raw=True, bar=no_bar)
    assert any(note.startswith(f"a plain round takes {pace:.2f} x") for note in tuned.notes()) is noted


def test_lanes_that_gave_the_same_cannot_be_told_apart():
    llm = llm_of(good=scripted(lambda position: True), bad=scripted(lambda position: True))
    many = [Conversation(str(number), "prose", ("ab" * number,)) for number in range(1, 6)]
    lanes = [Lane("good", 4, "greedy"), Lane("bad", 4, "greedy"), Lane("good", 1, "greedy")]
    found = bench(llm, many, SamplingParams(max_tokens=12), lanes, raw=True, warm_up=0)
    speed = {"plain": 1.0, "good K=4": 1.2, "bad K=4": 1.2, "good K=1": 1.1}
    runs = [replace(run, decode_s=run.tokens / speed[run.lane]) for run in found.runs]
    found = replace(found, runs=runs)
    assert between(found, "good K=4", "bad K=4") == Interval(1.0, 1.0)
    assert between(found, "good K=4", "good K=1") == Interval(pytest.approx(12 / 11), pytest.approx(12 / 11))
    assert between(replace(found, runs=[run for run in runs if run.prompt < "4"]), "good K=4", "bad K=4") is None


def test_a_budget_holds_no_more_candidates_than_there_are(monkeypatch):
    """A wish for all of them is no wish for a hundred, which this budget would not hold."""
    monkeypatch.setattr("outrider.tune.run.pace", lambda llm, costs, context: Pace(1.0, 0.1))
    llm = llm_of(good=scripted(lambda position: True), bad=scripted(lambda position: False))
    asked = replace(wanted(measure=99), time_budget=600.0)
    tuned = tune(llm, PROMPTS, SamplingParams(max_tokens=12), asked, FLAT, raw=True, bar=no_bar)
    assert (asked.candidates, tuned.share.measured) == (6, 6)
    assert len(tuned.checks) == 1 + 6
    monkeypatch.setattr("outrider.tune.run.pace", lambda llm, costs, context: Pace(10.0, 1.0))
    slow = tune(llm, PROMPTS, SamplingParams(max_tokens=12), asked, FLAT, raw=True, bar=no_bar)
    assert (slow.share.measured, len(slow.checks)) == (1, 2), "ten times as slow, it holds one"


def test_the_work_includes_the_reading_of_prompts():
    slow = replace(FLAT.drafters["bad"], catch_up_s=0.5)
    costs = replace(FLAT, drafters={"good": FLAT.drafters["good"], "bad": slow})
    load = load_of(costs, ["good", "bad"], 8, 10, temperatures=[0.0, 1.0], repeat=3, prompt_tokens=16, read_s=1.0)
    reading, drafting = 1.0 + 8.0, 10 * 0.8
    assert load.record_s == pytest.approx(2 * (reading + 10 + drafting))
    assert load.lane_s == pytest.approx(3 * (reading + 10))
    one = {"repeat": 1, "prompt_tokens": 16, "read_s": 1.0}
    cold, warm = (load_of(uneven("good"), ["good"], 8, 10, temperatures=[t], **one) for t in (0.0, 1.0))
    assert warm.record_s - cold.record_s == pytest.approx(10 * (0.03 + 1.6))
    assert warm.lane_s - cold.lane_s == pytest.approx(10 * 0.03)
    both = load_of(uneven("good"), ["good"], 8, 10, temperatures=[0.0, 1.0], beside=2, **one)
    assert both.record_s == pytest.approx(cold.record_s + warm.record_s)
    assert both.seconds(4, 3) == pytest.approx(4 * (both.record_s + (3 + 2) * cold.lane_s))
    assert both.seconds(4, 0) == pytest.approx(4 * both.record_s)


def test_a_budget_takes_prompts_from_every_category():
    many = [Conversation(str(i), "code" if i < 15 else "prose", ("x",)) for i in range(20)]
    assert [prompt.id for prompt in spread(many, 4)] == ["0", "1", "15", "16"]
    load = Load(record_s=2.0, lane_s=1.0)
    assert fit(many, 3, load, None).seconds == 20 * 6
    share = fit(many, 3, load, 60.0)
    assert (len(share.prompts), share.measured) == (10, 3)
    assert share.notes == ("the time budget of 60 s holds 10 of 20 prompts",)
    share = fit(many, 12, load, 60.0)
    assert (len(share.prompts), share.measured) == (8, 4), "as many candidates as leave eight prompts"
    share = fit(many, 3, load, 20.0)
    assert (len(share.prompts), share.measured, len(share.notes)) == (5, 1, 2)


def test_a_configuration_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "c.toml"
    values = {"model": 'a "b" \\ ü\n', "drafter": "ngram", "draft_model": None, "k": 4, "threads": 2}
    write_configuration(path, values, "Use\nit.", ['because "so"'], {"ratio": 1.5})
    assert read_configuration(path) == {key: value for key, value in values.items() if value is not None}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("k = ", "is no TOML file"),
        ('k = "4"', "'k' is '4', expected a whole number"),
        ("k = true", "expected a whole number"),
        ("rule = 4", "'rule' is '4', expected text"),
        ("speed = 4", "is no option here: allowed are model"),
        ('schema = "outrider.config/9"', "has schema"),
    ],
)
def test_what_is_no_configuration_is_refused(tmp_path, text, message):
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_configuration(tmp_path / "c.toml")
