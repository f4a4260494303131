"""Tiny EAGLE-3 heads with random weights."""

from __future__ import annotations

from typing import Any

import torch

from outrider.drafters.eagle3_net import Eagle3Config, Eagle3Net
from outrider.drafters.head_layer import LayerShape
from outrider.drafters.reduced_vocab import ReducedVocab

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
    of_layer = {name: fields.pop(name) for name in list(fields) if name in LayerShape.__slots__}
    sizes: dict[str, Any] = {name: getattr(SHAPE, name) for name in LayerShape.__slots__} | of_layer
    fields.setdefault("target_hidden_size", sizes["hidden_size"])
    return Eagle3Config(LayerShape(**sizes), vocab, draft_vocab or vocab, **fields)


def random_head(*, vocab: int, draft_ids: list[int] | None = None, seed: int = 0, **fields: Any) -> Eagle3Net:
    """Norms around 1, matrices of random numbers."""
    reduced = None if draft_ids is None else ReducedVocab(torch.tensor(draft_ids), vocab)
    net = Eagle3Net(tiny_config(vocab=vocab, draft_vocab=draft_ids and len(draft_ids), **fields), reduced)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else noise * 0.2)
    return net.eval()
