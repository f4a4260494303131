"""The twin of chain.py in plain torch: a pass of the layer and of the head for each token.

Shapes: M rows, d head width, S columns of the logits, V tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Layer = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(embeddings [M, d], what is handed on [M, d]) of the rows behind those before, to (what the head reads of the last
row [1, d], what that hands on [1, d])."""


def draft(
    embedded_Md: Tensor, handed_Md: Tensor, layer: Layer, head_Sd: Tensor, ids_S: Tensor, table_Vd: Tensor, limit: int
) -> tuple[list[int], list[float], Tensor]:
    """(`limit` likeliest tokens, their probabilities, what the last row hands on [1, d])."""
    tokens: list[int] = []
    shares: list[float] = []
    while len(tokens) < limit:
        normed_1d, handed_Md = layer(embedded_Md, handed_Md)
        share, column = torch.softmax(normed_1d[0] @ head_Sd.T, dim=0).max(0)
        tokens.append(int(ids_S[column]))
        shares.append(float(share))
        embedded_Md = table_Vd[tokens[-1:]]
    return tokens, shares, handed_Md
