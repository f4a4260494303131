"""A small exact world for drafters: models that keep account of their caches, and a way to run rounds."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor

from outrider.control.fixed import FixedController
from outrider.core.draft import DraftLaw, SeqDraft
from outrider.core.protocols import Committed, Drafter, Pass, Segment
from outrider.core.registry import verifier_class
from outrider.core.rng import CounterRng, Rng
from outrider.core.step import Decided, spec_step
from outrider.core.types import SamplingParams, Sequence
from outrider.models.table import TableCache, TableModel

VOCAB = 7
PREDICTION = [1, 2, 3, 4, 5, 6, 0, 2, 4, 6, 1, 3, 5, 0, 6, 5, 4, 3, 2, 1]

GREEDY = SamplingParams(max_tokens=10)
SAMPLED = SamplingParams(temperature=0.9, max_tokens=10)
PENALISED = SamplingParams(temperature=0.8, top_p=0.9, frequency_penalty=0.7, repetition_penalty=1.2, max_tokens=10)
RULED_PARAMS = [("greedy", GREEDY), ("chain", SAMPLED), ("block", PENALISED), ("match", SAMPLED), ("coupled", SAMPLED)]


class WatchedModel(TableModel):
    """A table model that knows its open caches, can leave early, and fails on sequences that hold a poison token."""

    n_layers = 2

    @property
    def hidden_size(self) -> int:
        return self.vocab_size

    @property
    def tappable(self) -> int:
        return self.n_layers

    @property
    def embedding_rows(self) -> int:
        return self.vocab_size

    def embed(self, tokens: Seq[int]) -> Tensor:
        """One-hot rows, like the features."""
        return torch.eye(self.vocab_size)[list(tokens)]

    def last_norm(self, x_Md: Tensor) -> Tensor:
        return x_Md

    def head_rows(self, ids: Seq[int]) -> Callable[[Tensor], Tensor]:
        weight_Sd = self.head_weights(ids)
        return lambda x_Md: x_Md @ weight_Sd.T

    def head_weights(self, ids: Seq[int]) -> Tensor:
        return 3 * torch.eye(self.vocab_size)[list(ids)]

    def __init__(self, logits: Tensor, *, poison: int | None = None, context_length: int = 4096) -> None:
        table = TableModel.from_table(logits, context_length=context_length)
        super().__init__(table._row, table.vocab_size, context_length=context_length)
        self.logits = logits
        self.poison = poison
        self.caches: list[TableCache] = []

    def new_cache(self) -> TableCache:
        cache = super().new_cache()
        self.caches.append(cache)
        return cache

    def forward(self, segments: Seq[Segment], *, logits: bool = True, taps: Seq[int] = ()) -> Pass:
        for segment in segments:
            assert isinstance(segment.cache, TableCache)
            held = len(segment.cache.tokens) + len(segment.tokens)
            assert held <= self.context_length, f"{held} positions of {self.context_length}"
            if self.poison in [*segment.cache.tokens, *segment.tokens]:
                self.passes += 1
                raise RuntimeError("poisoned")
        return super().forward(segments, logits=logits, taps=taps)

    def first_layers(self, count: int) -> WatchedModel:
        """Half the depth, half the sharpness."""
        return WatchedModel(self.logits * count / self.n_layers)

    @property
    def held(self) -> int:
        """Tokens in caches that were not freed."""
        return sum(cache.length for cache in self.caches)


def watched(
    seed: int, *, vocab: int = VOCAB, order: int = 2, poison: int | None = None, ctx: int = 4096
) -> WatchedModel:
    """A random model; models of nearby seeds resemble each other."""
    generator = torch.Generator().manual_seed(17)
    shape = (vocab,) * (order + 1)
    common = torch.randn(shape, generator=generator, dtype=torch.float64) * 2
    generator.manual_seed(seed)
    own = torch.randn(shape, generator=generator, dtype=torch.float64)
    return WatchedModel(common + own, poison=poison, context_length=ctx)


def sequence(
    seq_id: int, prompt: Seq[int], params: SamplingParams = GREEDY, rule: str = "greedy", seed: int = 0
) -> Sequence:
    """A sequence with a rule and a prediction, not yet opened anywhere."""
    seq = Sequence(seq_id, list(prompt), params, seed=seed, prediction=list(PREDICTION))
    seq.rule = verifier_class(rule)()
    seq.cache = TableCache()
    return seq


def begin(drafter: Drafter, seq: Sequence) -> None:
    """Opens a sequence, new or resumed, and prefills: hidden states come for all tokens but the last."""
    drafter.open(seq)
    assert isinstance(seq.cache, TableCache)
    seq.cache.tokens = []
    gain(drafter, seq, Committed(seq.tokens[:-1], 0))


def gain(drafter: Drafter, seq: Sequence, committed: Committed) -> None:
    """The target's cache gains all positions but the last, as a pass of a `WatchedModel` would have it."""
    assert isinstance(seq.cache, TableCache)
    gained = seq.tokens[len(seq.cache.tokens) : -1]
    seq.cache.tokens = seq.tokens[:-1]
    features = torch.eye(VOCAB, dtype=torch.float64)[gained].repeat(1, len(drafter.wants)) if drafter.wants else None
    if committed.tokens:
        drafter.commit(seq, replace(committed, features_TF=features))


def append(seq: Sequence, decided: list[Decided]) -> int:
    """Commits without text: stops at max_tokens."""
    for count, token in enumerate(decided, 1):
        seq.tokens.append(token.token)
        if seq.output_len == seq.params.max_tokens:
            seq.finish_reason = "length"
            return count
    return len(decided)


def start(seqs: Seq[Sequence], target: TableModel, drafter: Drafter) -> None:
    """Opens the sequences and prefills the target."""
    for seq in seqs:
        drafter.open(seq)
        seq.cache = target.new_cache()
        if len(seq.tokens) > 1:
            out = target.forward([Segment(seq.cache, seq.tokens[:-1])], logits=False, taps=drafter.wants)
            seq.cache.keep(range(len(seq.tokens) - 1))
            drafter.commit(seq, Committed(seq.tokens[: seq.prompt_len - 1], 0, out.features_MF))


def finish(
    seqs: Seq[Sequence], target: TableModel, drafter: Drafter, k: int, rng: Rng | None = None
) -> list[list[int]]:
    """Runs rounds until every sequence has ended, closes them, and returns the answers."""
    live = [seq for seq in seqs if not seq.finished]
    while live:
        spec_step(live, target, drafter, FixedController(k), rng or CounterRng(), append)
        live = [seq for seq in live if not seq.finished]
    for seq in seqs:
        drafter.close(seq)
        seq.stats.check()
    return [seq.tokens[seq.prompt_len :] for seq in seqs]


def commit_tokens(drafter: Drafter, seq: Sequence, tokens: Seq[int], accepted: int) -> None:
    """Tokens become final by other means than this drafter's draft."""
    seq.tokens.extend(tokens)
    gain(drafter, seq, Committed(list(tokens), accepted))


def same(a: SeqDraft, b: SeqDraft, q_error: float = 0.0) -> bool:
    """Whether two drafts are equal in everything that a rule or a controller can see; q within `q_error`."""
    flat = (a.tokens, a.parents, a.law, a.q_row, a.source) == (b.tokens, b.parents, b.law, b.q_row, b.source)
    rows = len(a.q_rows) == len(b.q_rows) and all(
        torch.allclose(x.to_dense(), y.to_dense(), rtol=0, atol=q_error)
        for x, y in zip(a.q_rows, b.q_rows, strict=True)
    )
    return flat and rows and torch.allclose(torch.tensor(a.confidence), torch.tensor(b.confidence))


def needs_q(draft: SeqDraft) -> bool:
    return draft.law in (DraftLaw.IID, DraftLaw.NO_REPLACEMENT)
