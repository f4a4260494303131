"""What an acceptance rule draws from after it has turned a draft token down.

With weight w in (0, 1] on the target's row p and a draft token drawn from q, the residual is (w p - q)+; for a point
draft at x that is p without x. Both are returned as weights, not normalised.

Its mass bounds the probability of needing it. So where the mass is nothing but rounding (p and q equal but for the
last bits), p itself is returned: a token that p allows is drawn, and the law moves by less than NO_MASS.

Shapes: V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.core.draft import DraftLaw, SeqDraft
from outrider.core.warp import Rows

NO_MASS = 1e-15
"""A residual of at most this mass is rounding."""


def draft_probability(draft: SeqDraft, node: int) -> float:
    """q at the node's own token: 1 for a point draft."""
    return 1.0 if draft.law is DraftLaw.POINT else float(draft.q(node)[draft.tokens[node]])


def residual(draft: SeqDraft, node: int, p: Rows, weight: float = 1.0) -> Tensor:
    """Weights [V] (float64, not all 0) of the token that replaces chain node `node`, judged by row `node` of p."""
    p_V = p.row(node)
    weights_V = _over(draft, node, p_V, weight)
    return weights_V if float(weights_V.sum()) > NO_MASS else p_V


def residual_mass(draft: SeqDraft, node: int, p: Rows, weight: float = 1.0) -> float:
    """The sum of (weight p - q)+ at chain node `node`."""
    if draft.law is DraftLaw.POINT:
        return weight * (1.0 - p.probability(node, draft.tokens[node]))
    return float(_over(draft, node, p.row(node), weight).sum())


def _over(draft: SeqDraft, node: int, p_V: Tensor, weight: float) -> Tensor:
    if draft.law is not DraftLaw.POINT:
        return torch.clamp(weight * p_V - draft.q(node).to(p_V.device), min=0.0)
    weights_V = weight * p_V
    weights_V[draft.tokens[node]] = 0.0
    return weights_V
