"""Trees as parent lists: row i continues row parents[i] < i, or the committed text when that is -1.

Shapes: m rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor


def depths(parents: Seq[int]) -> list[int]:
    """Depth of each row; a row that continues the committed text has depth 0."""
    depth: list[int] = []
    for parent in parents:
        depth.append(0 if parent < 0 else depth[parent] + 1)
    return depth


def is_chain(parents: Seq[int]) -> bool:
    """Whether every row continues the one before it."""
    return all(parent == i - 1 for i, parent in enumerate(parents))


def visible(parents: Seq[int]) -> Tensor:
    """[m, m] bool: whether row i sees row j, that is, j is i or an ancestor of i."""
    rows: list[bytearray] = []
    for i, parent in enumerate(parents):
        rows.append(bytearray(len(parents)) if parent < 0 else rows[parent].copy())
        rows[i][i] = True
    return torch.frombuffer(bytearray().join(rows), dtype=torch.bool).view(len(parents), len(parents))
