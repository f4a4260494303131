"""SmolLM2 as the GGUF file has it: our loader and decoder against the `gguf` package's reader and `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import kernels
from outrider.core.protocols import Segment
from outrider.models.load import load_model
from outrider.models.loader.catalogue import DEFAULT_MODEL
from outrider.models.loader.sources import resolve

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

QUESTION = "Explain in two sentences why the sky is blue, and name one planet where it is not."
TEXT = (
    "The capital of France is Paris, and the capital of Italy is Rome. Both cities lie on rivers: Paris on the Seine, "
    "Rome on the Tiber. A river brings water, trade and, in some years, a flood; so both built walls, bridges and "
    "quays early on. def area(width, height):\n    return width * height\n\nprint(area(3, 4))  # 12\n\nWhen Anna came "
    "home she found the door open and the cat on the table. 'Who let you in?' she asked. The cat, as cats do, said "
    "nothing, and went on eating the fish. In 1969 two men walked on the moon for two hours and thirty-one minutes; "
    "the third stayed above them in orbit. Add the flour to the butter, stir until it is smooth, then pour in the milk "
    "a little at a time."
)

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "blk": "model.layers",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def transformers_model(file: Path) -> Any:
    """A float32 Llama with the file's dequantised weights; rows of q and k back in half-rotation order."""
    reader = gguf.GGUFReader(file)

    def value(key: str) -> Any:
        return reader.fields[key].contents()

    config = transformers.LlamaConfig(
        vocab_size=value("llama.vocab_size"),
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=value("llama.attention.head_count"),
        num_key_value_heads=value("llama.attention.head_count_kv"),
        max_position_embeddings=value("llama.context_length"),
        rms_norm_eps=value("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("llama.rope.freq_base")},
        tie_word_embeddings=True,
    )
    weights = {}
    for tensor in reader.tensors:
        name = ".".join(NAMES.get(part, part) for part in tensor.name.split("."))
        weight = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if "q_proj" in name or "k_proj" in name:
            pairs = weight.view(-1, config.head_dim // 2, 2, weight.shape[1])
            weight = pairs.transpose(1, 2).reshape(weight.shape)
        weights[name] = weight
    model = transformers.LlamaForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert missing == ["lm_head.weight"]
    assert not unexpected
    return model


@pytest.mark.model
def test_smollm2_logits_on_a_real_prompt() -> None:
    file = resolve(DEFAULT_MODEL)
    reference = transformers_model(file)
    for dtype, tolerance in (("float32", 1e-4), ("bfloat16", 0.5)):
        loaded = load_model(file, dtype=dtype)
        assert loaded.tokenizer.vocab_size == loaded.model.vocab_size
        tokens = loaded.tokenizer.encode(
            loaded.template.render([{"role": "user", "content": QUESTION}]), add_special=False
        )
        assert len(tokens) > 40
        with torch.inference_mode():
            expected = reference(input_ids=torch.tensor([tokens])).logits[0].float()
        actual = loaded.model.forward([Segment(loaded.model.new_cache(), tokens)]).logits_MV
        assert actual is not None
        gap = float((actual - expected).abs().max())
        assert gap <= tolerance, f"{dtype} logits differ by {gap:.2e} of {float(expected.abs().max()):.1f}"
        agree = (actual.argmax(-1) == expected.argmax(-1)).float().mean()
        assert agree > (0.999 if dtype == "float32" else 0.9)


@pytest.mark.model
def test_quantised_weights_follow_the_float_model_and_rows_stay_identical() -> None:
    """The file's own blocks, with activations of 8 bits: near the float logits, and row-invariant bit for bit."""
    if not kernels.available():
        pytest.skip(f"computing with quantised blocks takes the compiled kernels: {kernels.why()}")
    path = str(resolve(DEFAULT_MODEL))
    exact, blocks = load_model(path, dtype="float32"), load_model(path, dtype="quantised")
    ids = exact.tokenizer.encode(TEXT, add_special=False)
    assert len(ids) > 150
    before = kernels.fast_calls().get("quantised_linear", 0)
    expected, actual = (
        loaded.model.forward([Segment(loaded.model.new_cache(), ids)]).logits_MV for loaded in (exact, blocks)
    )
    assert expected is not None
    assert actual is not None
    assert kernels.fast_calls()["quantised_linear"] > before
    off = actual - expected  # in the mean: the largest is chance, for a code that rounds the other way spreads
    assert float(off.square().mean().sqrt()) < 0.25
    assert (actual.argmax(1) == expected.argmax(1)).float().mean() > 0.9
    cache = blocks.model.new_cache()
    for i, token in enumerate(ids):
        row = blocks.model.forward([Segment(cache, [token])]).logits_MV
        cache.keep([0])
        assert row is not None
        assert torch.equal(row[0], actual[i])
    assert blocks.size_bytes < 0.5 * exact.size_bytes
