"""What the drafters `dflash` and `dspark` share: one pass for a whole block, then its tokens from left to right.

A block is always run whole, as it was trained, and a budget says how many of its rows are read out: its rows see each
other both ways, so the rows of a shorter block would be others. A row more costs little, since the layers' weights are
read once for all of them; the head, most of the work, computes only the rows that are read out. And so the first tokens
of a draft are the same whatever its budget.

Likeliest tokens of plain logits are found in one call of the kernels; what is drawn, or edited by processors, goes
token by token.

Shapes: M rows, K draft tokens, b rows of a block, n sequences in a step, d head width, S draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from itertools import pairwise
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from outrider.core.draft import Draft, DraftLaw
from outrider.core.protocols import Committed, LanguageModel
from outrider.core.rng import Rng
from outrider.core.row import Row
from outrider.core.step import PREFILL_CHUNK
from outrider.core.types import Sequence, TargetIdentity
from outrider.drafters.block_files import read_block
from outrider.drafters.block_habits import MOST, Habits
from outrider.drafters.block_net import BlockConfig, BlockNet
from outrider.drafters.block_parts import Parts, prepare_parts
from outrider.drafters.block_run import BlockRun, last, spans
from outrider.drafters.block_state import BlockState, Said
from outrider.drafters.catch_up import in_passes
from outrider.drafters.chain import GREEDY_BELOW_TEMPERATURE
from outrider.drafters.head_cache import Span
from outrider.drafters.head_drafter import HeadDrafter
from outrider.drafters.head_fit import require_width
from outrider.drafters.options import require_number
from outrider.errors import PairingError


class BlockDrafter(HeadDrafter[BlockState]):
    """Drafts chains with the block head `head`: a folder or file in one of the public layouts, or a network.

    target        the model that the head rides on
    identity      what the target is called and what its token ids stand for; None: sizes alone are compared
    other_target  accept a head whose file names another target; sizes and token ids must agree anyway
    dtype         of the head's weights: "int8", "int4", "bfloat16", "float32", or "auto" (int4 where the CPU kernels
                  run, float32 on other CPUs, the file's own elsewhere)
    draft_sample_method, greedy_below_temperature   as `draft_model`
    min_confidence   a draft ends before the first place where the product of the head's confidences, from the draft's
                     first place on, is less than this. A head without confidences: as `draft_model`
    adapt         how far, in nats, the bias of a pair of tokens moves when verification cuts a draft short there, and
                  whether confidences are calibrated by what was accepted; each sequence for itself, until it is
                  closed (`block_habits`). 0: neither

    Raises ModelFileError for a bad file, PairingError for a head of another target, ConfigError for an option.
    """

    def __init__(
        self,
        *,
        target: LanguageModel,
        head: str | Path | BlockNet,
        identity: TargetIdentity | None = None,
        other_target: bool = False,
        dtype: str = "auto",
        draft_sample_method: str = "auto",
        greedy_below_temperature: float = GREEDY_BELOW_TEMPERATURE,
        min_confidence: float = 0.0,
        adapt: float = 0.0,
    ) -> None:
        super().__init__(draft_sample_method, greedy_below_temperature, min_confidence)
        self.adapt = require_number(self.name, "adapt", adapt, 0, MOST)
        what, net = self._take_up(
            head, read_block, "block head", target=target, identity=identity, other_target=other_target
        )
        self._require_kind(what, net.config)
        _require_layers(what, net.config, target.name, self.host.n_layers)
        shares = {"embed_tokens": not net.config.own_embedding, "lm_head": not net.config.own_head}
        require_width(what, net.config.layer.hidden_size, shares, target, self.host)
        self.config = net.config
        self._tap(what, tuple(layer for layer in net.config.layer_ids if layer >= 0), target)
        self.parts: Parts = prepare_parts(self.name, net, self.host, target.vocab_size, dtype)
        self.columns = self.parts.columns
        self._lead = 0 if net.config.sample_from_anchor else 1

    @classmethod
    def _require_kind(cls, what: str, config: BlockConfig) -> None:
        """Raises PairingError for a head that is another drafter's."""
        raise NotImplementedError

    def head_alone(self) -> Self:
        other = super().head_alone()
        other.adapt = 0.0
        return other

    @torch.inference_mode()
    def propose(self, seqs: Seq[Sequence], budgets: Seq[int], rng: Rng) -> Draft:
        draft = super().propose(seqs, budgets, rng)
        for seq, own in zip(seqs, draft.seqs, strict=True):
            if self.adapt:
                state = self._states[seq.id]
                state.habits.note(seq.tokens[-1], own.tokens, state.block.said_K)
        return draft

    def commit(self, seq: Sequence, committed: Committed) -> None:
        """Learns from what became of a draft, too."""
        self._states[seq.id].habits.learn(committed.tokens)
        super().commit(seq, committed)

    def _new_state(self) -> BlockState:
        config = self.config
        habits = Habits(self.columns, config.vocab_size, config.n_drafts, self.adapt)
        return BlockState(config.layer.context_length, habits)

    def _ready(self, seq: Sequence, state: BlockState, budget: int) -> int:
        return super()._ready(seq, state, min(budget, self.config.n_drafts))

    def _prepare(self, runs: list[BlockRun], rng: Rng) -> None:
        """Catches up with the text, runs the blocks, and takes the likeliest tokens where nothing else is asked for."""
        for batch in in_passes([(run, run.state.cache.end, run.state.held) for run in runs], PREFILL_CHUNK):
            self._read(batch)
        if not runs:
            return
        self._count([run.state for run in runs])
        h_Md = self._speaking(runs)
        logits_MS, confidence_M = self.parts.logits(h_Md), self.parts.confidence_rows(h_Md)
        for run, (start, stop) in zip(runs, spans([run.limit for run in runs]), strict=True):
            run.state.block = Said(logits_MS[start:stop], h_Md[start:stop], confidence_M[start:stop])
        self._walk([run for run in runs if run.law is DraftLaw.POINT and run.plain], logits_MS)

    def _speaking(self, runs: list[BlockRun]) -> Tensor:
        """[M, d]: of each block the rows that say the tokens that its budget allows."""
        b, first = self.config.block_size, self._lead
        x_Md = self.parts.mask_1d.repeat(len(runs) * b, 1)
        for n, run in enumerate(runs):
            x_Md[n * b] = self.parts.embed(run.seq.tokens[-1])[0]
        h_Md = self.parts.backbone.rows(x_Md, [Span(run.state.cache, b, run.state.window) for run in runs])
        read = [h_Md[n * b + first : n * b + first + run.limit] for n, run in enumerate(runs)]
        return read[0] if len(read) == 1 else torch.cat(read)

    def _walk(self, runs: list[BlockRun], logits_MS: Tensor) -> None:
        """All tokens of these runs at once; `logits_MS` are the rows of all. Where a row is not finite the run goes on
        step by step, and ends there."""
        walk = self.parts.walk
        if not runs or walk is None:
            return
        counts, shares_wanted = [run.limit for run in runs], not self.parts.has_confidence
        before, pairs = [run.seq.tokens[-1] for run in runs], [run.state.habits.pairs for run in runs]
        if sum(counts) < len(logits_MS):
            logits_MS = torch.cat([run.state.block.logits_KS for run in runs])
        columns, tops, shares = walk(logits_MS, counts, before, pairs, shares=shares_wanted)
        for run, (start, stop) in zip(runs, spans(counts), strict=True):
            for m in range(start, stop):
                if run.done or math.isnan(tops[m]) or not self._is_confident(run):
                    break
                share = shares[m] if shares_wanted else 1.0
                if self._goes_on(run, share):
                    self._take(run, self.columns.token(columns[m]), share)

    def _read(self, batch: list[tuple[BlockRun, int, int]]) -> None:
        """Keys and values of these positions."""
        self._count([run.state for run, _, _ in batch])
        features_MF = torch.cat([self._features(run, start, stop) for run, start, stop in batch])
        positions = [position for _, start, stop in batch for position in range(start, stop)]
        kv_L2MGD = self.parts.backbone.context(features_MF, positions)
        parts = torch.split(kv_L2MGD, [stop - start for _, start, stop in batch], dim=2)
        for (run, _, _), part in zip(batch, parts, strict=True):
            run.state.cache.append(part)
            if run.state.cache.end == run.state.held:
                run.state.settle()

    def _features(self, run: BlockRun, start: int, stop: int) -> Tensor:
        """The target's hidden states at these positions. Layer id -1 is the target's embedding itself."""
        features_TF = run.state.features(start, stop)
        if self.config.layer_ids[0] >= 0:
            return features_TF
        embedded_Td = self.host.embed(run.seq.tokens[start:stop])
        return torch.cat([embedded_Td.to(features_TF), features_TF], dim=1)

    def _next_logits(self, runs: list[BlockRun]) -> Tensor:
        """Whether a token is drafted at all is decided before it is known."""
        going = [run for run in runs if self._is_confident(run)]
        logits_nS = self.parts.behind([(run.state.block, len(run.tokens), last(run)) for run in going])
        for run, logits_S in zip(going, logits_nS, strict=True):
            if (pairs := run.state.habits.pairs) is not None:
                pairs.add_(logits_S, last(run))
        return logits_nS

    def _is_confident(self, run: BlockRun) -> bool:
        """Works out how probably the next token will be accepted, if the head says so; may end the run by it."""
        if self.parts.has_confidence:
            block, place = run.state.block, len(run.tokens)
            logit = self.parts.confidence_behind(block.confidence_K[place], last(run))
            block.said_K.append(logit)
            block.confidence = run.state.habits.confidence(logit, place)
            return super()._goes_on(run, block.confidence)
        return not run.done

    def _continue(self, run: BlockRun, logits_S: Tensor, top: float, column: int, rng: Rng) -> None:
        """A likeliest token whose own probability nobody asks for is known already."""
        if self.parts.has_confidence and run.plain and run.law is DraftLaw.POINT and math.isfinite(top):
            self._take(run, self.columns.token(column), 1.0)
        else:
            super()._continue(run, logits_S, top, column, rng)

    def _peak(self, q: Row) -> float:
        return 1.0 if self.parts.has_confidence else super()._peak(q)

    def _goes_on(self, run: BlockRun, peak: float) -> bool:
        """The head's confidence has decided already, where it has one."""
        return self.parts.has_confidence or super()._goes_on(run, peak)

    def _take(self, run: BlockRun, token: int, peak: float) -> None:
        """The head's confidence stands where that of the token would."""
        super()._take(run, token, run.state.block.confidence if self.parts.has_confidence else peak)


def _require_layers(what: str, config: BlockConfig, name: str, n_layers: int) -> None:
    """Raises PairingError unless the target has the layers whose *outputs* the head reads; -1 is the embedding."""
    ids = config.layer_ids
    if not ids or any(a >= b for a, b in pairwise(ids)) or not -1 <= ids[0] <= ids[-1] < n_layers or ids[-1] < 0:
        raise PairingError(
            f"{what}: its configuration says that it reads the outputs of the layers {list(ids)}, and {name} has "
            f"{n_layers} layers: needed are ascending ids from -1 (the embedding) to {n_layers - 1}"
        )
