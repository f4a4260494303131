"""What is rounded in training is what is packed in four bits when the head is served."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider import kernels
from outrider.drafters import head_layer
from outrider.drafters.reduced_vocab import ReducedVocab
from outrider.engine.opening import identity_of, open_model
from outrider.train.heads import HeadSettings, TargetParts
from outrider.train.recipes import RECIPES
from outrider.train.rounding import round_
from outrider.train.run import native
from tests.tiny_folder import write_tiny_model

pytestmark = pytest.mark.skipif(not kernels.available(), reason=kernels.why())

HEADS = [
    ("eagle3", {}),
    ("mtp", {}),
    ("medusa", {}),
    ("dflash", {}),
    ("dspark", {}),
    ("dspark", {"markov_head_type": "rnn"}),
]


@pytest.mark.parametrize(
    ("kind", "options"), HEADS, ids=lambda value: value if isinstance(value, str) else "".join(value)
)
def test_what_is_rounded_is_what_is_packed(
    kind: str, options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_model(str(write_tiny_model(tmp_path / "target", layers=6)))
    target, identity = native(opened), identity_of(opened)
    parts = TargetParts(opened, target, identity, 0)
    vocab = ReducedVocab(torch.arange(0, 64), target.embedding_rows)
    head = RECIPES[kind](parts, vocab, HeadSettings(draft_vocab=64, steps=2, markov_rank=32, **options))
    round_(head.packed)
    head.write(tmp_path / "head")

    packed: list[Tensor] = []

    def spy(weight_NK: Tensor) -> Tensor:
        packed.append(weight_NK.clone())
        return kernels.encode_q4_0(weight_NK)

    monkeypatch.setitem(head_layer.BLOCKS, "int4", (spy, "Q4_0"))
    head.drafter(kind, target, identity, tmp_path / "head", {})
    assert packed, "nothing was packed in four bits"
    expected = list(head.packed)
    if head._head_Sd is not None:
        expected.append(head._head_Sd)
    assert rows(packed) == rows(expected)


def rows(matrices: list[Tensor]) -> set[tuple[float, ...]]:
    """All rows, as the file has them: matrices that read the same may be packed as one, and keys and values twice."""
    return {tuple(row.tolist()) for matrix in matrices for row in matrix.detach().bfloat16().float()}
