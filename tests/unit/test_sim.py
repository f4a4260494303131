"""The simulator: the engine's loop on virtual clocks. Counts and virtual times are asserted; nothing is timed."""

from __future__ import annotations

import json
from unittest.mock import Mock

import pytest

from outrider.control.fixed import FixedController
from outrider.core.registry import VERIFIERS, verifier_class
from outrider.core.types import SamplingParams
from outrider.drafters.fixed import FixedDrafter
from outrider.engine.engine import Engine
from outrider.engine.request import Request
from outrider.errors import ConfigError
from outrider.sim.machines import MACHINES, find_machine
from outrider.sim.recorded import recorded
from outrider.sim.report import SYNTHETIC, answer, ask, best_lines, document, statements
from outrider.sim.simulate import simulate
from outrider.sim.theory import Cost, Shape, measured_v, speedup
from outrider.sim.workload import Tables, by_position, by_rank, iid, known_text

Z_999 = 3.29
MEASURED = measured_v({1: 1.0, 2: 1.1, 4: 1.3, 9: 2.2})


def test_case_c13_is_slower_than_plain_in_theory_simulator_and_engine():
    """Alpha 0.3, K 8, c 0.3."""
    k, alpha, c, tokens = 8, 0.3, 0.3, 600
    cost = Cost(c=c)
    theory = speedup(Shape.chain([alpha] * k), cost)

    drafted = simulate(iid(alpha), k, [cost], tokens=tokens)
    plain = simulate(iid(alpha), 0, [cost], tokens=tokens)
    simulated = plain.times[0] / drafted.times[0]

    # The engine alone, without clocks: of ten drafts seven are wrong from the start, two keep one token, one keeps two.
    # That is 0.4 tokens more a round, and 0.43 would be alpha / (1 - alpha).
    def script(seq, budget):
        kept = (0, 0, 1, 0, 0, 2, 0, 0, 1, 0)[seq.stats.rounds % 10]
        start = len(seq.tokens)
        return [(start + i + (0 if i < kept else 1)) % 5 for i in range(budget)]

    engine = Engine(
        known_text(5, tokens + 2), {"fixed": FixedDrafter(script=script)}, FixedController(k), method="fixed"
    )
    request = engine.add(Request([0], SamplingParams(max_tokens=tokens)))
    results = {}
    while not engine.idle:
        results.update(engine.step()[1])
    stats = results[request].stats
    assert stats.emitted == tokens
    assert engine.target_passes == stats.rounds == pytest.approx(tokens / 1.4, abs=2)
    counted = tokens / (engine.target_passes + c * stats.drafted)

    assert theory == pytest.approx(0.420, abs=0.001)
    assert simulated == pytest.approx(theory, rel=0.1)
    assert counted == pytest.approx(1.4 / 3.4, rel=0.02)
    assert max(theory, simulated, counted) < 1


WORKLOADS = {
    "one alpha": iid(0.7),
    "by position": by_position([0.9, 0.6, 0.4, 0.8]),
    "tree": by_rank([0.5, 0.2, 0.1]),
    "hopeless": iid(0.0),
    "certain": iid(1.0),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_simulator_agrees_with_theory_within_its_interval(name):
    workload, k, tokens = WORKLOADS[name], 4, 800
    costs = [Cost(c=0.1), Cost(c=0.05, v=MEASURED, once=0.2, overhead=0.3)]
    found = simulate(workload, k, costs, tokens=tokens, seed=3)
    plain = simulate(workload, 0, costs, tokens=tokens, seed=3)
    assert found.stats.emitted == plain.stats.emitted == plain.stats.rounds == tokens
    assert plain.times == pytest.approx([tokens, tokens * 1.3])
    shape = workload.shape(k)
    # the answer's end cuts the last round's draft and tokens short
    assert abs(found.stats.acceptance_length - shape.tokens) <= found.drawn.half_width(Z_999) + 0.05
    for time, base, cost in zip(found.times, plain.times, costs, strict=True):
        per_round = found.stats.rounds * cost.round(shape)
        assert per_round - cost.round(shape) <= time <= per_round + 1e-9
        assert base / time == pytest.approx(
            speedup(shape, cost) * found.stats.acceptance_length / shape.tokens, rel=0.02
        )


def test_virtual_time_is_what_was_drafted_and_checked():
    """Costs of drafts, rows and overhead that can be told apart in the sum."""
    cost = Cost(c=0.37, v=lambda rows: 1.0 + 0.13 * (rows - 1), once=7.1, overhead=101.0)
    found = simulate(iid(0.5), 3, [cost], tokens=200)
    stats = found.stats
    checked = 1.0 * stats.rounds + 0.13 * stats.drafted + 101.0 * stats.rounds
    assert found.times[0] == pytest.approx(checked + 0.37 * stats.draft_passes + 7.1 * stats.drafted_at[0], rel=1e-12)
    assert stats.draft_passes == stats.drafted > 2 * stats.rounds


def test_a_seed_fixes_the_run_and_another_gives_another():
    runs = [simulate(iid(0.6), 4, [Cost(c=0.1)], tokens=300, seed=seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_trees_cost_their_levels_and_all_their_nodes():
    found = simulate(by_rank([0.4, 0.4]), 6, [Cost(c=1.0, v=lambda rows: 1000.0 * rows)], tokens=100)
    shape = by_rank([0.4, 0.4]).shape(6)
    assert shape.depth < shape.size == 6
    whole_rounds = found.stats.rounds - 3
    assert found.stats.drafted >= 6 * whole_rounds
    assert found.stats.draft_passes <= shape.depth * found.stats.rounds


def test_tables_are_judged_by_a_real_rule():
    """Equal tables keep everything; noise costs tokens, and `block` keeps at least what `chain` does."""
    same = simulate(Tables(0.0, "chain"), 3, [Cost()], tokens=100)
    assert Tables(0.0, "chain").alpha == pytest.approx(1)
    assert same.stats.accepted == same.stats.drafted
    noisy = Tables(0.5, "chain")
    assert 0.3 < noisy.alpha < 0.95
    found = simulate(noisy, 3, [Cost(c=0.1)], tokens=600)
    assert found.stats.acceptance_by_position()[0] == pytest.approx(noisy.alpha, abs=0.08)
    assert found.stats.draft_passes >= found.stats.drafted


@pytest.mark.parametrize("rule", ["chain", "match", "coupled"])
def test_theory_of_tables_is_the_rules_own(rule):
    [found] = answer(ask([Tables(1.0, rule)], [MACHINES["ideal"]], [3], 0.0, 3000, given=True), 3000, 0)
    assert found.tokens_per_round == pytest.approx(found.theory_tokens, abs=1.5 * found.half_width)


@pytest.mark.parametrize("rule", [name for name in VERIFIERS if name != "greedy"])
def test_tables_are_judged_by_every_rule(rule):
    found = simulate(Tables(0.4, rule), 2, [Cost()], tokens=40)
    assert (found.stats.emitted, found.stats.dropped) == (40, {})
    assert 0 < found.stats.accepted <= found.stats.drafted
    assert found.stats.accepted < found.stats.drafted or not verifier_class(rule).lossless


def bench_document(**changed):
    """What `outrider bench` prints, as far as it is read: half the rounds of `suffix` have a draft of 4."""
    lane = {
        "lane": "suffix K=4",
        "drafter": "suffix",
        "k": 4,
        "all": {
            "acceptance_by_position": [0.4, 0.3, 0.2, 0.1],
            "drafted": 200,
            "target_passes": 100,
            "draft_passes": 0,
            "time": {"round_ms": 12.0, "target_share": 0.9, "draft_share": 0.1},
        },
        "categories": {"code": {"acceptance_by_position": [0.5], "drafted": 10, "target_passes": 10}},
    }
    shorter = {"lane": "suffix K=1", "drafter": "suffix", "k": 1, "all": {"acceptance_by_position": [0.4]}}
    heads = {
        "lane": "eagle3 K=2",
        "drafter": "eagle3",
        "k": 2,
        "all": {
            "acceptance_by_position": [0.8, 0.4],
            "drafted": 200,
            "target_passes": 100,
            "draft_passes": 200,
            "time": {"round_ms": 12.0, "target_share": 0.7, "draft_share": 0.25},
        },
    }
    plain = {"lane": "plain", "drafter": "none", "k": 0, "all": {"time": {"round_ms": 10.0, "target_share": 0.8}}}
    peer = {"lane": "peer", "drafter": None, "all": {"drafted": 3}}
    return {"schema": "outrider.bench/1", "lanes": [plain, shorter, lane, heads, peer], **changed}


@pytest.fixture
def bench_file(tmp_path):
    def write(before="", **changed):
        path = tmp_path / "bench.json"
        path.write_text(before + json.dumps(bench_document(**changed)))
        return path

    return write


def test_a_recorded_lane_is_replayed_with_its_tokens_and_its_cost(bench_file):
    suffix, eagle3 = recorded(bench_file("a table\n"))
    assert (suffix.label, suffix.synthetic, suffix.most_k) == ("suffix (recorded)", False, 4)
    assert suffix.drafting == pytest.approx(0.5)
    assert suffix.chances == pytest.approx((0.8, 0.75, 2 / 3, 0.5))
    assert 1 + suffix.drafting * (suffix.shape(4).tokens - 1) == pytest.approx(2.0)
    # 1.2 ms of drafting a round is 2.4 a draft, and a plain pass takes 8
    assert (suffix.c, suffix.once) == (0.0, pytest.approx(0.3))
    # 3 ms a draft of two passes
    assert (eagle3.c, eagle3.once) == (pytest.approx(3 / 8 / 2), 0.0)
    found = simulate(suffix, 4, [Cost(once=0.3)], tokens=1500)
    assert found.stats.acceptance_length == pytest.approx(2.0, abs=0.15)
    assert found.stats.drafted / found.stats.rounds == pytest.approx(2.0, abs=0.2)


def test_a_category_and_a_drafter_are_chosen(bench_file):
    [code] = recorded(bench_file(), ["suffix"], "code")
    assert (code.chances, code.c, "code prompts" in code.source) == ((0.5,), None, True)  # it tells no times


PLAIN_LANE = {"lane": "plain", "drafter": "none", "k": 0, "all": {"time": {"round_ms": 10.0, "target_share": 0.8}}}
NOTHING_DRAFTED = {
    "lane": "x",
    "drafter": "x",
    "k": 1,
    "all": {
        "acceptance_by_position": [0.0],
        "drafted": 0,
        "target_passes": 100,
        "time": {"round_ms": 12.0, "draft_share": 0.1},
    },
}


@pytest.mark.parametrize(
    ("changed", "args", "parts"),
    [
        ({"schema": "outrider.profile/1"}, (), ["schema 'outrider.profile/1'", "outrider bench"]),
        ({"lanes": 3}, (), ["'lanes' is no list"]),
        ({"lanes": []}, (), ["no acceptance of drafter any", "none"]),
        ({}, (["ngram"],), ["drafter ngram", "suffix, eagle3"]),
        ({}, (["suffix"], "prose"), ["category 'prose'", "all, code"]),
        (
            {"lanes": [{"lane": "x", "drafter": "x", "k": 1, "all": {"acceptance_by_position": [0.2, 0.4]}}]},
            (),
            ["rises"],
        ),
        ({"lanes": [PLAIN_LANE, NOTHING_DRAFTED]}, (), ["'x' drafted nothing"]),
    ],
)
def test_documents_that_tell_no_acceptance_are_refused(bench_file, changed, args, parts):
    with pytest.raises(ConfigError) as caught:
        recorded(bench_file(**changed), *args)
    for part in parts:
        assert part in str(caught.value)


PROFILE = {
    "schema": "outrider.profile/1",
    "machine": {"cpu": "some CPU"},
    "model": {"target": "some model"},
    "settings": {"context": 512},
    "target_seconds": {"1": 0.1, "2": 0.11, "5": 0.2},
    "overhead_seconds": 0.005,
}


def test_a_profile_is_a_machine(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE))
    machine = find_machine(str(path))
    assert (machine.kind, machine.rows, machine.pass_s) == ("measured", 5, 0.1)
    assert machine.overhead == pytest.approx(0.05)
    assert [machine.v(rows) for rows in (1, 2, 5)] == pytest.approx([1, 1.1, 2])
    assert "some model behind 512 tokens on some CPU" in machine.source


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"schema": "x"}, "schema 'x'"),
        ({"target_seconds": {"1": 0.1}}, r"--machine .*profile.json: passes over \[1\] rows.*with outrider profile"),
        ({"target_seconds": {"1": 0.1, "a": 1}}, "no whole number"),
        ({"target_seconds": {"1": 0.1, "02": 1}}, "no whole number"),
        ({"target_seconds": {"1": 1e-300, "2": 1.0}}, "up to 1000000 times"),
        ({"target_seconds": {"1": 1e-300, "2": 1e-300}}, "expected 1e-07 or more"),
        ({"target_seconds": {"1": 0.1, "2": -1.0}}, "2 rows costs -1.0"),
        ({"overhead_seconds": -1}, "'overhead_seconds' is -1"),
        ({"model": {}}, "'target' is missing"),
    ],
)
def test_a_profile_without_its_figures_is_refused(tmp_path, changed, part):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**PROFILE, **changed}))
    with pytest.raises(ConfigError, match=part):
        find_machine(str(path))


def test_unknown_machines_are_refused_with_the_closest_name():
    with pytest.raises(ConfigError, match=r"did you mean 'tpu-v4-t5-small'.*one of ideal, tpu"):
        find_machine("tpu-v4-t5-smal")


def test_every_built_in_machine_names_its_source_and_none_claims_to_be_measured():
    assert {machine.kind for machine in MACHINES.values()} == {"assumed", "published", "data sheet"}
    for name, machine in MACHINES.items():
        assert machine.name == name
        assert machine.v(1) == 1 <= machine.v(2) <= machine.v(64)
        assert machine.kind == "assumed" or "arXiv" in machine.source or "NVIDIA" in machine.source


def test_rooflines_cross_where_reading_and_computing_take_as_long():
    """bfloat16 on an RTX 4090: 165.2e12 / 2 products a second over 504e9 weights a second: 163.9 rows."""
    assert MACHINES["rtx-4090-bf16"].v(163) == 1
    assert MACHINES["rtx-4090-bf16"].v(328) == pytest.approx(328 / 163.9, rel=1e-3)
    assert MACHINES["rtx-4090-4bit"].v(64) == pytest.approx(64 / 46.1, rel=1e-2)


def test_the_published_round_of_chinchilla():
    machine = MACHINES["tpu-v4-chinchilla"]
    assert 14.1 * Cost(machine.c, machine.v).round(Shape.chain([0.5] * 7)) == pytest.approx(28.6)


def test_what_is_synthetic_is_said_in_the_document_and_in_the_sentences(bench_file):
    replayed = recorded(bench_file(), ["suffix"])
    told, given = iid(0.5), by_rank([0.5, 0.2])
    for workloads, synthetic in (
        (replayed, False),
        ([told], True),
        ([*replayed, given], True),
        ([Tables(0.4, "block")], True),
    ):
        questions = ask(workloads, [MACHINES["ideal"]], [2], 0.1, 50, given=True)
        step = Mock()
        answers = answer(questions, 50, 0, step)
        assert step.call_count == len(questions)
        made = document(questions, answers, tokens=50, seed=0, dry_run=False)
        assert made["synthetic_acceptance"] is synthetic
        assert [a["synthetic"] for a in made["acceptances"]] == [w.synthetic for w in workloads]
        assert [r["synthetic_acceptance"] for r in made["results"]] == [w.synthetic for w in workloads]
        assert made["statements"] == list(statements(questions))
        assert sum(line.startswith(SYNTHETIC) for line in made["statements"]) == sum(w.synthetic for w in workloads)
        assert any("nothing was timed" in line for line in made["statements"])
        json.dumps(made, allow_nan=False)


def test_a_machine_that_is_continued_beyond_its_rows_is_told():
    [question] = ask([iid(0.5)], [MACHINES["tpu-v4-chinchilla"]], [12], None, 50, given=True)
    assert question.costs[0].c == pytest.approx(1.8 / 14.1)
    assert any("up to 8 rows" in line and "to 13" in line for line in statements([question]))


def test_the_cost_of_drafting_is_asked_for_where_nobody_tells_it(bench_file):
    with pytest.raises(ConfigError, match="--draft-cost"):
        ask([iid(0.5)], [MACHINES["ideal"]], [2], None, 50, given=True)
    [question] = ask(recorded(bench_file(), ["suffix"]), [MACHINES["ideal"]], [2], None, 50, given=True)
    assert (question.costs[0].c, question.costs[0].once) == (0.0, pytest.approx(0.3))


def test_a_cost_that_is_none_is_refused_with_whose_it_is(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**PROFILE, "overhead_seconds": 1e9}))
    with pytest.raises(ConfigError, match=r"acceptance 'alpha 0.5' on machine '.*profile.json': cost overhead"):
        ask([iid(0.5)], [find_machine(str(path))], [2], 0.1, 50, given=True)


def test_acceptances_that_differ_in_a_late_digit_stay_apart():
    workloads = [iid(0.12345678), iid(0.12345679)]
    questions = ask(workloads, [MACHINES["ideal"]], [2], 0.1, 50, given=True)
    made = document(questions, answer(questions, 50, 0), tokens=50, seed=0, dry_run=False)
    labels = ["alpha 0.12345678", "alpha 0.12345679"]
    assert [one["label"] for one in made["acceptances"]] == [one["acceptance"] for one in made["results"]] == labels
    assert len(made["conclusions"]) == 2


def test_lengths_beyond_a_known_acceptance_are_refused_when_asked_for_and_else_left_out():
    workload, ideal = by_position([0.8, 0.5]), [MACHINES["ideal"]]
    with pytest.raises(ConfigError, match="known for 2 positions"):
        ask([workload], ideal, [1, 3], 0.1, 50, given=True)
    assert [q.k for q in ask([workload], ideal, [1, 2, 3, 5], 0.1, 50, given=False)] == [1, 2]
    with pytest.raises(ConfigError, match="0 tokens"):
        ask([workload], ideal, [1], 0.1, 0, given=True)


def test_the_conclusion_says_when_nothing_pays():
    lines = {}
    for alpha, c in ((0.9, 0.05), (0.2, 0.9)):
        questions = ask([iid(alpha)], [MACHINES["ideal"]], [3], c, 300, given=True)
        [lines[alpha]] = best_lines(answer(questions, 300, 0))
    assert "fastest with K = 3" in lines[0.9]
    assert "no K of these pays" in lines[0.2]
