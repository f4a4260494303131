"""Tiny heads with random weights: EAGLE-3, next-token modules, Medusa."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from outrider.drafters.eagle3_net import Eagle3Config, Eagle3Net
from outrider.drafters.head_layer import LayerShape
from outrider.drafters.medusa_net import MedusaConfig, MedusaNet
from outrider.drafters.mtp_net import MtpConfig, MtpNet
from outrider.drafters.reduced_vocab import ReducedVocab

Net = TypeVar("Net", bound=nn.Module)

SHAPE = LayerShape(
    hidden_size=64,
    ffn_size=96,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    norm_eps=1e-5,
    context_length=256,
    rope_theta=1e4,
)


def tiny_config(*, vocab: int, draft_vocab: int | None = None, **fields: Any) -> Eagle3Config:
    """`fields` are those of LayerShape and Eagle3Config."""
    shape = tiny_shape(fields)
    fields.setdefault("target_hidden_size", shape.hidden_size)
    return Eagle3Config(shape, vocab, draft_vocab or vocab, **fields)


def tiny_shape(fields: dict[str, Any]) -> LayerShape:
    """SHAPE, changed by those of the fields that are its own, which are taken out."""
    of_layer = {name: fields.pop(name) for name in list(fields) if name in LayerShape.__slots__}
    return LayerShape(**{name: getattr(SHAPE, name) for name in LayerShape.__slots__} | of_layer)


def random_head(*, vocab: int, draft_ids: list[int] | None = None, seed: int = 0, **fields: Any) -> Eagle3Net:
    """An EAGLE-3 head."""
    config = tiny_config(vocab=vocab, draft_vocab=draft_ids and len(draft_ids), **fields)
    return filled(Eagle3Net(config, reduced(draft_ids, vocab)), seed)


def random_module(*, vocab: int, draft_ids: list[int] | None = None, seed: int = 0, **fields: Any) -> MtpNet:
    """A next-token module. `fields` are those of LayerShape and MtpConfig."""
    shape = tiny_shape(fields)
    config = MtpConfig(shape, vocab, len(draft_ids or range(vocab)), shape.hidden_size, **fields)
    return filled(MtpNet(config, reduced(draft_ids, vocab)), seed)


def random_medusa(
    *,
    vocab: int,
    draft_ids: list[int] | None = None,
    seed: int = 0,
    hidden_size: int = 64,
    n_heads: int = 3,
    **fields: Any,
) -> MedusaNet:
    """Medusa heads. `fields` are those of MedusaConfig."""
    config = MedusaConfig(hidden_size, vocab, len(draft_ids or range(vocab)), n_heads, **fields)
    return filled(MedusaNet(config, reduced(draft_ids, vocab)), seed)


def reduced(draft_ids: list[int] | None, vocab: int) -> ReducedVocab | None:
    return None if draft_ids is None else ReducedVocab(torch.tensor(draft_ids), vocab)


def filled(net: Net, seed: int) -> Net:
    """Norms around 1, matrices of random numbers."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else noise * 0.2)
    return net.eval()
