"""From a model's name to everything that is needed to talk to it: weights, tokenizer, chat template, and reasons."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from outrider.core.protocols import Drafter, LanguageModel
from outrider.core.registry import drafter_class, drafter_names
from outrider.core.types import Decision, TargetIdentity
from outrider.drafters.chain import ChainDrafter
from outrider.drafters.head_card import CARD, HeadCard, read_card
from outrider.drafters.head_kinds import kind_of_head
from outrider.engine.shipped import ShippedHead, last_of_cascade, shipped_for, shipped_heads
from outrider.errors import ConfigError, ModelFileError
from outrider.models.decoder import Decoder
from outrider.models.device import require_device
from outrider.models.load import LoadedModel, load_model
from outrider.models.loader.sources import Progress, resolve
from outrider.models.pairing import require_compatible
from outrider.models.tokenizer import Tokenizer

DraftOptions = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class OpenedHead:
    """A draft head that was found, the target that it is to ride on, and the precision that was asked for.

    `origin` says where it comes from.
    """

    name: str
    path: Path
    card: HeadCard | None
    identity: TargetIdentity
    dtype: str
    origin: str

    @property
    def advice(self) -> DraftOptions:
        """The drafter's options that the card recommends."""
        return {} if self.card is None else self.card.options

    @classmethod
    def of_package(cls, head: ShippedHead, identity: TargetIdentity, dtype: str) -> OpenedHead:
        origin = f"comes with the package, trained for {head.card.target}"
        return cls(head.name, head.path, head.card, identity, dtype, origin)


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


def find_heads(
    names: Iterable[str],
    target: LoadedModel,
    given: str | None,
    *,
    dtype: str = "auto",
    offline: bool = False,
    progress: Progress | None = None,
) -> dict[str, OpenedHead]:
    """Drafter -> its head on the target: the head `given`, for those of `names` that need one, else the package's.

    Those are for natively loaded targets, on which they were trained. The drafters read and check a head. Raises
    UserError or FetchError, one line each.
    """
    if given is None and not isinstance(target.model, Decoder):
        return {}
    identity = identity_of(target)
    if given is None:
        return {name: OpenedHead.of_package(head, identity, dtype) for name, head in shipped_for(identity).items()}
    path = resolve(given, offline=offline, progress=progress)
    head = OpenedHead(given, path, read_card(path), identity, dtype, f"read from {path.name}")
    names, kind = list(names), kind_of_head(path)
    riders = [name for name in names if "head" in needs_of(name)]
    if kind is not None and any("drafters" in needs_of(name) for name in names):
        riders.append(kind)
    return dict.fromkeys(riders, head)


def identity_of(target: LoadedModel) -> TargetIdentity:
    """The names that a target goes by, and the hash of what its token ids stand for."""
    return identify(target.tokenizer, (target.name, target.path.name, target.path.stem, target.model.name))


def identify(tokenizer: Tokenizer, names: Iterable[str]) -> TargetIdentity:
    """Of a target of these names."""
    digest = hashlib.sha256()
    for piece in tokenizer.vocabulary[: tokenizer.used_size]:
        digest.update(len(piece).to_bytes(4, "little") + piece)
    return TargetIdentity(tuple(dict.fromkeys(names)), digest.hexdigest())


def require_pair(target: LoadedModel, draft: LoadedModel) -> Decision:
    """Checks that the draft speaks the target's tokens; raises PairingError otherwise. Returns the finding."""
    pairing = require_compatible(target.tokenizer, draft.tokenizer, target_name=target.name, draft_name=draft.name)
    return Decision("pairing", pairing.verdict.value, " ".join([pairing.sentence, *pairing.notes]))


def build_drafter(
    name: str,
    target: LanguageModel,
    draft: LanguageModel | None,
    options: DraftOptions | None = None,
    heads: Mapping[str, OpenedHead] | None = None,
    min_confidence: float | None = None,
) -> Drafter:
    """The drafter `name`, given what it needs; `heads` by drafter. `min_confidence` is for those that have this option,
    unless `options` say otherwise. Raises ConfigError when something is missing, or for unknown options."""
    given = dict(options or {})
    cls = drafter_class(name)
    needs = needs_of(name)
    if min_confidence is not None and isinstance(cls, type) and issubclass(cls, ChainDrafter):
        given.setdefault("min_confidence", min_confidence)
    if "model" in needs:
        if draft is None:
            raise ConfigError(missing_draft(name))
        given["model"] = draft
    if "head" in needs:
        if (head := (heads or {}).get(name)) is None:
            raise ConfigError(missing_draft(name))
        if foreign := sorted(head.advice.keys() - getattr(cls, "recommends", {}).keys()):
            raise ModelFileError(
                f"the {CARD} of the head {head.name} recommends {', '.join(foreign)}, which {name} does not have: "
                "delete it there, or fetch the head again"
            )
        given = {"dtype": head.dtype, **head.advice, **given, "head": head.path, "identity": head.identity}
    if "vocab_size" in needs:
        given.setdefault("vocab_size", target.vocab_size)
    if "target" in needs:
        given["target"] = target
    if "drafters" in needs:
        behind = "draft_model" if draft is not None else last_of_cascade(heads or {}) or "ngram"
        members = given.pop("members", None) or {"suffix": {}, behind: {}}
        if not isinstance(members, Mapping):
            raise ConfigError(f"cascade: members = {members!r} is not allowed: give options by drafter name, in order")
        given["drafters"] = [
            build_drafter(member, target, draft, own, heads, min_confidence) for member, own in members.items()
        ]
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
    if "head" not in needs_of(name):
        return f"drafter {name!r} needs a draft model: give one (--draft-model), or choose one of {others}"
    targets = ", ".join(head.model for head in shipped_heads() if head.drafter == name)
    comes = f"one comes with the package for {targets}" if targets else "none comes with the package"
    return (
        f"drafter {name!r} needs a head's folder or file: give one (--draft-model; {comes}), or choose one of {others}"
    )
