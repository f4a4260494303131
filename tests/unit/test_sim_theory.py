"""Formulas against enumeration, against their limits, and against the tables of the papers."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from itertools import pairwise

import pytest

from outrider.errors import ConfigError
from outrider.sim.theory import (
    Cost,
    Drawn,
    Shape,
    best_tree,
    break_even,
    chain_break_even,
    flat,
    measured_v,
    speedup,
)
from tests.given_costs import one_context

MEASURED = measured_v({1: 10.0, 2: 10.6, 4: 12.6, 8: 21.0, 16: 32.3})
CHAINS = {
    "empty": [],
    "one": [0.4],
    "equal": [0.7] * 5,
    "falling": [0.9, 0.7, 0.5, 0.2],
    "rising": [0.5, 0.8, 0.95],
    "certain and hopeless": [1.0, 1.0, 0.0, 0.9],
}
TREES = {
    "pairs": Shape((-1, -1, 0, 0, 1), (0.6, 0.25, 0.5, 0.3, 0.7)),
    "comb": Shape((-1, 0, -1, 1, 0, 2), (0.5, 0.5, 0.5, 0.5, 0.5, 0.9)),
    "wide": best_tree([0.5, 0.2, 0.1], 9, 3),
}


def iid_tokens(alpha, k):
    """The closed form of the papers: tokens a round of a chain of K, each kept with alpha."""
    return k + 1.0 if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


def best_of_chains(alpha, cost, most):
    """The largest speed-up of the chains of 0 to `most` tokens."""
    return max(speedup(Shape.chain([alpha] * k), cost) for k in range(most + 1))


SHAPES = {**{name: Shape.chain(chances) for name, chances in CHAINS.items()}, **TREES}


def enumerated_tokens(shape):
    """1 + the mean number of nodes accepted, over every joint outcome: of each set of siblings one or none is right."""
    families = {}
    for node, parent in enumerate(shape.parents):
        families.setdefault(parent, []).append(node)
    options = [[*nodes, None] for nodes in families.values()]
    total = mass = 0.0
    for outcome in itertools.product(*options):
        right = dict(zip(families, outcome, strict=True))
        weight = 1.0
        for parent, node in right.items():
            chances = [shape.chances[n] for n in families[parent]]
            weight *= 1 - sum(chances) if node is None else shape.chances[node]
        at, kept = right.get(-1), 0
        while at is not None:
            at, kept = right.get(at), kept + 1
        total, mass = total + weight * (1 + kept), mass + weight
    assert mass == pytest.approx(1)
    return total


@pytest.mark.parametrize("name", SHAPES)
def test_expected_tokens_are_those_of_all_outcomes(name):
    assert SHAPES[name].tokens == pytest.approx(enumerated_tokens(SHAPES[name]), rel=1e-12)


def test_the_interval_is_as_wide_as_it_should_be():
    """One node: a Bernoulli variable, whose standard error is known."""
    drawn = Drawn((35_000, 15_000))
    assert (drawn.rounds, drawn.tokens) == (50_000, pytest.approx(1.3))
    assert drawn.half_width(1.0) == pytest.approx(math.sqrt(0.21 / 50_000))


@pytest.mark.parametrize("k", [0, 1, 2, 5, 12])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.75, 1.0])
def test_the_closed_form_is_the_sum(alpha, k):
    assert iid_tokens(alpha, k) == pytest.approx(Shape.chain([alpha] * k).tokens, rel=1e-12)


@pytest.mark.parametrize("cost", [Cost(), Cost(c=0.1, v=MEASURED), Cost(c=0.3, once=0.2, overhead=0.5, v=MEASURED)])
def test_no_draft_is_plain_decoding(cost):
    empty = Shape.chain([])
    assert empty.tokens == 1
    assert speedup(empty, cost) == 1
    assert speedup(Shape.chain([0.8] * 4), cost, drafting=0.0) == 1
    assert best_tree([0.6, 0.2], 0, 4) == best_tree([0.6, 0.2], 4, 0) == best_tree([], 4, 4) == empty


@pytest.mark.parametrize("cost", [Cost(c=0.05), Cost(c=0.1, v=MEASURED, overhead=0.1)])
def test_more_acceptance_is_faster(cost):
    found = [speedup(Shape.chain([alpha / 10] * 5), cost) for alpha in range(11)]
    assert all(less < more for less, more in pairwise(found))
    trees = [speedup(Shape((-1, -1, 0), (a / 20, a / 20, a / 10)), cost) for a in range(11)]
    assert all(less < more for less, more in pairwise(trees))


def test_free_drafts_and_a_flat_pass_give_the_tokens_themselves():
    for alpha in (0.2, 0.6, 0.9):
        for k in (1, 4, 9):
            assert speedup(Shape.chain([alpha] * k), Cost(c=0.0, v=flat)) == pytest.approx(iid_tokens(alpha, k))
    assert speedup(Shape.chain([0.8] * 200), Cost()) == pytest.approx(1 / (1 - 0.8))


def test_every_cost_counts():
    shape = Shape.chain([0.8] * 4)
    assert speedup(shape, Cost(c=0.1, v=MEASURED, once=0.2, overhead=0.5)) == pytest.approx(
        shape.tokens * 1.5 / (0.4 + 0.2 + (12.6 + (21.0 - 12.6) / 4) / 10 + 0.5)
    )


def test_measured_seconds_are_costs_in_passes_over_one_row():
    seconds = replace(one_context({1: 0.010, 5: 0.015}, {"draft": [0.002, 0.004, 0.006, 0.008]}), overhead_s=0.001)
    cost = Cost.of_model(seconds, seconds.draft_s("draft", 4, greedy=True), depth=4, context=100, greedy=True)
    assert (cost.c, cost.v(1), cost.v(5), cost.overhead) == pytest.approx((0.2, 1.0, 1.5, 0.1))
    round_s = seconds.round_s(5, 100, greedy=True) + seconds.draft_s("draft", 4, greedy=True)
    assert cost.round(Shape.chain([0.5] * 4)) == pytest.approx(round_s / 0.010)


def test_rounds_without_a_draft_cost_and_give_one_step():
    """Half the rounds: the time and the tokens of one round of each kind."""
    shape, cost = Shape.chain([0.9] * 3), Cost(c=0.1, v=MEASURED)
    mixed = (shape.tokens + 1) / (cost.round(shape) + cost.plain)
    assert speedup(shape, cost, drafting=0.5) == pytest.approx(mixed)


def test_case_c13_is_slower_than_plain():
    assert speedup(Shape.chain([0.3] * 8), Cost(c=0.3)) == pytest.approx(0.42, abs=0.001)


@pytest.mark.parametrize(
    "cost", [Cost(c=0.02), Cost(c=0.1), Cost(c=0.2, v=MEASURED), Cost(c=0.05, v=MEASURED, once=0.3)]
)
@pytest.mark.parametrize("k", [1, 3, 8])
def test_break_even(k, cost):
    alpha = chain_break_even(k, cost)
    if alpha is None:
        assert speedup(Shape.chain([1.0] * k), cost) < 1
        return
    assert speedup(Shape.chain([alpha] * k), cost) == pytest.approx(1, abs=1e-6)
    assert speedup(Shape.chain([alpha - 0.01] * k), cost) < 1


def test_break_even_of_a_tree_and_where_there_is_none():
    def pairs(alpha):
        return Shape((-1, -1, 0, 0), (0.7 * alpha, 0.3 * alpha, 0.7 * alpha, 0.3 * alpha))

    alpha = break_even(pairs, Cost(c=0.1, v=MEASURED))
    assert speedup(pairs(alpha), Cost(c=0.1, v=MEASURED)) == pytest.approx(1, abs=1e-6)
    assert chain_break_even(3, Cost(c=2.0)) is None
    assert chain_break_even(5, Cost()) == pytest.approx(0, abs=1e-6)


def test_one_draft_token_pays_when_alpha_is_above_c():
    """Corollary 3.9 of Leviathan et al., 2211.17192: with alpha > c some K is faster than plain, at least by
    (1 + alpha) / (1 + c)."""
    for alpha, c in [(0.3, 0.2), (0.6, 0.59), (0.9, 0.05)]:
        assert best_of_chains(alpha, Cost(c=c), 20) >= (1 + alpha) / (1 + c) - 1e-12 > 1
    assert best_of_chains(0.3, Cost(c=0.31), 20) == 1


def all_trees(ranks, size, depth):
    """Every tree of this many nodes in which the choices of a node are taken in order, as sets of rank paths."""
    trees = {frozenset()}
    for _ in range(size):
        grown = set()
        for tree in trees:
            for path in [(), *tree]:
                taken = sum(1 for other in tree if len(other) == len(path) + 1 and other[: len(path)] == path)
                if taken < len(ranks) and len(path) < depth:
                    grown.add(tree | {(*path, taken)})
        trees = grown
    return trees


@pytest.mark.parametrize(("size", "depth"), [(1, 1), (3, 2), (5, 2), (6, 6)])
def test_no_tree_of_this_size_expects_more(size, depth):
    ranks = [0.55, 0.25, 0.1]
    best = best_tree(ranks, size, depth)
    assert (best.size, best.depth <= depth) == (size, True)
    every = [1 + sum(math.prod(ranks[r] for r in path) for path in tree) for tree in all_trees(ranks, size, depth)]
    assert best.tokens == pytest.approx(max(every), rel=1e-12)


def test_a_tree_of_one_choice_is_the_chain_and_more_choices_never_hurt():
    assert best_tree([0.7], 4, 9) == Shape.chain([0.7] * 4)
    assert best_tree([0.7, 0.2], 4, 4).tokens >= best_tree([0.7], 4, 4).tokens


def test_a_measured_v_is_linear_between_its_rows_and_along_the_last_two_beyond():
    assert [MEASURED(rows) for rows in (1, 2, 3, 4, 16)] == pytest.approx([1, 1.06, 1.16, 1.26, 3.23])
    assert MEASURED(24) == pytest.approx(3.23 + 8 * (3.23 - 2.1) / 8)
    assert measured_v({1: 10.0, 2: 13.0, 4: 12.0})(8) == pytest.approx(1.25)


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: Shape.chain([0.5, 1.2]), "acceptance 1.2"),
        (lambda: Shape((-1, -1), (0.7, 0.5)), "siblings are accepted with 1.200"),
        (lambda: Shape.chain([-0.1]), "acceptance -0.1"),
        (lambda: measured_v({1: 1.0}), r"\[1\] rows"),
        (lambda: measured_v({2: 1.0, 4: 2.0}), r"\[2, 4\] rows"),
        (lambda: measured_v({1: 1.0, 2: 0.0}), "2 rows costs 0.0"),
        (lambda: Cost(c=-1.0), "c = -1.0"),
        (lambda: Cost(c=math.nan), "c = nan"),
        (lambda: Cost(once=1e300), "once = 1e\\+300.*from 0 to 1000000"),
        (lambda: measured_v({1: 1.0, 2: 1e9}), "2 rows costs 1000000000.0"),
    ],
)
def test_what_is_no_acceptance_and_no_cost_is_refused(make, part):
    with pytest.raises(ConfigError, match=part):
        make()


def test_alpha_of_two_tables():
    torch = pytest.importorskip("torch")
    from outrider.sim.theory import alpha

    p = torch.tensor([[0.7, 0.3], [0.2, 0.8]], dtype=torch.float64)
    q = torch.tensor([[0.5, 0.5], [0.6, 0.4]], dtype=torch.float64)
    assert alpha(p, q) == pytest.approx((0.8 + 0.6) / 2)
    assert alpha(p, q, "greedy") == 0.5
    assert alpha(p, q, "match") == pytest.approx((0.7 + 0.2) / 2)
    assert alpha(p, q, "coupled") == pytest.approx((1 / 2 + 0.3 / 1 + 1 / 5 + 1 / 2.5) / 2)
    assert alpha(torch.eye(2).double(), torch.eye(2).double().flip(0), "coupled") == pytest.approx(0)
    assert [alpha(p, q, rule) for rule in ("block", "typical", "top1")] == [None] * 3
    assert alpha(p, p) == pytest.approx(1)


# ---- The tables of the papers. Columns `exp` and `emp` are the papers' own; nothing here was measured by this project.

T5 = [  # 2211.17192, Table 4: T5-XXL (11B) on one TPU-v4, batch 1; c from profiler traces
    # task, draft, temperature, K, alpha, c, exp, emp
    ("EnDe", "small", 0, 7, 0.75, 0.02, 3.2, 3.4),
    ("EnDe", "base", 0, 7, 0.80, 0.04, 3.3, 2.8),
    ("EnDe", "large", 0, 7, 0.82, 0.11, 2.5, 1.7),
    ("EnDe", "small", 1, 7, 0.62, 0.02, 2.3, 2.6),
    ("EnDe", "base", 1, 5, 0.68, 0.04, 2.4, 2.4),
    ("EnDe", "large", 1, 3, 0.71, 0.11, 2.0, 1.4),
    ("CNNDM", "small", 0, 5, 0.65, 0.02, 2.4, 3.1),
    ("CNNDM", "base", 0, 5, 0.73, 0.04, 2.6, 3.0),
    ("CNNDM", "large", 0, 3, 0.74, 0.11, 2.0, 2.2),
    ("CNNDM", "small", 1, 5, 0.53, 0.02, 1.9, 2.3),
    ("CNNDM", "base", 1, 3, 0.55, 0.04, 1.8, 2.2),
    ("CNNDM", "large", 1, 3, 0.56, 0.11, 1.6, 1.7),
]


@pytest.mark.parametrize(("task", "draft", "temperature", "k", "alpha", "c", "exp", "emp"), T5)
def test_leviathan_table_4_expected(task, draft, temperature, k, alpha, c, exp, emp):
    """Their expected column, from their alpha and c with v = 1, to the one digit that they print (their alpha and c are
    rounded to two digits: 0.07 covers that)."""
    assert speedup(Shape.chain([alpha] * k), Cost(c=c)) == pytest.approx(exp, abs=0.07)


def test_leviathan_table_4_measured_differs_as_they_say():
    """What they measured is up to 1.47 x off the formula, above and below: 9 of 12 within 25 %. They name two reasons,
    implementation and acceptance that is not i.i.d.; the formula must not be read closer than that."""
    ratios = [emp / speedup(Shape.chain([alpha] * k), Cost(c=c)) for *_, k, alpha, c, _, emp in T5]
    assert min(ratios) == pytest.approx(0.68, abs=0.01)
    assert max(ratios) == pytest.approx(1.29, abs=0.01)
    assert sum(abs(ratio - 1) <= 0.25 for ratio in ratios) == 9


def test_leviathan_bigram():
    """Section 4.2: a bigram table has alpha 0.2 on EnDe and costs nothing: 1.25 x."""
    assert best_of_chains(0.2, Cost(), 10) == pytest.approx(1.25, abs=1e-4)


CHINCHILLA_MS, DRAFT_MS = 14.1, 1.8  # 2302.01318: Chinchilla 70B and its 4B draft, a token, on 16 TPU-v4
CHEN = [  # 2302.01318, Table 1: K = 4. benchmark, ms a token with speculation, the speed-up that they print
    ("XSum nucleus", 7.52, 1.92),
    ("XSum greedy", 7.00, 2.01),
    ("HumanEval nucleus", 5.73, 2.46),
]


def test_chen_table_1_as_printed():
    """Their speed-ups are 14.1 ms over their mean token time; the first as printed is not (1.875; they say 1.92)."""
    ratios = {name: CHINCHILLA_MS / ms for name, ms, _ in CHEN}
    printed = {name: gain for name, _, gain in CHEN}
    for name in ("XSum greedy", "HumanEval nucleus"):
        assert ratios[name] == pytest.approx(printed[name], abs=0.006)
    assert ratios["XSum nucleus"] == pytest.approx(1.875, abs=0.001) != printed["XSum nucleus"]


# 2302.01318, Figure 1 at K = 7, read off the plot: (ms a round, accepted of drafted, ms for 128 tokens)
CHEN_FIGURE = {"HumanEval": (28.6, 0.68, 690.0), "XSum": (28.6, 0.45, 1000.0)}


@pytest.mark.parametrize("name", CHEN_FIGURE)
def test_chen_figure_1_from_its_own_acceptance_and_cost(name):
    """Figure 1 gives acceptance and round time by K; Table 1 gives no acceptance. From both, and c = 1.8 / 14.1, the
    time of 128 tokens comes out within 15 % of the third panel (all three are read off a plot). The round takes 1.9 ms
    more than seven draft tokens and one pass: v(8) is 1.13 there, not the 1 of the formula."""
    round_ms, accepted, measured_ms = CHEN_FIGURE[name]
    k, c = 7, DRAFT_MS / CHINCHILLA_MS
    v = (round_ms - k * DRAFT_MS) / CHINCHILLA_MS
    assert v == pytest.approx(1.135, abs=0.005)
    low, high = 0.0, 1.0  # the alpha of which i.i.d. chains keep this share of seven tokens
    while high - low > 1e-9:
        low, high = (
            ((low + high) / 2, high) if iid_tokens((low + high) / 2, k) < 1 + k * accepted else (low, (low + high) / 2)
        )
    gain = speedup(Shape.chain([low] * k), Cost(c=c, v=measured_v({1: 1.0, k + 1: v})))
    assert 128 * CHINCHILLA_MS / gain == pytest.approx(measured_ms, rel=0.15)
    assert speedup(Shape.chain([low] * k), Cost(c=c)) > gain
