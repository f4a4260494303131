"""What is said of an LLM when it has been loaded: its plan, a line a decision, and what is doubtful about it."""

from __future__ import annotations

from outrider.core.registry import verifier_class
from outrider.core.types import Decision
from outrider.engine.engine import resolve_rule
from outrider.engine.opening import needs_of, require_pair
from outrider.models.load import LoadedModel


def plan_of(target: LoadedModel, draft: LoadedModel | None) -> list[Decision]:
    """What was loaded, and how."""
    plan = [Decision("target", target.name, f"loaded from {target.path.name} in {target.load_s:.1f} s")]
    plan += target.decisions
    plan.append(Decision("target memory", f"{target.size_bytes / 1e6:.0f} MB", "weights as loaded; the cache grows"))
    if draft is not None:
        plan.append(Decision("draft", draft.name, f"loaded from {draft.path.name} in {draft.load_s:.1f} s"))
        plan.append(Decision("draft memory", f"{draft.size_bytes / 1e6:.0f} MB", "weights as loaded; the cache grows"))
        plan.append(require_pair(target, draft))
    return plan


def plan_rule(rule: str) -> Decision:
    above = "none" if rule == "greedy" else resolve_rule(rule, greedy=False)
    reasons = {"auto": "block accepts most of a chain", "coupled": "the text does not depend on what is drafted"}
    why = reasons.get(rule, f"rule {rule!r} was asked for")
    return Decision("rule", f"greedy at temperature 0, {above} above", why)


def warnings_of(target: LoadedModel, draft: LoadedModel | None, names: list[str], k: int, rule: str) -> list[str]:
    warnings = []
    needs_draft = any(needs_of(name) & {"model", "drafters"} for name in names)
    if draft is not None and (not needs_draft or k == 0):
        why = "K = 0" if k == 0 else f"the drafter is {', '.join(names)}"
        warnings.append(f"draft model {draft.name} is loaded but unused: {why}")
    if draft is not None and draft.size_bytes >= target.size_bytes:
        cost = draft.size_bytes / target.size_bytes
        best = (k + 1) / (1 + cost * max(k, 1))
        warnings.append(
            f"draft model {draft.name} ({draft.size_bytes / 1e6:.0f} MB) is as large as the target {target.name} "
            f"({target.size_bytes / 1e6:.0f} MB): even if every draft token is accepted, speed is about {best:.2f} x "
            "plain; swap them, or use a smaller draft"
        )
    if rule != "auto" and not verifier_class(rule)().lossless:
        warnings.append(
            f"rule {rule!r} is lossy: above temperature 0 the answers do not follow the target's distribution"
        )
    return warnings
