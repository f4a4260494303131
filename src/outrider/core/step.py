"""One round: draft, one target pass, accept, commit. Plain decoding is this very function with empty drafts.

Shapes: B sequences, M rows of the pass, V vocabulary, F feature width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from outrider.core.draft import Draft, Dropped, SeqDraft, sanitise
from outrider.core.protocols import Committed, Controller, Drafter, LanguageModel, Segment
from outrider.core.rng import Rng
from outrider.core.tree import depths
from outrider.core.types import Sequence
from outrider.core.verdict import Origin, Verdict
from outrider.core.warp import RowContext, Rows, warp


@dataclass(frozen=True, slots=True)
class Decided:
    """A token that the rule has decided on, with the target's unprocessed logits [V] for its position."""

    token: int
    origin: Origin
    source: str
    logits_V: Tensor


Commit = Callable[[Sequence, list[Decided]], int]
"""Makes decided tokens final, one by one, until one ends the sequence; returns how many became final (>= 1)."""

PREFILL_CHUNK = 512
"""Tokens that one pass of a prefill takes: the memory of a long prompt's activations stays bounded."""

BAD_LOGITS = "error: the target's logits are NaN, or every token is forbidden"


@dataclass(frozen=True, slots=True)
class SeqRound:
    """What became of one sequence in one round.

    `draft` is what the target checked, `dropped` what it was spared; `p` the rows of the pass (row 0 follows the last
    committed token, row i + 1 draft node i). Of the verdict, `emitted` tokens became final, the first `accepted` of
    them draft tokens; none when the logits were unusable.
    """

    seq: Sequence
    position: int
    draft: SeqDraft
    dropped: Dropped | None
    p: Rows
    verdict: Verdict
    accepted: int
    emitted: int


def spec_step(
    seqs: Seq[Sequence], target: LanguageModel, drafter: Drafter, controller: Controller, rng: Rng, commit: Commit
) -> list[SeqRound]:
    """Advances every sequence by at least one token, in one target pass. Mutates sequences, caches and drafter state.

    A sequence whose logits are unusable gets an error as its finish_reason and commits nothing; the others go on. Where
    they become unusable inside a draft, the tokens before that place are committed: one of them may end the answer.
    """
    rooms = [room(seq, target) for seq in seqs]
    budgets = [min(pair) for pair in zip(controller.budgets(seqs, rooms), rooms, strict=True)]
    proposed = drafter.propose(seqs, budgets, rng)
    checked = [_checked(seq, d, k, target) for seq, d, k in zip(seqs, proposed.seqs, budgets, strict=True)]
    draft = Draft([d for d, _ in checked])

    pairs = list(zip(seqs, draft.seqs, strict=True))
    out = target.forward(
        [Segment(seq.cache, [seq.tokens[-1], *d.tokens], _row_parents(d)) for seq, d in pairs], taps=drafter.wants
    )
    assert out.logits_MV is not None
    p = warp(out.logits_MV, [context for seq, d in pairs for context in _contexts(seq, d)])

    rounds, split = [], draft.split
    for b, (seq, d) in enumerate(pairs):
        start, stop = split[b] + b, split[b + 1] + b + 1
        p_rows, logits, position = p.slice(start, stop), out.logits_MV[start:stop], seq.output_len
        verdict = seq.rule.verify(d, p_rows, rng.of(seq.id), seq.seed, position)
        kept = [0, *(node + 1 for node in verdict.path)]
        usable = next((i for i, row in enumerate(kept) if p_rows.bad_M[row]), len(kept))
        emitted = commit(seq, _decided(d, verdict, kept, logits)[:usable]) if usable else 0
        accepted = min(emitted, verdict.n_accept)
        if usable == 0:
            seq.finish_reason = BAD_LOGITS
        else:
            seq.cache.keep(kept[:emitted])
            drafter.commit(
                seq, Committed(seq.tokens[-emitted:], accepted, _rows(out.features_MF, start, kept[:emitted]))
            )
            controller.observe(seq, budgets[b], d.size, accepted, d.source)
            seq.stats.record(depths(d.parents), accepted, emitted - accepted, verdict.n_accept + 1 - emitted)
        seq.stats.draft_passes += d.passes
        rounds.append(SeqRound(seq, position, d, checked[b][1], p_rows, verdict, accepted, emitted))
    return rounds


def prefill(target: LanguageModel, seq: Sequence, taps: Seq[int] = ()) -> Iterator[Committed]:
    """Runs all prompt tokens but the last, in chunks; yields each chunk as committed. A round takes the last along."""
    for start in range(0, seq.prompt_len - 1, PREFILL_CHUNK):
        chunk = seq.tokens[start : min(start + PREFILL_CHUNK, seq.prompt_len - 1)]
        out = target.forward([Segment(seq.cache, chunk)], logits=False, taps=taps)
        seq.cache.keep(range(len(chunk)))
        yield Committed(chunk, 0, out.features_MF)


def room(seq: Sequence, target: LanguageModel) -> int:
    """Draft tokens that can still matter: the answer's last token is the rule's own, and the context ends somewhere."""
    left = target.context_length - len(seq.tokens)
    if seq.params.max_tokens is not None:
        left = min(left, seq.params.max_tokens - seq.output_len)
    return max(left - 1, 0)


def _checked(seq: Sequence, draft: SeqDraft, budget: int, target: LanguageModel) -> tuple[SeqDraft, Dropped | None]:
    """The draft without what no honest drafter proposes, or the rule cannot judge; counted by reason."""
    clean, dropped = sanitise(draft, budget, target.vocab_size)
    rule = seq.rule
    if clean.size and clean.law not in rule.laws:
        reason = f"rule {rule.name!r} cannot judge {clean.law.value} drafts"
        clean, dropped = clean.head(0), Dropped(draft.size, reason)
    elif not (clean.is_chain or (rule.trees and target.trees)):
        who = f"rule {rule.name!r}" if target.trees else f"model {target.name!r}"
        clean, dropped = clean.head(0), Dropped(draft.size, f"{who} takes chains only")
    if dropped is not None:
        seq.stats.dropped[dropped.reason] += dropped.count
    return clean, dropped


def _row_parents(draft: SeqDraft) -> list[int] | None:
    """Parents of the rows (last committed token, then nodes); None when they form a chain."""
    return None if draft.is_chain else [-1, *(parent + 1 for parent in draft.parents)]


def _rows(features_MF: Tensor | None, start: int, kept: list[int]) -> Tensor | None:
    """The features of these rows behind `start`. Most often they follow one another: a view, for copying a few rows
    takes ten times as long."""
    if features_MF is None:
        return None
    if kept[-1] == len(kept) - 1:
        return features_MF[start : start + len(kept)]
    return features_MF[[start + row for row in kept]]


def _contexts(seq: Sequence, draft: SeqDraft) -> Iterator[RowContext]:
    for node in range(-1, draft.size):
        yield RowContext(seq, tuple(draft.tokens[i] for i in draft.path(node)))


def _decided(draft: SeqDraft, verdict: Verdict, kept: list[int], logits_mV: Tensor) -> list[Decided]:
    tokens = [*(draft.tokens[node] for node in verdict.path), verdict.next_token]
    origins = [Origin.ACCEPTED] * verdict.n_accept + [verdict.origin]
    return [
        Decided(token, origin, draft.source if origin is Origin.ACCEPTED else "", logits_mV[row])
        for token, origin, row in zip(tokens, origins, kept, strict=True)
    ]
