"""What the drafters `dflash` and `dspark` share: one pass for a whole block, then its tokens from left to right.

Shapes: M rows, K draft tokens, n sequences in a step, d head width, r rank of the Markov head, S draft vocabulary, V
target vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence as Seq
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch import Tensor

from outrider.core.draft import Draft, DraftLaw
from outrider.core.protocols import Committed, LanguageModel
from outrider.core.rng import Rng
from outrider.core.step import PREFILL_CHUNK
from outrider.core.types import Sequence, TargetIdentity
from outrider.drafters.block_files import read_block
from outrider.drafters.block_net import BlockConfig, BlockNet
from outrider.drafters.block_parts import Parts, prepare_parts
from outrider.drafters.block_state import BlockState, Said
from outrider.drafters.catch_up import in_passes
from outrider.drafters.chain import GREEDY_BELOW_TEMPERATURE, ChainDrafter, Run
from outrider.drafters.head_fit import require_fit, require_host, require_width
from outrider.errors import PairingError

BlockRun = Run[BlockState]
Choice = tuple[int, float, float]
"""As in `ChainDrafter._choose`."""


class BlockDrafter(ChainDrafter[BlockState]):
    """Drafts chains with the block head `head`: a folder or file in one of the public layouts, or a network.

    target        the model that the head rides on
    identity      what the target is called and what its token ids stand for; None: sizes alone are compared
    other_target  accept a head whose file names another target; sizes and token ids must agree anyway
    dtype         of the head's weights: "int8", "int4", "bfloat16", "float32", or "auto" (int8 where the CPU kernels
                  run, float32 on other CPUs, the file's own elsewhere)
    draft_sample_method, greedy_below_temperature   as `draft_model`
    min_confidence   no token is drafted, nor any behind it, that the head gives less probability to be accepted; the
                     head decides before the token is known. A head without confidences: as `draft_model`

    Raises ModelFileError for a bad file, PairingError for a head of another target, ConfigError for an option. A
    sequence is not drafted while the features of its latest position are not known (a prompt of one token).
    """

    needs = frozenset({"target", "head", "identity"})

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
    ) -> None:
        super().__init__(draft_sample_method, greedy_below_temperature, min_confidence)
        net = copy.deepcopy(head) if isinstance(head, BlockNet) else read_block(head)
        what = f"the block head {head}" if not isinstance(head, BlockNet) else "the block head"
        self._require_kind(what, net.config)
        self.host = require_host(self.name, target)
        require_fit(what, net.config.trained_for(by_name=not other_target), target, self.host, identity)
        _require_layers(what, net.config, target.name, self.host.n_layers)
        shares = {"embed_tokens": not net.config.own_embedding, "lm_head": not net.config.own_head}
        require_width(what, net.config.layer.hidden_size, shares, target, self.host)
        self.config = net.config
        self.wants = tuple(layer for layer in net.config.layer_ids if layer >= 0)
        self.parts: Parts = prepare_parts(self.name, net, self.host, target.vocab_size, dtype)
        self.columns = self.parts.columns
        self._lead = 0 if net.config.sample_from_anchor else 1
        self.passes = 0

    @classmethod
    def _require_kind(cls, what: str, config: BlockConfig) -> None:
        """Raises PairingError for a head that is another drafter's."""
        raise NotImplementedError

    @torch.inference_mode()
    def propose(self, seqs: Seq[Sequence], budgets: Seq[int], rng: Rng) -> Draft:
        return super().propose(seqs, budgets, rng)

    def commit(self, seq: Sequence, committed: Committed) -> None:
        """Keeps the features of the positions that the target's cache gained."""
        state = self._states[seq.id]
        if committed.features_TF is not None and not state.stopped:
            state.add(committed.features_TF, seq.cache.length)

    def _new_state(self) -> BlockState:
        return BlockState(self.config.layer.context_length)

    def _ready(self, seq: Sequence, state: BlockState, budget: int) -> int:
        if state.held == 0 or state.held != len(seq.tokens) - 1:
            return 0
        return min(budget, self.config.n_drafts)

    def _prepare(self, runs: list[BlockRun]) -> None:
        """Catches up with the text, and runs the blocks: of each as many rows as its budget needs."""
        for batch in in_passes([(run, run.state.cache.end, run.state.held) for run in runs], PREFILL_CHUNK):
            self._read(batch)
        if not runs:
            return
        self._count(runs)
        counts = [run.limit + self._lead for run in runs]
        mask_1d = self.parts.mask_1d
        blocks = [
            (self.parts.embed(run.seq.tokens[-1]), mask_1d.expand(count - 1, -1))
            for run, count in zip(runs, counts, strict=True)
        ]
        spans = [(run.state.cache, run.state.window, count) for run, count in zip(runs, counts, strict=True)]
        h_Md = self.parts.backbone.rows(torch.cat([part for block in blocks for part in block]), spans)
        if self._lead:
            h_Md = torch.cat([rows_md[1:] for rows_md in torch.split(h_Md, counts)])
        logits_MS, sure_M = self.parts.logits(h_Md), self.parts.sure_rows(h_Md)
        for run, (start, stop) in zip(runs, pairwise(accumulate((run.limit for run in runs), initial=0)), strict=True):
            run.state.block = Said(logits_MS[start:stop], h_Md[start:stop], sure_M[start:stop])

    def _read(self, batch: list[tuple[BlockRun, int, int]]) -> None:
        """Keys and values of these positions."""
        self._count([run for run, _, _ in batch])
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
        going = [run for run in runs if self._goes_on(run)]
        return self.parts.behind([(run.state.block, len(run.tokens), _last(run)) for run in going])

    def _goes_on(self, run: BlockRun) -> bool:
        """Works out how probably the next token will be accepted, if the head says so; may end the run by it."""
        if self.parts.sure:
            block = run.state.block
            block.sure = self.parts.confidence(block.sure_K[len(run.tokens)], _last(run))
            run.done = block.sure < self.min_confidence
        return not run.done

    def _choose(self, run: BlockRun, logits_S: Tensor, top: float, column: int, rng: Rng) -> Choice | None:
        """A likeliest token whose own probability nobody asks for is known already."""
        plain = run.seq.params.plain_logits and run.seq.constraint is None
        if self.parts.sure and plain and run.law is DraftLaw.POINT and math.isfinite(top):
            return self.columns.token(column), 1.0, 1.0
        return super()._choose(run, logits_S, top, column, rng)

    def _take(self, run: BlockRun, token: int, peak: float, probability: float) -> None:
        """The head's confidence stands where that of the token would; it has decided already."""
        sure = self.parts.sure
        super()._take(run, token, run.state.block.sure if sure else peak, 1.0 if sure else probability)

    def _count(self, runs: Seq[BlockRun]) -> None:
        self.passes += 1
        for run in runs:
            run.state.count_pass()


def _last(run: BlockRun) -> int:
    """The token before the next one."""
    return run.tokens[-1] if run.tokens else run.seq.tokens[-1]


def _require_layers(what: str, config: BlockConfig, name: str, n_layers: int) -> None:
    """Raises PairingError unless the target has the layers whose *outputs* the head reads; -1 is the embedding."""
    ids = config.layer_ids
    if not ids or any(a >= b for a, b in pairwise(ids)) or not -1 <= ids[0] <= ids[-1] < n_layers or ids[-1] < 0:
        raise PairingError(
            f"{what}: its configuration says that it reads the outputs of the layers {list(ids)}, and {name} has "
            f"{n_layers} layers: needed are ascending ids from -1 (the embedding) to {n_layers - 1}"
        )
