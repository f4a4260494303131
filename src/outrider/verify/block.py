"""Rule `block`: block verification (Sun et al., 2403.10444, algorithm 2), which judges the draft as a whole.

Statement. Carry a weight along the chain: P_0 = 1, P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i)). Position i < K accepts
with probability h_i = S_i / (S_i + 1 - P_i), where S_i is the mass of (P_i p_{i+1} - q_{i+1})+; the last one with h_K
= P_K. All positions are tried, and the *last* that accepts counts: n. Then draw from (P_n p_{n+1} - q_{n+1})+, or
from p_{K+1} when n = K. A point draft has a one-hot q.

Proof sketch. Call R_i the probability, given x_1..x_i, that the draft is kept to at least i. By induction from the
end, R_i = P_i. It holds at K. At i < K, with x = x_{i+1}, keeping more than i has probability sum_x q(x) min(1, P_i
p(x)/q(x)) = sum_x min(q, P_i p) = P_i - S_i given x_1..x_i; else h_i decides, so R_i = (P_i - S_i) + (1 - P_i + S_i)
h_i = P_i. So the path is kept to exactly i with probability S_i, and the residual there has mass S_i and is drawn
normalised: token y follows x_1..x_i with probability min(q, P_i p)(y) + (P_i p - q)+(y) = P_i p(y), given that
prefix. That is p(y) given that the prefix is kept, which has probability P_i; tokens after a recovered or bonus one
are the next round's.

Expected length. The sum over i of E[P_i], at least the sum of E[prod min(1, p/q)] that `chain` gets, because a ratio
above 1 may make up for an earlier one below 1; no rule that sees one chain does better. A point draft has no ratio
above 1: there the two are equal.

Edge cases. An empty draft is a plain step. S_i = 0 with P_i = 1 (p = q) leaves h_i = 0/0, taken as 1: nothing is lost
there. Rejecting a position depends on draws made *after* it, so no draw may be seen again by a later round; the keys
of core/rng.py see to that. A residual that is all rounding falls back to p. One-hot rows of p give greedy decoding.
"""

from __future__ import annotations

from outrider.core.draft import DraftLaw, SeqDraft
from outrider.core.rng import Key, Purpose, Rng
from outrider.core.verdict import Origin, Verdict
from outrider.core.warp import Rows
from outrider.verify.residual import draft_probability, residual, residual_mass


class BlockVerifier:
    """Jointly over the chain: the last position that accepts wins."""

    name = "block"
    lossless = True
    laws = frozenset({DraftLaw.POINT, DraftLaw.IID})
    trees = False
    weighs_q = True

    def verify(self, draft: SeqDraft, p: Rows, rng: Rng, seed: int, position: int) -> Verdict:
        n, weight_n, weight = 0, 1.0, 1.0
        for i in range(1, draft.size + 1):
            ratio = p[i - 1][draft.tokens[i - 1]] / draft_probability(draft, i - 1)
            weight = min(1.0, weight * ratio)
            if weight == 0.0:
                break
            accept = self._accept_probability(draft, i, p, weight)
            if rng.bernoulli(accept, Key(seed, position, Purpose.ACCEPT, i - 1)):
                n, weight_n = i, weight
        path, key = list(range(n)), Key(seed, position, Purpose.TARGET, n)
        if n == draft.size:
            return Verdict(path, rng.categorical(p[n], key), Origin.BONUS)
        return Verdict(path, rng.categorical(residual(draft, n, p, weight_n), key), Origin.RECOVERED)

    def _accept_probability(self, draft: SeqDraft, i: int, p: Rows, weight: float) -> float:
        """h_i: the probability of keeping i tokens when no longer prefix was kept."""
        if i == draft.size:
            return weight
        mass = residual_mass(draft, i, p, weight)
        rest = mass + 1.0 - weight
        return mass / rest if rest > 0.0 else 1.0
