"""Drafter `eagle3`: a one-layer head on the target's hidden states (EAGLE-3, Li et al. 2025, 2503.01840, section 3).

Row t of the head reads the target's features of position t and the embedding of token t + 1, and says what token t + 2
may be. Behind the last committed token it goes on with its own output in the place of the features. The keys and values
of committed rows are always made from the target's features: those of drafted rows are forgotten after the round. They
depend on their own row alone, so catching up computes nothing but them, for every row but the last.

Shapes: T positions, M rows, n sequences in a step, d head width, F target features, E = 2 d, S draft vocabulary,
V target vocabulary, H query heads, G key-value heads, D head width of the attention.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch import Tensor

from outrider import kernels
from outrider.core.protocols import Committed, LanguageModel
from outrider.core.step import PREFILL_CHUNK
from outrider.core.types import Sequence, TargetIdentity
from outrider.drafters.chain import GREEDY_BELOW_TEMPERATURE, ChainDrafter, Run
from outrider.drafters.columns import Columns
from outrider.drafters.eagle3_files import read_eagle3
from outrider.drafters.eagle3_net import Eagle3Config, Eagle3Net
from outrider.drafters.head_fit import require_fit, require_host
from outrider.drafters.head_layer import HeadCache, pack_
from outrider.errors import ConfigError, PairingError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Eagle3State:
    """One sequence's place in the head.

    The target's features are known of the positions before `held`; the cache holds the rows before `settled`, and
    behind them those of the last draft. A head sees the last `window` positions.
    """

    def __init__(self, window: int) -> None:
        self.stopped = ""
        self.window = window
        self.held = self.settled = 0
        self.cache = HeadCache(0)
        self.carried_d: Tensor | None = None
        self._features: list[Tensor] = []
        self._passes = 0

    def add(self, features_TF: Tensor, end: int) -> None:
        """Features of the positions up to `end`. A gap before them starts the head's window anew."""
        start = end - len(features_TF)
        if start != self.held:
            self._features, self.cache, self.settled = [], HeadCache(start), start
        self._features.append(features_TF)
        self.held = end
        if end - self.settled > self.window:
            self._features = [torch.cat(self._features)[-self.window :]]
            self.settled = end - self.window
            self.cache = HeadCache(self.settled)

    def catch_up(self) -> None:
        """Forgets the last draft; the row of the last position is always run again."""
        self.settled = min(self.settled, self.held - 1)
        self.cache.truncate(self.settled)
        self.cache.keep_last(self.window)

    def features(self, start: int, stop: int) -> Tensor:
        """[stop - start, F] of these positions, from `settled` on."""
        features_TF = self._features[0] if len(self._features) == 1 else torch.cat(self._features)
        self._features = [features_TF]
        base = self.held - len(features_TF)
        return features_TF[start - base : stop - base]

    def settle(self) -> None:
        """All rows before `held` are in the cache."""
        self._features = [self.features(self.held - 1, self.held).clone()]
        self.settled = self.held

    def count_pass(self) -> None:
        self._passes += 1

    def take_passes(self) -> int:
        """Passes since this was last asked."""
        passes, self._passes = self._passes, 0
        return passes

    def stop(self, reason: str) -> None:
        """No more drafts; gives the memory back."""
        self.stopped = reason
        self.free()

    def free(self) -> None:
        """Gives the memory back."""
        self.cache, self._features, self.carried_d = HeadCache(0), [], None
        self.held = self.settled = 0


class Eagle3Drafter(ChainDrafter[Eagle3State]):
    """Drafts chains with the head `head`: a folder or file in one of the public layouts, or a network.

    target        the model that the head rides on
    identity      what the target is called and what its token ids stand for; None: sizes alone are compared
    other_target  accept a head whose file names another target; sizes and token ids must agree anyway
    dtype         of the head's weights: "float32", "bfloat16", or "auto" (bfloat16 where the CPU kernels run, float32
                  on other CPUs, the file's own elsewhere)
    draft_sample_method, greedy_below_temperature, min_confidence   as `draft_model`

    Raises ModelFileError for a bad file, PairingError for a head of another target, ConfigError for an option. A
    sequence is not drafted while the features of its latest position are not known (a prompt of one token).
    """

    name = "eagle3"
    needs = frozenset({"target", "head", "identity"})

    def __init__(
        self,
        *,
        target: LanguageModel,
        head: str | Path | Eagle3Net,
        identity: TargetIdentity | None = None,
        other_target: bool = False,
        dtype: str = "auto",
        draft_sample_method: str = "auto",
        greedy_below_temperature: float = GREEDY_BELOW_TEMPERATURE,
        min_confidence: float = 0.0,
    ) -> None:
        super().__init__(draft_sample_method, greedy_below_temperature, min_confidence)
        if dtype not in ("auto", *DTYPES):
            raise ConfigError(f"{self.name}: dtype = {dtype!r} is not allowed: choose one of auto, {', '.join(DTYPES)}")
        net = copy.deepcopy(head) if isinstance(head, Eagle3Net) else read_eagle3(head)
        what = f"the EAGLE-3 head {head}" if not isinstance(head, Eagle3Net) else "the EAGLE-3 head"
        self.host = require_host(self.name, target)
        require_fit(what, net.config.trained_for(by_name=not other_target), target, self.host, identity)
        self.layer_ids = _layer_ids(what, net.config, target.name, self.host.n_layers)
        _require_width(what, net.config, target.name, self.host.hidden_size)
        device = self.host.embed([0]).device
        packs = device.type == "cpu" and kernels.available()
        automatic = torch.bfloat16 if packs else torch.float32 if device.type == "cpu" else net.dtype
        self.dtype = DTYPES.get(dtype, automatic)
        self.net = net.to(device, self.dtype).eval()
        if packs:
            pack_(self.net, dtype if dtype != "auto" else "bfloat16")
        own_head = self.net.lm_head
        self._logits = own_head if own_head is not None else self.host.head_rows(net.vocab.ids_S.tolist())
        ids_S = net.vocab.ids_S[net.vocab.ids_S < target.vocab_size].cpu()  # the others are padding, never proposed
        self._kept, self.columns = len(ids_S), Columns(ids_S, target.vocab_size)
        self.wants = tuple(layer - 1 for layer in self.layer_ids if layer > 0)
        self.passes = 0

    def commit(self, seq: Sequence, committed: Committed) -> None:
        """Keeps the features of the positions that the target's cache gained."""
        state = self._states[seq.id]
        if committed.features_TF is not None and not state.stopped:
            state.add(committed.features_TF, seq.cache.length)

    def _new_state(self) -> Eagle3State:
        return Eagle3State(self.net.config.layer.context_length)

    def _ready(self, seq: Sequence, state: Eagle3State, budget: int) -> int:
        if state.held == 0 or state.held != len(seq.tokens) - 1:
            return 0
        state.catch_up()
        return budget

    @torch.inference_mode()
    def _prepare(self, runs: list[Run[Eagle3State]]) -> None:
        """Keys and values of all rows but the last of each sequence, some hundred rows a pass."""
        for batch in _batches(runs):
            self._count([run.state for run, _, _ in batch])
            tokens = [token for run, start, stop in batch for token in run.seq.tokens[start + 1 : stop + 1]]
            g_Md = torch.cat([self._fused(run, start, stop) for run, start, stop in batch])
            positions_M = torch.cat([torch.arange(start, stop) for _, start, stop in batch])
            x_ME, _ = self.net.inputs(self._embedded(tokens), g_Md)
            k_MGD, v_MGD = self.net.midlayer.self_attn.keys_values(x_ME, positions_M)
            ends = list(accumulate(stop - start for _, start, stop in batch))
            for (run, start, stop), end in zip(batch, ends, strict=True):
                rows = slice(end - (stop - start), end)
                run.state.cache.append(k_MGD[rows], v_MGD[rows])
                run.state.settled = stop

    @torch.inference_mode()
    def _next_logits(self, runs: list[Run[Eagle3State]]) -> Tensor:
        """One row for every run: its last committed token with the target's features, or its last draft token."""
        self._count([run.state for run in runs])
        attention = self.net.midlayer.self_attn
        tokens = [run.tokens[-1] if run.tokens else run.seq.tokens[-1] for run in runs]
        g_nd = torch.cat([self._carried(run) for run in runs])
        positions_n = torch.tensor([run.state.cache.end for run in runs])
        x_nE, residual_nd = self.net.inputs(self._embedded(tokens), g_nd)
        q_nHD = attention.queries(x_nE, positions_n)
        k_nGD, v_nGD = attention.keys_values(x_nE, positions_n)
        mixed = []
        for n, run in enumerate(runs):
            state = run.state
            state.cache.append(k_nGD[n : n + 1], v_nGD[n : n + 1])
            mixed.append(state.cache.mix(q_nHD[n], state.window))
            if not run.tokens:
                state.settle()
        normed_nd, carried_nd = self.net.read(self.net.midlayer.finish(residual_nd, torch.stack(mixed)))
        logits_nS = self._logits(normed_nd if self.net.lm_head is not None else normed_nd.float()).float()
        for n, run in enumerate(runs):
            run.state.carried_d = carried_nd[n]
        return logits_nS[:, : self._kept].cpu()

    def _carried(self, run: Run[Eagle3State]) -> Tensor:
        """[1, d]: what stands in the features' place of the run's next row."""
        if not run.tokens:
            return self._fused(run, run.state.held - 1, run.state.held)
        assert run.state.carried_d is not None
        return run.state.carried_d[None]

    def _fused(self, run: Run[Eagle3State], start: int, stop: int) -> Tensor:
        """[T, d] from the target's features of these positions. Layer id 0 is the target's embedding itself."""
        features_TF = run.state.features(start, stop)
        if self.layer_ids[0] == 0:
            embedded_Td = self.host.embed(run.seq.tokens[start:stop])
            features_TF = torch.cat([embedded_Td.to(features_TF.dtype), features_TF], dim=1)
        return self.net.fuse(features_TF)

    def _embedded(self, tokens: list[int]) -> Tensor:
        own = self.net.embed_tokens
        if own is None:
            return self.host.embed(tokens)
        rows: Tensor = own(torch.tensor(tokens, device=own.weight.device))
        return rows

    def _count(self, states: Seq[Eagle3State]) -> None:
        self.passes += 1
        for state in states:
            state.count_pass()


def _require_width(what: str, config: Eagle3Config, name: str, width: int) -> None:
    """Raises PairingError for a head that shares what it is too wide or too narrow for."""
    lacks = [part for part, own in (("embed_tokens", config.own_embedding), ("lm_head", config.own_head)) if not own]
    if lacks and config.layer.hidden_size != width:
        raise PairingError(
            f"{what} is {config.layer.hidden_size} wide, has no {' and no '.join(lacks)} of its own and cannot share "
            f"that of {name}, which is {width} wide: take a head with {' and '.join(f'{p}.weight' for p in lacks)}"
        )


def _layer_ids(what: str, config: Eagle3Config, name: str, n_layers: int) -> tuple[int, ...]:
    """The target layers whose *inputs* the head reads: id i is the output of layer i - 1, id 0 the embedding."""
    ids = config.layer_ids or (2, n_layers // 2, n_layers - 3)
    if any(a >= b for a, b in pairwise(ids)) or not 0 <= ids[0] <= ids[-1] <= n_layers or ids[-1] == 0:
        said = "its configuration says" if config.layer_ids else "by default it reads"
        raise PairingError(
            f"{what}: {said} the inputs of the layers {list(ids)}, and {name} has {n_layers} layers: needed are "
            f"ascending ids from 0 to {n_layers}"
        )
    return ids


def _batches(runs: list[Run[Eagle3State]]) -> Iterator[list[tuple[Run[Eagle3State], int, int]]]:
    """Rows to catch up with, as (run, start, stop) by sequence; at most PREFILL_CHUNK rows a batch."""
    batch: list[tuple[Run[Eagle3State], int, int]] = []
    free = PREFILL_CHUNK
    for run in runs:
        start, last = run.state.settled, run.state.held - 1
        while start < last:
            stop = min(last, start + free)
            batch.append((run, start, stop))
            free -= stop - start
            start = stop
            if free == 0:
                yield batch
                batch, free = [], PREFILL_CHUNK
    if batch:
        yield batch
