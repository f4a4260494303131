"""Where the columns of a draft model's logits lie in the target's vocabulary.

Two reasons for a difference: vocabularies padded to different sizes (only the common range is ever proposed), and a
draft head cut down to frequent tokens (FR-Spec, Zhao et al. 2025, 2502.14856): q is 0 outside, and the residual makes
up for it.

Shapes: n rows, S tokens that are proposed.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from outrider.core.protocols import LanguageModel
from outrider.drafters.columns import Columns
from outrider.errors import ConfigError


@runtime_checkable
class HeadSubset(Protocol):
    """A model that can leave rows of its output head out."""

    def with_head_rows(self, ids: Seq[int]) -> LanguageModel:
        """This model with only these rows of the head: logits have len(ids) columns, in the order of `ids`."""
        ...


class DraftVocab:
    """The model to run, and what the columns of its logits stand for.

    `draft_vocab` are the token ids that the draft side keeps; None keeps all. A model without the capability
    `HeadSubset` computes all logits, and those outside are left out.
    """

    def __init__(self, model: LanguageModel, vocab_size: int, draft_vocab: Seq[int] | None) -> None:
        self.known = model.vocab_size
        self.model = model
        common = min(model.vocab_size, vocab_size)
        ids_S = None if draft_vocab is None else torch.tensor(_checked_ids(draft_vocab, common))
        self.columns = Columns(ids_S, vocab_size)
        self._kept: slice | Tensor = slice(common) if ids_S is None else ids_S
        if ids_S is not None and isinstance(model, HeadSubset):
            self.model = model.with_head_rows(ids_S.tolist())
            self._kept = slice(len(ids_S))

    def own_columns(self, logits_n: Tensor) -> Tensor:
        """The model's logits without the columns that it never proposes."""
        return logits_n[:, self._kept]

    def unknown(self, tokens: Seq[int]) -> bool:
        """Whether some token has no embedding in the draft model."""
        return any(token >= self.known for token in tokens)


def _checked_ids(draft_vocab: Seq[int], common: int) -> list[int]:
    ids = list(draft_vocab)
    bad = next((i for i in ids if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < common), None)
    if not ids or bad is not None or len(set(ids)) != len(ids):
        what = "is empty" if not ids else f"holds {bad!r}" if bad is not None else "names an id twice"
        raise ConfigError(f"draft_vocab {what}: give distinct token ids from 0 to {common - 1}, the common range")
    return sorted(ids)
