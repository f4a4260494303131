"""From logits to the distribution that is sampled: the one place where that happens.

Plain steps, draft models, acceptance ratios, residuals and bonus tokens all use `warp`, so p and q are always the
distributions *after* processing. Order of the processors:

    penalties -> logit bias -> bans (bad tokens, stop tokens before min_tokens, grammar mask)
    -> greedy: the likeliest token, lowest index on ties
    -> else temperature -> top-k -> top-p -> min-p -> softmax, all in float64

Every processor is a pure function of (logits, the tokens before the row), and each row is processed with its own
context: committed tokens plus the draft tokens on its path.

What it costs. Logits are read once for the largest of each block of BLOCK; greedy rows and all selections start from
those. A distribution is made when a rule first asks for it, from the few tokens that its processors can keep; only
top-p and an unrestricted row need an exponential for every token. Nothing sorts the vocabulary.

Shapes: M rows, V vocabulary, b blocks, S tokens kept.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.row import Row
from outrider.core.types import SamplingParams, Sequence

BLOCK = 64
NEAR = 8.0
"""Where top-p looks first: tokens less than e^8 times as unlikely as the likeliest."""
ROUNDING = 1e-6
"""Bounds on logits are widened by this share, more than float32 rounds off; float64 weights decide."""
SORTED = 1024
"""Sorting this many costs less than another look at them."""


@dataclass(frozen=True, slots=True)
class RowContext:
    """What a row's processors depend on: its sequence, and the draft tokens on the path from its text to the row."""

    seq: Sequence
    path: tuple[int, ...] = ()


class Rows:
    """Rows of processed distributions: `rows[m]` is a `Row`, made when it is first asked for.

    `bad_M` flags rows whose logits held NaN or left no token possible. Rows not yet made share memory with the logits:
    valid until the model's next pass.
    """

    def __init__(self, rows: Seq[Row | Processed], bad_M: Seq[bool]) -> None:
        self._rows = list(rows)
        self.bad_M = list(bad_M)

    def __getitem__(self, m: int) -> Row:
        row = self._rows[m]
        if isinstance(row, Processed):
            row = self._rows[m] = row.distribution()
        return row

    def row(self, m: int) -> Tensor:
        """Row m in full, float64 [V]."""
        return self[m].to_dense()

    def slice(self, start: int, stop: int) -> Rows:
        """Rows start..stop-1."""
        return Rows(self._rows[start:stop], self.bad_M[start:stop])


def warp(logits_MV: Tensor, contexts: Seq[RowContext]) -> Rows:
    """The processed distribution of each row. Does not change `logits_MV` (float32 or float64)."""
    count, _ = logits_MV.shape
    assert count == len(contexts), f"{count} rows of logits for {len(contexts)} contexts"
    logits_MV = _edited(logits_MV, contexts)
    highest_Mb = block_maxima(logits_MV)
    top_M = highest_Mb.amax(1).tolist()
    bad_M = [not math.isfinite(top) for top in top_M]
    rows: list[Row | Processed] = []
    for m, context in enumerate(contexts):
        processed = Processed(logits_MV[m], highest_Mb[m], top_M[m], context.seq.params)
        rows.append(processed.greedy() if context.seq.params.greedy or bad_M[m] else processed)
    return Rows(rows, bad_M)


def distribution(logits_V: Tensor, params: SamplingParams) -> Row:
    """softmax(logits / T) restricted by top-k, top-p and min-p; sums to 1. Not for greedy parameters."""
    assert not params.greedy
    highest_b = block_maxima(logits_V[None])[0]
    return Processed(logits_V, highest_b, float(highest_b.max()), params).distribution()


def block_maxima(logits_MV: Tensor) -> Tensor:
    """[M, b] The largest logit of each BLOCK neighbours; NaN where one of them is."""
    blocks, rest = divmod(logits_MV.shape[1], BLOCK)
    highest_Mb = logits_MV[:, : blocks * BLOCK].reshape(len(logits_MV), blocks, BLOCK).amax(2)
    return torch.cat([highest_Mb, logits_MV[:, -rest:].amax(1, keepdim=True)], dim=1) if rest else highest_Mb


# Penalties, biases and bans


def _edited(logits_MV: Tensor, contexts: Seq[RowContext]) -> Tensor:
    """Penalties, biases and bans; `logits_MV` itself where there are none."""
    edits = {id(context.seq): _Edits(context.seq) for context in contexts}
    if not any(edit.any for edit in edits.values()):
        return logits_MV
    edited_MV = logits_MV.clone()
    for m, context in enumerate(contexts):
        edits[id(context.seq)].apply(edited_MV[m], context.path)
    return edited_MV


class _Edits:
    """What a sequence does to the logits of its rows. The committed text is counted once for all of them."""

    def __init__(self, seq: Sequence) -> None:
        self.seq = seq
        self.any = not seq.params.plain_logits or seq.constraint is not None
        repeats = seq.params.repetition_penalty != 1
        self.penalises = repeats or seq.params.presence_penalty != 0 or seq.params.frequency_penalty != 0
        self.times: Counter[int] = Counter()
        if self.penalises:
            self.times.update(seq.tokens[seq.prompt_len :])
        if repeats:
            self.times.update(dict.fromkeys(seq.tokens[: seq.prompt_len], 0))

    def apply(self, logits_V: Tensor, path: tuple[int, ...]) -> None:
        """In place."""
        seq, params = self.seq, self.seq.params
        if self.penalises:
            self._penalise(logits_V, path)
        if params.logit_bias:
            bias_T = torch.tensor(list(params.logit_bias.values()), dtype=logits_V.dtype, device=logits_V.device)
            logits_V[list(params.logit_bias)] += bias_T
        if params.bad_token_ids:
            logits_V[list(params.bad_token_ids)] = -torch.inf
        if seq.output_len + len(path) < params.min_tokens and seq.stop_ids:
            logits_V[sorted(seq.stop_ids)] = -torch.inf
        if seq.constraint is not None:
            allowed_V = seq.constraint.allowed(path)
            if allowed_V is not None:
                logits_V.masked_fill_(~allowed_V, -torch.inf)

    def _penalise(self, logits_V: Tensor, path: tuple[int, ...]) -> None:
        """Repetition penalty over all tokens, presence and frequency penalties over output tokens, path included."""
        on_path = Counter(path)
        path_T, before_T = list(on_path), logits_V[list(on_path)]
        if self.times:
            text_T = list(self.times)
            logits_V[text_T] = self._penalised(logits_V[text_T], list(self.times.values()))
        if on_path:
            times = [self.times[token] + count for token, count in on_path.items()]
            logits_V[path_T] = self._penalised(before_T, times)

    def _penalised(self, logits_T: Tensor, times: list[int]) -> Tensor:
        """The logits of tokens that the text holds, `times` times in its output."""
        params, factor = self.seq.params, self.seq.params.repetition_penalty
        times_T = torch.tensor(times, dtype=logits_T.dtype, device=logits_T.device)
        if factor != 1:
            logits_T = torch.where(logits_T > 0, logits_T / factor, logits_T * factor)
        penalty_T = params.presence_penalty + params.frequency_penalty * times_T
        return logits_T - torch.where(times_T > 0, penalty_T, 0.0)


# Temperature, top-k, top-p, min-p


@dataclass(frozen=True, slots=True)
class Processed:
    """A row of edited logits, the largest of each block of them, and the largest of all."""

    logits_V: Tensor
    highest_b: Tensor
    top: float
    params: SamplingParams

    def greedy(self) -> Row:
        """One-hot at the likeliest token; the lowest index on ties."""
        start = int(self.highest_b.argmax()) * BLOCK
        token = start + int(self.logits_V[start : start + BLOCK].argmax())
        return Row.one_hot(token, self.logits_V.numel())

    def distribution(self) -> Row:
        """softmax(logits / T) over what top-k, top-p and min-p keep."""
        params, size = self.params, self.logits_V.numel()
        goal = math.inf
        if 0 < params.top_k < size:
            token_S = self._first(params.top_k)
            weight_S = self._weights(token_S)
            goal = params.top_p * float(weight_S.sum())
        elif params.top_p < 1:
            token_S, weight_S, goal = self._around_nucleus()
        elif params.min_p > 0:
            token_S = self._within(-math.log(params.min_p))
            weight_S = self._weights(token_S)
        else:
            weight_V = self._weights()
            return Row(size, weight_V.div_(weight_V.sum()))
        if params.top_p < 1:
            kept_S = _nucleus(weight_S, goal)
            token_S, weight_S = token_S[kept_S], weight_S[kept_S]
        if params.min_p > 0:
            kept_S = weight_S >= params.min_p
            token_S, weight_S = token_S[kept_S], weight_S[kept_S]
        return Row(size, weight_S / weight_S.sum(), token_S)

    def _weights(self, token_S: Tensor | None = None) -> Tensor:
        """exp((logit - top) / T) of these tokens (None: of all), float64."""
        logits_S = self.logits_V if token_S is None else self.logits_V[token_S]
        weight_S = logits_S.to(torch.float64, copy=True)
        weight_S -= self.top
        weight_S /= self.params.temperature
        return weight_S.exp_()

    def _within(self, reach: float) -> Tensor:
        """The tokens of a weight above e^-reach, ascending; a few just below it may be among them."""
        floor = self.top - self.params.temperature * reach
        return self._above(floor - ROUNDING * max(1.0, abs(self.top), abs(floor)))

    def _above(self, floor: float) -> Tensor:
        """The tokens with logits >= floor that are not impossible, ascending."""
        floor = max(floor, torch.finfo(self.logits_V.dtype).min)
        start_b = (self.highest_b >= floor).nonzero() * BLOCK
        token_S = (start_b + torch.arange(BLOCK, device=start_b.device)).flatten()
        token_S = token_S[: token_S.numel() - max(0, int(start_b[-1]) + BLOCK - self.logits_V.numel())]
        return token_S[self.logits_V[token_S] >= floor]

    def _first(self, k: int) -> Tensor:
        """The k likeliest tokens (fewer if no more are possible), ascending; equals rank by index."""
        floor = float(self.highest_b.topk(k).values[-1]) if k <= self.highest_b.numel() else -math.inf
        token_S = self._above(floor)
        logits_S = self.logits_V[token_S]
        threshold = logits_S.topk(min(k, token_S.numel())).values[-1]
        kept_S = logits_S > threshold
        at_border = (logits_S == threshold).nonzero().flatten()[: k - int(kept_S.sum())]
        kept_S[at_border] = True
        return token_S[kept_S]

    def _around_nucleus(self) -> tuple[Tensor, Tensor, float]:
        """Tokens that hold the nucleus, their weights, and the weight that it has to reach."""
        total = float(self._weights().sum())
        goal = self.params.top_p * total
        # Tokens lighter than this weigh less than what may be missing, even all together.
        surely = math.log(self.logits_V.numel() / (total - goal))
        for reach in (NEAR, surely):
            token_S = self._within(min(reach, surely))
            weight_S = self._weights(token_S)
            if float(weight_S.sum()) >= goal:
                break
        return token_S, weight_S, goal


def _nucleus(weight_S: Tensor, goal: float) -> Tensor:
    """bool [S]: the smallest set of the largest weights whose sum reaches `goal`; equals rank by index.

    Where there are many, the place where the sum is reached is first narrowed down by halves of the weights' range.
    """
    kept_S = torch.zeros(weight_S.shape, dtype=torch.bool, device=weight_S.device)
    open_T, taken = torch.arange(weight_S.numel(), device=weight_S.device), 0.0
    while open_T.numel() > SORTED:
        weight_T = weight_S[open_T]
        useless = (taken + float(weight_T.sum()) - goal) / open_T.numel()
        pivot = math.sqrt(max(useless, float(weight_T.min())) * float(weight_T.max()))
        upper_T = weight_T > pivot
        upper = float(weight_T[upper_T].sum())
        if not 0 < int(upper_T.sum()) < open_T.numel():
            break
        if taken + upper >= goal:
            open_T = open_T[upper_T]
        else:
            kept_S[open_T[upper_T]] = True
            open_T, taken = open_T[~upper_T], taken + upper
    sorted_T, order_T = weight_S[open_T].sort(descending=True, stable=True)
    kept_S[open_T[order_T[taken + sorted_T.cumsum(0) - sorted_T < goal]]] = True
    return kept_S
