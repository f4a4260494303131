"""What an acceptance rule draws from after it has turned a draft token down.

With weight w in (0, 1] on the target's row p and a draft token drawn from q, the residual is (w p - q)+; for a point
draft at x that is p without x. Rows of weights, not normalised.

Its mass bounds the probability of needing it. So where the mass is nothing but rounding (p and q equal but for the
last bits), p itself is returned: a token that p allows is drawn, and the law moves by less than NO_MASS.
"""

from __future__ import annotations

from outrider.core.draft import DraftLaw, SeqDraft
from outrider.core.row import Row
from outrider.core.warp import Rows

NO_MASS = 1e-15
"""A residual of at most this mass is rounding."""


def draft_probability(draft: SeqDraft, node: int) -> float:
    """q at the node's own token: 1 for a point draft."""
    return 1.0 if draft.law is DraftLaw.POINT else draft.q(node)[draft.tokens[node]]


def residual(draft: SeqDraft, node: int, p: Rows, weight: float = 1.0) -> Row:
    """Weights (not all 0) of the token that replaces chain node `node`, judged by row `node` of p."""
    point = draft.law is DraftLaw.POINT
    rest = p[node].without(draft.tokens[node]) if point else p[node].excess(draft.q(node), weight)
    return rest if rest.total() > NO_MASS else p[node]


def residual_mass(draft: SeqDraft, node: int, p: Rows, weight: float = 1.0) -> float:
    """The sum of (weight p - q)+ at chain node `node`."""
    if draft.law is DraftLaw.POINT:
        return weight * (1.0 - p[node][draft.tokens[node]])
    return p[node].excess(draft.q(node), weight).total()
