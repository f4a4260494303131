"""Which drafters an LLM has and how many tokens they draft, where options leave it open; what is refused at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq

from outrider import kernels
from outrider.control.fixed import check_k
from outrider.control.governor import DEFAULT_MOST
from outrider.core.protocols import Drafter
from outrider.core.registry import verifier_class
from outrider.core.types import Decision
from outrider.drafters.chain import ChainDrafter
from outrider.drafters.head_kinds import READERS, kind_of_head
from outrider.drafters.head_layer import PACKED_DTYPES
from outrider.engine.opening import OpenedHead, missing_draft, needs_of
from outrider.engine.shipped import default_drafter, last_of_cascade, shipped_heads
from outrider.errors import ConfigError, PairingError
from outrider.models.load import DTYPES, require_dtype

DEFAULT_K = 5


def asked_for(drafter: str | Seq[str] | None, draft_model: str | None) -> list[str]:
    """The drafters that were asked for, by name or with a draft model or head; none: the target decides."""
    if drafter is None:
        return [] if draft_model is None else [kind_of_head(draft_model) or "draft_model"]
    names = [drafter] if isinstance(drafter, str) else list(drafter)
    if not names:
        raise ConfigError("no drafter was named: give at least one, or 'none'")
    return list(dict.fromkeys(names))


def is_head(draft_model: str | None, names: Seq[str]) -> bool:
    """Whether what was given is a draft head: it says so, or a drafter that needs one was named."""
    if draft_model is None:
        return False
    return kind_of_head(draft_model) is not None or any("head" in needs_of(name) for name in names)


def check_options(
    names: list[str],
    rule: str,
    threads: int | None,
    k: int | None,
    *,
    dtype: str,
    draft_dtype: str,
    draft_model: str | None,
    min_confidence: float | None = None,
) -> None:
    """What can be refused before a model is loaded is."""
    if k is not None:
        check_k(k)
    if min_confidence is not None and not 0 <= min_confidence <= 1:
        raise ConfigError(f"min_confidence = {min_confidence!r} is not allowed: give a number from 0 to 1")
    most = kernels.usable_processors()
    if threads is not None and not 1 <= threads <= most:
        raise ConfigError(
            f"threads = {threads} is not allowed: give an integer from 1 to {most}, the logical processors that this "
            "process may use"
        )
    if rule != "auto":
        verifier_class(rule)
    for name in names if draft_model is None else []:
        comes = "head" in needs_of(name) and any(head.drafter == name for head in shipped_heads())
        if needs_of(name) & {"model", "head"} and not comes:
            raise ConfigError(missing_draft(name))
    if draft_model is not None and (kind := kind_of_head(draft_model)) is not None:
        _require_rider(names, draft_model, kind)
    heads, drafts = ([name for name in names if need in needs_of(name)] for need in ("head", "model"))
    if heads and drafts:
        raise ConfigError(
            f"drafters {heads[0]!r} and {drafts[0]!r} read different things from one draft_model, a head and a model: "
            "name one of them"
        )
    require_dtype(dtype)
    rides = is_head(draft_model, names)
    _require_draft_dtype(draft_dtype, head=rides or bool(heads), model=draft_model is not None and not rides)


def _require_draft_dtype(dtype: str, *, head: bool, model: bool) -> None:
    """Raises ConfigError unless it is a name for what drafts, a head or a model; for either where neither does."""
    allowed = [] if model else list(PACKED_DTYPES)
    allowed += [] if head else [name for name in DTYPES if name not in allowed]
    if dtype not in ("auto", *allowed):
        raise ConfigError(f"draft_dtype {dtype!r} is not allowed: give one of auto, {', '.join(allowed)}")


def may_ride(asked: Seq[str], k: int | None) -> bool:
    """Whether a head that comes with the package may be wanted."""
    return k != 0 if not asked else any(needs_of(name) & {"head", "drafters"} for name in asked)


def choose_drafters(
    asked: list[str], heads: Mapping[str, OpenedHead], k: int | None, *, governed: bool
) -> tuple[list[str], Decision]:
    if not asked:
        chosen = default_drafter(heads, k)
        return [chosen.value], chosen
    who = "a governor chooses between them" if governed else "the first is used"
    return asked, Decision("drafter", ", ".join(asked), f"{who} unless a request names another")


def choose_k(k: int | None, drafter: str, heads: Mapping[str, OpenedHead]) -> tuple[int, Decision]:
    """A cascade drafts as many as the head at its end."""
    if k is not None:
        return k, Decision("k", str(k), "draft tokens a round" if k else "speculation is off: K = 0 was asked for")
    head = heads.get(last_of_cascade(heads) or drafter) if "drafters" in needs_of(drafter) else heads.get(drafter)
    if head is not None and head.card is not None and head.card.k is not None:
        return head.card.k, Decision("k", str(head.card.k), f"draft tokens a round, as the card of {head.name} says")
    return DEFAULT_K, Decision("k", str(DEFAULT_K), "draft tokens a round")


def _require_rider(names: Seq[str], head: str, kind: str) -> None:
    """Raises PairingError for drafters that ride on heads of another kind, and where none can use it."""
    wrong = [name for name in names if name in READERS and name != kind]
    usable = [name for name in names if needs_of(name) & {"head", "drafters"} and name not in wrong]
    if wrong or not usable:
        raise PairingError(
            f"{head} is a draft head of {kind}, and {', '.join(wrong or names)} cannot use it: name {kind} "
            f"(--drafter {kind}), or give another --draft-model"
        )


def plan_drafts(asked: float | None, drafters: Iterable[Drafter], heads: Mapping[str, OpenedHead]) -> list[Decision]:
    """Where drafts end for want of confidence (`asked`: a `min_confidence`), and how far they copy. Raises ConfigError
    where the first was asked for and no drafter can."""
    drafters = list(drafters)
    members = [member for drafter in drafters for member in getattr(drafter, "drafters", [drafter])]
    able = [drafter for drafter in members if isinstance(drafter, ChainDrafter)]
    if asked is not None and not able:
        raise ConfigError(
            f"min_confidence = {asked} is not for {', '.join(drafter.name for drafter in members)}: it is an option of "
            "heads and draft models, so name one of them or leave it out"
        )
    found = []
    for drafter in able:
        head = heads.get(drafter.name)
        if least := drafter.min_confidence:
            why = "as asked" if asked is not None else _who_says("min_confidence", least, head)
            found.append(
                Decision("min_confidence", f"{least:g}", f"less sure of a draft, {drafter.name} ends it, {why}")
            )
        if copy := getattr(drafter, "copy", 0.0):
            said = f"nats by which {drafter.name} raises what the text says, for each token matched but one"
            found.append(Decision("copy", f"{copy:g}", f"{said}, {_who_says('copy', copy, head)}"))
    return list(dict.fromkeys(found))


def _who_says(option: str, value: float, head: OpenedHead | None) -> str:
    """Why a drafter has this option."""
    advised = head is not None and head.advice.get(option) == value
    return f"as the card of {head.name} says" if head is not None and advised else "as asked"


def choose_most(k: int | None) -> tuple[int, Decision]:
    """The most that a governor may draft."""
    if k is not None:
        return k, Decision("k", f"up to {k}", "draft tokens a round, as the governor decides")
    return DEFAULT_MOST, Decision("k", f"up to {DEFAULT_MOST}", "draft tokens a round, as the governor decides")
