"""What the drafters share whose head drafts token by token on its own output: `eagle3` and `mtp`.

Row t of the head reads the target's features of position t and the embedding of token t + 1, and says what token t + 2
may be. Behind the last committed token it goes on with its own output in the place of the features. The keys and values
of committed rows are always made from the target's features: those of drafted rows are forgotten after the round. They
depend on their own row alone.

Shapes: T positions, M rows, n sequences in a step, d head width.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor

from outrider.core.draft import DraftLaw
from outrider.core.protocols import LanguageModel
from outrider.core.rng import Rng
from outrider.core.step import PREFILL_CHUNK
from outrider.core.types import Sequence, TargetIdentity
from outrider.drafters.catch_up import in_passes
from outrider.drafters.chain import GREEDY_BELOW_TEMPERATURE, ChainDrafter, Run
from outrider.drafters.columns import Columns
from outrider.drafters.copies import MOST_COPY, add_copy_
from outrider.drafters.head_cache import Span
from outrider.drafters.head_drafter import HeadDrafter
from outrider.drafters.head_fit import require_width
from outrider.drafters.head_kernels import as_linear, choose_dtype
from outrider.drafters.options import require_number
from outrider.drafters.recurrent_chain import Ask, DraftChain, make_chain
from outrider.drafters.recurrent_core import Core, make_core
from outrider.drafters.recurrent_net import RecurrentNet
from outrider.drafters.recurrent_state import RecurrentState
from outrider.drafters.token_rows import OwnRows, SharedRows, TokenRows
from outrider.kernels import Drafted

ROWS_WITH_A_DRAFT = 16
"""So few rows are caught up with in the pass of the first draft token."""
COLDEST = 1e-30
"""Temperatures below it are taken for it, as in `kernels.softmax`."""

N = TypeVar("N", bound=RecurrentNet)


class RecurrentDrafter(HeadDrafter[RecurrentState], Generic[N]):
    """Drafts chains with the head `head`: a folder or file in one of the public layouts, or a network.

    target        the model that the head rides on
    identity      what the target is called and what its token ids stand for; None: sizes alone are compared
    other_target  accept a head whose file names another target; sizes and token ids must agree anyway
    dtype         of the head's weights: "int8", "int4", "bfloat16", "float32", or "auto" (int4 where the CPU kernels
                  run, float32 on other CPUs, the file's own elsewhere)
    copy          nats by which the logit of a token is raised that came the last time when the latest tokens stood in
                  the text, for each of those but one (`copies`); 0: the head alone
    draft_sample_method, greedy_below_temperature, min_confidence   as `draft_model`

    Raises ModelFileError for a bad file, PairingError for a head of another target, ConfigError for an option.
    """

    # A larger `copy` brought longer drafts and hardly a token more (docs/log.md).
    recommends: ClassVar[Mapping[str, float]] = MappingProxyType({**ChainDrafter.recommends, "copy": 1.5})

    def __init__(
        self,
        *,
        target: LanguageModel,
        head: str | Path | N,
        identity: TargetIdentity | None = None,
        other_target: bool = False,
        dtype: str = "auto",
        draft_sample_method: str = "auto",
        greedy_below_temperature: float = GREEDY_BELOW_TEMPERATURE,
        min_confidence: float = 0.0,
        copy: float = 0.0,
    ) -> None:
        super().__init__(draft_sample_method, greedy_below_temperature, min_confidence)
        self.copy = require_number(self.name, "copy", copy, 0, MOST_COPY)
        what, net = self._take_up(head, self._read, "head", target=target, identity=identity, other_target=other_target)
        shares = {"embed_tokens": not net.config.own_embedding, "lm_head": not net.config.own_head}
        require_width(what, net.config.layer.hidden_size, shares, target, self.host)
        self._tap(what, self._layers(what, net, target.name), target)
        device = self.host.embed([0]).device
        self.dtype, packed = choose_dtype(self.name, dtype, device, net.dtype)
        self.net = net.to(device, self.dtype).eval()
        ids_S = net.vocab.proposable(target.vocab_size)
        self.columns = Columns(ids_S, target.vocab_size)
        if net.lm_head is not None:
            net.lm_head = as_linear(net.lm_head.weight[: len(ids_S)])
        elif packed is not None:
            net.lm_head = as_linear(self.host.head_weights(ids_S.tolist()))
        self.core: Core = make_core(self.net, packed)
        own = net.embed_tokens
        if own is not None:
            self._embedded: TokenRows = OwnRows(own.weight)
        else:
            self._embedded = SharedRows(self.host.embed, self.host.embedding_rows, ids_S.tolist())
        self._chain = make_chain(self.net, self.core, ids_S, self._embedded.table)
        self._head = net.lm_head if net.lm_head is not None else self.host.head_rows(ids_S.tolist())

    def head_alone(self) -> Self:
        other = super().head_alone()
        other.copy = 0.0
        return other

    @abstractmethod
    def _read(self, path: str | Path) -> N:
        """The network of a head's files."""

    @abstractmethod
    def _layers(self, what: str, net: N, target: str) -> tuple[int, ...]:
        """The target layers whose outputs the head reads. Raises PairingError where there are none such."""

    @abstractmethod
    def _fused(self, run: Run[RecurrentState], start: int, stop: int) -> Tensor:
        """[T, d] from the target's features of these positions."""

    def _new_state(self) -> RecurrentState:
        return RecurrentState(self.net.config.layer.context_length)

    def _ready(self, seq: Sequence, state: RecurrentState, budget: int) -> int:
        ready = super()._ready(seq, state, budget)
        if ready:
            state.catch_up()
        return ready

    @torch.inference_mode()
    def _prepare(self, runs: list[Run[RecurrentState]], rng: Rng) -> None:
        """Keys and values of all rows but the last of sequences that miss many, some hundred rows a pass; then all of
        plain drafts."""
        behind = [(run, run.state.settled, run.state.held - 1) for run in runs]
        many = [(run, start, stop) for run, start, stop in behind if stop - start > ROWS_WITH_A_DRAFT]
        for batch in in_passes(many, PREFILL_CHUNK):
            self._count([run.state for run, _, _ in batch])
            tokens = [token for run, start, stop in batch for token in run.seq.tokens[start + 1 : stop + 1]]
            g_Md = torch.cat([self._fused(run, start, stop) for run, start, stop in batch])
            spans = [Span(run.state.cache, stop - start, run.state.window) for run, start, stop in batch]
            self.core.fill(*self.net.inputs(self._embedded(tokens).to(self.dtype), g_Md), spans)
            for run, _, stop in batch:
                run.state.settled = stop

        if self._chain is not None:
            likeliest = [run for run in runs if run.law is DraftLaw.POINT and run.plain]
            drawn = [run for run in runs if run.law is DraftLaw.IID and run.plainly_drawn]
            self._draft(
                self._chain, likeliest + [run for run in drawn if rng.foresee(run.draw_key(0)) is not None], rng
            )

    def _draft(self, chain: DraftChain, runs: list[Run[RecurrentState]], rng: Rng) -> None:
        """All tokens of these runs; in one call where the embeddings of all that it drafts are at hand."""
        while runs:
            rows, embedded_Md, g_Md = self._rows(runs)
            asks = [self._ask(run, span, rng) for run, span in zip(runs, self._spans(runs, rows), strict=True)]
            drafts, carried_nd = chain.draft(embedded_Md, g_Md, asks)
            for step in range(max(found.steps for found in drafts)):
                going = [n for n, found in enumerate(drafts) if step < found.steps]
                self._count([runs[n].state for n in going])
            self._hand_on(runs, carried_nd)
            for run, found in zip(runs, drafts, strict=True):
                self._take_all(run, found, rng.of(run.seq.id))
            runs = [run for run in runs if not run.done]

    def _ask(self, run: Run[RecurrentState], span: Span, rng: Rng) -> Ask:
        least = self.min_confidence / run.sure if self.min_confidence else 0.0
        limit = run.limit - len(run.tokens)
        ask = Ask(span, limit, run.seq.stop_ids, least)
        if self.copy:
            text_T, known = run.state.text.with_room(run.seq.tokens, run.tokens, limit)
            ask = ask._replace(copy=self.copy, text_T=text_T, known=known)
        if run.law is DraftLaw.POINT:
            return ask
        return ask._replace(temperature=max(run.seq.params.temperature, COLDEST), uniforms=_uniforms(run, rng))

    def _take_all(self, run: Run[RecurrentState], found: Drafted, rng: Rng) -> None:
        """The tokens that the chain found. Those drawn are drawn again where draws are made and noted down."""
        for i, (token, share) in enumerate(zip(found.tokens, found.shares, strict=True)):
            if run.done:
                return
            if found.weights_kS is not None:
                self._draw_from(run, found.weights_kS[i], rng)
                run.done |= run.tokens[-1:] != [token]
            elif self._goes_on(run, share):
                self._take(run, token, share)
        if found.lost and not run.done:
            self._lose(run)

    @torch.inference_mode()
    def _next_logits(self, runs: list[Run[RecurrentState]]) -> Tensor:
        """Behind the last draft token of every run; behind its last committed token at first, whose row comes with
        those that the cache lacks."""
        self._count([run.state for run in runs])
        rows, embedded_Md, g_Md = self._rows(runs)
        spans = self._spans(runs, rows)
        normed_nd, carried_nd = self.core.last(*self.net.inputs(embedded_Md.to(self.dtype), g_Md), spans)
        self._hand_on(runs, carried_nd)
        logits_nS = self._head(normed_nd if self.net.lm_head is not None else normed_nd.float()).float().cpu()
        if self.copy:
            for run, logits_S in zip(runs, logits_nS, strict=True):
                text_T, known = run.state.text.with_room(run.seq.tokens, run.tokens, 0)
                add_copy_(logits_S, text_T[:known], self.columns, self.copy)
        return logits_nS

    def _rows(self, runs: list[Run[RecurrentState]]) -> tuple[list[int], Tensor, Tensor]:
        """(how many are next in each run, their tokens' embeddings [M, d], what stands in the features' place)."""
        tokens = [run.tokens[-1:] or run.seq.tokens[run.state.settled + 1 :] for run in runs]
        given = [self._given(run) for run in runs]
        g_Md = given[0] if len(given) == 1 else torch.cat(given)
        return [len(own) for own in tokens], self._embedded([token for own in tokens for token in own]), g_Md

    def _spans(self, runs: list[Run[RecurrentState]], rows: list[int]) -> list[Span]:
        return [Span(run.state.cache, own, run.state.window) for run, own in zip(runs, rows, strict=True)]

    def _hand_on(self, runs: list[Run[RecurrentState]], carried_nd: Tensor) -> None:
        """Behind a pass over the rows that were next."""
        for run, carried_d in zip(runs, carried_nd, strict=True):
            run.state.carried_d = carried_d
            if not run.tokens:
                run.state.settle()

    def _given(self, run: Run[RecurrentState]) -> Tensor:
        """[T, d]: what stands in the features' place of the run's next rows."""
        if not run.tokens:
            return self._fused(run, run.state.settled, run.state.held)
        assert run.state.carried_d is not None
        return run.state.carried_d[None]


def _uniforms(run: Run[RecurrentState], rng: Rng) -> list[float]:
    """Those of the draws that are still to come, where draws are settled beforehand."""
    numbers = [rng.foresee(run.draw_key(i)) for i in range(len(run.tokens), run.limit)]
    return [number for number in numbers if number is not None]
