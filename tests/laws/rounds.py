"""Exact laws of whole answers: `spec_step` over a TableModel until the answer ends, every draw branched.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.core.draft import Draft, DraftLaw, SeqDraft
from outrider.core.protocols import Committed, Controller, Drafter, LanguageModel, Segment, Verifier
from outrider.core.rng import ExhaustiveRng, Key, Purpose, Rng
from outrider.core.row import Row
from outrider.core.step import Decided, spec_step
from outrider.core.types import SamplingParams, Sequence
from outrider.core.warp import RowContext, warp
from outrider.models.table import TableModel
from tests.laws.harness import Law, Prefix

PROMPT = [0]


def table_model(vocab_size: int, order: int, seed: int, sharpness: float = 1.0) -> TableModel:
    """A random Markov model."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((vocab_size,) * (order + 1), generator=generator, dtype=torch.float64) * sharpness
    return TableModel.from_table(logits)


def answer(prompt_len: int, tokens: Seq[int], params: SamplingParams, stop_ids: frozenset[int]) -> Sequence:
    """A sequence as it stands after these tokens, for asking what its processors say."""
    seq = Sequence(0, list(tokens[:prompt_len]), params, seed=0, stop_ids=stop_ids)
    seq.tokens = list(tokens)
    return seq


class TableDrafter:
    """Drafts from a model of its own, under processors of its own, in the way that `law` says.

    `stop(q_V, token)` ends a draft behind that token; it may know the draft and q, never p.
    """

    name = "table"
    trees = False
    wants = ()

    def __init__(
        self,
        model: TableModel,
        params: SamplingParams,
        law: DraftLaw = DraftLaw.IID,
        stop: Callable[[Tensor, int], bool] = lambda q_V, token: False,
    ) -> None:
        self.model = model
        self.params = params
        self.laws = frozenset({law})
        self.law = law
        self.stop = stop
        self._q: dict[tuple[int, ...], Tensor] = {}

    def open(self, seq: Sequence) -> None:
        return

    def commit(self, seq: Sequence, committed: Committed) -> None:
        return

    def close(self, seq: Sequence) -> None:
        return

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int], rng: Rng) -> Draft:
        return Draft([self.draft(seq, budget, rng) for seq, budget in zip(seqs, budgets, strict=True)])

    def draft(self, seq: Sequence, budget: int, rng: Rng) -> SeqDraft:
        tokens: list[int] = []
        rows: list[Row] = []
        for i in range(budget):
            q_V = self.q(seq, tokens)
            token = self.choose(q_V, seq, i, rng)
            tokens.append(token)
            rows.append(Row.dense(q_V))
            if self.stop(q_V, token):
                break
        return SeqDraft.chain(tokens, self.law, rows if self.law is DraftLaw.IID else ())

    def q(self, seq: Sequence, path: list[int]) -> Tensor:
        """The processed row behind the committed text and `path`; computed once."""
        context = (*seq.tokens, *path)
        if context not in self._q:
            shadow = answer(seq.prompt_len, seq.tokens, self.params, seq.stop_ids)
            logits_V = self.model.forward([Segment(self.model.new_cache(), context)]).logits_MV[-1]
            self._q[context] = warp(logits_V[None], [RowContext(shadow, tuple(path))])[0].to_dense()
        return self._q[context]

    def choose(self, q_V: Tensor, seq: Sequence, i: int, rng: Rng) -> int:
        position = seq.output_len
        if self.law is DraftLaw.POINT:
            return int(q_V.argmax())
        if self.law is DraftLaw.SHARED_NOISE:
            return rng.race(Row.dense(q_V), Key(seq.seed, position + i, Purpose.RACE))
        return rng.categorical(Row.dense(q_V), Key(seq.seed, position, Purpose.DRAFT, i))


class CautiousController:
    """Two draft tokens after a round that accepted something (and at the start), one after any other."""

    def __init__(self) -> None:
        self.accepted: dict[int, int] = {}

    def budgets(self, seqs: Seq[Sequence], rooms: Seq[int]) -> list[int]:
        return [2 if self.accepted.get(seq.id, 1) else 1 for seq in seqs]

    def observe(self, seq: Sequence, asked: int, drafted: int, accepted: int, source: str) -> None:
        self.accepted[seq.id] = accepted


class BudgetController:
    """A fixed K for each sequence id, so that a batch can be ragged."""

    def __init__(self, *k: int) -> None:
        self.k = k

    def budgets(self, seqs: Seq[Sequence], rooms: Seq[int]) -> list[int]:
        return [self.k[seq.id] for seq in seqs]

    def observe(self, seq: Sequence, asked: int, drafted: int, accepted: int, source: str) -> None:
        return


def commit(seq: Sequence, decided: list[Decided]) -> int:
    """Appends until the answer ends."""
    for count, token in enumerate(decided, start=1):
        seq.tokens.append(token.token)
        if token.token in seq.stop_ids:
            seq.finish_reason = "stop"
        elif seq.output_len == seq.params.max_tokens:
            seq.finish_reason = "length"
        if seq.finished:
            return count
    return len(decided)


@dataclass(frozen=True)
class Setting:
    """What a run is made of; `drafter` and `controller` are built afresh for every branch unless they hold no state."""

    target: LanguageModel
    rule: Verifier
    drafter: Callable[[], Drafter]
    controller: Callable[[], Controller]
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    prompts: list[list[int]] = field(default_factory=lambda: [PROMPT])


def generate(setting: Setting, rng: Rng, seeds: Seq[int] | None = None) -> list[list[int]]:
    """The answers to all prompts, decoded as one batch."""
    drafter, controller = setting.drafter(), setting.controller()
    seqs = [_open(setting, i, prompt, seeds[i] if seeds else i) for i, prompt in enumerate(setting.prompts)]
    for seq in seqs:
        drafter.open(seq)
    while active := [seq for seq in seqs if not seq.finished]:
        spec_step(active, setting.target, drafter, controller, rng, commit)
    for seq in seqs:
        seq.stats.check()
    return [seq.tokens[seq.prompt_len :] for seq in seqs]


def _open(setting: Setting, seq_id: int, prompt: list[int], seed: int) -> Sequence:
    seq = Sequence(seq_id, prompt, setting.params, seed=seed, stop_ids=setting.stop_ids)
    seq.rule = setting.rule
    seq.cache = setting.target.new_cache()
    if len(prompt) > 1:
        setting.target.forward([Segment(seq.cache, prompt[:-1])], logits=False)
        seq.cache.keep(range(len(prompt) - 1))
    return seq


def answer_law(setting: Setting) -> Law:
    """The exact law of the answer to the only prompt."""
    assert len(setting.prompts) == 1
    return ExhaustiveRng().law(lambda rng: tuple(generate(setting, rng)[0]))


def joint_law(setting: Setting) -> dict[tuple[Prefix, ...], float]:
    """The exact joint law of the answers to all prompts."""
    return ExhaustiveRng().law(lambda rng: tuple(tuple(tokens) for tokens in generate(setting, rng)))


def plain_law(
    target: TableModel, params: SamplingParams, stop_ids: frozenset[int] = frozenset(), prompt: Seq[int] = tuple(PROMPT)
) -> Law:
    """The law of decoding token by token, multiplied out from the processed rows: no sampling code is involved."""
    law: Law = {}
    frontier: Law = {(): 1.0}
    while frontier:
        longer: Law = {}
        for tokens, probability in frontier.items():
            text = [*prompt, *tokens]
            logits_V = target.forward([Segment(target.new_cache(), text)]).logits_MV[-1]
            p_V = warp(logits_V[None], [RowContext(answer(len(prompt), text, params, stop_ids))])[0].to_dense()
            for token, weight in enumerate(p_V.tolist()):
                if weight > 0.0:
                    ended = token in stop_ids or len(tokens) + 1 == params.max_tokens
                    (law if ended else longer)[(*tokens, token)] = probability * weight
        frontier = longer
    return law
