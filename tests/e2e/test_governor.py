"""The governor through the engine: answers are plain's, in any batch; its decisions are in the result."""

from __future__ import annotations

import json
import random

import pytest

from outrider import LLM, SamplingParams, Speculation
from outrider.bench import measured_costs
from outrider.bench.bandwidth import Bandwidth
from outrider.cli.main import main
from outrider.control.governor import GovernorController
from outrider.core.draft import SeqDraft
from outrider.core.types import Sequence
from outrider.drafters.cascade import CascadeDrafter
from outrider.engine.report import completion_json
from outrider.errors import ConfigError
from tests.e2e.test_batch import Scripted
from tests.given_costs import one_context
from tests.tiny import byte_tokenizer, cycle_model, random_table
from tests.tiny_folder import write_tiny_model

V = 11
PASSES = {1: 1.0, 2: 1.05, 5: 1.2, 9: 1.5, 33: 4.0}
COSTS = one_context(
    PASSES, {name: [0.1 * k for k in range(1, 9)] for name in ("right", "wrong", "raises", "prediction")}
)
PARAMS = SamplingParams(max_tokens=60)


def broken(seq, k):
    raise RuntimeError("the draft model broke")


def governed(names, answer=None, **options):
    """An LLM whose drafter `right` knows the answer (after prompt [2]), and `wrong` never says it."""
    target = random_table(V, seed=1)
    answers = {2: answer or []}

    def right(seq, k):
        return SeqDraft.chain(answers[seq.tokens[0]][seq.output_len : seq.output_len + k])

    def wrong(seq, k):
        return SeqDraft.chain([random.Random(len(seq.tokens)).randrange(V) for _ in range(k)])

    made = {"right": Scripted("right", right), "wrong": Scripted("wrong", wrong), "raises": Scripted("raises", broken)}
    drafters = {name: made[name] for name in names}
    controller = GovernorController(COSTS, [*names, "prediction"])
    llm = LLM.from_parts(target, drafters, controller=controller, **options)
    return llm, drafters


def plain_answer() -> list[int]:
    return LLM.from_parts(random_table(V, seed=1), {}).generate([2], PARAMS)[0].token_ids


def test_it_finds_the_drafter_that_is_right() -> None:
    answer = plain_answer()
    llm, drafters = governed(["wrong", "right"], answer)
    [result] = llm.generate([2], PARAMS)
    assert result.token_ids == answer
    assert result.stats.rounds < 30
    switches = result.completions[0].switches
    assert switches[-1].drafter == "right"
    assert switches[-1].k >= 3
    told = completion_json(result.completions[0], None)["switches"]
    assert told[0].keys() == {"position", "drafter", "k", "reason"}
    assert json.dumps(told)
    assert not any(drafter.open_ids for drafter in drafters.values())
    llm.engine.check_integrity()


def test_a_useless_drafter_is_left_in_peace() -> None:
    llm, _ = governed(["wrong"])
    params = SamplingParams(max_tokens=300)
    [result] = llm.generate([3], params)
    plain = LLM.from_parts(random_table(V, seed=1), {}).generate([3], params)[0]
    assert result.token_ids == plain.token_ids
    stats = result.stats
    seconds = stats.rounds * PASSES[1] + stats.drafted * (
        PASSES[2] - PASSES[1] + COSTS.draft_s("wrong", 1, greedy=True)
    )
    assert stats.drafted > 0
    assert seconds <= 300 / 0.97


def cascaded(*names, answer, costs):
    """An LLM with these drafters and a cascade of others like them; `costs` by drafter, else 0.1 a token."""
    _, drafters = governed(names, answer)
    members = [Scripted(name, drafters[name]._draft) for name in names]
    told = {name: costs.get(name, [0.1 * k for k in range(1, 9)]) for name in (*names, "cascade")}
    drafters = {**drafters, "cascade": CascadeDrafter(drafters=members)}
    governor = GovernorController(one_context(PASSES, told), list(drafters))
    return LLM.from_parts(random_table(V, seed=1), drafters, controller=governor)


def test_a_drafter_of_drafters_stands_for_its_members() -> None:
    """As long as it pays; a request that names one gets it."""
    answer = plain_answer()
    llm = cascaded("right", "wrong", answer=answer, costs={})
    [result] = llm.generate([2], PARAMS)
    assert result.token_ids == answer
    assert result.stats.accepted > 0
    assert {switch.drafter for switch in result.completions[0].switches} <= {"cascade", "none"}
    [named] = llm.generate([2], PARAMS, speculation=Speculation("right"))
    assert (named.token_ids, named.completions[0].method) == (answer, "right")
    assert named.stats.accepted > 0
    assert {switch.drafter for switch in named.completions[0].switches} <= {"right", "none"}


def test_members_of_what_does_not_pay_are_weighed() -> None:
    """A cascade that is too dear to be tried does not keep what is cheap from drafting."""
    answer = plain_answer()
    [result] = cascaded("right", answer=answer, costs={"cascade": [9.0] * 8}).generate([2], PARAMS)
    assert result.token_ids == answer
    assert result.stats.rounds < 30
    assert result.completions[0].switches[-1].drafter == "right"


def test_a_member_that_breaks_takes_no_drafter_with_it() -> None:
    answer = plain_answer()
    llm = cascaded("raises", "right", answer=answer, costs={})
    [result] = llm.generate([2], PARAMS)
    assert result.token_ids == answer
    assert result.stats.accepted > 0
    assert result.stats.rounds < 50
    llm.engine.check_integrity()


@pytest.mark.parametrize("params", [PARAMS, SamplingParams(temperature=1.0, seed=5, max_tokens=40)])
def test_batched_equals_solo(params) -> None:
    """Greedy, and by rule `coupled`: the answer does not depend on what is drafted."""
    prompts = [[i] for i in range(3, 9)]
    spec = Speculation(rule=None if params.greedy else "coupled")
    solo = [governed(["wrong"])[0].generate([p], params, speculation=spec)[0].token_ids for p in prompts]
    llm, _ = governed(["wrong"], max_batch=4)
    together = [result.token_ids for result in llm.generate(prompts, params, speculation=spec)]
    assert together == solo
    llm.engine.check_integrity()


def test_the_same_requests_give_the_same_decisions() -> None:
    runs = []
    for _ in range(2):
        llm, _ = governed(["wrong", "right"], plain_answer())
        results = llm.generate([[2], [2]], PARAMS)
        runs.append([(r.token_ids, r.completions[0].switches, r.stats.drafted) for r in results])
    assert runs[0] == runs[1]


def test_a_request_may_name_its_drafter_or_none() -> None:
    answer = plain_answer()
    llm, _ = governed(["right", "wrong"], answer)
    [plain] = llm.generate([2], PARAMS, speculation=Speculation("none"))
    [off] = llm.generate([2], PARAMS, speculation=Speculation(k=0))
    [wrong] = llm.generate([2], PARAMS, speculation=Speculation("wrong"))
    assert plain.token_ids == off.token_ids == wrong.token_ids == answer
    assert plain.stats.drafted == off.stats.drafted == 0
    assert {s.drafter for s in wrong.completions[0].switches} <= {"wrong", "none"}


def test_a_drafter_that_breaks_leaves_the_others() -> None:
    answer = plain_answer()
    llm, _ = governed(["raises", "right"], answer)
    [result] = llm.generate([2], PARAMS)
    assert result.token_ids == answer
    assert result.completions[0].method == "right"
    assert result.stats.dropped == {"drafter raises failed": 1}
    assert result.stats.rounds < 30


def test_a_prediction_is_one_of_them() -> None:
    answer = plain_answer()
    llm, _ = governed(["wrong"])
    [result] = llm.generate([2], PARAMS, prediction=answer)
    assert result.token_ids == answer
    assert result.completions[0].switches[-1].drafter == "prediction"


def test_a_drafter_of_trees_is_passed_over_where_the_target_takes_chains() -> None:
    target, tree = random_table(V, seed=1), Scripted("raises", broken)
    target.trees, tree.trees = False, True
    controller = GovernorController(COSTS, ["right", "raises"])
    right = Scripted("right", lambda seq, k: SeqDraft.chain([1] * k))
    llm = LLM.from_parts(target, {"right": right, "raises": tree}, controller=controller, rule="greedy")
    [result] = llm.generate([2], PARAMS)
    assert result.stats.dropped == {}
    assert {switch.drafter for switch in result.completions[0].switches} <= {"right", "none"}
    with pytest.raises(ConfigError, match="'raises' makes trees and model 'table' takes chains only"):
        llm.generate([2], PARAMS, speculation=Speculation("raises"))


def test_an_engine_sees_what_its_governor_keeps_of_the_dead() -> None:
    llm, _ = governed(["wrong"])
    llm.generate([2], PARAMS)
    llm.engine.check_integrity()
    llm.engine.controller.open(Sequence(99, [1], PARAMS, seed=0), ["wrong"])
    with pytest.raises(AssertionError, match="never closed"):
        llm.engine.check_integrity()


def test_drafts_are_measured_greedy_and_drawn() -> None:
    seen = set()

    def spy(seq, k):
        seen.add((seq.params.greedy, len(seq.tokens) > 0 and k > 0))
        return SeqDraft.chain([1] * k)

    llm = LLM.from_parts(cycle_model("abcd"), {"spy": Scripted("spy", spy)}, tokenizer=byte_tokenizer())
    measured_costs.measure_drafter(llm, "spy", COSTS)
    assert {(True, True), (False, True)} <= seen
    assert llm.controller_name == "fixed"
    with pytest.raises(ConfigError, match="from_parts"):
        llm.drafter_identities()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "target", layers=2, context=256)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("outrider.bench.profile.read_bandwidth", lambda: Bandwidth(20.0, "made up", 2))
    for name, fewer in (("ROWS", (1, 2)), ("LENGTHS", (1, 2)), ("REPEAT", 1)):
        monkeypatch.setattr(measured_costs, name, fewer)
    return tmp_path / "cache" / "costs"


def profile(capsys, model, *args):
    code = main(["profile", str(model), "--rows", "1", "--context", "20", "--repeat", "1", "--json", "--quiet", *args])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out)["costs"], err


def test_from_profile_to_answer(model, cache, capsys) -> None:
    asked = ["generate", "one two one two", "--raw", "-m", str(model), "-d", "suffix,ngram", "--controller", "governor"]
    assert main(asked) == 2
    err = capsys.readouterr().err
    assert "controller 'governor' needs measured costs: nothing has been measured" in err
    assert err.endswith(f"measure them with: outrider profile {model} -d suffix,ngram\n")
    assert main([*asked, "--dtype", "float32"]) == 2
    command = f"outrider profile {model} -d suffix,ngram --dtype float32\n"
    assert capsys.readouterr().err.endswith(f"measure them with: {command}")
    told, _ = profile(capsys, model, "-d", "suffix")
    assert told["measured"] == ["the target", "suffix", "prediction"]
    assert main(asked) == 2
    assert "drafter 'ngram' has not been measured" in capsys.readouterr().err
    told, _ = profile(capsys, model, "-d", "suffix,ngram")
    assert told["measured"] == ["ngram"], "what still holds is not measured again"
    assert sorted(told["drafters"]) == ["ngram", "prediction", "suffix"]
    assert main([*asked, "--json", "--quiet", "--max-tokens", "40"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["controller"] == "governor"
    assert told["k"] == 8
    assert told["switches"][0]["position"] == 0
    assert main(["generate", "one two", "--raw", "-m", str(model), "-d", "none", "--json", "--quiet"]) == 0
    assert told["text"] != ""
    assert "switches" not in json.loads(capsys.readouterr().out)


def test_what_is_stale_is_measured_again_and_said(model, cache, capsys) -> None:
    profile(capsys, model)
    [path] = cache.iterdir()
    again, _ = profile(capsys, model)
    assert (again["measured"], again["stale"], again["path"]) == ([], [], str(path))
    kept = json.loads(path.read_text())
    kept["key"]["build"] = "an older one"
    path.write_text(json.dumps(kept))
    rebuilt, _ = profile(capsys, model)
    assert rebuilt["measured"][0] == "the target"
    assert "the build has changed" in rebuilt["stale"][0]
    path.write_text("{")
    damaged, err = profile(capsys, model)
    assert "is no file of costs" in damaged["stale"][0]
    assert "Traceback" not in err
    fresh, _ = profile(capsys, model, "--refresh")
    assert (fresh["measured"], fresh["stale"]) == (["the target", "suffix", "prediction"], ["--refresh"])
    profile(capsys, model, "-d", "ngram")
    fresh, _ = profile(capsys, model, "-d", "suffix", "--refresh")
    assert fresh["measured"] == ["the target", "suffix", "prediction"]
    assert sorted(fresh["drafters"]) == ["ngram", "prediction", "suffix"], "what was not named stays"


def test_costs_of_a_busy_hour_say_so_wherever_they_are_used(model, cache, capsys, monkeypatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    hour = "measured while the machine was busy (load 5.8 on 2 cores)"
    people = ["profile", str(model), "--rows", "1", "--context", "20", "--repeat", "1", "--quiet", "-d", "suffix"]
    asked = ["generate", "one two", "--raw", "-m", str(model), "-d", "suffix", "--controller", "governor", "-n", "4"]

    def at(load, command):
        monkeypatch.setattr("os.getloadavg", lambda: (load, 0, 0))
        assert main(command) == 0
        out, err = capsys.readouterr()
        return err + out

    assert f"but {hour}; --refresh measures them again" in at(5.8, people)
    assert f"still hold, but {hour}; --refresh measures them again" in at(0.1, people)
    assert f"{hour}: outrider profile --refresh measures them again" in at(0.1, asked)
    told = json.loads(at(0.1, [*people, "--json"]).splitlines()[-1])["costs"]
    assert told["busy"] == told["drafters"]["suffix"]["busy"] == {"load_1min": 5.8, "cores": 2}
    assert hour not in at(0.1, [*people, "--refresh"])
    assert hour not in at(5.8, asked), "how busy it is now is another thing"


def test_people_see_the_drafters_that_they_asked_for(model, cache, capsys) -> None:
    profile(capsys, model, "-d", "ngram,suffix")
    _, table = profile(capsys, model, "-d", "suffix")
    assert [line.split()[2] for line in table.splitlines() if line.startswith("drafting with")] == ["suffix,"]


def test_bad_names_are_one_line(capsys) -> None:
    for args, part in (
        (["--controller", "govenor"], "controller 'govenor' is unknown (did you mean 'governor'?)"),
        (["-d", "suffix,ngram"], "names several drafters and one is used here"),
    ):
        assert main(["generate", "x", *args]) == 2
        err = capsys.readouterr().err
        assert part in err
        assert err.count("\n") == 1
