"""Drafter `fixed`: proposes what it was told to, right or wrong. For tests and demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq

from outrider.core.draft import Draft, DraftLaw, SeqDraft
from outrider.core.protocols import Committed
from outrider.core.rng import Rng
from outrider.core.types import Sequence
from outrider.errors import ConfigError

Script = Callable[[Sequence, int], SeqDraft | Seq[int]] | Mapping[int, Seq[int]] | Seq[int]


class FixedDrafter:
    """Follows a script.

    `script` is the answer's expected token ids; or the continuations by output position; or a function of (sequence,
    budget) that returns token ids or a whole SeqDraft. A function's result is passed on as it is, longer than the
    budget, malformed or not. `laws` and `trees` declare what a function returns.
    """

    name = "fixed"
    wants: tuple[int, ...] = ()

    def __init__(
        self, *, script: Script = (), laws: Iterable[DraftLaw] = (DraftLaw.POINT,), trees: bool = False
    ) -> None:
        if not callable(script) and not isinstance(script, (Mapping, Seq)):
            kind = type(script).__name__
            raise ConfigError(f"fixed: script is a {kind}: give token ids, a mapping by output position, or a function")
        self.script = script
        self.laws = frozenset(laws)
        self.trees = trees

    def open(self, seq: Sequence) -> None:
        return

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int], rng: Rng) -> Draft:
        return Draft([self._draft(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)])

    def _draft(self, seq: Sequence, budget: int) -> SeqDraft:
        if not budget:
            return SeqDraft.empty(self.name)
        if callable(self.script):
            scripted = self.script(seq, budget)
            return scripted if isinstance(scripted, SeqDraft) else SeqDraft.chain(scripted, source=self.name)
        if isinstance(self.script, Mapping):
            tokens = self.script.get(seq.output_len, ())[:budget]
        else:
            tokens = self.script[seq.output_len : seq.output_len + budget]
        return SeqDraft.chain(tokens, source=self.name)

    def commit(self, seq: Sequence, committed: Committed) -> None:
        return

    def close(self, seq: Sequence) -> None:
        return
