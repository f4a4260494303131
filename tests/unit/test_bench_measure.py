"""`bench`: the figures add up, differing answers are left out and counted, and idle speculation is said to be idle."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from outrider import LLM, SamplingParams
from outrider.bench.lanes import Lane
from outrider.bench.machine import busy_warning, git_commit, machine_facts
from outrider.bench.measure import bench
from outrider.bench.summary import ALL, Speedup, Spread, lengths, summarise
from outrider.bench.tables import bench_json, print_bench, summary_notes
from outrider.bench.timing import timed
from outrider.core.stats import SpecStats
from outrider.core.verdict import Origin, Verdict
from outrider.drafters.fixed import FixedDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.engine.prompt_file import Conversation
from outrider.engine.report import conditional_acceptance
from outrider.errors import ConfigError
from outrider.verify.greedy import GreedyVerifier
from tests.tiny import byte_tokenizer, cycle_model

GREEDY = SamplingParams(max_tokens=24)
PROMPTS = [
    Conversation("1", "code", ("hello hello hello",)),
    Conversation("2", "prose", ("the cat, the cat",)),
    Conversation("3", "prose", ("x",)),
]


def llm_of(**drafters) -> LLM:
    return LLM.from_parts(cycle_model("abcabd "), drafters, tokenizer=byte_tokenizer(), k=4)


def measured_by(llm: LLM, *methods: str, params: SamplingParams = GREEDY, rule: str = "greedy", **options):
    lanes = [Lane(method, 4, rule) for method in methods]
    return bench(llm, PROMPTS, params, lanes, raw=True, **options)


def by_lane(measured, category: str = ALL):
    return {summary.lane: summary for summary in summarise(measured) if summary.category == category}


def printed(measured) -> str:
    console = Console(width=220, record=True, file=io.StringIO())
    print_bench(measured, summarise(measured), [], console)
    return console.export_text()


def test_the_figures_of_a_right_drafter_add_up():
    llm = llm_of(ngram=NgramDrafter())
    runs = []
    measured = measured_by(llm, "ngram", repeat=2, on_run=lambda: runs.append(1))
    assert len(runs) == len(measured.runs) == 3 * 2 * 2
    plain, ngram = by_lane(measured)["plain"], by_lane(measured)["ngram K=4"]
    for summary in (plain, ngram):
        assert summary.prompts == 3
        assert summary.tokens == 3 * 24
        assert summary.differing == 0
        assert summary.tok_s.q1 <= summary.tok_s.median <= summary.tok_s.q3
        assert summary.tok_s_with_prefill_total <= summary.tok_s_total
        assert 0 < summary.target_share < 1
        assert summary.ttft_s.median > 0
    assert plain.stats.rounds == plain.tokens
    assert plain.stats.drafted == plain.stats.draft_passes == 0
    assert plain.speedup is None
    assert ngram.speedup.rows == 3
    assert ngram.stats.rounds < plain.stats.rounds
    assert ngram.stats.emitted == ngram.tokens
    expected = ngram.tok_s_total / plain.tok_s_total
    assert ngram.speedup.of_totals == pytest.approx(expected)
    assert llm.engine.target.name == "table", "the timing proxies are gone"
    llm.engine.check_integrity()


def test_the_engine_has_its_own_parts_back_after_an_exception():
    llm = llm_of(ngram=NgramDrafter())
    target, drafters = llm.engine.target, llm.engine.router.drafters

    def fails():
        with timed(llm):
            assert llm.engine.target is not target
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert llm.engine.target is target
    assert llm.engine.router.drafters is drafters


def test_categories_are_reported_apart():
    measured = measured_by(llm_of(ngram=NgramDrafter()), "ngram")
    assert by_lane(measured, "prose")["plain"].prompts == 2
    assert by_lane(measured, "code")["ngram K=4"].tokens == 24


def test_the_order_of_lanes_rotates():
    measured = measured_by(llm_of(ngram=NgramDrafter(), fixed=FixedDrafter()), "ngram", "fixed")
    first = {measured.runs[i].lane for i in (0, 3, 6)}
    assert first == {"plain", "ngram K=4", "fixed K=4"}


def test_idle_speculation_is_named():
    measured = measured_by(llm_of(fixed=FixedDrafter(script=())), "fixed")
    assert "fixed K=4: speculation never happened" in measured.notes[0]
    assert "speculation never happened" in printed(measured)


def test_a_failing_drafter_is_named():
    def fails(seq, budget):
        raise RuntimeError("broken")

    measured = measured_by(llm_of(fixed=FixedDrafter(script=fails)), "fixed")
    assert any("the drafter failed in 3 of 3 answers" in note for note in measured.notes)


class KeepsTheFirst(GreedyVerifier):
    """A broken rule: the first draft token is kept, right or wrong."""

    def verify(self, draft, p, rng, seed, position):
        path = [0] if draft.size else []
        return Verdict(path, p[len(path)].only, Origin.BONUS)


def test_answers_that_differ_are_counted_and_left_out_of_the_speedup(monkeypatch):
    def wrong_for_x(seq, budget):
        return [ord("!")] if bytes(seq.tokens[: seq.prompt_len]) == b"x" else []

    monkeypatch.setattr("outrider.verify.greedy.GreedyVerifier", KeepsTheFirst)
    measured = measured_by(llm_of(fixed=FixedDrafter(script=wrong_for_x)), "fixed")
    fixed = by_lane(measured)["fixed K=4"]
    assert (fixed.differing, fixed.diverged, fixed.ties) == (1, 1, 0)
    assert fixed.speedup.rows == 2
    text = printed(measured)
    assert "1 of 3 answers differ from plain" in text
    assert "2/3 equal" in text


def test_sampled_answers_are_compared_by_tokens_a_second_and_that_is_said():
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=24)
    measured = measured_by(llm_of(ngram=NgramDrafter()), "ngram", params=params, rule="block")
    ngram = by_lane(measured)["ngram K=4"]
    assert ngram.differing is None
    assert ngram.speedup.rows == 3
    assert any("--rule coupled makes answers comparable" in note for note in measured.notes)


def test_coupled_answers_stay_comparable_at_temperature_one():
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=24)
    measured = measured_by(llm_of(ngram=NgramDrafter()), "ngram", params=params, rule="coupled")
    assert by_lane(measured)["ngram K=4"].differing == 0


def test_lossy_rules_are_labelled():
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=8)
    measured = measured_by(llm_of(ngram=NgramDrafter()), "ngram", params=params, rule="typical")
    assert any("'typical' is lossy" in note for note in measured.notes)
    assert bench_json(measured, summarise(measured), {}, [])["lanes"][1]["lossless"] is False


def test_the_document_is_json_and_holds_every_lane_and_category():
    measured = measured_by(llm_of(ngram=NgramDrafter()), "ngram")
    facts = {"machine": machine_facts(), "measurement": lengths(measured)}
    document = json.loads(json.dumps(bench_json(measured, summarise(measured), facts, ["w"]), allow_nan=False))
    assert document["schema"] == "outrider.bench/1"
    assert [lane["lane"] for lane in document["lanes"]] == ["plain", "ngram K=4"]
    assert set(document["lanes"][1]["categories"]) == {"code", "prose"}
    everything = document["lanes"][1]["all"]
    assert everything["answers"] == {"differing": 0, "ties": 0, "diverged": 0}
    assert sum(everything["acceptance_by_position"]) * everything["target_passes"] == pytest.approx(
        everything["accepted"]
    )
    assert document["machine"]["versions"]["torch"]
    assert document["measurement"]["longest_context"] == 17 + 24
    assert document["notes"][0] == "w"


def test_a_speedup_beyond_what_acceptance_can_give_is_called_implausible():
    measured = measured_by(llm_of(ngram=NgramDrafter()), "ngram")
    [summary] = [s for s in summarise(measured) if s.lane == "ngram K=4" and s.category == ALL]
    possible = replace(
        summary, speedup=Speedup(Spread(1.0, 1.0, 1.0), 1.0, summary.stats.acceptance_length, 3), beyond=()
    )
    impossible = replace(possible, speedup=Speedup(Spread(1.0, 1.0, 1.0), 1.0, 2 * summary.stats.acceptance_length, 3))
    assert summary_notes([possible]) == []
    assert "do not quote it" in summary_notes([impossible])[0]


def test_bad_counts_are_refused():
    with pytest.raises(ConfigError, match="--repeat 0 is not allowed"):
        measured_by(llm_of(ngram=NgramDrafter()), "ngram", repeat=0)
    with pytest.raises(ConfigError, match="a raw prompt is one text"):
        bench(
            llm_of(ngram=NgramDrafter()),
            [Conversation("1", "a", ("x", "y"))],
            GREEDY,
            [Lane("ngram", 1, "greedy")],
            raw=True,
        )


class Template:
    """Stands in for a chat template: every message is its role's initial and its text."""

    def render(self, messages, **options):
        return "".join(f"{m['role'][0]}:{m['content']};" for m in messages)


def test_later_turns_continue_from_the_plain_answer():
    llm = LLM.from_parts(
        cycle_model("ab"), {"ngram": NgramDrafter()}, tokenizer=byte_tokenizer(), template=Template(), k=2
    )
    params = SamplingParams(max_tokens=3)
    measured = bench(llm, [Conversation("q", "a", ("one", "two"))], params, [Lane("ngram", 2, "greedy")])
    assert [run.prompt for run in measured.runs] == ["q", "q", "q/2", "q/2"]
    answer = measured.runs[0].text
    assert measured.runs[-1].prompt_tokens == len(f"u:one;a:{answer};u:two;")


def test_spread_and_conditional_acceptance():
    assert Spread.of([None, 3.0]) == Spread(3.0, 3.0, 3.0)
    assert Spread.of([None]) is None
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(3.0, 2.0, 4.0)
    stats = SpecStats()
    for accepted in (2, 1, 0, 0):
        stats.record([0, 1], accepted, 1, 0)
    assert stats.acceptance_by_position() == [0.5, 0.25]
    assert conditional_acceptance(stats) == [0.5, 0.5]


def test_a_busy_machine_is_named_and_an_idle_one_is_not():
    assert "load average 3.0 on 4 cores" in busy_warning({"load_1min": 3.0, "cores": 4})
    assert busy_warning({"load_1min": 0.2, "cores": 4}) is None
    assert busy_warning({"load_1min": None, "cores": 4}) is None


def test_no_commit_outside_a_checkout(tmp_path):
    assert git_commit(tmp_path) is None
