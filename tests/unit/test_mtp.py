"""Next-token modules: the network against a plain reference, the loss against drafting, and the public layouts."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider import kernels
from outrider.drafters.head_cache import HeadCache, Span
from outrider.drafters.head_training import Lesson
from outrider.drafters.mtp import MtpDrafter
from outrider.drafters.mtp_files import LAYOUTS, read_mtp, write_mtp
from outrider.drafters.mtp_net import MtpNet, mtp_losses
from outrider.drafters.recurrent_core import Core, StackCore, TorchCore, make_core
from outrider.errors import ConfigError, ModelFileError, PairingError
from tests.tiny_decoder import tiny_decoder
from tests.tiny_head import SHAPE, random_module

VOCAB, IDS = 40, [1, 4, 5, 9, 12, 20, 33, 39]


def module(**fields: Any) -> MtpNet:
    return random_module(vocab=VOCAB, draft_ids=IDS, own_embedding=True, **fields).double()


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + SHAPE.norm_eps) * weight


def reference(net: MtpNet, hidden: Tensor, tokens: list[int], drafted: list[int]) -> Tensor:
    """[1 + drafts, S] logits, row by row, from the names of the tensors. Rotations are left to `rotated`."""
    w = {name: tensor.detach() for name, tensor in net.state_dict().items()}
    attn, everything = "midlayer.self_attn.", [*tokens, *drafted]
    keys: list[Tensor] = []
    values: list[Tensor] = []
    logits, h = [], hidden[0]
    for t, token in enumerate(everything[1:]):
        h = hidden[t] if t < len(tokens) - 1 else h
        both = torch.cat(
            [rms(w["embed_tokens.weight"][token], w["embed_norm.weight"]), rms(h, w["hidden_norm.weight"])]
        )
        x = w["fc.weight"] @ both
        n = rms(x, w["midlayer.input_layernorm.weight"])
        q, k, v = (w[f"{attn}{part}_proj.weight"] @ n for part in "qkv")
        keys.append(rotated(k.view(-1, 16), t))
        values.append(v.view(-1, 16))
        mixed = []
        for head, one in enumerate(rotated(q.view(-1, 16), t)):
            scores = torch.stack([key[head // 2] @ one / 4 for key in keys]).softmax(0)
            mixed.append(sum(s * value[head // 2] for s, value in zip(scores, values, strict=True)))
        x = x + w[f"{attn}o_proj.weight"] @ torch.cat(mixed)  # type: ignore[arg-type]
        n = rms(x, w["midlayer.post_attention_layernorm.weight"])
        gate, up = w["midlayer.mlp.gate_proj.weight"] @ n, w["midlayer.mlp.up_proj.weight"] @ n
        h = rms(x + w["midlayer.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up), w["norm.weight"])
        if t >= len(tokens) - 2:
            logits.append(w["lm_head.weight"] @ h)
    return torch.stack(logits)


def rotated(x_HD: Tensor, position: int) -> Tensor:
    angle = position / SHAPE.rope_theta ** (torch.arange(0, 16, 2) / 16)
    left, right = x_HD[:, :8], x_HD[:, 8:]
    return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], dim=1)


def drafted_logits(net: MtpNet, hidden: Tensor, tokens: list[int], drafted: list[int], core: Core | None) -> Tensor:
    """The same by the network's parts and the cache, as the drafter puts them together."""
    assert net.embed_tokens is not None
    assert net.lm_head is not None
    core, cache, logits, carried = core or TorchCore(net), HeadCache(0), [], hidden[:1]
    for t, token in enumerate([*tokens, *drafted][1:]):
        g = net.fuse(hidden[t : t + 1]) if t < len(tokens) - 1 else carried
        normed, carried = core.last(*net.inputs(net.embed_tokens(torch.tensor([token])), g), [Span(cache, 1, 100)])
        if t >= len(tokens) - 2:
            logits.append(net.lm_head(normed)[0])
    return torch.stack(logits)


@pytest.mark.parametrize("fast", [False, True])
def test_the_network_equals_a_plain_reference(fast: bool) -> None:
    if fast and not kernels.available():
        pytest.skip("no kernels")
    net = module()
    hidden, tokens = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).double(), [3, 7, 1, 30, 22, 9]
    expected = reference(net, hidden, tokens, [4, 12])
    core: Core | None = None
    if fast:
        net, hidden = copy.deepcopy(net).float(), hidden.float()
        core = make_core(net, "float32")
        assert isinstance(core, StackCore)
    with torch.no_grad():
        got = drafted_logits(net, hidden, tokens, [4, 12], core)
    assert torch.allclose(got.double(), expected, rtol=1e-4, atol=1e-4)


def test_the_loss_sees_what_drafting_sees() -> None:
    """Every step behind every position, on norms of the last layer's outputs; weights are normalised powers."""
    net = module()
    generator = torch.Generator().manual_seed(2)
    outputs, tokens = torch.randn(8, 64, generator=generator).double(), [3, 7, 1, 30, 22, 9, 2, 2]
    logits = torch.randn(8, VOCAB, generator=generator).double() * 3
    logits[:, IDS] += 7
    logp, likeliest = logits.log_softmax(-1).topk(5)
    counted = torch.tensor([[False, False, True, True, True, True, True, False]])
    lesson = Lesson(torch.tensor([tokens]), outputs[None], likeliest[None], logp[None], counted)
    got = mtp_losses(net, lesson, last_norm=lambda x: 0.5 * x, steps=3, beta=0.6)
    total = 0.0
    for step, weight in enumerate((1 / 1.96, 0.6 / 1.96, 0.36 / 1.96)):
        losses = []
        for t in range(7 - step):
            at = t + 1 + step
            if not counted[0, at]:
                continue
            with torch.no_grad():
                said = drafted_logits(net, 0.5 * outputs, tokens[: t + 2], tokens[t + 2 : t + 2 + step], None)[step]
            p = torch.tensor([logits[at].softmax(0)[i] if i in likeliest[at] else 0.0 for i in IDS]).double()
            losses.append(float(-(p / p.sum() * said.log_softmax(0)).sum()))
        assert got.loss_by_position[step] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
        total += weight * got.loss_by_position[step]
    assert float(got.total.detach()) == pytest.approx(total, rel=1e-4)
    got.total.backward()
    assert all(p.grad is not None for name, p in net.named_parameters() if "embed_tokens" not in name)


# Files

LAYER = {
    "self_attn.q_proj.weight": (64, 64),
    "self_attn.k_proj.weight": (32, 64),
    "self_attn.v_proj.weight": (32, 64),
    "self_attn.o_proj.weight": (64, 64),
    "mlp.gate_proj.weight": (96, 64),
    "mlp.up_proj.weight": (96, 64),
    "mlp.down_proj.weight": (64, 96),
    "input_layernorm.weight": (64,),
    "post_attention_layernorm.weight": (64,),
}
NAMES = {
    "speculators": {
        "embed_norm.weight": "mtp_layers.0.token_layernorm.weight",
        "hidden_norm.weight": "mtp_layers.0.hidden_layernorm.weight",
        "fc.weight": "mtp_layers.0.input_proj.weight",
        "norm.weight": "mtp_layers.0.final_layernorm.weight",
        **{f"midlayer.{name}": f"mtp_layers.0.{name}" for name in LAYER},
    },
    "qwen": {
        "embed_norm.weight": "mtp.pre_fc_norm_embedding.weight",
        "hidden_norm.weight": "mtp.pre_fc_norm_hidden.weight",
        "fc.weight": "mtp.fc.weight",
        "norm.weight": "mtp.norm.weight",
        **{f"midlayer.{name}": f"mtp.layers.0.{name}" for name in LAYER},
    },
    "deepseek": {
        "embed_norm.weight": "model.layers.30.enorm.weight",
        "hidden_norm.weight": "model.layers.30.hnorm.weight",
        "fc.weight": "model.layers.30.eh_proj.weight",
        "norm.weight": "model.layers.30.shared_head.norm.weight",
        "lm_head.weight": "model.layers.30.shared_head.head.weight",
        "embed_tokens.weight": "model.layers.30.embed_tokens.weight",
        **{f"midlayer.{name}": f"model.layers.30.{name}" for name in LAYER},
    },
}
SHAPES = {"fc.weight": (64, 128), "lm_head.weight": (VOCAB, 64), "embed_tokens.weight": (VOCAB, 64)}


def by_hand(folder: Path, layout: str, more: dict[str, Tensor] | None = None, **changes: Any) -> dict[str, Tensor]:
    """Writes the files of a module as that project has them; returns its tensors by our names."""
    folder.mkdir()
    layer = SHAPE.to_json() | {"vocab_size": VOCAB, "num_hidden_layers": 30}
    config: dict[str, Any] = dict(layer)
    if layout == "speculators":
        verifier = {"name_or_path": "org/Some-1B", "architectures": []}
        config = {"speculators_model_type": "mtp", "transformer_layer_config": layer}
        config["speculators_config"] = {"algorithm": "mtp", "verifier": verifier}
    generator = torch.Generator().manual_seed(3)
    made = {
        ours: torch.randn(SHAPES.get(ours, LAYER.get(ours.removeprefix("midlayer."), (64,))), generator=generator)
        for ours in NAMES[layout]
    }
    save_file({NAMES[layout][ours]: t for ours, t in made.items()} | (more or {}), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | changes))
    return made


@pytest.mark.parametrize("layout", NAMES)
def test_read_key_by_key_and_written_back(layout: str, tmp_path: Path) -> None:
    made = by_hand(tmp_path / "in", layout)
    net = read_mtp(tmp_path / "in")
    own = net.state_dict()
    assert set(own) == set(made)
    assert all(torch.equal(own[name], made[name]) for name in own)
    assert net.config.own_head == net.config.own_embedding == (layout == "deepseek")
    assert net.config.target_name == ("org/Some-1B" if layout == "speculators" else None)
    if layout in LAYOUTS:
        write_mtp(net, tmp_path / "out", layout)
        before, after = (load_file(tmp_path / side / "model.safetensors") for side in ("in", "out"))
        assert set(after) - set(before) == {"d2t", "t2d"}
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_reads_equal(layout: str, tmp_path: Path) -> None:
    known = {"target_name": "a", "vocabulary_sha256": "b" * 64, "own_head": layout == "qwen"}
    net = random_module(vocab=VOCAB, draft_ids=IDS, own_embedding=True, qk_norm=True, bias=True, **known).bfloat16()
    write_mtp(net, tmp_path, layout)
    again = read_mtp(tmp_path)
    assert again.config == net.config
    assert again.dtype == torch.bfloat16
    assert again.vocab.ids_S.tolist() == IDS
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), again.state_dict().values(), strict=True))
    with pytest.raises(ConfigError, match="choose one of speculators, qwen"):
        write_mtp(net, tmp_path, "deepseek")


def test_the_rest_of_a_model_is_passed_over(tmp_path: Path) -> None:
    model = {f"model.layers.{i}.self_attn.q_proj.weight": torch.zeros(64, 64) for i in range(2)}
    made = by_hand(tmp_path / "a", "deepseek", model | {"lm_head.weight": torch.zeros(VOCAB, 64)})
    assert torch.equal(read_mtp(tmp_path / "a").state_dict()["lm_head.weight"], made["lm_head.weight"])
    by_hand(tmp_path / "b", "qwen", model)
    assert not read_mtp(tmp_path / "b").config.own_head


@pytest.mark.parametrize(
    ("layout", "more", "said"),
    [
        ("deepseek", "model.layers.30.mlp.experts.0.up_proj.weight", r"mlp\.experts.*mixtures of experts"),
        ("qwen", "mtp.layers.0.mlp.gate.weight", "mixtures of experts"),
        ("deepseek", "model.layers.30.self_attn.kv_a_proj_with_mqa.weight", "latent attention"),
        ("qwen", "mtp.layers.0.self_attn.gate.weight", r"has the tensor mtp\.layers\.0\.self_attn\.gate\.weight"),
        ("deepseek", "model.layers.31.eh_proj.weight", "holds 2 next-token modules"),
    ],
)
def test_modules_that_are_not_computed_are_refused(layout: str, more: str, said: str, tmp_path: Path) -> None:
    by_hand(tmp_path / "a", layout, {more: torch.zeros(64, 64)})
    with pytest.raises(ModelFileError, match=said):
        read_mtp(tmp_path / "a")


@pytest.mark.parametrize(
    ("layout", "changes", "said"),
    [
        ("speculators", {"speculators_model_type": "eagle3"}, "'eagle3', expected 'mtp'"),
        ("qwen", {"model_type": "qwen3_next"}, "'qwen3_next' are gated"),
        ("qwen", {"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2"),
        ("deepseek", {"num_nextn_predict_layers": 3}, "num_nextn_predict_layers is 3"),
        ("qwen", {"target_hidden_size": 48}, "target_hidden_size is 48, the module 64"),
        ("qwen", {"intermediate_size": 95}, r"shape \[\d+, \d+\]"),
    ],
)
def test_configurations_that_are_not_computed_are_refused(
    layout: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    by_hand(tmp_path / "a", layout, **changes)
    with pytest.raises(ModelFileError, match=said):
        read_mtp(tmp_path / "a")


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    save_file({"fc.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelFileError, match=r"no next-token module: it holds none of mtp_layers\.0\.input_proj"):
        read_mtp(tmp_path)


def test_a_module_of_another_target_is_refused() -> None:
    with pytest.raises(PairingError, match="hidden states of 32 numbers and tiny-0 has 64"):
        MtpDrafter(target=tiny_decoder(), head=random_module(vocab=131, hidden_size=32, head_dim=8))
    assert MtpDrafter(target=tiny_decoder(n_layers=5), head=random_module(vocab=131)).wants == (4,)
