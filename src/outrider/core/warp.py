"""From logits to the distribution that is sampled: the one place where that happens.

Plain steps, draft models, acceptance ratios, residuals and bonus tokens all use `warp`, so p and q are always the
distributions *after* processing. Order of the processors:

    penalties -> logit bias -> bans (bad tokens, stop tokens before min_tokens, grammar mask)
    -> greedy: the likeliest token, lowest index on ties
    -> else temperature -> top-k -> top-p -> min-p -> softmax, all in float64

Every processor is a pure function of (logits, the tokens before the row), and each row is processed with its own
context: committed tokens plus the draft tokens on its path.

Shapes: M rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.types import SamplingParams, Sequence


@dataclass(frozen=True, slots=True)
class RowContext:
    """What a row's processors depend on: its sequence, and the draft tokens on the path from its text to the row."""

    seq: Sequence
    path: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of processed distributions.

    `point_M[m]` is the token of a one-hot row (greedy decoding) or -1; `dense[m]` is the float64 row [V] or None for a
    one-hot row. `bad_M` flags rows whose logits held NaN or left no token possible.
    """

    vocab_size: int
    point_M: list[int]
    dense: list[Tensor | None]
    bad_M: list[bool]

    def row(self, m: int) -> Tensor:
        """Row m as a dense float64 vector [V]."""
        dense_V = self.dense[m]
        if dense_V is None:
            dense_V = torch.zeros(self.vocab_size, dtype=torch.float64)
            dense_V[self.point_M[m]] = 1.0
        return dense_V

    def probability(self, m: int, token: int) -> float:
        """Probability of `token` in row m."""
        dense_V = self.dense[m]
        return float(self.point_M[m] == token) if dense_V is None else float(dense_V[token])

    def slice(self, start: int, stop: int) -> Rows:
        """Rows start..stop-1, sharing memory."""
        return Rows(self.vocab_size, self.point_M[start:stop], self.dense[start:stop], self.bad_M[start:stop])

    @classmethod
    def of(cls, p_MV: Tensor) -> Rows:
        """Dense rows from a float64 matrix of probabilities."""
        count, vocab_size = p_MV.shape
        return cls(vocab_size, [-1] * count, list(p_MV), [False] * count)


def warp(logits_MV: Tensor, contexts: Seq[RowContext]) -> Rows:
    """The processed distribution of each row. Does not change `logits_MV` (float32 or float64)."""
    count, vocab_size = logits_MV.shape
    assert count == len(contexts), f"{count} rows of logits for {len(contexts)} contexts"
    biased = [_bias(logits_MV[m], context) for m, context in enumerate(contexts)]
    top_M, argmax_M = _maxima(logits_MV, biased)
    bad_M = [not math.isfinite(top) for top in top_M]
    point_M, dense = [], list[Tensor | None]()
    for m, context in enumerate(contexts):
        if context.seq.params.greedy or bad_M[m]:
            point_M.append(argmax_M[m])
            dense.append(None)
        else:
            point_M.append(-1)
            dense.append(distribution(biased[m].to(torch.float64), context.seq.params))
    return Rows(vocab_size, point_M, dense, bad_M)


def _maxima(logits_MV: Tensor, biased: list[Tensor]) -> tuple[list[float], list[int]]:
    """Largest value and its lowest index, by row."""
    untouched = all(row_V.data_ptr() == logits_MV[m].data_ptr() for m, row_V in enumerate(biased))
    processed_MV = logits_MV if untouched else torch.stack(biased)
    top_M, argmax_M = processed_MV.max(dim=1)
    return top_M.tolist(), argmax_M.tolist()


def _bias(logits_V: Tensor, context: RowContext) -> Tensor:
    """Penalties, biases and bans; the row itself when there is none."""
    seq, params = context.seq, context.seq.params
    if not params.plain_logits:
        logits_V = logits_V.clone()
        _penalise(logits_V, context)
        for token, bias in params.logit_bias.items():
            logits_V[token] += bias
        if params.bad_token_ids:
            logits_V[list(params.bad_token_ids)] = -torch.inf
        if seq.output_len + len(context.path) < params.min_tokens and seq.stop_ids:
            logits_V[sorted(seq.stop_ids)] = -torch.inf
    if seq.constraint is not None:
        allowed_V = seq.constraint.allowed(context.path)
        if allowed_V is not None:
            logits_V = torch.where(allowed_V, logits_V, -torch.inf)
    return logits_V


def _penalise(logits_V: Tensor, context: RowContext) -> None:
    """In place: presence and frequency penalties over output tokens, repetition penalty over all tokens."""
    seq, params = context.seq, context.seq.params
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted({*seq.tokens, *context.path}))
        values = logits_V[seen]
        factor = params.repetition_penalty
        logits_V[seen] = torch.where(values > 0, values / factor, values * factor)
    if params.presence_penalty != 0 or params.frequency_penalty != 0:
        counts = Counter(seq.tokens[seq.prompt_len :])
        counts.update(context.path)
        if counts:
            ids = torch.tensor(list(counts))
            times = torch.tensor(list(counts.values()), dtype=logits_V.dtype)
            logits_V[ids] -= params.presence_penalty + params.frequency_penalty * times


def distribution(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """softmax(logits / T) restricted by top-k, top-p and min-p; float64 [V], sums to 1. Not for greedy parameters."""
    assert not params.greedy
    scaled_V = (logits_V - logits_V.max()) / params.temperature
    if 0 < params.top_k < scaled_V.numel():
        scaled_V = _keep_first(scaled_V, params.top_k)
    p_V = torch.softmax(scaled_V, dim=0)
    if params.top_p < 1:
        p_V = _nucleus(p_V, params.top_p)
    if params.min_p > 0:
        p_V = torch.where(p_V >= params.min_p * p_V.max(), p_V, 0.0)
        p_V = p_V / p_V.sum()
    return p_V


def _keep_first(scaled_V: Tensor, k: int) -> Tensor:
    """All but the k largest set to -inf; among equals at the border the lowest indices stay."""
    threshold = scaled_V.topk(k).values[-1]
    above_V = scaled_V > threshold
    at_border = (scaled_V == threshold).nonzero().flatten()[: k - int(above_V.sum())]
    kept_V = torch.full_like(scaled_V, -torch.inf)
    kept_V[above_V] = scaled_V[above_V]
    kept_V[at_border] = scaled_V[at_border]
    return kept_V


def _nucleus(p_V: Tensor, top_p: float) -> Tensor:
    """The smallest set of likeliest tokens with mass >= top_p, renormalised; equals rank by index."""
    sorted_V, order_V = p_V.sort(descending=True, stable=True)
    before_V = sorted_V.cumsum(0) - sorted_V
    kept_V = torch.zeros_like(p_V)
    inside = order_V[before_V < top_p]
    kept_V[inside] = p_V[inside]
    return kept_V / kept_V.sum()
