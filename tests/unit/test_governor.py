"""The governor on a virtual clock: scripted acceptance, given costs, no model. What it loses, decides and forgets."""

from __future__ import annotations

import random

import pytest

from outrider.control.acceptance import Acceptance, Makers, SharedAcceptance, alpha_of
from outrider.control.cost_model import CostModel, Curve, DraftCost, DraftCurves
from outrider.control.governor import LOG_LENGTH, PROBE_SHARE, PROBE_START, GovernorController
from outrider.core.types import SamplingParams, Sequence
from outrider.errors import ConfigError
from tests.given_costs import one_context

V = (1.0, 1.05, 1.1, 1.16, 1.22, 1.3, 1.4, 1.5, 1.6)
COSTS = one_context(
    {rows: 0.010 * v for rows, v in enumerate(V, 1)},
    {
        "suffix": [0.00002] * 8,
        "head": [0.003 * (0.4 + 0.6 * k) for k in range(1, 9)],
        "random": [0.003 * k for k in range(1, 9)],
    },
)
PLAIN_S = 0.010
Text = dict[str, tuple[float, float]]
"""By drafter: how often it drafts at all, and the chance that each token of its draft is kept."""
CODE: Text = {"suffix": (0.3, 0.7), "head": (1.0, 0.85)}
PROSE: Text = {"suffix": (0.08, 0.3), "head": (1.0, 0.15)}
QUOTE: Text = {"suffix": (1.0, 0.98), "head": (1.0, 0.5)}
USELESS: Text = {"random": (1.0, 0.0)}
PARTS = [(CODE, 400), (PROSE, 400), (QUOTE, 400)]


def expected(text: Text, drafter: str, k: int) -> tuple[float, float]:
    """(tokens, seconds) that a round gives and takes on average."""
    if k == 0:
        return 1.0, PLAIN_S
    often, kept = text[drafter]
    with_draft = COSTS.round_s(1 + k, 0, greedy=True)
    seconds = often * with_draft + (1 - often) * PLAIN_S + COSTS.draft_s(drafter, k, greedy=True)
    return 1.0 + often * sum(kept**i for i in range(1, k + 1)), seconds


def best_s(text: Text, drafters: list[str]) -> float:
    """Seconds a token of the best fixed choice."""
    rounds = [expected(text, drafter, k) for drafter in drafters for k in range(9)]
    return min(seconds / tokens for tokens, seconds in rounds)


def sequence(seq_id: int = 0, **options: object) -> Sequence:
    return Sequence(seq_id, [0] * 50, SamplingParams(max_tokens=4000), seed=0, **options)  # type: ignore[arg-type]


def rooms(seqs: list[Sequence]) -> list[int]:
    return [max((seq.params.max_tokens or 0) - seq.output_len - 1, 0) for seq in seqs]


class Stream:
    """One sequence under a governor; outcomes are drawn by the texts' chances. Keeps every (drafter, K)."""

    def __init__(self, governor: GovernorController, seq: Sequence, drafters: list[str], seed: int = 0) -> None:
        self.governor, self.seq, self.random = governor, seq, random.Random(seed)
        self.rounds: list[tuple[str, int]] = []
        governor.open(seq, drafters)

    def round(self, text: Text, batch: list[Sequence] | None = None) -> tuple[str, int]:
        seqs = batch or [self.seq]
        k = self.governor.budgets(seqs, rooms(seqs))[seqs.index(self.seq)]
        drafter = self.governor.drafter(self.seq)
        self.rounds.append((drafter, k))
        self.take(text, drafter, k)
        return drafter, k

    def take(self, text: Text, drafter: str, k: int) -> None:
        drafted = accepted = 0
        if k:
            often, kept = text[drafter]
            drafted = k if self.random.random() < often else 0
            while accepted < drafted and self.random.random() < kept:
                accepted += 1
        self.seq.tokens += [0] * (accepted + 1)
        self.governor.observe(self.seq, k, drafted, accepted, drafter)

    def run(self, text: Text, tokens: int) -> tuple[float, float]:
        """(seconds expected of the choices made, seconds of the best fixed choice for the same tokens)."""
        until, took, gave = len(self.seq.tokens) + tokens, 0.0, 0.0
        while len(self.seq.tokens) < until:
            drafter, k = self.round(text)
            gained, seconds = expected(text, drafter, k)
            took, gave = took + seconds, gave + gained
        return took, gave * best_s(text, list(text))


def governed(drafters: list[str], seed: int = 0, **options: object) -> Stream:
    return Stream(GovernorController(COSTS, drafters, **options), sequence(), drafters, seed)  # type: ignore[arg-type]


def test_a_useless_drafter_costs_less_than_3_percent() -> None:
    stream = governed(["random"])
    took, plain = stream.run(USELESS, 512)
    assert plain == pytest.approx(512 * PLAIN_S)
    assert plain / took >= 0.97
    late = [k for _, k in stream.rounds[100:]]
    assert set(late) == {0, 1}, "it is tried now and then, with one token"
    assert 0 < sum(late) < 0.1 * len(late)


def test_a_draft_that_is_handed_on_costs_what_its_maker_takes() -> None:
    """A cascade drafts as dearly as its head where the head drafts, and for nothing where suffix does."""
    passes = {rows: 0.010 * v for rows, v in enumerate(V, 1)}
    costs = one_context(passes, {"suffix": [0.00002] * 8, "cascade": [0.015] * 8})
    chosen = {}
    for source in ("suffix", "cascade", "unheard of"):
        governor, seq = GovernorController(costs, ["cascade"]), sequence()
        for _ in range(40):
            [k] = governor.budgets([seq], [99])
            seq.tokens += [0] * (2 if k else 1)
            governor.observe(seq, k, min(k, 2), min(k, 1), source)
        chosen[source] = governor.budgets([seq], [99])[0] > 0
    assert chosen == {"suffix": True, "cascade": False, "unheard of": False}


def test_makers_are_counted_of_the_request_and_of_all() -> None:
    every = Makers(0.995)
    one, other = Makers(0.5, every), Makers(0.5, every)
    assert one.shares() == {}
    for source in ("suffix", "suffix", "head"):
        one.add(source)
    assert sum(one.shares().values()) == pytest.approx(1.0)
    assert one.counts == {"suffix": 0.75, "head": 1.0}
    assert other.shares() == pytest.approx(every.shares())
    assert every.shares()["suffix"] == pytest.approx(2 / 3, abs=0.01)
    for _ in range(20):
        other.add("head")
    assert other.shares()["head"] > every.shares()["head"] > one.shares()["head"]


def test_a_second_request_starts_from_what_the_first_has_shown() -> None:
    stream = governed(["random"])
    stream.run(USELESS, 512)
    later = Stream(stream.governor, sequence(1), ["random"])
    took, plain = later.run(USELESS, 512)
    assert sum(k for _, k in later.rounds[:20]) <= 3, "a token now and then, from the start"
    assert plain / took >= 0.98


@pytest.mark.parametrize("drafters", [["suffix"], ["head"], ["suffix", "head"]], ids="+".join)
def test_a_mixed_stream_is_within_5_percent_of_the_best_choice_of_each_part(drafters: list[str]) -> None:
    shares = []
    for seed in range(3):
        stream = governed(drafters, seed, alphas={"head": 0.8})
        parts = [stream.run({name: text[name] for name in drafters}, tokens) for text, tokens in PARTS]
        shares.append(sum(took for took, _ in parts) / sum(best for _, best in parts))
    assert sum(shares) / len(shares) <= 1.05, shares


def test_it_follows_the_text_within_a_few_rounds() -> None:
    stream = governed(["suffix", "head"], alphas={"head": 0.8})
    stream.run(CODE, 300)
    assert stream.rounds[-1][0] == "head"
    assert stream.rounds[-1][1] >= 3
    for _ in range(12):
        stream.round(PROSE)
    assert all(drafter != "head" or k <= 1 for drafter, k in stream.rounds[-6:]), stream.rounds[-12:]
    stream.run(PROSE, 300)
    stream.run(QUOTE, 60)
    assert stream.rounds[-1][0] == "suffix"
    assert stream.rounds[-1][1] >= 4
    log = stream.governor.close(stream.seq)
    assert 3 <= len(log) <= LOG_LENGTH
    assert [switch.position for switch in log] == sorted(switch.position for switch in log)
    assert all("x plain" in switch.reason or "nothing else pays" in switch.reason for switch in log)
    assert any("the text has changed" in switch.reason for switch in log)
    assert {"head", "suffix"} <= {switch.drafter for switch in log}
    stream.governor.check_integrity()


def test_the_same_outcomes_give_the_same_decisions() -> None:
    streams = [governed(["suffix", "head"], seed=3) for _ in range(2)]
    for stream in streams:
        for text, _ in PARTS:
            stream.run(text, 100)
    first, second = streams
    assert first.rounds == second.rounds
    assert first.governor.close(first.seq) == second.governor.close(second.seq)


def test_what_may_never_pay_is_never_drafted() -> None:
    """C13: alpha 0.3, K = 8, c = 0.3; and a drafter as slow as the target."""
    slow = one_context({1: 1.0, 9: 1.0}, {"slow": [1.0 * k for k in range(1, 9)]})
    governor = GovernorController(slow, ["slow"])
    stream = Stream(governor, sequence(), ["slow"])
    for _ in range(400):
        stream.round({"slow": (1.0, 0.9)})
    assert {k for _, k in stream.rounds} == {0, 1}
    assert sum(k for _, k in stream.rounds) <= 80, "a token now and then, which loses a tenth of a round"
    costs = one_context(dict.fromkeys((1, 9), 1.0), {"draft": [0.3 * k for k in range(1, 9)]})
    drafts = Stream(GovernorController(costs, ["draft"]), sequence(), ["draft"])
    for _ in range(100):
        drafts.round({"draft": (1.0, 0.3)})
    assert max(k for _, k in drafts.rounds[20:]) <= 2


def test_a_request_bounds_what_is_drafted() -> None:
    for most, seq in ((3, sequence()), (8, sequence(k=3))):
        stream = Stream(GovernorController(COSTS, ["suffix"], most=most), seq, ["suffix"])
        stream.run({"suffix": (1.0, 0.98)}, 200)
        assert max(k for _, k in stream.rounds) == 3
    off = Stream(GovernorController(COSTS, ["suffix"]), sequence(k=0), ["suffix"])
    off.run({"suffix": (1.0, 0.98)}, 50)
    assert {k for _, k in off.rounds} == {0}
    plain = Stream(GovernorController(COSTS, ["suffix"]), sequence(), ["none"])
    plain.run({"suffix": (1.0, 0.98)}, 50)
    assert set(plain.rounds) == {("none", 0)}


def test_the_end_of_the_answer_bounds_it_too() -> None:
    seq = Sequence(0, [0], SamplingParams(max_tokens=3), seed=0)
    stream = Stream(GovernorController(COSTS, ["suffix"]), seq, ["suffix"])
    assert stream.governor.budgets([seq], [2]) == [2]


def test_the_end_of_the_context_is_no_news_of_the_text() -> None:
    stream = governed(["head"])
    stream.run({"head": (1.0, 0.98)}, 300)
    assert stream.rounds[-1][1] >= 6
    for _ in range(20):
        [k] = stream.governor.budgets([stream.seq], [1])
        assert k == 1
        stream.take({"head": (1.0, 1.0)}, "head", k)
    assert stream.governor.budgets([stream.seq], [9])[0] >= 6
    assert not any("changed" in switch.reason for switch in stream.governor.close(stream.seq))


def batch_costs(**drafters: DraftCost) -> CostModel:
    """Passes of one second, however many rows."""
    return CostModel.measured({0: {1: 1.0, 99: 1.0}}, {1: 0.0}, {1: 0.0}, 0.0, drafters)


def test_a_lone_probe_in_a_batch_is_charged_as_such() -> None:
    curves = DraftCurves(Curve.rising({1: 0.4, 8: 3.2}), Curve.rising({1: 0.05, 8: 0.4}))
    costs = batch_costs(random=DraftCost(curves, curves, 8))
    governor = GovernorController(costs, ["random"], alphas={"random": 0.0})
    streams = [Stream(governor, sequence(i), ["random"], i) for i in range(8)]
    seqs, spent_s = [stream.seq for stream in streams], 0.0
    for _ in range(200):
        ks = governor.budgets(seqs, rooms(seqs))
        spent_s += sum(costs.draft_s("random", k, sum(map(bool, ks)), greedy=True) for k in ks)
        for stream, k in zip(streams, ks, strict=True):
            stream.take(USELESS, "random", k)
    assert 0 < spent_s <= 8 * PROBE_START + PROBE_SHARE * 200 + 1


def slow_reader(prompt_len: int, max_tokens: int, alpha: float) -> Stream:
    """A drafter whose tokens cost a tenth of a round, and as much for every token that it has to read before."""
    curve = Curve.rising({1: 0.1, 8: 0.8})
    curves = DraftCurves(curve, curve)
    costs = batch_costs(model=DraftCost(curves, curves, 1, catch_up_s=0.1))
    seq = Sequence(0, [0] * prompt_len, SamplingParams(max_tokens=max_tokens), seed=0)
    return Stream(GovernorController(costs, ["model"], alphas={"model": alpha}), seq, ["model"])


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "drafts"), [(10, 400, True), (1000, 400, True), (1000, 40, False)]
)
def test_what_a_drafter_has_to_read_first_is_earned_over_the_answer(
    prompt_len: int, max_tokens: int, drafts: bool
) -> None:
    stream = slow_reader(prompt_len, max_tokens, alpha=0.9)
    assert (stream.round({"model": (1.0, 0.9)})[1] > 0) == drafts


def test_a_probe_pays_for_what_it_reads() -> None:
    stream = slow_reader(prompt_len=100, max_tokens=2000, alpha=0.0)
    for _ in range(400):
        stream.round({"model": (1.0, 0.0)})
    probes = sum(k > 0 for _, k in stream.rounds)
    assert probes == 0, "reading a hundred tokens costs ten rounds, and the purse holds two"


def test_a_dear_probe_does_not_keep_a_cheap_one_waiting() -> None:
    """A text that becomes a quotation is noticed by the drafter that costs nothing to try."""
    cheap, dear = Curve.rising({1: 0.02, 8: 0.05}), Curve.rising({1: 0.5, 8: 4.0})
    costs = batch_costs(
        suffix=DraftCost(DraftCurves(cheap, cheap), DraftCurves(cheap, cheap), 1),
        model=DraftCost(DraftCurves(dear, dear), DraftCurves(dear, dear), 1, catch_up_s=0.1),
    )
    stream = Stream(GovernorController(costs, ["model", "suffix"]), sequence(), ["model", "suffix"])
    for _ in range(200):
        stream.round({"model": (1.0, 0.0), "suffix": (0.0, 0.0)})
    found = [stream.round({"model": (1.0, 0.0), "suffix": (1.0, 0.95)})[0] for _ in range(60)]
    assert found[-20:] == ["suffix"] * 20


def test_a_drafter_is_paid_alone_where_the_others_use_another() -> None:
    """Together with as many as itself it would pay, alone it does not."""
    free = DraftCurves(Curve.rising({1: 0.0}), Curve.rising({1: 0.0}))
    dear = DraftCurves(Curve.rising({1: 0.9}), Curve.rising({1: 0.1}))
    costs = batch_costs(free=DraftCost(free, free, 2), dear=DraftCost(dear, dear, 2))
    governor = GovernorController(costs, ["free", "dear"], most=1, alphas={"free": 0.5, "dear": 0.5})
    first, second, third = (sequence(i) for i in range(3))
    governor.open(first, ["free"])
    governor.open(second, ["dear"])
    governor.budgets([first, second], [9, 9])
    assert "nothing else pays" in governor.close(second)[0].reason
    governor.open(third, ["dear"])
    governor.budgets([third], [9])
    assert "nothing else pays" in governor.close(third)[0].reason


def test_drawn_drafts_have_their_own_price() -> None:
    quick, slow = (DraftCurves(curve, curve) for curve in (Curve.rising({1: 0.1}), Curve.rising({1: 2.0, 8: 16.0})))
    governor = GovernorController(batch_costs(head=DraftCost(quick, slow, 1)), ["head"], alphas={"head": 0.8})
    greedy, drawn = sequence(0), sequence(1)
    drawn.params = SamplingParams(temperature=1.0, max_tokens=4000)
    governor.budgets([greedy], [9])
    governor.budgets([drawn], [9])
    assert governor.close(greedy)[0].drafter == "head"
    assert governor.close(drawn)[0].drafter == "none"


def test_a_full_batch_drafts_less() -> None:
    """Rows that are free for one sequence cost something where many share the pass."""
    steep = one_context({1: 1.0, 4: 1.0, 8: 2.0, 16: 4.0, 32: 8.0}, {"suffix": [0.0] * 8})
    governor = GovernorController(steep, ["suffix"])
    text: Text = {"suffix": (1.0, 0.7)}
    streams = [Stream(governor, sequence(i), ["suffix"], i) for i in range(8)]
    for _ in range(40):
        streams[0].round(text)
    alone = [k for _, k in streams[0].rounds[-10:]]
    seqs = [stream.seq for stream in streams]
    together = []
    for _ in range(40):
        ks = governor.budgets(seqs, rooms(seqs))
        together.append(sum(ks) / len(ks))
        for stream, k in zip(streams, ks, strict=True):
            stream.take(text, governor.drafter(stream.seq), k)
    assert min(alone) >= 2
    assert sum(together[-10:]) / 10 < 1


def test_only_drafters_of_known_cost_are_governed() -> None:
    with pytest.raises(ConfigError, match="what drafter 'eagle3' costs is not known: known are suffix, head, random"):
        GovernorController(COSTS, ["suffix", "eagle3"])


def test_a_card_is_a_first_guess() -> None:
    assert alpha_of(sum(0.7**i for i in range(6)), 5) == pytest.approx(0.7, abs=1e-6)
    hopeful, doubtful = (GovernorController(COSTS, ["head"], alphas={"head": alpha}) for alpha in (0.9, 0.05))
    assert hopeful.budgets([sequence()], [9])[0] >= 3
    assert doubtful.budgets([sequence()], [9]) == [1], "a probe"
    assert "nothing else pays" in doubtful.close(sequence())[0].reason


def test_estimates_by_position() -> None:
    found = Acceptance(SharedAcceptance(4))
    for _ in range(60):
        found.add(4, 4, 2)
    kept, drafted = found.gains()
    assert kept[0] == drafted[0] == 0.0
    assert kept[2] == pytest.approx(2.0, abs=0.15), "the first two are always kept"
    assert kept[4] - kept[2] < 0.1, "the third never is"
    assert drafted[4] == pytest.approx(4.0, abs=0.15)


def test_a_tree_is_charged_by_its_nodes_and_keeps_its_path() -> None:
    found = Acceptance(SharedAcceptance(8))
    for _ in range(60):
        found.add(8, 8, 2)
    kept, drafted = found.gains()
    assert drafted[8] == pytest.approx(8.0, abs=0.3)
    assert kept[8] == pytest.approx(2.0, abs=0.15)


def test_a_change_is_noticed_and_noise_is_not() -> None:
    rng, found, alarms = random.Random(1), Acceptance(SharedAcceptance(4)), 0
    for _ in range(200):
        accepted = next((i for i in range(4) if rng.random() > 0.9), 4)
        alarms += found.add(4, 4, accepted)
    assert alarms <= 10
    assert found.first() > 0.8
    assert any(found.add(4, 4, 0) for _ in range(4))
    assert found.first() < 0.5


def test_costs_of_a_governor_are_those_of_its_model() -> None:
    assert isinstance(COSTS, CostModel)
    governor = GovernorController(COSTS, ["suffix"])
    assert governor._round_s(2.5, 0, True) == pytest.approx(COSTS.round_s(2.5, 0, greedy=True))


def test_before_a_round_was_seen_it_says_what_it_assumes() -> None:
    stream = governed(["head"], alphas={"head": 0.8})
    stream.run(CODE, 40)
    first = stream.governor.close(stream.seq)[0]
    assert "head: 80% of first tokens kept, as its card says" in first.reason
    later = Stream(stream.governor, sequence(1), ["head"])
    later.round(CODE)
    reason = stream.governor.close(later.seq)[0].reason
    assert "of first tokens kept" in reason
    assert "card" not in reason
    alone = governed(["suffix"])
    alone.round(CODE)
    assert "suffix: 60% of first tokens assumed to be kept" in alone.governor.close(alone.seq)[0].reason
