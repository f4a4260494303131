"""What the losses of all draft heads share: a batch of the target's own text, and how far q is from the target's p.

p is kept sparse: the C likeliest tokens behind every position at temperature 1. What they leave out, and what a draft
vocabulary cannot say, counts as never accepted, so an overlap found here is at most the true one.

Shapes: B sequences, T positions, F target features, C likeliest tokens, X any leading dimensions, S draft vocabulary,
V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outrider.drafters.reduced_vocab import ReducedVocab


@dataclass(frozen=True, slots=True)
class Lesson:
    """A batch of sequences, padded at their ends.

    `features_BTF` are the outputs of the target layers that the head reads, side by side. Row t of `likeliest_BTC`
    (token ids, likeliest first) and `logp_BTC` (their log-probabilities) is the target's distribution behind position
    t, of the token t + 1. `counted_BT` says where that is to be learned: in answers and in what was asked, not in what
    the template says and in padding.
    """

    tokens_BT: Tensor
    features_BTF: Tensor
    likeliest_BTC: Tensor
    logp_BTC: Tensor
    counted_BT: Tensor


@dataclass(frozen=True, slots=True)
class Losses:
    """`total` is what is minimised. By draft position: the loss, the share of rows whose likeliest token is the
    target's (what is accepted at temperature 0), and the mean overlap of q and p (at temperature 1)."""

    total: Tensor
    loss_by_position: list[float]
    agreement_by_position: list[float]
    overlap_by_position: list[float]


class Aims:
    """The target's distributions behind some positions, in the columns of a draft vocabulary."""

    def __init__(self, likeliest_XC: Tensor, logp_XC: Tensor, vocab: ReducedVocab) -> None:
        columns_V = vocab.columns().to(likeliest_XC.device)
        columns_XC = columns_V[likeliest_XC]
        self.known_XC = columns_XC >= 0
        self.columns_XC = columns_XC.clamp(min=0)
        self.p_XC = logp_XC.float().exp() * self.known_XC
        self.usable_X = self.known_XC[..., 0]
        """Whether the likeliest token is in the draft vocabulary."""


def mean(value_X: Tensor) -> float:
    """The mean as a number; 0 of nothing."""
    return float(value_X.detach().float().mean()) if value_X.numel() else 0.0
