"""Rule `chain`: speculative sampling (Leviathan et al., 2211.17192, algorithm 1; Chen et al., 2302.01318, algorithm 2).

Statement. Go along the chain. Accept draft token x, drawn from q, with probability min(1, p(x) / q(x)); at the first
one turned down draw from the residual (p - q)+ and stop. After a fully accepted draft draw from the last row of p.
For a point draft q is one-hot: accept with probability p(x), the residual is p without x.

Proof sketch. Given its prefix a token y comes out as an accepted draft with probability q(y) min(1, p(y)/q(y)) =
min(p, q)(y). A draft is rejected with probability 1 - sum min(p, q) = sum (p - q)+, which is the residual's mass, so
y comes out of the residual with probability (p - q)+(y). The two add up to p(y). What follows depends on the past
only through the prefix, so the sequence has the target's law. A point draft may be chosen by any means that do not
know the target's randomness: given x, y comes out with probability p(x) [y = x] + (1 - p(x)) p(y) [y != x] / (1 -
p(x)) = p(y).

Expected length. The number of accepted tokens is the sum over i of P(first i accepted). Given the prefix a drawn
token survives with probability sum min(p, q) = 1 - TV(p, q), a point token with probability p(x).

Edge cases. An empty draft is a plain step. p(x) = 0 always rejects; p = q always accepts, and a residual that is all
rounding falls back to p (see residual.py). One-hot rows of p give greedy decoding whatever q is.
"""

from __future__ import annotations

from outrider.core.draft import DraftLaw, SeqDraft
from outrider.core.rng import Key, Purpose, Rng
from outrider.core.verdict import Origin, Verdict
from outrider.core.warp import Rows
from outrider.verify.residual import draft_probability, residual


class ChainVerifier:
    """Token by token, stopping at the first rejection."""

    name = "chain"
    lossless = True
    laws = frozenset({DraftLaw.POINT, DraftLaw.IID})
    trees = False
    weighs_q = True

    def verify(self, draft: SeqDraft, p: Rows, rng: Rng, seed: int, position: int) -> Verdict:
        for i, token in enumerate(draft.tokens):
            ratio = p[i][token] / draft_probability(draft, i)
            if not rng.bernoulli(min(1.0, ratio), Key(seed, position, Purpose.ACCEPT, i)):
                recovered = rng.categorical(residual(draft, i, p), Key(seed, position, Purpose.TARGET, i))
                return Verdict(list(range(i)), recovered, Origin.RECOVERED)
        bonus = rng.categorical(p[draft.size], Key(seed, position, Purpose.TARGET, draft.size))
        return Verdict(list(range(draft.size)), bonus, Origin.BONUS)
