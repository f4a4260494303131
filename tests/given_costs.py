"""Cost models from given figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.control.cost_model import CostModel, Curve, DraftCost, DraftCurves


def one_context(passes: Mapping[int, float], drafters: Mapping[str, Sequence[float]], *, context: int = 0) -> CostModel:
    """Passes by rows, and by drafter the seconds of drafts of 1, 2, ... tokens."""
    costs = {}
    for name, seconds in drafters.items():
        curve = Curve.rising(dict(enumerate(seconds, 1)))
        curves = DraftCurves(curve, curve)
        costs[name] = DraftCost(curves, curves, 1, identity="given")
    return CostModel.measured({context: passes}, {1: 0.0}, {1: 0.0}, 0.0, costs)
