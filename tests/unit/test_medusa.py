"""Medusa heads: what they compute and learn, and the public layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.drafters.head_training import Lesson
from outrider.drafters.medusa import MedusaDrafter
from outrider.drafters.medusa_files import read_medusa, write_medusa
from outrider.drafters.medusa_net import MedusaConfig, MedusaNet, medusa_losses
from outrider.errors import ConfigError, ModelFileError, PairingError
from tests.tiny_decoder import tiny_decoder
from tests.tiny_head import random_medusa

VOCAB, IDS = 40, [1, 4, 5, 9, 12, 20, 33, 39]


def said_by(net: MedusaNet, h: Tensor, k: int) -> Tensor:
    """[S] logits of head k = 1.. from the names of its tensors."""
    w = {name: tensor.detach() for name, tensor in net.state_dict().items()}
    for i in range(net.config.n_layers):
        y = w[f"blocks.{k - 1}.{i}.weight"] @ h + w[f"blocks.{k - 1}.{i}.bias"]
        h = h + y * y.sigmoid()
    return w[f"lm_heads.{k - 1}.weight"] @ h


@pytest.mark.parametrize("n_layers", [1, 2])
def test_heads_equal_a_plain_reference(n_layers: int) -> None:
    net, h = random_medusa(vocab=VOCAB, draft_ids=IDS, n_layers=n_layers), torch.randn(2, 64)
    with torch.no_grad():
        for k in (1, 2, 3):
            got = net.lm_heads[k - 1](net.read(h, k - 1))
            assert torch.allclose(got, torch.stack([said_by(net, row, k) for row in h]), atol=1e-4)


def lesson() -> tuple[Lesson, Tensor]:
    """One sequence and the target's logits of it."""
    generator = torch.Generator().manual_seed(2)
    outputs, logits = torch.randn(8, 64, generator=generator), 3 * torch.randn(8, VOCAB, generator=generator)
    logits[:6, IDS] += 9
    logp, likeliest = logits.log_softmax(-1).topk(5)
    counted = torch.tensor([[False, False, True, True, True, True, True, False]])
    return Lesson(torch.zeros(1, 8, dtype=torch.int64), outputs[None], likeliest[None], logp[None], counted), logits


def test_the_loss_is_that_of_what_heads_say() -> None:
    """Head k behind position t + k, from the hidden state of position t; weights are powers."""
    net = random_medusa(vocab=VOCAB, draft_ids=IDS)
    given, logits = lesson()
    got = medusa_losses(net, given, last_norm=lambda x: 2 * x, decay=0.5)
    total = 0.0
    for k in (1, 2, 3):
        losses, agreed, n = [], 0, 0
        for at in range(k, 8):
            if not given.counted_BT[0, at]:
                continue
            n += 1
            said = said_by(net, 2 * given.features_BTF[0, at - k], k)
            kept = given.likeliest_BTC[0, at].tolist()
            if kept[0] in IDS:
                p = torch.tensor([float(logits[at].softmax(0)[i]) if i in kept else 0.0 for i in IDS])
                losses.append(float(-(p / p.sum() * said.log_softmax(0)).sum()))
                agreed += IDS[int(said.argmax())] == kept[0]
        assert 0 < len(losses) <= n
        assert got.loss_by_position[k - 1] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
        assert got.agreement_by_position[k - 1] == pytest.approx(agreed / n)
        total += 0.5**k * got.loss_by_position[k - 1]
    assert float(got.total.detach()) == pytest.approx(total, rel=1e-4)


def test_shared_rows_teach_the_blocks_alone() -> None:
    own, shared = random_medusa(vocab=VOCAB, draft_ids=IDS), random_medusa(vocab=VOCAB, draft_ids=IDS, own_heads=False)
    shared.blocks.load_state_dict(own.blocks.state_dict())
    rows = own.lm_heads[0].weight.detach().clone()
    with torch.no_grad():
        for head in own.lm_heads:
            head.weight.copy_(rows)
    given, _ = lesson()
    losses = [medusa_losses(net, given, last_norm=lambda x: x, head_Sd=rows) for net in (own, shared)]
    for loss in losses:
        loss.total.backward()
    assert losses[0].loss_by_position == losses[1].loss_by_position
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(own.blocks.parameters(), shared.parameters(), strict=True))  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="need the target's rows"):
        medusa_losses(shared, given, last_norm=lambda x: x)


def test_heads_begin_as_the_targets_own() -> None:
    net, h = random_medusa(vocab=VOCAB, own_heads=False, n_layers=2), torch.randn(3, 64)
    net.reset()
    assert torch.equal(net.read(h, 1), h)


def by_hand(folder: Path, rows: int = VOCAB, **changes: Any) -> dict[str, Tensor]:
    """Two heads of one block as that project's own code leaves them: no sizes but those of the tensors."""
    folder.mkdir()
    made: dict[str, Tensor] = {}
    for k in range(2):
        made[f"{k}.0.linear.weight"], made[f"{k}.0.linear.bias"] = torch.randn(64, 64), torch.randn(64)
        made[f"{k}.1.weight"] = torch.randn(rows, 64)
    torch.save(made, folder / "medusa_lm_head.pt")
    config = {"base_model_name_or_path": "org/Some-1B", "medusa_num_heads": 2, "medusa_num_layers": 1}
    (folder / "config.json").write_text(json.dumps(config | changes))
    return made


def test_read_key_by_key_and_written_back(tmp_path: Path) -> None:
    made = by_hand(tmp_path / "in")
    net = read_medusa(tmp_path / "in")
    assert net.config == MedusaConfig(64, VOCAB, VOCAB, 2, target_name="org/Some-1B")
    own = net.state_dict()
    assert len(own) == len(made)
    for k in range(2):
        assert torch.equal(own[f"blocks.{k}.0.weight"], made[f"{k}.0.linear.weight"])
        assert torch.equal(own[f"blocks.{k}.0.bias"], made[f"{k}.0.linear.bias"])
        assert torch.equal(own[f"lm_heads.{k}.weight"], made[f"{k}.1.weight"])
    write_medusa(net, tmp_path / "out")
    after = torch.load(tmp_path / "out" / "medusa_lm_head.pt", weights_only=True)
    assert set(after) == set(made)
    assert all(torch.equal(after[name], made[name]) for name in made)
    assert read_medusa(tmp_path / "out" / "medusa_lm_head.pt").config == net.config


@pytest.mark.parametrize("own_heads", [True, False])
def test_what_is_written_reads_equal(own_heads: bool, tmp_path: Path) -> None:
    known = {"target_name": "a", "vocabulary_sha256": "b" * 64, "n_layers": 2}
    net = random_medusa(vocab=VOCAB, draft_ids=IDS, own_heads=own_heads, **known).bfloat16()
    write_medusa(net, tmp_path)
    again = read_medusa(tmp_path)
    assert again.config == net.config
    assert again.vocab.ids_S.tolist() == IDS
    assert next(again.parameters()).dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), again.state_dict().values(), strict=True))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"medusa_num_heads": 3}, r"lacks the tensors 2\.0\.linear\.weight"),
        ({"medusa_num_heads": 1}, r"has the tensors 1\.0\.linear"),
        ({"medusa_num_layers": 0}, "medusa_num_layers is 0, allowed are 1 to 64"),
        ({"medusa_num_heads": 10**9}, "allowed are 1 to 64"),
        ({"draft_vocab_size": 41}, "draft_vocab_size 41 of a vocabulary of 40"),
        ({"vocab_size": 50}, "lacks the tensor d2t"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    by_hand(tmp_path / "a", **changes)
    with pytest.raises(ModelFileError, match=said):
        read_medusa(tmp_path / "a")


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    save_file({"fc.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelFileError, match="no Medusa heads"):
        read_medusa(tmp_path)
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"no checkpoint")
    with pytest.raises(ModelFileError, match="damaged"):
        read_medusa(tmp_path / "medusa_lm_head.pt")


def test_heads_of_another_target_are_refused() -> None:
    with pytest.raises(PairingError, match="hidden states of 32 numbers and tiny-0 has 64"):
        MedusaDrafter(target=tiny_decoder(), head=random_medusa(vocab=131, hidden_size=32))
    with pytest.raises(ConfigError, match="medusa: dtype = 'quantised'"):
        MedusaDrafter(target=tiny_decoder(), head=random_medusa(vocab=131), dtype="quantised")
    assert MedusaDrafter(target=tiny_decoder(n_layers=5), head=random_medusa(vocab=131)).wants == (4,)
