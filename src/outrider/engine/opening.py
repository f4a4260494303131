"""From a model's name to everything that is needed to talk to it: weights, tokenizer, chat template, and reasons."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from outrider.core.protocols import Drafter, LanguageModel
from outrider.core.registry import drafter_class, drafter_names
from outrider.core.types import Decision, TargetIdentity
from outrider.errors import ConfigError
from outrider.models.device import require_device
from outrider.models.load import LoadedModel, load_model
from outrider.models.loader.sources import Progress, resolve
from outrider.models.pairing import require_compatible

DraftOptions = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class OpenedHead:
    """A draft head that was found, the target that it is to ride on, and the precision that was asked for."""

    name: str
    path: Path
    identity: TargetIdentity
    dtype: str


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
    """Finds (fetching if need be), reads and checks a model; `draft` as in `load_model`.

    Raises UserError or FetchError, one line each.
    """
    require_device(device)
    path = resolve(name, offline=offline, progress=progress)
    if on_load is not None:
        on_load(name)
    return load_model(path, name=name, dtype=dtype, device=device, draft=draft)


def find_head(
    name: str, target: LoadedModel, *, dtype: str = "auto", offline: bool = False, progress: Progress | None = None
) -> OpenedHead:
    """Where the head `name` lies; its drafter reads and checks it. Raises UserError or FetchError, one line each."""
    return OpenedHead(name, resolve(name, offline=offline, progress=progress), identity_of(target), dtype)


def identity_of(target: LoadedModel) -> TargetIdentity:
    """The names that a target goes by, and the hash of what its token ids stand for."""
    digest = hashlib.sha256()
    for piece in target.tokenizer.vocabulary[: target.tokenizer.used_size]:
        digest.update(len(piece).to_bytes(4, "little") + piece)
    names = dict.fromkeys((target.name, target.path.name, target.path.stem, target.model.name))
    return TargetIdentity(tuple(names), digest.hexdigest())


def require_pair(target: LoadedModel, draft: LoadedModel) -> Decision:
    """Checks that the draft speaks the target's tokens; raises PairingError otherwise. Returns the finding."""
    pairing = require_compatible(target.tokenizer, draft.tokenizer, target_name=target.name, draft_name=draft.name)
    return Decision("pairing", pairing.verdict.value, " ".join([pairing.sentence, *pairing.notes]))


def build_drafter(
    name: str,
    target: LanguageModel,
    draft: LanguageModel | None,
    options: DraftOptions | None = None,
    head: OpenedHead | None = None,
) -> Drafter:
    """The drafter `name`, given what it needs. Raises ConfigError when that is missing, or for unknown options."""
    given = dict(options or {})
    cls = drafter_class(name)
    needs = needs_of(name)
    if "model" in needs:
        if draft is None:
            raise ConfigError(missing_draft(name))
        given["model"] = draft
    if "head" in needs:
        if head is None:
            raise ConfigError(missing_draft(name))
        given = {"dtype": head.dtype, **given, "head": head.path, "identity": head.identity}
    if "vocab_size" in needs:
        given.setdefault("vocab_size", target.vocab_size)
    if "target" in needs:
        given["target"] = target
    if "drafters" in needs:
        members = given.pop("members", None) or {"suffix": {}, "ngram" if draft is None else "draft_model": {}}
        if not isinstance(members, Mapping):
            raise ConfigError(f"cascade: members = {members!r} is not allowed: give options by drafter name, in order")
        given["drafters"] = [build_drafter(member, target, draft, own, head) for member, own in members.items()]
    try:
        return cls(**given)
    except TypeError as error:
        raise ConfigError(f"drafter {name!r} cannot take options {sorted(given)}: {error}") from None


def needs_of(name: str) -> frozenset[str]:
    """What the drafter's class declares that it must be given: model (a draft), head, vocab_size, target,
    drafters."""
    return frozenset(getattr(drafter_class(name), "needs", ()))


def missing_draft(name: str) -> str:
    """What to say when the drafter `name` is asked for without a draft model."""
    others = ", ".join(other for other in drafter_names() if other != name)
    what = "a head's folder or file" if "head" in needs_of(name) else "a draft model"
    return f"drafter {name!r} needs {what}: give one (--draft-model), or choose one of {others}"
