"""One row of p or q: what a token is drawn from.

Top-p and its kin leave a few dozen tokens of a vocabulary of 150,000, so a row holds its support only; all that the
acceptance rules do with rows happens on the support.

Shapes: V vocabulary, S support, T some tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Row:
    """Non-negative weights over a vocabulary of `size` tokens. Immutable.

    `weight_S` (float64) belongs to the tokens `token_S` (int64, ascending), or to all of the vocabulary where that is
    None; every other token has weight 0. A row made by `warp` sums to 1: `row[x]` is then the probability of x. A row
    at temperature 0 is known by its one token: its tensors are made when somebody asks for them.
    """

    __slots__ = ("_one", "_token_S", "_weight_S", "size")

    def __init__(self, size: int, weight_S: Tensor, token_S: Tensor | None = None) -> None:
        self.size = size
        self._weight_S: Tensor | None = weight_S
        self._token_S = token_S
        self._one: int | None = None

    @classmethod
    def dense(cls, weight_V: Tensor) -> Row:
        """A row that names every token."""
        return cls(weight_V.numel(), weight_V)

    @classmethod
    def one_hot(cls, token: int, size: int) -> Row:
        """A row that gives one token everything."""
        row = cls.__new__(cls)
        row.size, row._weight_S, row._token_S, row._one = size, None, None, token
        return row

    @property
    def weight_S(self) -> Tensor:
        if self._weight_S is None:
            self._weight_S = torch.ones(1, dtype=torch.float64)
        return self._weight_S

    @property
    def token_S(self) -> Tensor | None:
        if self._token_S is None and self._one is not None:
            self._token_S = torch.tensor([self._one])
        return self._token_S

    @property
    def only(self) -> int | None:
        """The token of a one-hot row; None where there is something to draw."""
        if self._one is not None:
            return self._one
        return self.token(0) if self.token_S is not None and self.weight_S.numel() == 1 else None

    def token(self, index: int) -> int:
        """The token whose weight is weight_S[index]."""
        return index if self.token_S is None else int(self.token_S[index])

    def __getitem__(self, token: int) -> float:
        if self._one is not None:
            return float(token == self._one)
        if self.token_S is None:
            return float(self.weight_S[token])
        index = int(torch.searchsorted(self.token_S, token))
        found = index < self.token_S.numel() and int(self.token_S[index]) == token
        return float(self.weight_S[index]) if found else 0.0

    def total(self) -> float:
        return float(self.weight_S.sum())

    def likeliest(self) -> int:
        """The token of the largest weight; the lowest index on ties."""
        return self.token(int(self.weight_S.argmax()))

    def to_dense(self) -> Tensor:
        """All weights, float64 [V]."""
        if self.token_S is None:
            return self.weight_S
        weight_V = self.weight_S.new_zeros(self.size)
        weight_V[self.token_S] = self.weight_S
        return weight_V

    def without(self, token: int) -> Row:
        """This row with weight 0 at `token`."""
        weight_S = self.weight_S.clone()
        if self.token_S is None:
            weight_S[token] = 0.0
        else:
            weight_S[self.token_S == token] = 0.0
        return Row(self.size, weight_S, self.token_S)

    def excess(self, other: Row, scale: float = 1.0) -> Row:
        """(scale * self - other)+, token by token."""
        weight_S = self.weight_S * scale
        weight_S -= other._at(self.token_S).to(weight_S.device)
        return Row(self.size, weight_S.clamp_(min=0.0), self.token_S)

    def _at(self, token_T: Tensor | None) -> Tensor:
        """The weights of these tokens (None: of all)."""
        if token_T is None:
            return self.to_dense()
        if self.token_S is None:
            return self.weight_S[token_T]
        index_T = torch.searchsorted(self.token_S, token_T).clamp_(max=self.token_S.numel() - 1)
        return torch.where(self.token_S[index_T] == token_T, self.weight_S[index_T], 0.0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Row) and torch.equal(self.to_dense(), other.to_dense())

    __hash__ = None  # type: ignore[assignment]  # holds tensors: equal by value, not to be a key
