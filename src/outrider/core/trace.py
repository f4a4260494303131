"""One round, written down: what was proposed, drawn and decided. Versioned JSON, for people and tests."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass

from outrider.core.rng import Draw, Purpose
from outrider.core.step import SeqRound
from outrider.core.verdict import Origin

TRACE_VERSION = 1


@dataclass(frozen=True, slots=True)
class TracedNode:
    """A draft node: its probability under target (p) and drafter (q; 1 where none travels), and its fate."""

    token: int
    parent: int
    p: float
    q: float
    accepted: bool


@dataclass(frozen=True, slots=True)
class TracedDraw:
    """A random draw: what for, at which offset in the round, at which probability, the uniform, what came out."""

    purpose: str
    offset: int
    kind: str
    probability: float
    uniform: float | None
    outcome: int


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One sequence's round.

    `position` is the output position at which it began. `residual` lists the likeliest (token, probability) of the
    distribution from which a recovered token was drawn; empty otherwise. `emitted` counts the tokens that were
    committed; fewer than accepted + 1 means that a stop cut the block.
    """

    seq_id: int
    position: int
    rule: str
    lossless: bool
    source: str
    law: str
    nodes: list[TracedNode]
    draws: list[TracedDraw]
    path: list[int]
    next_token: int
    origin: str
    residual: list[tuple[int, float]]
    emitted: int
    version: int = TRACE_VERSION

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> StepTrace:
        """Reads what `to_json` wrote; refuses another version."""
        data = json.loads(text)
        if data.get("version") != TRACE_VERSION:
            raise ValueError(f"trace version {data.get('version')!r} is not supported: this reads {TRACE_VERSION}")
        data["nodes"] = [TracedNode(**node) for node in data["nodes"]]
        data["draws"] = [TracedDraw(**draw) for draw in data["draws"]]
        data["residual"] = [(token, p) for token, p in data["residual"]]
        return cls(**data)


def trace_of(done: SeqRound, draws: Seq[Draw]) -> StepTrace:
    """The trace of a round, given the draws that were recorded for its sequence."""
    draft, verdict = done.draft, done.verdict
    nodes = [
        TracedNode(
            token,
            parent,
            done.p[parent + 1][token],
            draft.q(node)[token] if draft.q_row else 1.0,
            node in verdict.path,
        )
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True))
    ]
    final = [draw for draw in draws if draw.key.purpose is Purpose.TARGET and draw.outcome == verdict.next_token]
    return StepTrace(
        seq_id=done.seq.id,
        position=done.position,
        rule=done.seq.rule.name,
        lossless=done.seq.rule.lossless,
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
        emitted=done.emitted,
    )
