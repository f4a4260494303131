"""Exact laws of one round, without a model: tables of p and q, drafts of every law, and what a rule makes of them.

Shapes: V vocabulary, K draft tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.draft import DraftLaw, SeqDraft
from outrider.core.protocols import Verifier
from outrider.core.registry import VERIFIERS, verifier_class
from outrider.core.rng import ExhaustiveRng, Key, Purpose, Rng
from outrider.core.row import Row
from outrider.core.warp import Rows

Prefix = tuple[int, ...]
Law = dict[Prefix, float]
EXACT = 1e-12
"""Laws that differ by no more than this in total variation are the same law."""


@dataclass(frozen=True)
class Tables:
    """p and q after each prefix (float64 [V]); with `point`, the rows of p are one-hot."""

    name: str
    vocab_size: int
    p: Callable[[Prefix], Tensor]
    q: Callable[[Prefix], Tensor]
    point: bool = False

    @classmethod
    def constant(cls, p: list[float], q: list[float], name: str = "constant") -> Tables:
        """The same two rows after every prefix."""
        p_V, q_V = torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64)
        return cls(name, len(p), lambda prefix: p_V, lambda prefix: q_V)


def _softmax(generator: torch.Generator, size: int, sharpness: float) -> Tensor:
    return torch.softmax(torch.randn(size, generator=generator, dtype=torch.float64) * sharpness, 0)


def _pair(kind: str, generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
    """A row of p and a row of q."""
    p_V, q_V = _softmax(generator, size, 1.0), _softmax(generator, size, 1.0)
    match kind:
        case "peaked":
            return _softmax(generator, size, 4.0), _softmax(generator, size, 4.0)
        case "flat":
            return _softmax(generator, size, 0.2), _softmax(generator, size, 0.2)
        case "close":
            q_V = p_V * torch.exp(0.3 * torch.randn(size, generator=generator, dtype=torch.float64))
        case "disjoint":
            side_V = torch.randperm(size, generator=generator) < size // 2
            p_V, q_V = p_V * side_V, q_V * ~side_V
        case "zeros":
            p_V[int(torch.randint(size, (), generator=generator))] = 0.0
            q_V[int(torch.randint(size, (), generator=generator))] = 0.0
        case "ties":
            p_V, q_V = (torch.randint(1, 3, (2, size), generator=generator)).to(torch.float64)
        case "equal":
            return p_V, p_V.clone()
        case "rounding":
            return p_V, p_V * (1 + 2.0**-52 * torch.randint(-1, 2, (size,), generator=generator))
        case "point":
            p_V = (p_V == p_V.max()).to(torch.float64)
    return p_V / p_V.sum(), q_V / q_V.sum()


KINDS = ("peaked", "flat", "close", "disjoint", "zeros", "ties", "equal", "rounding", "point")


def random_tables(kind: str, vocab_size: int, seed: int = 0) -> Tables:
    """Rows that are fresh after every prefix and fixed by (kind, seed)."""
    known: dict[Prefix, tuple[Tensor, Tensor]] = {}

    def pair(prefix: Prefix) -> tuple[Tensor, Tensor]:
        if prefix not in known:
            number = seed
            for token in prefix:
                number = number * (vocab_size + 1) + token + 1
            generator = torch.Generator().manual_seed(number * len(KINDS) + KINDS.index(kind))
            known[prefix] = _pair(kind, generator, vocab_size)
        return known[prefix]

    return Tables(
        f"{kind}-{seed}", vocab_size, lambda prefix: pair(prefix)[0], lambda prefix: pair(prefix)[1], kind == "point"
    )


def target_rows(tables: Tables, draft: SeqDraft) -> Rows:
    """What the target says at the root and behind each draft node."""
    prefixes = [(), *(tuple(draft.tokens[n] for n in draft.path(node)) for node in range(draft.size))]
    rows = [tables.p(prefix) for prefix in prefixes]
    one_hot = [Row.one_hot(int(row_V.argmax()), tables.vocab_size) for row_V in rows]
    return Rows(one_hot if tables.point else [Row.dense(row_V) for row_V in rows], [False] * len(rows))


Propose = Callable[[Tables, int, Rng], SeqDraft]


def propose_point(tables: Tables, k: int, rng: Rng) -> SeqDraft:
    """The likeliest token of q, K times."""
    tokens: list[int] = []
    for _ in range(k):
        tokens.append(int(tables.q(tuple(tokens)).argmax()))
    return SeqDraft.chain(tokens)


def propose_secret(tables: Tables, k: int, rng: Rng) -> SeqDraft:
    """Drawn from q, but handed over as a point draft: the rule does not learn q."""
    return SeqDraft.chain(propose_iid(tables, k, rng).tokens)


def propose_iid(tables: Tables, k: int, rng: Rng) -> SeqDraft:
    """Each token drawn from its row of q."""
    tokens: list[int] = []
    rows: list[Row] = []
    for i in range(k):
        rows.append(Row.dense(tables.q(tuple(tokens))))
        tokens.append(rng.categorical(rows[-1], Key(0, 0, Purpose.DRAFT, i)))
    return SeqDraft.chain(tokens, DraftLaw.IID, rows)


def propose_race(tables: Tables, k: int, rng: Rng) -> SeqDraft:
    """Each token wins the race of q under the clocks of its output position."""
    tokens: list[int] = []
    for i in range(k):
        tokens.append(rng.race(Row.dense(tables.q(tuple(tokens))), Key(0, i, Purpose.RACE)))
    return SeqDraft.chain(tokens, DraftLaw.SHARED_NOISE)


def propose_point_tree(tables: Tables, k: int, rng: Rng) -> SeqDraft:
    """The two likeliest children at the root and below each, K <= 2 levels."""
    return _tree(tables, k, lambda q_V, offset: q_V.topk(2).indices.tolist(), DraftLaw.POINT)


def propose_tree(tables: Tables, k: int, rng: Rng) -> SeqDraft:
    """Two children at the root and below the first, drawn in turn without replacement; K <= 2 levels."""

    def children(q_V: Tensor, offset: int) -> list[int]:
        first = rng.categorical(Row.dense(q_V), Key(0, 0, Purpose.DRAFT, offset))
        rest = Row.dense(q_V).without(first)
        if not rest.total() > 0.0:
            return [first]
        return [first, rng.categorical(rest, Key(0, 0, Purpose.DRAFT, offset + 1))]

    return _tree(tables, k, children, DraftLaw.NO_REPLACEMENT)


def _tree(tables: Tables, k: int, children: Callable[[Tensor, int], list[int]], law: DraftLaw) -> SeqDraft:
    q_rows = [tables.q(())]
    tokens = children(q_rows[0], 0)
    parents = [-1] * len(tokens)
    q_row = [0] * len(tokens)
    if k > 1:
        q_rows.append(tables.q((tokens[0],)))
        below = children(q_rows[1], len(tokens))
        tokens, parents, q_row = tokens + below, parents + [0] * len(below), q_row + [1] * len(below)
    return SeqDraft(tokens, parents, law, [Row.dense(q_V) for q_V in q_rows], q_row)


PROPOSERS: dict[DraftLaw, list[Propose]] = {
    DraftLaw.POINT: [propose_point, propose_secret],
    DraftLaw.IID: [propose_iid],
    DraftLaw.SHARED_NOISE: [propose_race],
    DraftLaw.NO_REPLACEMENT: [],
}
TREE_PROPOSERS: dict[DraftLaw, Propose] = {
    DraftLaw.POINT: propose_point_tree,
    DraftLaw.NO_REPLACEMENT: propose_tree,
}


@dataclass(frozen=True)
class RoundLaw:
    """`law` of the round's tokens, extended by p to K + 1 of them; `expected` accepted tokens."""

    law: Law
    expected: float


def one_round(rule: Verifier, tables: Tables, k: int, propose: Propose) -> RoundLaw:
    """The exact law of one round of `rule`."""

    def round_(rng: Rng) -> tuple[Prefix, int]:
        draft = propose(tables, k, rng)
        verdict = rule.verify(draft, target_rows(tables, draft), rng, 0, 0)
        return (*(draft.tokens[node] for node in verdict.path), verdict.next_token), verdict.n_accept

    law: Law = {}
    expected = 0.0
    for (tokens, n_accept), probability in ExhaustiveRng().law(round_).items():
        law[tokens] = law.get(tokens, 0.0) + probability
        expected += n_accept * probability
    return RoundLaw(extend(law, tables, k + 1), expected)


def extend(law: Law, tables: Tables, length: int) -> Law:
    """Plain steps until every outcome has `length` tokens."""
    for size in range(length):
        longer: Law = {}
        for tokens, probability in law.items():
            if len(tokens) > size:
                longer[tokens] = longer.get(tokens, 0.0) + probability
                continue
            for token, weight in enumerate(tables.p(tokens).tolist()):
                if weight > 0.0:
                    longer[(*tokens, token)] = longer.get((*tokens, token), 0.0) + probability * weight
        law = longer
    return law


def target_law(tables: Tables, length: int) -> Law:
    """The law of `length` plain steps."""
    return extend({(): 1.0}, tables, length)


def total_variation(a: Law, b: Law) -> float:
    """Half the sum of the differences."""
    return 0.5 * sum(abs(a.get(outcome, 0.0) - b.get(outcome, 0.0)) for outcome in {*a, *b})


def distance(rule: Verifier, tables: Tables, k: int, propose: Propose) -> float:
    """How far one round of `rule` is from the target's law."""
    return total_variation(one_round(rule, tables, k, propose).law, target_law(tables, k + 1))


def rules(*, lossless: bool) -> list[str]:
    """The registered rules of that kind."""
    return [name for name in VERIFIERS if verifier_class(name).lossless is lossless]


def judges(name: str, tables: Tables) -> bool:
    """Rule `greedy` is for one-hot rows only."""
    return tables.point or name != "greedy"


def proposals(name: str) -> Iterator[tuple[str, Propose, bool]]:
    """The ways of drafting that the rule declares: a label, the proposer, whether it makes trees."""
    rule = verifier_class(name)
    for law in DraftLaw:
        if law not in rule.laws:
            continue
        for propose in PROPOSERS[law]:
            yield propose.__name__.removeprefix("propose_"), propose, False
        if rule.trees and law in TREE_PROPOSERS:
            yield TREE_PROPOSERS[law].__name__.removeprefix("propose_"), TREE_PROPOSERS[law], True
