"""Whether a draft model's token ids mean what the target's mean: tokenizers are compared, never just their sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from outrider.errors import PairingError
from outrider.models.tokenizer import Tokenizer

MIN_OVERLAP = 0.5
N_SHOWN = 5


class Compatibility(Enum):
    """IDENTICAL: every id means the same. PADDED: so does every common id, one side has more rows: mask the tail.
    PARTIAL: ids differ, at least half of the target's tokens exist in the draft too. INCOMPATIBLE: fewer do."""

    IDENTICAL = "identical"
    PADDED = "padded"
    PARTIAL = "partial"
    INCOMPATIBLE = "incompatible"


@dataclass(frozen=True)
class Difference:
    """One id that stands for other bytes in the target than in the draft; None: that side has no such id."""

    token_id: int
    target: bytes | None
    draft: bytes | None

    def __str__(self) -> str:
        return f"id {self.token_id}: {_shown(self.target)} in the target, {_shown(self.draft)} in the draft"


@dataclass(frozen=True)
class Pairing:
    """How a draft's vocabulary fits a target's.

    `n_common`: ids 0 to n_common - 1 mean the same on both sides (0 unless `usable`); all others must be masked on
    either side. `overlap`: the share of the target's tokens that the draft has too, under whatever id.
    `target_rows`, `draft_rows`: ids with the padding; `target_used`, `draft_used`: without.
    """

    verdict: Compatibility
    n_common: int
    overlap: float
    target_rows: int
    draft_rows: int
    target_used: int
    draft_used: int
    n_different: int
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]

    @property
    def usable(self) -> bool:
        """True if draft ids may be handed to the target as they are, up to `n_common`."""
        return self.verdict in (Compatibility.IDENTICAL, Compatibility.PADDED)

    @property
    def sentence(self) -> str:
        """The verdict for a person, in one line."""
        if self.verdict is Compatibility.IDENTICAL:
            return f"identical: all {self.target_used} token ids stand for the same bytes"
        if self.verdict is Compatibility.PADDED:
            return (
                f"padded: the first {self.n_common} token ids stand for the same bytes, the target has "
                f"{self.target_rows} rows ({self.target_used} used) and the draft {self.draft_rows} "
                f"({self.draft_used} used); the tail is masked"
            )
        firsts = "; ".join(map(str, self.differences))
        return (
            f"{self.verdict.value}: {self.n_different} token ids differ, {self.overlap:.1%} of the target's tokens "
            f"exist in the draft. First: {firsts}"
        )


def compare_tokenizers(target: Tokenizer, draft: Tokenizer) -> Pairing:
    """Special flags, end-of-text ids and normalisers do not change what an id stands for; where they differ the pairing
    says so in `notes`."""
    target_used, draft_used = target.used_size, draft.used_size
    n_common = min(target_used, draft_used)
    left, right = target.vocabulary[:target_used], draft.vocabulary[:draft_used]
    differences: list[Difference] = []
    n_different = 0
    if left[:n_common] != right[:n_common]:
        for difference in _differences(left, right):
            n_different += 1
            if len(differences) < N_SHOWN:
                differences.append(difference)
    same_size = target_used == draft_used and target.vocab_size == draft.vocab_size
    known = set(left) - {b""}
    overlap = len(known & set(right)) / max(len(known), 1)
    if n_different == 0 and n_common > 0:
        verdict = Compatibility.IDENTICAL if same_size else Compatibility.PADDED
    else:
        n_common = 0
        verdict = Compatibility.PARTIAL if overlap >= MIN_OVERLAP else Compatibility.INCOMPATIBLE
    return Pairing(
        verdict=verdict,
        n_common=n_common,
        overlap=overlap,
        target_rows=target.vocab_size,
        draft_rows=draft.vocab_size,
        target_used=target_used,
        draft_used=draft_used,
        n_different=n_different,
        differences=tuple(differences),
        notes=tuple(_notes(target, draft, n_common)),
    )


def require_compatible(target: Tokenizer, draft: Tokenizer, *, target_name: str, draft_name: str) -> Pairing:
    """The pairing, if it is usable. Raises `PairingError` that names both models, the verdict and the first ids."""
    pairing = compare_tokenizers(target, draft)
    if pairing.usable:
        return pairing
    raise PairingError(
        f"the draft {draft_name} does not fit the target {target_name}: their tokenizers are {pairing.sentence}. "
        f"Allowed: a draft whose token ids stand for the same bytes. Use a smaller model of {target_name}'s own "
        "family, or a drafter without a model (ngram, suffix)"
    )


def _differences(left: tuple[bytes, ...], right: tuple[bytes, ...]) -> Iterator[Difference]:
    for index in range(max(len(left), len(right))):
        target = left[index] if index < len(left) else None
        draft = right[index] if index < len(right) else None
        if target != draft:
            yield Difference(index, target, draft)


def _notes(target: Tokenizer, draft: Tokenizer, n_common: int) -> Iterator[str]:
    flags = sorted(index for index in target.special_ids ^ draft.special_ids if index < n_common)
    if flags:
        listed = ", ".join(f"{index} {_shown(target.vocabulary[index])}" for index in flags[:N_SHOWN])
        yield f"{len(flags)} ids are special on one side only ({listed}); the target's flags apply"
    if set(target.eos_ids) != set(draft.eos_ids):
        yield f"end-of-text ids differ: target {target.eos_ids}, draft {draft.eos_ids}; the target's apply"
    if target.normalizer != draft.normalizer:
        yield "texts are normalised differently; prompts are encoded by the target's tokenizer"


def _shown(piece: bytes | None) -> str:
    if piece is None:
        return "no token"
    return repr(piece) if piece else "an unused id"
