"""Training a head that drafts token by token: which rows there are, and what a row of a later step sees.

Every row drafts several tokens, one a step. It sees the rows before it as step 0 made them (from the target's hidden
states), and its own of every step: as when it is used, where the keys and values of committed rows are of step 0.

Shapes: B sequences, T positions, M rows of step 0, A rows that draft, m of them in one sequence, t rows of step 0 in
it, H query heads, G key-value heads, g = H / G, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class NeededRows:
    """Rows (sequence, position) of a batch, sequence by sequence: at B x T positions laid flat, and in their sequence.

    Step 0 runs the rows M, up to the last that drafts; those that draft are the rows `active_A` of them. `spans` cuts
    them by sequence: (start in M, stop in M, start in A, stop in A).
    """

    flat_M: Tensor
    position_M: Tensor
    active_A: Tensor
    spans: list[tuple[int, int, int, int]]
    length: int

    @property
    def flat_A(self) -> Tensor:
        return self.flat_M[self.active_A]

    @property
    def position_A(self) -> Tensor:
        return self.position_M[self.active_A]

    def inside_A(self, step: int) -> Tensor:
        """bool [A]: where the position that step `step` draws behind is one of the sequence."""
        return self.position_A + 1 + step < self.length


def needed_rows(counted_BT: Tensor, steps: int) -> NeededRows:
    """The rows that have anything to learn in `steps` steps, and those that they see.

    Row t of step i draws behind position t + 1 + i, which must count.
    """
    length = counted_BT.shape[1]
    drafts_BT = torch.zeros_like(counted_BT)
    for step in range(min(steps, length - 1)):
        drafts_BT[:, : length - 1 - step] |= counted_BT[:, 1 + step :]
    flat, positions, active, spans, m, a = [], [], [], [], 0, 0
    for sequence, drafts_T in enumerate(drafts_BT):
        at_m = drafts_T.nonzero().flatten()
        if not len(at_m):
            continue
        rows = int(at_m[-1]) + 1
        positions.append(torch.arange(rows, device=at_m.device))
        flat.append(positions[-1] + sequence * length)
        active.append(at_m + m)
        spans.append((m, m + rows, a, a + len(at_m)))
        m, a = m + rows, a + len(at_m)
    none = torch.empty(0, dtype=torch.int64, device=counted_BT.device)
    flat_M, position_M, active_A = (torch.cat(parts) if parts else none for parts in (flat, positions, active))
    return NeededRows(flat_M, position_M, active_A, spans, length)


def see_own_steps(
    q_AHD: Tensor, k_MGD: Tensor, v_MGD: Tensor, own: list[tuple[Tensor, Tensor]], rows: NeededRows
) -> Tensor:
    """[A, H, D]: attention of the rows that draft over the rows of step 0 up to themselves, and over their own of the
    later steps (keys and values [A, G, D] of each)."""
    n_kv, width = k_MGD.shape[1:]
    q_AGgD = q_AHD.view(len(q_AHD), n_kv, -1, width) * width**-0.5
    own_AGgJ = [(q_AGgD * k_AGD[:, :, None]).sum(-1, keepdim=True) for k_AGD, _ in own]
    mixed = []
    for start, stop, first, last in rows.spans:
        k_Gt, v_Gt = k_MGD[start:stop].transpose(0, 1), v_MGD[start:stop].transpose(0, 1)
        q_GmgD = q_AGgD[first:last].transpose(0, 1)
        later_mt = torch.arange(stop - start, device=q_AHD.device) > rows.position_A[first:last, None]
        scores = (q_GmgD.flatten(1, 2) @ k_Gt.transpose(1, 2)).view(*q_GmgD.shape[:3], stop - start)
        scores = scores.masked_fill(later_mt[:, None], -torch.inf)
        weights = torch.cat([scores, *(s[first:last].transpose(0, 1) for s in own_AGgJ)], dim=-1).softmax(-1)
        mixed_GmgD = (weights[..., : stop - start].flatten(1, 2) @ v_Gt).view(q_GmgD.shape)
        for j, (_, v_AGD) in enumerate(own, stop - start):
            mixed_GmgD = mixed_GmgD + weights[..., j : j + 1] * v_AGD[first:last].transpose(0, 1)[:, :, None]
        mixed.append(mixed_GmgD.transpose(0, 1).flatten(1, 2))
    return torch.cat(mixed) if mixed else torch.empty_like(q_AHD)
