"""One round, written down: what was proposed, drawn and decided. Versioned JSON, for people and tests."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

TRACE_VERSION = 1


@dataclass(frozen=True, slots=True)
class TracedNode:
    """A draft node: its probability under target (p) and drafter (q; 1 for a point draft), and its fate."""

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
