"""Tiny block heads (DFlash, DSpark) with random weights."""

from __future__ import annotations

from typing import Any

import torch

from outrider.drafters.block_net import BlockConfig, BlockNet
from outrider.drafters.head_layer import LayerShape
from outrider.drafters.reduced_vocab import ReducedVocab
from tests.tiny_head import SHAPE

DSPARK: dict[str, Any] = {"markov_rank": 8, "confidence": True}
DFLASH: dict[str, Any] = {"sample_from_anchor": False}


def random_block(*, vocab: int, draft_ids: list[int] | None = None, seed: int = 0, **fields: Any) -> BlockNet:
    """Norms around 1, matrices of random numbers. `fields` are those of LayerShape and BlockConfig."""
    reduced = None if draft_ids is None else ReducedVocab(torch.tensor(draft_ids), vocab)
    of_layer = {name: fields.pop(name) for name in list(fields) if name in LayerShape.__slots__}
    layer = LayerShape(**({name: getattr(SHAPE, name) for name in LayerShape.__slots__} | of_layer))
    sizes: dict[str, Any] = {"n_layers": 2, "block_size": 4, "mask_token_id": vocab - 1, "layer_ids": (0, 1, 2)}
    sizes |= {"target_hidden_size": layer.hidden_size, "draft_vocab_size": len(draft_ids) if draft_ids else vocab}
    net = BlockNet(BlockConfig(layer, vocab_size=vocab, **(sizes | fields)), reduced)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else noise * 0.2)
    return net.eval()
