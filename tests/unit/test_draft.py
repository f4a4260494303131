"""Drafts and what is thrown away of them before the target looks."""

from __future__ import annotations

import pytest
import torch

from outrider.core.draft import Draft, DraftLaw, Dropped, SeqDraft, sanitise
from outrider.core.row import Row
from outrider.core.tree import depths, is_chain, visible

UNIFORM = Row.dense(torch.full((4,), 0.25, dtype=torch.float64))


def drawn(tokens: list[int], rows: list[Row] | None = None) -> SeqDraft:
    return SeqDraft.chain(tokens, DraftLaw.IID, rows if rows is not None else [UNIFORM] * len(tokens))


def test_chain() -> None:
    draft = SeqDraft.chain([3, 1, 2], source="test")
    assert draft.parents == [-1, 0, 1]
    assert draft.is_chain
    assert draft.law is DraftLaw.POINT
    assert draft.path(2) == [0, 1, 2]
    assert draft.path(-1) == []


def test_empty() -> None:
    draft = SeqDraft.empty("none")
    assert (draft.size, draft.is_chain, draft.source) == (0, True, "none")
    assert sanitise(draft, 0, 4) == (draft, None)


def test_tree() -> None:
    draft = SeqDraft([0, 1, 2, 3], [-1, -1, 1, 2])
    assert not draft.is_chain
    assert draft.path(3) == [1, 2, 3]
    assert depths(draft.parents) == [0, 0, 1, 2]
    assert not is_chain(draft.parents)
    assert visible(draft.parents).tolist() == [
        [True, False, False, False],
        [False, True, False, False],
        [False, True, True, False],
        [False, True, True, True],
    ]


def test_siblings_share_a_row_of_q() -> None:
    rows = [UNIFORM, Row.dense(UNIFORM.to_dense())]
    draft = SeqDraft([0, 1, 2], [-1, -1, 0], DraftLaw.NO_REPLACEMENT, rows, [0, 0, 1])
    assert draft.q(0) is draft.q(1)
    assert draft.q(2) is rows[1]


def test_split_cuts_a_ragged_batch() -> None:
    draft = Draft([SeqDraft.chain([5, 6]), SeqDraft.empty(), SeqDraft([7, 8], [-1, -1])])
    assert draft.split == [0, 2, 2, 4]


def test_head_keeps_everything_that_belongs_to_it() -> None:
    draft = SeqDraft.chain([1, 2, 3], DraftLaw.IID, [UNIFORM] * 3, confidence=[0.9, 0.8, 0.7], source="s")
    head = draft.head(2)
    assert (head.tokens, head.parents, head.q_row, head.confidence) == ([1, 2], [-1, 0], [0, 1], [0.9, 0.8])
    assert (head.law, head.source) == (DraftLaw.IID, "s")
    assert draft.head(3) is draft


@pytest.mark.parametrize("draft", [drawn([0, 3, 2]), SeqDraft.chain([0, 3, 2]), SeqDraft([1, 2], [-1, -1])])
def test_an_honest_draft_is_left_alone(draft: SeqDraft) -> None:
    assert sanitise(draft, 3, 4) == (draft, None)


def bad_row(**changes: float) -> Row:
    row_V = UNIFORM.to_dense().clone()
    for name, value in changes.items():
        row_V[int(name[1:])] = value
    return Row.dense(row_V)


@pytest.mark.parametrize(
    ("draft", "kept", "reason"),
    [
        (SeqDraft.chain([0, -1, 2]), 1, "token id outside the vocabulary"),
        (SeqDraft.chain([0, 1, 4]), 2, "token id outside the vocabulary"),
        (SeqDraft.chain([0, 1, 2, 3, 0]), 3, "longer than the budget"),
        (SeqDraft.chain([0, 9, 2, 3, 0]), 1, "token id outside the vocabulary"),
        (SeqDraft([0, 1], [-1, 1]), 1, "parent is not an earlier node"),
        (SeqDraft([0, 1], [-2, 0]), 0, "parent is not an earlier node"),
        (drawn([0, 1], [UNIFORM]), 1, "no q row"),
        (
            drawn([0, 1], [UNIFORM, Row.dense(torch.full((5,), 0.2, dtype=torch.float64))]),
            1,
            "q has another vocabulary size",
        ),
        (drawn([0, 1], [UNIFORM, UNIFORM.to_dense()]), 1, "q is no Row"),
        (drawn([0, 1], [UNIFORM, bad_row(t3=float("nan"))]), 1, "q is not a distribution"),
        (drawn([0, 1], [bad_row(t3=0.5), UNIFORM]), 0, "q is not a distribution"),
        (drawn([0, 1], [UNIFORM, bad_row(t2=-0.25, t3=0.75)]), 1, "q is not a distribution"),
        (drawn([0, 1], [UNIFORM, bad_row(t1=0.0, t3=0.5)]), 1, "q gives its own token no probability"),
    ],
)
def test_what_no_honest_drafter_proposes_is_cut_with_a_reason(draft: SeqDraft, kept: int, reason: str) -> None:
    clean, dropped = sanitise(draft, 3, 4)
    assert clean.tokens == draft.tokens[:kept]
    assert dropped == Dropped(draft.size - kept, reason)
