"""A head's own, smaller vocabulary: the frequent tokens, in the order of their ids in the target.

Checkpoints state it twice: `d2t` holds offsets (target id = i + d2t[i]), `t2d` flags the target ids that are in it.

Shapes: S draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.errors import ModelFileError


class ReducedVocab:
    """The target ids `ids_S` (ascending) that the columns of a head's logits stand for, out of `size`."""

    def __init__(self, ids_S: Tensor, size: int) -> None:
        self.ids_S = ids_S
        self.size = size

    @classmethod
    def whole(cls, size: int) -> ReducedVocab:
        """Every token."""
        return cls(torch.arange(size), size)

    @classmethod
    def from_tensors(cls, where: str, d2t_S: Tensor, t2d_V: Tensor | None, size: int) -> ReducedVocab:
        """Raises ModelFileError unless the offsets give ascending ids below `size`, and `t2d_V` says the same."""
        if d2t_S.is_floating_point() or d2t_S.dtype == torch.bool:
            raise ModelFileError(f"{where}: d2t holds {d2t_S.dtype}, expected whole numbers: target id minus draft id")
        ids_S = torch.arange(len(d2t_S)) + d2t_S.to(torch.int64)
        wrong_S = torch.zeros(len(ids_S), dtype=torch.bool)
        wrong_S[1:] = ids_S[1:] <= ids_S[:-1]
        wrong_S |= (ids_S < 0) | (ids_S >= size)
        if bool(wrong_S.any()):
            at = int(wrong_S.nonzero()[0])
            raise ModelFileError(
                f"{where}: d2t[{at}] = {int(d2t_S[at])} makes draft token {at} the target's {int(ids_S[at])}. d2t "
                f"holds offsets (target id = draft id + d2t), and the ids must ascend from 0 to {size - 1}"
            )
        vocab = cls(ids_S, size)
        if t2d_V is not None and not torch.equal(t2d_V.to(torch.bool), vocab.flags()):
            at = int((t2d_V.to(torch.bool) != vocab.flags()).nonzero()[0])
            raise ModelFileError(f"{where}: t2d and d2t disagree about token {at}: one of them belongs to another head")
        return vocab

    def proposable(self, tokens: int) -> Tensor:
        """On the CPU, those of a target of so many tokens: the others are padding of its matrices."""
        return self.ids_S[self.ids_S < tokens].cpu()

    def offsets(self) -> Tensor:
        """d2t, int64 [S]."""
        return self.ids_S - torch.arange(len(self.ids_S), device=self.ids_S.device)

    def flags(self) -> Tensor:
        """t2d, bool [V]."""
        flags_V = torch.zeros(self.size, dtype=torch.bool, device=self.ids_S.device)
        flags_V[self.ids_S] = True
        return flags_V

    def columns(self) -> Tensor:
        """int64 [V]: the draft id of every target id, -1 for those that are not in it."""
        columns_V = torch.full((self.size,), -1, dtype=torch.int64, device=self.ids_S.device)
        columns_V[self.ids_S] = torch.arange(len(self.ids_S), device=self.ids_S.device)
        return columns_V
