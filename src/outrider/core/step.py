"""One round: draft, one target pass, accept, commit. Plain decoding is this very function with empty drafts.

Shapes: B sequences, M rows of the pass, V vocabulary, F feature width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from outrider.core.draft import SeqDraft, sanitise
from outrider.core.protocols import Committed, Controller, Drafter, LanguageModel, Segment
from outrider.core.rng import Purpose, RecordingRng, Rng
from outrider.core.trace import StepTrace, TracedDraw, TracedNode
from outrider.core.tree import depths
from outrider.core.types import Sequence
from outrider.core.verdict import Origin, SeqVerdict
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

BAD_LOGITS = "error: the target's logits are NaN, or every token is forbidden"


def spec_step(
    seqs: Seq[Sequence],
    target: LanguageModel,
    drafter: Drafter,
    controller: Controller,
    rng: Rng,
    commit: Commit,
    on_trace: Callable[[StepTrace], None] | None = None,
) -> None:
    """Advances every sequence by at least one token, in one target pass. Mutates sequences, caches and drafter state.

    A sequence whose logits are unusable gets an error as its finish_reason and commits nothing; the others go on. Where
    they become unusable inside a draft, the tokens before that place are committed: one of them may end the answer.
    """
    budgets = [min(k, room(seq, target)) for seq, k in zip(seqs, controller.budgets(seqs), strict=True)]
    draft = drafter.propose(seqs, budgets, rng)
    drafts = [_checked(seq, d, k, target) for seq, d, k in zip(seqs, draft.seqs, budgets, strict=True)]
    for seq, budget in zip(seqs, budgets, strict=True):
        seq.stats.draft_passes += draft.passes if budget else 0

    rows = [
        Segment(seq.cache, [seq.tokens[-1], *d.tokens], _row_parents(d)) for seq, d in zip(seqs, drafts, strict=True)
    ]
    out = target.forward(rows, taps=drafter.wants)
    assert out.logits_MV is not None
    p = warp(out.logits_MV, [context for seq, d in zip(seqs, drafts, strict=True) for context in _contexts(seq, d)])

    start = 0
    for seq, d in zip(seqs, drafts, strict=True):
        stop = start + 1 + d.size
        p_rows, logits, position = p.slice(start, stop), out.logits_MV[start:stop], seq.output_len
        verdict = seq.rule.verify(d, p_rows, rng, seq.seed, position)
        kept = [0, *(node + 1 for node in verdict.path)]
        usable = next((i for i, row in enumerate(kept) if p_rows.bad_M[row]), len(kept))
        if usable == 0:
            seq.finish_reason = BAD_LOGITS
        else:
            emitted = commit(seq, _decided(d, verdict, kept, logits)[:usable])
            accepted = min(emitted, verdict.n_accept)
            seq.stats.record(depths(d.parents), accepted, emitted - accepted, verdict.n_accept + 1 - emitted)
            seq.cache.keep(kept[:emitted])
            features = None if out.features_MF is None else out.features_MF[start:stop][kept[:emitted]]
            drafter.commit(seq, Committed(seq.tokens[-emitted:], accepted, features))
            controller.observe(seq, d.size, verdict.n_accept)
            if on_trace is not None:
                on_trace(_trace(seq, d, verdict, p_rows, rng, position, emitted))
        start = stop


def room(seq: Sequence, target: LanguageModel) -> int:
    """Draft tokens that can still matter: the answer's last token is the rule's own, and the context ends somewhere."""
    left = target.context_length - len(seq.tokens)
    if seq.params.max_tokens is not None:
        left = min(left, seq.params.max_tokens - seq.output_len)
    left = max(left - 1, 0)
    return left if seq.draft_limit is None else min(left, seq.draft_limit)


def _checked(seq: Sequence, draft: SeqDraft, budget: int, target: LanguageModel) -> SeqDraft:
    """The draft without what no honest drafter proposes, counted by reason; asserts that the rule may judge it."""
    clean, dropped = sanitise(draft, budget, target.vocab_size)
    if dropped is not None:
        seq.stats.dropped[dropped.reason] += dropped.count
    rule = seq.rule
    assert not clean.size or clean.law in rule.laws, f"rule {rule.name!r} cannot judge {clean.law.value} drafts"
    assert rule.trees or clean.is_chain, f"rule {rule.name!r} judges chains only"
    return clean


def _row_parents(draft: SeqDraft) -> list[int] | None:
    """Parents of the rows (last committed token, then nodes); None when they form a chain."""
    return None if draft.is_chain else [-1, *(parent + 1 for parent in draft.parents)]


def _contexts(seq: Sequence, draft: SeqDraft) -> Iterator[RowContext]:
    yield RowContext(seq)
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
        yield RowContext(seq, paths[-1])


def _decided(draft: SeqDraft, verdict: SeqVerdict, kept: list[int], logits_mV: Tensor) -> list[Decided]:
    tokens = [*(draft.tokens[node] for node in verdict.path), verdict.next_token]
    origins = [Origin.ACCEPTED] * verdict.n_accept + [verdict.origin]
    return [
        Decided(token, origin, draft.source if origin is Origin.ACCEPTED else "", logits_mV[row])
        for token, origin, row in zip(tokens, origins, kept, strict=True)
    ]


def _trace(
    seq: Sequence, draft: SeqDraft, verdict: SeqVerdict, p: Rows, rng: Rng, position: int, emitted: int
) -> StepTrace:
    draws = rng.take(seq.seed) if isinstance(rng, RecordingRng) else []
    nodes = [
        TracedNode(
            token,
            parent,
            p.probability(parent + 1, token),
            float(draft.q(node)[token]) if draft.q_row else 1.0,
            node in verdict.path,
        )
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True))
    ]
    final = [draw for draw in draws if draw.key.purpose is Purpose.TARGET and draw.outcome == verdict.next_token]
    return StepTrace(
        seq_id=seq.id,
        position=position,
        rule=seq.rule.name,
        lossless=seq.rule.lossless,
        source=draft.source,
        law=draft.law.value,
        nodes=nodes,
        draws=[
            TracedDraw(d.key.purpose.name.lower(), d.key.offset, d.kind, d.probability, d.uniform, d.outcome)
            for d in draws
        ],
        path=verdict.path,
        next_token=verdict.next_token,
        origin=verdict.origin.value,
        residual=list(final[-1].likeliest) if final and verdict.origin is Origin.RECOVERED else [],
        emitted=emitted,
    )
