"""Costs: interpolated, forced monotone, kept in a file, and never trusted when the file is another's."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from outrider.control.cost_cache import CostKey, find_costs, identity_of_files, keep_costs
from outrider.control.cost_model import SCHEMA, Busy, CostModel, Curve, DraftCost, DraftCurves
from outrider.errors import ConfigError
from tests.given_costs import one_context

KEY = CostKey("f00", "quantised", "cpu", "some processor", 2, "avx2", "build 1")
QUICK = DraftCurves(Curve.rising({1: 1e-5}), Curve.rising({1: 1e-5}))
SUFFIX = DraftCost(QUICK, QUICK, 4, 0.0, "as it comes")
HEAD = DraftCost(
    DraftCurves(Curve.rising({1: 0.002, 8: 0.009}), Curve.rising({1: 0.001, 8: 0.004})),
    DraftCurves(Curve.rising({1: 0.003, 8: 0.024}), Curve.rising({1: 0.002, 8: 0.016})),
    4,
    0.0001,
    "head 1",
)


def made() -> CostModel:
    passes = {512: {1: 0.012, 2: 0.013, 32: 0.030}, 64: {1: 0.010, 2: 0.011, 32: 0.028}}
    return CostModel.measured(
        passes, {1: 0.0001, 32: 0.001}, {1: 0.001, 32: 0.02}, 0.0005, {"suffix": SUFFIX, "head": HEAD}
    )


def test_a_curve_goes_through_its_points_and_on() -> None:
    curve = Curve.rising({1: 1.0, 3: 2.0, 5: 6.0})
    assert [curve(x) for x in (0, 1, 2, 3, 4, 5, 6)] == [1.0, 1.0, 1.5, 2.0, 4.0, 6.0, 8.0]
    assert Curve.rising({4: 7.0})(100) == 7.0


def test_noise_that_falls_is_levelled() -> None:
    curve = Curve.rising({1: 1.0, 2: 3.0, 3: 2.0, 4: 2.5, 5: 5.0})
    assert curve.values == (1.0, 2.5, 2.5, 2.5, 5.0)
    falling = Curve.rising({1: 3.0, 2: 2.0, 3: 1.0})
    assert falling.values == (2.0, 2.0, 2.0)


def test_passes_by_rows_and_context() -> None:
    costs = made()
    assert costs.pass_s(1, 64) == costs.pass_s(1, 0) == 0.010
    assert costs.pass_s(1, 288) == pytest.approx(0.011)
    assert costs.pass_s(1, 960) == pytest.approx(0.014), "on along the last two contexts"
    assert costs.v(32, 64) == pytest.approx(2.8)
    assert costs.round_s(1, 64, greedy=True) == pytest.approx(0.0106)
    assert costs.round_s(1, 64, greedy=False) == pytest.approx(0.0115)
    costs = CostModel.measured({64: {1: 2.0, 2: 2.0}, 512: {1: 1.0, 2: 3.0}}, {1: 0.0}, {1: 0.0}, -1.0, {})
    assert (costs.pass_s(1, 512), costs.pass_s(2, 512)) == (2.0, 3.0), "a longer context is not cheaper"
    assert costs.overhead_s == 0.0


def test_drafts_by_length_and_batch() -> None:
    costs = made()
    assert costs.draft_s("head", 0, 4, greedy=True) == 0.0
    assert costs.draft_s("head", 1, greedy=True) == 0.002
    assert costs.draft_s("head", 1, 4, greedy=True) == pytest.approx(0.001)
    assert costs.draft_s("head", 1, 2, greedy=True) == pytest.approx((0.002 + (0.004 - 0.002) / 3) / 2)
    assert costs.draft_s("head", 1, greedy=False) == 0.003
    assert costs.draft_s("head", 8, 4, greedy=False) == pytest.approx(0.016)
    assert costs.catch_up_s("head", 10) == pytest.approx(0.001)
    with pytest.raises(ConfigError, match="what drafter 'mtp' costs is not known: known are suffix, head"):
        costs.draft_s("mtp", 1, greedy=True)


def test_a_slower_machine_takes_so_much_longer_for_everything() -> None:
    costs, slower = made(), made().times(1.5)
    assert slower.pass_s(7, 300) == pytest.approx(1.5 * costs.pass_s(7, 300))
    for greedy in (True, False):
        assert slower.round_s(3, 64, greedy=greedy) == pytest.approx(1.5 * costs.round_s(3, 64, greedy=greedy))
        assert slower.draft_s("head", 5, 3, greedy=greedy) == pytest.approx(
            1.5 * costs.draft_s("head", 5, 3, greedy=greedy)
        )
    assert slower.catch_up_s("head", 10) == pytest.approx(1.5 * costs.catch_up_s("head", 10))
    assert slower.busy == costs.busy


def test_costs_are_kept_and_found(tmp_path) -> None:
    path = keep_costs(tmp_path / "costs", KEY, made())
    found = find_costs(tmp_path / "costs", KEY, {"suffix": "as it comes"})
    assert (found.costs, found.path, found.stale) == (made(), path, ())
    assert json.loads(path.read_text())["schema"] == SCHEMA
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_it_is_kept_which_costs_are_of_a_busy_hour(tmp_path) -> None:
    idle, busy, busier = made(), Busy(5.8, 2), Busy(9.0, 2)
    costs = replace(idle, busy=busy, drafters={"suffix": replace(SUFFIX, busy=busier), "head": HEAD})
    keep_costs(tmp_path, KEY, costs)
    found = find_costs(tmp_path, KEY, {}).costs
    assert found == costs
    assert (found.busiest(["head"]), found.busiest(["head", "suffix"])) == (busy, busier)
    assert str(busy) == "measured while the machine was busy (load 5.8 on 2 cores)"
    path = keep_costs(tmp_path, KEY, idle)
    older = json.loads(path.read_text())
    for part in (older, *older["drafters"].values()):
        assert part.pop("busy") is None
    path.write_text(json.dumps(older))
    assert find_costs(tmp_path, KEY, {}).costs == idle
    assert idle.busiest(["suffix", "head"]) is None


def test_another_threads_another_file_another_build_the_same(tmp_path) -> None:
    keep_costs(tmp_path, KEY, made())
    other = find_costs(tmp_path, replace(KEY, threads=1), {})
    assert other.costs is None
    assert "nothing has been measured for this" in other.stale[0]
    rebuilt = find_costs(tmp_path, replace(KEY, build="build 2"), {})
    assert rebuilt.costs is None
    assert "the build has changed since it was measured" in rebuilt.stale[0]
    keep_costs(tmp_path, replace(KEY, build="build 2"), made())
    assert len(list(tmp_path.iterdir())) == 1


def test_drafters_go_stale_one_by_one(tmp_path) -> None:
    keep_costs(tmp_path, KEY, made())
    found = find_costs(tmp_path, KEY, {"suffix": "as it comes", "head": "head 2", "ngram": "as it comes"})
    assert found.costs is not None
    assert list(found.costs.drafters) == ["suffix"]
    assert found.stale == (
        "drafter 'head' was another when it was measured (head 1)",
        "drafter 'ngram' has not been measured",
    )


DAMAGE = {
    "not json": lambda d: "{",
    "another document": lambda d: '{"schema": "other/1"}',
    "a list": lambda d: "[]",
    "no key": lambda d: d.pop("key"),
    "key is text": lambda d: d.update(key="x"),
    "foreign": lambda d: d["key"].update(processor="another"),
    "no target": lambda d: d.pop("target_seconds"),
    "a context that is none": lambda d: d["target_seconds"].update(far={"1": 1.0}),
    "rows that are none": lambda d: d["target_seconds"]["64"].update(x=1.0),
    "seconds that are text": lambda d: d["greedy_seconds"].update({"1": "fast"}),
    "negative seconds": lambda d: d["greedy_seconds"].update({"1": -1.0}),
    "falling seconds": lambda d: d["greedy_seconds"].update({"40": 0.0}),
    "negative overhead": lambda d: d.update(overhead_seconds=-1),
    "a context of too many digits": lambda d: d["target_seconds"].update({"9" * 5000: {"1": 1.0}}),
    "a context beyond any": lambda d: d["target_seconds"].update({"9" * 400: {"1": 1.0}}),
    "a context twice": lambda d: d["target_seconds"].update({"064": {"1": 1.0}}),
    "rows in other digits": lambda d: d["greedy_seconds"].update({"\u0663\u0663": 1.0}),
    "passes that take no time": lambda d: d["target_seconds"].update({"64": {"1": 0.0, "2": 0.0}}),
    "seconds without end": lambda d: d["target_seconds"]["512"].update({"32": 1e299}),
    "a catch-up without end": lambda d: d["drafters"]["head"].update(catch_up_seconds=1e299),
    "a batch beyond any": lambda d: d["drafters"]["head"].update(batch=10**400),
    "drafts at temperature 0 only": lambda d: d["drafters"]["head"].pop("sampled"),
    "a batch of none": lambda d: d["drafters"]["head"].update(batch=0),
    "busy as text": lambda d: d.update(busy="very"),
    "busy on no cores": lambda d: d.update(busy={"load_1min": 5.8, "cores": 0}),
    "a drafter that is a number": lambda d: d["drafters"].update(head=3),
}


@pytest.mark.parametrize("label", DAMAGE)
def test_a_bad_file_is_one_sentence(tmp_path, label) -> None:
    path = tmp_path / KEY.name
    document = json.loads(keep_costs(tmp_path, KEY, made()).read_text())
    changed = DAMAGE[label](document)
    text = changed if isinstance(changed, str) and label in ("not json", "another document", "a list") else None
    path.write_text(text if text is not None else json.dumps(document))
    found = find_costs(tmp_path, KEY, {})
    assert found.costs is None, label
    [sentence] = found.stale
    assert "\n" not in sentence
    assert path.name in sentence


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"costs cannot be kept in .*OUTRIDER_CACHE"):
        keep_costs(tmp_path / "file" / "costs", KEY, made())


def test_files_are_told_apart_by_content_and_not_by_place(tmp_path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.gguf").write_bytes(b"x" * 100)
    same = {identity_of_files(tmp_path / folder / "model.gguf") for folder in ("a", "b")}
    assert len(same) == 1
    (tmp_path / "b" / "model.gguf").write_bytes(b"x" * 99 + b"y")
    assert identity_of_files(tmp_path / "b") != identity_of_files(tmp_path / "a")


def test_given_figures() -> None:
    costs = one_context({1: 1.0, 5: 1.5}, {"draft": [0.3, 0.6]})
    assert costs.v(5, 1000) == 1.5
    assert costs.draft_s("draft", 8, greedy=True) == pytest.approx(2.4)
