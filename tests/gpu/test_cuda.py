"""The decoder on a CUDA GPU: recorded passes ran, and equal those that go operation by operation.

Shapes: m rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.core.protocols import Segment
from outrider.drafters.suffix import SuffixDrafter
from outrider.models.decoder import Decoder
from outrider.models.loader.checkpoint import Checkpoint
from outrider.models.static import StaticSize
from tests.tiny_decoder import TINY, RandomCheckpoint, random_tokens
from tests.tiny_folder import write_tiny_model

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason=f"no CUDA GPU here, or torch {torch.__version__} was not built for one"
)

TREE = [-1, 0, 0, 1, 1, 2, 4]


def decoder(device: str, dtype: torch.dtype, static: StaticSize | None = None) -> Decoder:
    checkpoint = cast(Checkpoint, RandomCheckpoint(replace(TINY, sliding_window=None)))
    return Decoder.from_checkpoint(checkpoint, device=device, dtype=dtype, static=static)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.5)])
def test_replayed_passes_equal_the_ragged_ones(dtype: torch.dtype, tolerance: float) -> None:
    recorded, ragged = decoder("cuda", dtype), decoder("cuda", dtype)
    ragged._static_size = None
    caches = [[model.new_cache() for _ in range(2)] for model in (recorded, ragged)]
    for model, own in zip((recorded, ragged), caches, strict=True):
        for i, cache in enumerate(own):
            model.forward([Segment(cache, random_tokens(20 + i, seed=i))], logits=False)
            cache.keep(range(20 + i))
    for round_ in range(6):
        tokens = [random_tokens(len(TREE), seed=round_), random_tokens(2, seed=round_)]
        outs = [
            model.forward([Segment(own[0], tokens[0], TREE), Segment(own[1], tokens[1])], taps=(0, 2))
            for model, own in zip((recorded, ragged), caches, strict=True)
        ]
        for part in ("logits_MV", "features_MF"):
            torch.testing.assert_close(getattr(outs[0], part), getattr(outs[1], part), rtol=0, atol=tolerance)
        assert outs[0].logits_MV is not None
        assert outs[0].logits_MV.device.type == "cpu"
        for own in caches:
            own[0].keep([0, 1, 4, 6])
            own[1].keep([0])
            own[0].check_integrity()
    assert recorded.static_calls == {"recorded": 1, "replayed": 6}
    assert ragged.static_calls == {}


def test_the_gpu_equals_the_cpu() -> None:
    tokens, new = random_tokens(30), random_tokens(5, seed=1)
    rows = []
    for device in ("cpu", "cuda"):
        model = decoder(device, torch.float32)
        cache = model.new_cache()
        model.forward([Segment(cache, tokens)], logits=False)
        cache.keep(range(30))
        rows.append(model.forward([Segment(cache, new)]).logits_MV)
    torch.testing.assert_close(rows[0], rows[1], rtol=0, atol=1e-2)


def test_every_bucket_records() -> None:
    model = decoder("cuda", torch.bfloat16)
    cache = model.new_cache()
    model.forward([Segment(cache, random_tokens(20))], logits=False)
    cache.keep(range(20))
    for count in range(1, 17):
        out = model.forward([Segment(cache, random_tokens(count))]).logits_MV
        assert out is not None
        assert bool(out.isfinite().all())
    assert model.static_calls == {"recorded": 5, "replayed": 16}


def test_greedy_speculation_equals_plain_and_ran_recorded() -> None:
    texts = {}
    for k in (0, 4):
        model = decoder("cuda", torch.float32)
        llm = LLM.from_parts(model, {"suffix": SuffixDrafter()}, k=k)
        prompts = [random_tokens(n, seed=n) * 2 for n in (6, 11, 20)]
        results = llm.generate(prompts, SamplingParams(max_tokens=60, ignore_eos=True))
        texts[k] = [result.token_ids for result in results]
        calls = model.static_calls
        assert calls["replayed"] > 10
        assert calls["recorded"] < calls["replayed"]
        assert "direct" not in calls
    assert texts[0] == texts[4]


def test_llm_on_cuda(tmp_path: Path) -> None:
    folder = str(write_tiny_model(tmp_path / "tiny"))
    llm = LLM(folder, device="cuda")
    plan = {decision.field: decision for decision in llm.plan}
    assert plan["dtype"].value in ("bfloat16", "float32")
    assert plan["kernels"].value == "torch"
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    for options in ({}, {"temperature": 0.8, "top_p": 0.9, "seed": 1}, {"frequency_penalty": 1.0}):
        (result,) = llm.generate("hello there", replace(params, **options))
        assert len(result.token_ids) == 30
    assert llm.opened is not None
    model = llm.opened.model
    assert isinstance(model, Decoder)
    assert model.kv_dtype == getattr(torch, plan["dtype"].value)
    assert model.static_calls["replayed"] > 10


def test_a_draft_model_on_cuda(tmp_path: Path) -> None:
    target, draft = (str(write_tiny_model(tmp_path / name, seed=i)) for i, name in enumerate(("target", "draft")))
    llm = LLM(target, draft_model=draft, device="cuda", k=3)
    (result,) = llm.generate("hello there", SamplingParams(max_tokens=20, ignore_eos=True))
    assert len(result.token_ids) == 20
    assert result.stats.drafted > 0
