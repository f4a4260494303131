"""Ways of being wrong. Each looks like a rule, a drafter or a controller that someone might write; the law tests that
pass for the real ones must fail for every one of these, or they prove nothing.

Shapes: V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from outrider.control.cost_model import CostModel
from outrider.control.governor import GovernorController
from outrider.core.draft import DraftLaw, SeqDraft
from outrider.core.rng import Key, Purpose, Rng
from outrider.core.row import Row
from outrider.core.types import Sequence
from outrider.core.verdict import Origin, Verdict
from outrider.core.warp import Rows
from outrider.verify.block import BlockVerifier
from outrider.verify.chain import ChainVerifier
from tests.laws.harness import Tables, propose_iid
from tests.laws.rounds import TableDrafter


class Mutant(ChainVerifier):
    """Rule `chain` with its two final draws open to damage."""

    name = "mutant"

    def verify(self, draft: SeqDraft, p: Rows, rng: Rng, seed: int, position: int) -> Verdict:
        for i, token in enumerate(draft.tokens):
            q = 1.0 if draft.law is DraftLaw.POINT else draft.q(i)[token]
            if not rng.bernoulli(min(1.0, p[i][token] / q), Key(seed, position, Purpose.ACCEPT, i)):
                return Verdict(
                    list(range(i)),
                    rng.categorical(self.recovered(draft, i, p), Key(seed, position, Purpose.TARGET, i)),
                    Origin.RECOVERED,
                )
        token = rng.categorical(self.bonus(draft, p), Key(seed, position, Purpose.TARGET, draft.size))
        return Verdict(list(range(draft.size)), token, Origin.BONUS)

    def recovered(self, draft: SeqDraft, i: int, p: Rows) -> Row:
        if draft.law is DraftLaw.POINT:
            weights_V = p[i].to_dense().clone()
            weights_V[draft.tokens[i]] = 0.0
        else:
            weights_V = torch.clamp(p[i].to_dense() - draft.q(i).to_dense(), min=0.0)
        return Row.dense(weights_V) if float(weights_V.sum()) > 0.0 else p[i]

    def bonus(self, draft: SeqDraft, p: Rows) -> Row:
        return p[draft.size]


class RedrawsFromTarget(Mutant):
    """After a rejection draws from p. For a point draft that is a residual without x taken out."""

    def recovered(self, draft: SeqDraft, i: int, p: Rows) -> Row:
        return p[i]


class UnwarpedBonus(Mutant):
    """Draws the bonus token from the logits before the temperature (here 0.5) was applied."""

    def bonus(self, draft: SeqDraft, p: Rows) -> Row:
        return Row.dense(p[draft.size].to_dense() ** 0.5)


class GoesOnBehindRejection(Mutant):
    """Leaves a rejected token out and judges the next with logits that were computed behind it."""

    def verify(self, draft: SeqDraft, p: Rows, rng: Rng, seed: int, position: int) -> Verdict:
        path = []
        for i, token in enumerate(draft.tokens):
            ratio = p[i][token] / draft.q(i)[token]
            if rng.bernoulli(min(1.0, ratio), Key(seed, position, Purpose.ACCEPT, i)):
                path.append(i)
        token = rng.categorical(p[draft.size], Key(seed, position, Purpose.TARGET, draft.size))
        return Verdict(path, token, Origin.BONUS)


class RacesResidualOnSharedClocks(Mutant):
    """Takes drafts that won a race of q, and races the residual on the same clocks when one is turned down."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables

    def verify(self, draft: SeqDraft, p: Rows, rng: Rng, seed: int, position: int) -> Verdict:
        for i, token in enumerate(draft.tokens):
            q_V = self.tables.q(tuple(draft.tokens[:i]))
            ratio = p[i][token] / float(q_V[token])
            if not rng.bernoulli(min(1.0, ratio), Key(seed, position, Purpose.ACCEPT, i)):
                weights_V = torch.clamp(p[i].to_dense() - q_V, min=0.0)
                recovered = rng.race(Row.dense(weights_V / weights_V.sum()), Key(seed, position + i, Purpose.RACE))
                return Verdict(list(range(i)), recovered, Origin.RECOVERED)
        bonus = rng.categorical(p[draft.size], Key(seed, position, Purpose.TARGET, draft.size))
        return Verdict(list(range(draft.size)), bonus, Origin.BONUS)


class BlockWithChainResidual(BlockVerifier):
    """Block acceptance, with the residual (p - q)+ of `chain`."""

    name = "mutant"

    def verify(self, draft: SeqDraft, p: Rows, rng: Rng, seed: int, position: int) -> Verdict:
        verdict = super().verify(draft, p, rng, seed, position)
        if verdict.n_accept == draft.size:
            return verdict
        weights_V = torch.clamp(p[verdict.n_accept].to_dense() - draft.q(verdict.n_accept).to_dense(), min=0.0)
        residual = Row.dense(weights_V) if float(weights_V.sum()) > 0.0 else p[verdict.n_accept]
        key = Key(seed, position, Purpose.TARGET, draft.size + verdict.n_accept)
        return Verdict(verdict.path, rng.categorical(residual, key), verdict.origin)


class UncappedBlock(BlockVerifier):
    """Block verification whose last acceptance forgets the caps: min(1, prod p/q), as if nothing could exceed 1."""

    name = "mutant"

    def _accept_probability(self, draft: SeqDraft, i: int, p: Rows, weight: float) -> float:
        if i < draft.size:
            return super()._accept_probability(draft, i, p, weight)
        ratios = (p[j][token] / draft.q(j)[token] for j, token in enumerate(draft.tokens))
        return min(1.0, math.prod(ratios))


def drops_unlikely(tables: Tables, k: int, rng: Rng) -> SeqDraft:
    """A drafter that draws a token and then leaves it out because q gave it little."""
    draft = propose_iid(tables, k, rng)
    size = next((i for i in range(k) if draft.q(i)[draft.tokens[i]] < 1.0 / tables.vocab_size), k)
    return draft.head(size)


def peeks_at_target(tables: Tables, k: int, rng: Rng) -> SeqDraft:
    """A controller that lets a token be checked only when the target is sure of what follows it."""
    draft = propose_iid(tables, k, rng)
    sure = [float(tables.p(tuple(draft.tokens[: i + 1])).max()) > 0.6 for i in range(k)]
    return draft.head(sure.index(False) if False in sure else k)


class PeekingGovernor(GovernorController):
    """Decides the round's K by the tokens of this very round's draft: what a controller must not see.

    The drafter and the controller share a glimpse: `first` is what the draft will begin with.
    """

    def __init__(self, costs: CostModel, glimpse: Callable[[Sequence], int]) -> None:
        super().__init__(costs, ["table"], most=2)
        self.glimpse = glimpse

    def budgets(self, seqs: Seq[Sequence], rooms: Seq[int]) -> list[int]:
        ks = super().budgets(seqs, rooms)
        return [k if self.glimpse(seq) == 0 else 0 for seq, k in zip(seqs, ks, strict=True)]


def rounds_q(dtype: torch.dtype) -> object:
    """A drafter that draws in float64 and reports q in another precision."""

    def propose(tables: Tables, k: int, rng: Rng) -> SeqDraft:
        draft = propose_iid(tables, k, rng)
        rows = [q.to_dense().to(dtype).to(torch.float64) for q in draft.q_rows]
        return SeqDraft.chain(draft.tokens, DraftLaw.IID, [Row.dense(q_V / q_V.sum()) for q_V in rows])

    return propose


class AbsoluteNoiseDrafter(TableDrafter):
    """Draws position t with noise that belongs to t, so that a round may see what an earlier one has seen.

    The noise takes one of three equal values, and q of this drafter is in thirds: its draws have law q exactly.
    """

    def open(self, seq: Sequence) -> None:
        self.noise: dict[int, int] = {}

    def q(self, seq: Sequence, path: list[int]) -> Tensor:
        last = [*seq.tokens, *path][-1]
        return torch.tensor([2 / 3, 1 / 3] if last == 0 else [1 / 3, 2 / 3], dtype=torch.float64)

    def choose(self, q_V: Tensor, seq: Sequence, i: int, rng: Rng) -> int:
        place = seq.output_len + i
        if place not in self.noise:
            thirds_3 = torch.full((3,), 1 / 3, dtype=torch.float64)
            self.noise[place] = rng.categorical(Row.dense(thirds_3), Key(seq.seed, place, Purpose.DRAFT))
        return int((self.noise[place] + 0.5) / 3 > float(q_V[0]))


class FreshNoiseDrafter(AbsoluteNoiseDrafter):
    """The same drafter with noise of its own in every round: the control."""

    def choose(self, q_V: Tensor, seq: Sequence, i: int, rng: Rng) -> int:
        return rng.categorical(Row.dense(q_V), Key(seq.seed, seq.output_len, Purpose.DRAFT, i))
