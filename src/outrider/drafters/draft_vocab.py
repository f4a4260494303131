"""Where the columns of a draft model's logits lie in the target's vocabulary.

Two reasons for a difference: vocabularies padded to different sizes (only the common range is ever proposed), and a
draft head cut down to frequent tokens (FR-Spec, Zhao et al. 2025, 2502.14856): q is 0 outside, and the residual makes
up for it.

Shapes: n rows, V target vocabulary, C common range, S subset of the draft head.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from outrider.core.protocols import LanguageModel
from outrider.errors import ConfigError


@runtime_checkable
class HeadSubset(Protocol):
    """A model that can leave rows of its output head out."""

    def with_head_rows(self, ids: Seq[int]) -> LanguageModel:
        """This model with only these rows of the head: logits have len(ids) columns, in the order of `ids`."""
        ...


class DraftVocab:
    """The model to run, and the way from its logits to the target's columns.

    `draft_vocab` are the token ids that the draft side keeps; None keeps all. A model without the capability
    `HeadSubset` computes all logits, and those outside are masked.
    """

    def __init__(self, model: LanguageModel, vocab_size: int, draft_vocab: Seq[int] | None) -> None:
        self.vocab_size = vocab_size
        self.known = model.vocab_size
        self.model = model
        self._common = min(model.vocab_size, vocab_size)
        self._ids_S: Tensor | None = None
        self._narrow_head = False
        if draft_vocab is not None:
            ids = _checked_ids(draft_vocab, self._common)
            self._ids_S = torch.tensor(ids)
            if isinstance(model, HeadSubset):
                self.model = model.with_head_rows(ids)
                self._narrow_head = True

    def widen(self, logits_n: Tensor) -> Tensor:
        """The model's logits as [n, V], -inf in columns that it never proposes."""
        if self._ids_S is None and logits_n.shape[1] == self.vocab_size:
            return logits_n
        wide_nV = logits_n.new_full((logits_n.shape[0], self.vocab_size), -torch.inf)
        if self._ids_S is None:
            wide_nV[:, : self._common] = logits_n[:, : self._common]
        else:
            ids_S = self._ids_S.to(logits_n.device)
            wide_nV[:, ids_S] = logits_n if self._narrow_head else logits_n[:, ids_S]
        return wide_nV

    def unknown(self, tokens: Seq[int]) -> bool:
        """Whether some token has no embedding in the draft model."""
        return any(token >= self.known for token in tokens)


def _checked_ids(draft_vocab: Seq[int], common: int) -> list[int]:
    ids = list(draft_vocab)
    bad = next((i for i in ids if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < common), None)
    if not ids or bad is not None or len(set(ids)) != len(ids):
        what = "is empty" if not ids else f"holds {bad!r}" if bad is not None else "names an id twice"
        raise ConfigError(f"draft_vocab {what}: give distinct token ids from 0 to {common - 1}, the common range")
    return ids
