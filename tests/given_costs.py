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


def uneven(*drafters: str) -> CostModel:
    """Passes that cost more behind a longer context, judging that costs more above temperature 0, an overhead, and
    drafters that do, too, and that read."""
    greedy = DraftCurves(Curve.rising({1: 0.1, 8: 0.8}), Curve.rising({1: 0.1, 8: 0.8}))
    sampled = DraftCurves(Curve.rising({1: 0.3, 8: 2.4}), Curve.rising({1: 0.3, 8: 2.4}))
    passes = {0: {1: 1.0, 9: 2.6}, 100: {1: 2.0, 9: 5.2}}
    costs = {name: DraftCost(greedy, sampled, 1, 0.05, identity="given") for name in drafters}
    return CostModel.measured(passes, {1: 0.01, 9: 0.09}, {1: 0.04, 9: 0.36}, 0.25, costs)
