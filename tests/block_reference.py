"""A block head's arithmetic again, one row and one number at a time, from the names of its tensors alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from outrider.drafters.block_net import BlockNet
from tests.tiny_head import SHAPE


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean() + SHAPE.norm_eps) * weight


def turned(x: Tensor, position: int) -> Tensor:
    """One head's vector, pair by pair."""
    half = len(x) // 2
    out = x.clone()
    for r in range(half):
        angle = position / SHAPE.rope_theta ** (2 * r / len(x))
        out[r] = x[r] * math.cos(angle) - x[r + half] * math.sin(angle)
        out[r + half] = x[r + half] * math.cos(angle) + x[r] * math.sin(angle)
    return out


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def block_rows(net: BlockNet, features: Tensor, anchor: int, token: int, embedding: Tensor, rows: int) -> list[Tensor]:
    """The normed rows of the block at an anchor, one at a time, from the names of the tensors."""
    w = {name: tensor.detach() for name, tensor in net.state_dict().items()}
    c, shape = net.config, net.config.layer
    table = w.get("embed_tokens.weight", embedding)
    context = [rms(w["fc.weight"] @ f, w["hidden_norm.weight"]) for f in features[:anchor]]
    xs = [table[token if j == 0 else c.mask_token_id] for j in range(rows)]
    for i in range(c.n_layers):
        layer, attn = f"layers.{i}.", f"layers.{i}.self_attn."

        def heads(part: str, x: Tensor, position: int, attn: str = attn) -> list[Tensor]:
            y = w[attn + f"{part}_proj.weight"] @ x + w.get(attn + f"{part}_proj.bias", torch.zeros(1))
            split = list(y.split(shape.head_dim))
            if shape.qk_norm and part != "v":
                split = [rms(one, w[attn + f"{part}_norm.weight"]) for one in split]
            return split if part == "v" else [turned(one, position) for one in split]

        inner = [rms(x, w[layer + "input_layernorm.weight"]) for x in xs]
        seen = [*context, *inner]
        keys, values = ([heads(part, x, t) for t, x in enumerate(seen)] for part in ("k", "v"))
        for j, x in enumerate(inner):
            mixed = []
            for h, q in enumerate(heads("q", x, anchor + j)):
                group = h // (shape.n_heads // shape.n_kv_heads)
                scores = torch.stack([q @ key[group] for key in keys]) / math.sqrt(shape.head_dim)
                mixed.append(sum(s * value[group] for s, value in zip(scores.softmax(0), values, strict=True)))
            z = xs[j] + w[attn + "o_proj.weight"] @ torch.cat(mixed)
            z = z + w.get(attn + "o_proj.bias", torch.zeros(1))
            n = rms(z, w[layer + "post_attention_layernorm.weight"])
            gate, up = w[layer + "mlp.gate_proj.weight"] @ n, w[layer + "mlp.up_proj.weight"] @ n
            xs[j] = z + w[layer + "mlp.down_proj.weight"] @ (gate * sigmoid(gate) * up)
    return [rms(x, w["norm.weight"]) for x in xs]


def said(
    net: BlockNet,
    features: Tensor,
    anchor: int,
    tokens: list[int],
    embedding: Tensor,
    head: Tensor,
    rows: int | None = None,
) -> list[tuple[Tensor, Tensor | None]]:
    """By draft token behind the anchor: its logits [S], and its confidence. `tokens` are those from the anchor on;
    `embedding` and `head` the target's; `rows` those of the block, if not all."""
    w = {name: tensor.detach() for name, tensor in net.state_dict().items()}
    c = net.config
    hidden = block_rows(net, features, anchor, tokens[0], embedding, rows or c.block_size)
    out_rows = w.get("lm_head.weight", head)
    state, result = torch.zeros(c.markov_rank, dtype=out_rows.dtype), []
    for h, previous in zip(hidden if c.sample_from_anchor else hidden[1:], tokens, strict=False):
        logits, read = out_rows @ h, h
        if c.markov_rank:
            e = w["markov_head.markov_w1.weight"][previous]
            if c.markov_head_type == "rnn":
                joint = w["markov_head.joint_proj.weight"] @ torch.cat([state, e, h])
                gate, new, out = (joint + w["markov_head.joint_proj.bias"]).split(c.markov_rank)
                state = sigmoid(gate) * state + (1 - sigmoid(gate)) * torch.tanh(new)
                logits = logits + w["markov_head.markov_w2.weight"] @ torch.tanh(out)
            else:
                logits = logits + w["markov_head.markov_w2.weight"] @ e
            read = torch.cat([h, e]) if c.confidence_with_markov else h
        sure = None
        if c.confidence:
            sure = sigmoid(w["confidence_head.proj.weight"][0] @ read + w["confidence_head.proj.bias"][0])
        result.append((logits, sure))
    return result
