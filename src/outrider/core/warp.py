"""From logits to the distribution that is sampled: the one place where that happens.

Plain steps, draft models, acceptance ratios, residuals and bonus tokens all use `warp`, so p and q are always the
distributions *after* processing. Order of the processors:

    penalties -> logit bias -> bans (bad tokens, stop tokens before min_tokens, grammar mask)
    -> greedy: the likeliest token, lowest index on ties
    -> else temperature -> top-k -> top-p -> min-p -> softmax, all in float64

Every processor is a pure function of (logits, the tokens before the row), and each row is processed with its own
context: committed tokens plus the draft tokens on its path.

What it costs. Logits are read once for the likeliest token, which is all of a greedy row. Where there are other rows
they are read again for the largest of each block of BLOCK, from which all selections start. A distribution is made when
a rule first asks for it, and holds the tokens that its processors keep. Only a row without any of them needs a float64
exponential for every token; top-p mostly does with bounds on their sum. Nothing sorts the vocabulary.

Shapes: M rows, V vocabulary, b blocks, S tokens kept.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.row import Row
from outrider.core.types import SamplingParams, Sequence

BLOCK = 64
NEAR = 128
"""Top-p looks at the likeliest tokens first: those of this many blocks."""
SORTED = 1024
"""Sorting this many costs less than another look at them."""
SAMPLED = 256
"""Tokens whose median halves the rest."""
ROUNDING = 1e-6
"""Bounds on logits are widened by this share, more than float32 rounds off; float64 weights decide."""
FLOAT32_ERROR = 1e-5
"""More than the relative error of a sum of float32 exponentials: exp(x) is off by |x| 2^-23 at most, |x| < 88."""


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

    def slice(self, start: int, stop: int) -> Rows:
        """Rows start..stop-1."""
        return Rows(self._rows[start:stop], self.bad_M[start:stop])


def warp(logits_MV: Tensor, contexts: Seq[RowContext]) -> Rows:
    """The processed distribution of each row. Does not change `logits_MV` (float32 or float64)."""
    count, size = logits_MV.shape
    assert count == len(contexts), f"{count} rows of logits for {len(contexts)} contexts"
    logits_MV = _edited(logits_MV, contexts)
    likeliest_M, top_M = _argmax(logits_MV)
    bad_M = [not math.isfinite(top) for top in top_M]
    one_hot_M = [bad or context.seq.params.greedy for bad, context in zip(bad_M, contexts, strict=True)]
    highest_Mb = None if all(one_hot_M) else block_maxima(logits_MV)
    rows: list[Row | Processed] = []
    for m, context in enumerate(contexts):
        if one_hot_M[m] or highest_Mb is None:
            rows.append(Row.one_hot(likeliest_M[m], size))
        else:
            rows.append(Processed(logits_MV[m], highest_Mb[m], top_M[m], context.seq.params))
    return Rows(rows, bad_M)


def distribution(logits_V: Tensor, params: SamplingParams) -> Row:
    """softmax(logits / T) restricted by top-k, top-p and min-p; sums to 1. Not for greedy parameters."""
    assert not params.greedy
    highest_b = block_maxima(logits_V[None])[0]
    return Processed(logits_V, highest_b, float(highest_b.max()), params).distribution()


def _argmax(logits_MV: Tensor) -> tuple[list[int], list[float]]:
    """By row: the likeliest token, the lowest index on ties, and its logit; NaN where one of them is."""
    rows_MV = logits_MV.numpy(force=True)  # whose argmax takes a tenth of the time
    tokens_M = rows_MV.argmax(1).tolist()
    return tokens_M, [float(row_V[token]) for row_V, token in zip(rows_MV, tokens_M, strict=True)]


def block_maxima(logits_MV: Tensor) -> Tensor:
    """[M, b] The largest logit of each BLOCK neighbours; NaN where one of them is."""
    blocks, rest = divmod(logits_MV.shape[1], BLOCK)
    highest_Mb = logits_MV[:, : blocks * BLOCK].view(len(logits_MV), blocks, BLOCK).amax(2)
    return torch.cat([highest_Mb, logits_MV[:, -rest:].amax(1, keepdim=True)], dim=1) if rest else highest_Mb


# Penalties, biases and bans


def _edited(logits_MV: Tensor, contexts: Seq[RowContext]) -> Tensor:
    """Penalties, biases and bans; `logits_MV` itself where there are none."""
    edited = dict.fromkeys(
        context.seq for context in contexts if not context.seq.params.plain_logits or context.seq.constraint is not None
    )
    if not edited:
        return logits_MV
    edits = {seq: _Edits(seq) for seq in edited}
    edited_MV = logits_MV.clone()
    for m, context in enumerate(contexts):
        if context.seq in edits:
            edits[context.seq].apply(edited_MV[m], context.path)
    return edited_MV


class _Edits:
    """What a sequence does to the logits of its rows. The committed text is counted once for all of them."""

    def __init__(self, seq: Sequence) -> None:
        self.seq = seq
        repeats = seq.params.repetition_penalty != 1
        self.penalises = repeats or seq.params.presence_penalty != 0 or seq.params.frequency_penalty != 0
        self.times: Counter[int] = Counter()
        if self.penalises:
            self.times.update(seq.tokens[seq.prompt_len :])
        if repeats:
            self.times.update(dict.fromkeys(seq.tokens[: seq.prompt_len], 0))
        self.token_T = torch.tensor(list(self.times), dtype=torch.int64)
        self.times_T = torch.tensor(list(self.times.values()), dtype=torch.int64)

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
        path_T = torch.tensor(list(on_path), dtype=torch.int64)
        before_T = logits_V[path_T]
        logits_V[self.token_T] = self._penalised(logits_V[self.token_T], self.times_T)
        times_T = torch.tensor([self.times[token] + count for token, count in on_path.items()], dtype=torch.int64)
        logits_V[path_T] = self._penalised(before_T, times_T)

    def _penalised(self, logits_T: Tensor, times_T: Tensor) -> Tensor:
        """The logits of tokens that the text holds, `times` times in its output."""
        params, factor = self.seq.params, self.seq.params.repetition_penalty
        times_T = times_T.to(logits_T)
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

    def distribution(self) -> Row:
        """softmax(logits / T) over what top-k, top-p and min-p keep."""
        params, size = self.params, self.logits_V.numel()
        if 0 < params.top_k < size:
            token_S = self._first(params.top_k)
            weight_S = self._weights(token_S)
            if params.top_p < 1:
                kept_S = _nucleus(weight_S, params.top_p * float(weight_S.sum()))
                token_S, weight_S = token_S[kept_S], weight_S[kept_S]
        elif params.top_p < 1:
            token_S, weight_S = self._first_with_mass(params.top_p)
        elif params.min_p > 0:
            token_S = self._tokens(self.highest_b >= self._floor(-math.log(params.min_p)))
            weight_S = self._weights(token_S)
        else:
            weight_V = self._weights()
            return Row(size, weight_V.div_(weight_V.sum()))
        if params.min_p > 0:
            kept_S = weight_S >= params.min_p
            token_S, weight_S = token_S[kept_S], weight_S[kept_S]
        return Row(size, weight_S / weight_S.sum(), token_S)

    def _weights(self, token_S: Tensor | None = None) -> Tensor:
        """exp((logit - top) / T) of these tokens (None: of all), float64."""
        logits_S = self.logits_V if token_S is None else self.logits_V[token_S]
        weight_S = logits_S.to(torch.float64, copy=True)
        return weight_S.sub_(self.top).div_(self.params.temperature).exp_()

    def _floor(self, reach: float) -> float:
        """No token with a smaller logit has a weight of e^-reach or more."""
        floor = self.top - self.params.temperature * reach
        return floor - ROUNDING * max(1.0, abs(self.top), abs(floor))

    def _tokens(self, chosen_b: Tensor) -> Tensor:
        """The tokens of these blocks, ascending."""
        start_b = chosen_b.nonzero() * BLOCK
        token_S = (start_b + torch.arange(BLOCK, device=start_b.device)).flatten()
        beyond = int(start_b[-1]) + BLOCK - self.logits_V.numel()
        return token_S[:-beyond] if beyond > 0 else token_S

    def _first(self, k: int) -> Tensor:
        """The k likeliest tokens (fewer if no more are possible), ascending; equals rank by index."""
        floor = float(self.highest_b.topk(k).values[-1]) if k <= self.highest_b.numel() else -math.inf
        token_S = self._tokens(self.highest_b >= max(floor, torch.finfo(self.logits_V.dtype).min))
        logits_S = self.logits_V[token_S]
        threshold = logits_S.topk(min(k, token_S.numel())).values[-1]
        kept_S = logits_S > threshold
        at_border = (logits_S == threshold).nonzero().flatten()[: k - int(kept_S.sum())]
        kept_S[at_border] = True
        return token_S[kept_S]

    def _first_with_mass(self, top_p: float) -> tuple[Tensor, Tensor]:
        """The smallest set of likeliest tokens with probability >= top_p, ascending, and their weights.

        The set is cut from a ranking of the likeliest tokens, with the weight of all tokens known between bounds: the
        cut stands when it is the same for both.
        """
        token_S, weight_S, near, far = self._likeliest()
        total_S = weight_S.cumsum(0)
        for least, most in self._weight_of_all(near, far):
            count = int(torch.searchsorted(total_S, top_p * least)) + 1
            if count > total_S.numel():
                break
            if float(total_S[count - 1]) >= top_p * most:
                token_S, order_S = token_S[:count].sort()
                return token_S, weight_S[order_S]
        weight_V = self._weights()
        token_S = _nucleus(weight_V, top_p * float(weight_V.sum())).nonzero().flatten()
        return token_S, weight_V[token_S]

    def _likeliest(self) -> tuple[Tensor, Tensor, float, float]:
        """All tokens down to the maximum of the NEAR-th block, ranked, and their weights.

        Also the weight of all tokens in these blocks, and a bound on that of the tokens in other blocks.
        """
        largest = self.highest_b.topk(min(NEAR, self.highest_b.numel()))
        floor = max(float(largest.values[-1]), torch.finfo(self.logits_V.dtype).min)
        near_b = self.highest_b >= floor
        token_T = self._tokens(near_b)
        weight_T = self._weights(token_T)
        far_b = self.highest_b.to(torch.float64).sub_(self.top).div_(self.params.temperature).exp_()
        ranked = (self.logits_V[token_T] >= floor).nonzero().flatten()
        weight_S, order_S = weight_T[ranked].sort(descending=True, stable=True)
        far = BLOCK * float(far_b.masked_fill_(near_b, 0.0).sum())
        return token_T[ranked[order_S]], weight_S, float(weight_T.sum()), far

    def _weight_of_all(self, near: float, far: float) -> Iterator[tuple[float, float]]:
        """Bounds on the sum of all weights, each pair closer and dearer than the one before; the last is the sum."""
        yield near, near + far
        rough = (self.logits_V - self.top).to(torch.float32).div_(self.params.temperature).exp_().sum()
        yield float(rough) * (1 - FLOAT32_ERROR), float(rough) * (1 + FLOAT32_ERROR)
        exact = float(self._weights().sum())
        yield exact, exact


def _nucleus(weight_S: Tensor, goal: float) -> Tensor:
    """bool [S]: the smallest set of the largest weights whose sum reaches `goal`; equals rank by index.

    Where there are many, the weight at which the sum is reached is first narrowed down: comparing with the median of a
    sample settles about half of what is still open (quickselect, Hoare 1961, with weights).
    """
    kept_S = torch.zeros(weight_S.shape, dtype=torch.bool, device=weight_S.device)
    index_T, weight_T, taken = torch.arange(weight_S.numel(), device=weight_S.device), weight_S, 0.0
    while index_T.numel() > SORTED:
        # Tokens of less than this are not needed: all of them together weigh less than what may be left out.
        needless = (taken + float(weight_T.sum()) - goal) / index_T.numel()
        pivot = max(needless, float(weight_T[:: index_T.numel() // SAMPLED].median()))
        upper_T = (weight_T > pivot).nonzero().flatten()
        upper, open_T = float(weight_T[upper_T].sum()), upper_T
        if taken + upper < goal:
            kept_S[index_T[upper_T]] = True
            taken += upper
            open_T = ((weight_T <= pivot) & (weight_T >= needless)).nonzero().flatten()
        if open_T.numel() == index_T.numel():
            break
        index_T, weight_T = index_T[open_T], weight_T[open_T]
    sorted_T, order_T = weight_T.sort(descending=True, stable=True)
    kept_S[index_T[order_T[taken + sorted_T.cumsum(0) - sorted_T < goal]]] = True
    return kept_S
