"""From a model's name to everything that is needed to talk to it: weights, tokenizer, chat template, and reasons."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from outrider.core.protocols import Drafter, LanguageModel
from outrider.core.registry import drafter_class, drafter_names
from outrider.core.types import Decision
from outrider.errors import ConfigError
from outrider.models.device import require_device
from outrider.models.load import LoadedModel, load_model
from outrider.models.loader.sources import Progress, resolve
from outrider.models.pairing import require_compatible

DraftOptions = Mapping[str, object]


def open_model(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    draft: bool = False,
    offline: bool = False,
    progress: Progress | None = None,
    on_load: Callable[[str], None] | None = None,
) -> LoadedModel:
    """Finds (fetching if need be), reads and checks a model; `draft` as in `load_model`. Raises UserError or FetchError, one line each."""
    require_device(device)
    path = resolve(name, offline=offline, progress=progress)
    if on_load is not None:
        on_load(name)
    return load_model(path, name=name, dtype=dtype, device=device, draft=draft)


def require_pair(target: LoadedModel, draft: LoadedModel) -> Decision:
    """Checks that the draft speaks the target's tokens; raises PairingError otherwise. Returns the finding."""
    pairing = require_compatible(target.tokenizer, draft.tokenizer, target_name=target.name, draft_name=draft.name)
    return Decision("pairing", pairing.verdict.value, " ".join([pairing.sentence, *pairing.notes]))


def build_drafter(
    name: str, target: LanguageModel, draft: LanguageModel | None, options: DraftOptions | None = None
) -> Drafter:
    """The drafter `name`, given what it needs. Raises ConfigError when that is missing, or for unknown options."""
    given = dict(options or {})
    cls = drafter_class(name)
    needs = needs_of(name)
    if "model" in needs:
        if draft is None:
            raise ConfigError(missing_draft(name))
        given["model"] = draft
    if "vocab_size" in needs:
        given.setdefault("vocab_size", target.vocab_size)
    if "target" in needs:
        given["target"] = target
    if "drafters" in needs:
        members = given.pop("members", None) or {"suffix": {}, "ngram" if draft is None else "draft_model": {}}
        if not isinstance(members, Mapping):
            raise ConfigError(f"cascade: members = {members!r} is not allowed: give options by drafter name, in order")
        given["drafters"] = [build_drafter(member, target, draft, own) for member, own in members.items()]
    try:
        return cls(**given)
    except TypeError as error:
        raise ConfigError(f"drafter {name!r} cannot take options {sorted(given)}: {error}") from None


def needs_of(name: str) -> frozenset[str]:
    """What the drafter's class declares that it must be given: model (a draft), vocab_size, target, drafters."""
    return frozenset(getattr(drafter_class(name), "needs", ()))


def missing_draft(name: str) -> str:
    """What to say when the drafter `name` is asked for without a draft model."""
    others = ", ".join(other for other in drafter_names() if other != name)
    return f"drafter {name!r} needs a draft model: give one (--draft-model), or choose one of {others}"
