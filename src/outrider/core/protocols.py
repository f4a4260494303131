"""The seams between the layers. Anything that fits one of these can be plugged in; nothing else is assumed.

Shapes: m rows of one segment, M rows of a pass, V vocabulary, F feature width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from outrider.core.draft import Draft, DraftLaw, SeqDraft
from outrider.core.rng import Rng
from outrider.core.types import Sequence, Switch
from outrider.core.verdict import Verdict
from outrider.core.warp import Rows


class KVCache(Protocol):
    """What a model remembers of one sequence: `length` committed positions, then the rows of the latest pass.

    A pass writes its rows behind `length` and commits nothing. `keep` commits some of them; the next pass overwrites
    the rest.
    """

    @property
    def length(self) -> int:
        """Committed positions."""
        ...

    def keep(self, rows: Seq[int]) -> None:
        """Commits these rows of the latest pass (a path: increasing, each the child of the one before), in order."""
        ...

    def truncate(self, length: int) -> None:
        """Forgets the committed positions from `length` on; pending rows are dropped."""
        ...

    def free(self) -> None:
        """Gives the memory back; the cache must not be used again."""
        ...

    def digest(self) -> str:
        """A hash of the committed state: equal for equal histories, whatever was drafted and dropped in between."""
        ...

    def check_integrity(self) -> None:
        """Asserts that the cache's own bookkeeping is consistent."""
        ...


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's rows in a pass: these tokens, behind the committed positions of `cache`.

    `parents[i]` is the row that row i continues (-1: the cache's last committed position); None is a chain. Row i sits
    at position cache.length + its depth and sees the committed positions, its ancestors and itself.
    """

    cache: KVCache
    tokens: Seq[int]
    parents: Seq[int] | None = None


@dataclass(frozen=True, slots=True)
class Pass:
    """What a forward pass gives: logits (float32 or float64; None when not asked for) and hidden states.

    `features_MF` holds the outputs of the asked layers side by side, in the order asked; None when none was. No later
    pass writes to their memory: drafters keep them.
    """

    logits_MV: Tensor | None
    features_MF: Tensor | None = None


class LanguageModel(Protocol):
    """A causal language model. It commits nothing and knows nothing of drafts."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int: ...

    @property
    def trees(self) -> bool:
        """Whether segments may branch."""
        ...

    def new_cache(self) -> KVCache:
        """An empty cache for one sequence."""
        ...

    def forward(self, segments: Seq[Segment], *, logits: bool = True, taps: Seq[int] = ()) -> Pass:
        """One pass over the rows of all segments. Writes their keys and values; see KVCache for what is kept.

        `taps` are layer indices whose outputs are returned as features.
        """
        ...


@runtime_checkable
class EarlyExit(Protocol):
    """A model that can also run as its own first layers."""

    def first_layers(self, count: int) -> LanguageModel:
        """The model made of the first `count` layers, the final norm and the head; shares the weights."""
        ...


@runtime_checkable
class HeadHost(Protocol):
    """A model that draft heads can ride on: they read its layers' outputs (`taps`), and share its embedding, its final
    norm and rows of its head."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def n_layers(self) -> int: ...

    @property
    def tappable(self) -> int:
        """Of how many layers, from the first on, the outputs can be had."""
        ...

    @property
    def embedding_rows(self) -> int:
        """Token ids with an embedding: the vocabulary and its padding."""
        ...

    def embed(self, tokens: Seq[int]) -> Tensor:
        """float32 [T, d]: what the first layer reads, on the model's device."""
        ...

    def last_norm(self, x_Md: Tensor) -> Tensor:
        """float32 [M, d]: outputs of the last layer as the head reads them."""
        ...

    def head_rows(self, ids: Seq[int]) -> Callable[[Tensor], Tensor]:
        """The head with these rows only: normed float32 [M, d] to logits float32 [M, len(ids)], in the model's own
        precision. Holds memory of its own."""
        ...

    def head_weights(self, ids: Seq[int]) -> Tensor:
        """float32 [len(ids), d]: these rows of the head as numbers, for training."""
        ...


@dataclass(frozen=True, slots=True)
class Committed:
    """What became of a round, told to the drafter of the sequence, whoever drafted.

    `tokens` were appended to the sequence; the first `accepted` of them were draft tokens. `features_TF` are the
    target's hidden states at the positions that the target's cache gained, or None when the drafter asked for none.
    """

    tokens: Seq[int]
    accepted: int
    features_TF: Tensor | None = None

    def for_layers(self, wanted: tuple[int, ...], given: tuple[int, ...]) -> Committed:
        """The same with the hidden states of the layers `wanted` only, out of those `given` (None for no layers)."""
        if wanted == given or self.features_TF is None:
            return self
        if not wanted:
            return Committed(self.tokens, self.accepted)
        blocks = self.features_TF.chunk(len(given), dim=1)
        own_TF = torch.cat([blocks[given.index(layer)] for layer in wanted], dim=1)
        return Committed(self.tokens, self.accepted, own_TF)


class Drafter(Protocol):
    """Proposes what the target might say next. It never sees p.

    `laws` are the laws its drafts can have, `trees` whether they can branch, `wants` the target layers whose hidden
    states it reads.
    """

    @property
    def name(self) -> str: ...

    @property
    def laws(self) -> frozenset[DraftLaw]: ...

    @property
    def trees(self) -> bool: ...

    @property
    def wants(self) -> tuple[int, ...]: ...

    def open(self, seq: Sequence) -> None:
        """A sequence begins; its prompt is in seq.tokens."""
        ...

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int], rng: Rng) -> Draft:
        """A draft for each sequence, at most budgets[b] nodes each; fewer or none is fine. Budget 0 costs no work."""
        ...

    def commit(self, seq: Sequence, committed: Committed) -> None:
        """Tokens became final (also those of the prompt, and those that another drafter proposed)."""
        ...

    def close(self, seq: Sequence) -> None:
        """A sequence ends; nothing of it may be left."""
        ...


class Verifier(Protocol):
    """An acceptance rule."""

    @property
    def name(self) -> str: ...

    @property
    def lossless(self) -> bool: ...

    @property
    def laws(self) -> frozenset[DraftLaw]:
        """The draft laws under which the rule is what it claims to be."""
        ...

    @property
    def trees(self) -> bool: ...

    @property
    def weighs_q(self) -> bool:
        """Whether q decides what is accepted; if not, the likeliest token is the best draft."""
        ...

    def verify(self, draft: SeqDraft, p: Rows, rng: Rng, seed: int, position: int) -> Verdict:
        """Decides one sequence's draft. Row 0 of p follows the last committed token, row i + 1 follows draft node i.

        `seed` and `position` (the output position of the next token) key the draws.
        """
        ...


class Controller(Protocol):
    """Decides how many tokens to draft. It sees the past and the load, never this round's p."""

    def budgets(self, seqs: Seq[Sequence], rooms: Seq[int]) -> list[int]:
        """Draft nodes allowed for each sequence in the coming round (0: a plain step): at most rooms[b], which is what
        its answer and the context leave, and its own `k`."""
        ...

    def observe(self, seq: Sequence, asked: int, drafted: int, accepted: int, source: str) -> None:
        """What became of a round: of the `asked` nodes that were allowed, `drafted` reached the target, and the first
        `accepted` became final. `source` made the draft: a drafter, or a member of one."""
        ...


@runtime_checkable
class Governor(Controller, Protocol):
    """A controller that also says who drafts."""

    def open(self, seq: Sequence, drafters: Seq[str], members: Mapping[str, Seq[str]]) -> None:
        """A sequence is queued; one of these may draft in each of its rounds. `members`: by drafter, those whose drafts
        it hands on."""
        ...

    def drafter(self, seq: Sequence) -> str:
        """Who drafts in the round whose budgets were asked for last."""
        ...

    def close(self, seq: Sequence) -> list[Switch]:
        """A sequence ends; what was decided for it, in order. Nothing of it may be left."""
        ...

    def check_integrity(self) -> None:
        """Asserts that no closed sequence has left anything here."""
        ...


class Constraint(Protocol):
    """A grammar that a sequence must follow, as a pure function of the tokens after the committed ones."""

    def allowed(self, path: Seq[int]) -> Tensor | None:
        """Tokens allowed after committed text + path, bool [V]; None: all are. After a forbidden path: any value."""
        ...

    def advance(self, token: int) -> None:
        """`token` was committed."""
        ...
