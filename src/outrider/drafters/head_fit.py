"""Whether a draft head belongs to a target: sizes must agree, and so must what the head says of its target."""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import PurePath

from outrider.core.protocols import HeadHost, LanguageModel
from outrider.core.types import TargetIdentity
from outrider.errors import PairingError


@dataclass(frozen=True, slots=True)
class TrainedFor:
    """What a head's configuration says of its target; None: nothing. The hash is of what the token ids stand for."""

    hidden_size: int
    vocab_size: int
    name: str | None = None
    vocabulary_sha256: str | None = None


def require_host(drafter: str, target: LanguageModel) -> HeadHost:
    """The target, if heads can ride on it."""
    if not isinstance(target, HeadHost):
        raise PairingError(
            f"{drafter}: {target.name} does not hand out its hidden states and embedding: use a natively loaded model "
            "as the target, or another drafter"
        )
    return target


def require_fit(
    what: str, trained: TrainedFor, target: LanguageModel, host: HeadHost, identity: TargetIdentity | None
) -> None:
    """Raises PairingError, with both sides' values, when the head `what` was trained for another target."""
    other = "Take the head of this target, or load the target that the head was trained for"
    if trained.hidden_size != host.hidden_size:
        raise PairingError(
            f"{what} reads hidden states of {trained.hidden_size} numbers and {target.name} has {host.hidden_size}. "
            f"{other}"
        )
    if not target.vocab_size <= trained.vocab_size <= host.embedding_rows:
        rows = f"{target.vocab_size} tokens ({host.embedding_rows} rows with padding)"
        raise PairingError(f"{what} is for a vocabulary of {trained.vocab_size} and {target.name} has {rows}. {other}")
    if identity is None:
        return
    hash_, own = trained.vocabulary_sha256, identity.vocabulary_sha256
    if hash_ is not None and hash_ != own:
        raise PairingError(
            f"{what} was trained for {trained.name or 'a target'} whose token ids have the hash {hash_[:12]}; those of "
            f"{identity.names[0]} have {own[:12]}. {other}"
        )
    if trained.name is not None and not any(same_model(trained.name, name) for name in identity.names):
        raise PairingError(
            f"{what} was trained for {trained.name} and the target is {identity.names[0]}. {other}; if it is the same "
            "model under another name, say so with the option other_target=True"
        )


def require_width(what: str, width: int, shares: Mapping[str, bool], target: LanguageModel, host: HeadHost) -> None:
    """Raises PairingError for a head that is too wide or too narrow for the target's matrices that it `shares`."""
    lacks = [part for part, shared in shares.items() if shared]
    if lacks and width != host.hidden_size:
        raise PairingError(
            f"{what} is {width} wide, has no {' and no '.join(lacks)} of its own and cannot share that of "
            f"{target.name}, which is {host.hidden_size} wide: take a head with "
            f"{' and '.join(f'{part}.weight' for part in lacks)}"
        )


def require_taps(what: str, wants: Seq[int], target: LanguageModel, host: HeadHost) -> None:
    """Raises PairingError for layers whose outputs the target does not hand out."""
    if missing := [layer for layer in wants if layer >= host.tappable]:
        raise PairingError(
            f"{what} reads the output of layer {missing[0]} and {target.name} hands out those of layers 0 to "
            f"{host.tappable - 1} of {host.n_layers}: load the target natively, or take a head of earlier layers"
        )


def same_model(trained: str, name: str) -> bool:
    """Whether one name, without owner, suffix and punctuation, is part of the other."""
    one, other = (re.sub(r"[^a-z0-9]", "", PurePath(text).name.lower().split(":")[-1]) for text in (trained, name))
    return bool(one and other) and (one in other or other in one)
