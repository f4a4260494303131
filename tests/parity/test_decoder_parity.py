"""The native decoder against `transformers` on the same float32 weights.

Shapes: m rows, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.core.protocols import Segment
from outrider.models.decoder import Decoder
from outrider.models.loader.checkpoint import open_checkpoint
from tests.tiny_decoder import FAMILIES, random_tokens, reference_logits, write_reference

pytest.importorskip("transformers")

TOLERANCE = 1e-5
"""Relative to the largest logit; the promise is 1e-4 absolute."""

TREE = [-1, 0, 0, 1, 1, 2, 4, 5]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Decoder]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    model = write_reference(folder, request.param)
    return model, Decoder.from_checkpoint(open_checkpoint(folder), dtype=torch.float32)


def assert_close(actual_mV: Tensor | None, expected_mV: Tensor) -> None:
    assert actual_mV is not None
    assert actual_mV.dtype == torch.float32
    gap, scale = float((actual_mV - expected_mV).abs().max()), float(expected_mV.abs().max())
    assert scale > 0.5, "these logits are too small to compare"
    assert gap <= max(TOLERANCE * scale, TOLERANCE), f"logits differ by {gap:.2e} of {scale:.2f}"


def path_of(row: int, parents: list[int]) -> list[int]:
    path: list[int] = []
    while row >= 0:
        path.insert(0, row)
        row = parents[row]
    return path


def test_prefill(pair: tuple[Any, Decoder]) -> None:
    model, decoder = pair
    tokens = random_tokens(40)
    assert_close(decoder.forward([Segment(decoder.new_cache(), tokens)]).logits_MV, reference_logits(model, tokens))


def test_step_by_step(pair: tuple[Any, Decoder]) -> None:
    model, decoder = pair
    tokens, cache = random_tokens(20, seed=1), decoder.new_cache()
    rows = []
    for token in tokens:
        rows.append(decoder.forward([Segment(cache, [token])]).logits_MV)
        cache.keep([0])
    assert_close(torch.cat(rows), reference_logits(model, tokens))


def test_chunks_with_rejected_rows_and_a_roll_back(pair: tuple[Any, Decoder]) -> None:
    model, decoder = pair
    tokens, noise, cache = random_tokens(30, seed=2), random_tokens(30, seed=3), decoder.new_cache()
    expected_mV = reference_logits(model, tokens)
    for step, accepted in enumerate([7, 1, 3, 0, 5, 2, 9]):
        start = cache.length
        chunk = [*tokens[start : start + accepted + 1], *noise[step : step + 4]]
        logits = decoder.forward([Segment(cache, chunk)]).logits_MV
        assert logits is not None
        assert_close(logits[: accepted + 1], expected_mV[start : start + accepted + 1])
        cache.keep(range(accepted + 1))
        if step == 4:
            cache.truncate(cache.length - 6)
    assert_close(
        decoder.forward([Segment(cache, tokens[cache.length :])]).logits_MV, expected_mV[cache.length - len(tokens) :]
    )


def test_every_row_of_a_tree_equals_the_chain_of_its_path(pair: tuple[Any, Decoder]) -> None:
    model, decoder = pair
    prefix, tree, cache = random_tokens(11, seed=4), random_tokens(len(TREE), seed=5), decoder.new_cache()
    decoder.forward([Segment(cache, prefix)], logits=False)
    cache.keep(range(len(prefix)))
    logits_mV = decoder.forward([Segment(cache, tree, TREE)]).logits_MV
    assert logits_mV is not None
    for row in range(len(tree)):
        chain = prefix + [tree[node] for node in path_of(row, TREE)]
        assert_close(logits_mV[row : row + 1], reference_logits(model, chain)[-1:])
    kept = path_of(6, TREE)
    cache.keep(kept)
    rest = random_tokens(3, seed=6)
    expected_mV = reference_logits(model, prefix + [tree[node] for node in kept] + rest)
    assert_close(decoder.forward([Segment(cache, rest)]).logits_MV, expected_mV[-3:])


def test_a_ragged_batch(pair: tuple[Any, Decoder]) -> None:
    model, decoder = pair
    prompts = [random_tokens(count, seed=count) for count in (3, 17, 9)]
    caches = [decoder.new_cache() for _ in prompts]
    decoder.forward([Segment(c, p[:-2]) for c, p in zip(caches, prompts, strict=True)], logits=False)
    for cache, prompt in zip(caches, prompts, strict=True):
        cache.keep(range(len(prompt) - 2))
    tails = [prompts[0][-2:], [*prompts[1][-2:], 5], prompts[2][-2:]]
    parents = [None, [-1, 0, 0], None]
    out = decoder.forward([Segment(c, t, p) for c, t, p in zip(caches, tails, parents, strict=True)]).logits_MV
    expected = [reference_logits(model, prompt)[-2:] for prompt in prompts]
    branch = reference_logits(model, [*prompts[1][:-1], 5])[-1:]
    assert_close(out, torch.cat([expected[0], expected[1], branch, expected[2]]))


def test_taps_are_the_outputs_of_the_layers(pair: tuple[Any, Decoder]) -> None:
    model, decoder = pair
    tokens = random_tokens(12, seed=7)
    outputs: dict[int, Tensor] = {}
    hooks = [
        layer.register_forward_hook(lambda _m, _a, out, i=i: outputs.update({i: out[0] if out.dim() == 3 else out}))
        for i, layer in enumerate(model.model.layers)
    ]
    reference_logits(model, tokens)
    for hook in hooks:
        hook.remove()
    features = decoder.forward([Segment(decoder.new_cache(), tokens)], logits=False, taps=(2, 0)).features_MF
    assert_close(features, torch.cat([outputs[2], outputs[0]], dim=-1))


def test_the_first_layers_are_a_model_of_their_own(pair: tuple[Any, Decoder]) -> None:
    model, decoder = pair
    tokens = random_tokens(14, seed=8)
    layers, model.model.layers = model.model.layers, model.model.layers[:2]
    model.config.num_hidden_layers = 2
    try:
        expected_mV = reference_logits(model, tokens)
    finally:
        model.model.layers, model.config.num_hidden_layers = layers, 3
    short = decoder.first_layers(2)
    assert_close(short.forward([Segment(short.new_cache(), tokens)]).logits_MV, expected_mV)
