"""EAGLE-3 checkpoints made by hand in each public layout: read key by key, written back, and refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider import kernels
from outrider.core.types import TargetIdentity
from outrider.drafters.eagle3 import Eagle3Drafter
from outrider.drafters.eagle3_files import LAYOUTS, read_eagle3, write_eagle3
from outrider.drafters.head_files import write_head
from outrider.drafters.reduced_vocab import ReducedVocab
from outrider.errors import ConfigError, ModelFileError, ModelNotFoundError, OutriderError, PairingError
from tests.tiny_decoder import tiny_decoder
from tests.tiny_head import random_head

VOCAB, USED = 131, [2, 3, 7, 11, 50, 130]
FLAT: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "vocab_size": VOCAB,
    "draft_vocab_size": len(USED),
}
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.9.0",
    "speculators_config": {
        "algorithm": "eagle3",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": "some-org/Some-Model-1B", "architectures": ["LlamaForCausalLM"]},
    },
    "transformer_layer_config": {key: value for key, value in FLAT.items() if key != "draft_vocab_size"}
    | {"head_dim": 16},
    "draft_vocab_size": len(USED),
    "norm_before_residual": True,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
}


def tensors(layer: str) -> dict[str, Tensor]:
    """A checkpoint of these sizes, every tensor by its public name, each with numbers of its own."""
    shapes = {
        "fc.weight": (64, 192),
        "norm.weight": (64,),
        "lm_head.weight": (len(USED), 64),
        f"{layer}.hidden_norm.weight": (64,),
        f"{layer}.input_layernorm.weight": (64,),
        f"{layer}.post_attention_layernorm.weight": (64,),
        f"{layer}.self_attn.q_proj.weight": (64, 128),
        f"{layer}.self_attn.k_proj.weight": (32, 128),
        f"{layer}.self_attn.v_proj.weight": (32, 128),
        f"{layer}.self_attn.o_proj.weight": (64, 64),
        f"{layer}.mlp.gate_proj.weight": (96, 64),
        f"{layer}.mlp.up_proj.weight": (96, 64),
        f"{layer}.mlp.down_proj.weight": (64, 96),
    }
    made = {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(i))
        for i, (name, shape) in enumerate(shapes.items())
    }
    made["d2t"] = torch.tensor(USED) - torch.arange(len(USED))
    made["t2d"] = torch.tensor([token in USED for token in range(VOCAB)])
    return made


def by_hand(folder: Path, layout: str, **changes: Any) -> Path:
    """Files as that project's own code leaves them; `changes` to the top level of the configuration."""
    folder.mkdir()
    weights = tensors("layers.0" if layout == "speculators" else "midlayer")
    config = dict(SPECULATORS if layout == "speculators" else FLAT)
    if layout == "safeailab":
        config["architectures"] = ["LlamaForCausalLM"]
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        if layout == "specforge":
            config["architectures"] = ["LlamaForCausalLMEagle3"]
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True}
        save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def edit(folder: Path, **weights: Tensor | None) -> Path:
    """Replaces or removes tensors, whose names have no dots here but double underscores."""
    path = folder / "model.safetensors"
    have = load_file(path)
    for name, tensor in weights.items():
        have.pop(name.replace("__", "."), None)
        if tensor is not None:
            have[name.replace("__", ".")] = tensor
    save_file(have, path)
    return folder


def stored(folder: Path) -> dict[str, Tensor]:
    pickled = folder / "pytorch_model.bin"
    if pickled.exists():
        return torch.load(pickled, weights_only=True)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_read_key_by_key_and_written_back(layout: str, tmp_path: Path) -> None:
    source = by_hand(tmp_path / "in", layout)
    net = read_eagle3(source)
    given = tensors("midlayer")
    own = net.state_dict()
    assert set(own) == set(given) - {"d2t", "t2d"}
    assert all(torch.equal(own[name], given[name]) for name in own)
    assert net.vocab.ids_S.tolist() == USED
    assert net.config.layer.rope_theta == 500000.0
    assert net.config.layer_ids == (None if layout == "safeailab" else (1, 2, 3))
    assert net.config.norm_before_residual == (layout == "speculators")
    assert net.config.target_name == ("some-org/Some-Model-1B" if layout == "speculators" else None)
    write_eagle3(net, tmp_path / "out", layout)
    before, after = stored(source), stored(tmp_path / "out")
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    for key, value in json.loads((source / "config.json").read_text()).items():
        if key == "speculators_config":
            assert written[key]["verifier"]["name_or_path"] == value["verifier"]["name_or_path"]
        elif key == "transformer_layer_config":
            assert {**written[key], **value} == written[key]
        else:
            assert written[key] == value, key


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_reads_equal(layout: str, dtype: torch.dtype, tmp_path: Path) -> None:
    net = random_head(
        vocab=VOCAB, draft_ids=USED, layer_ids=(0, 3), own_embedding=True, fc_norm=True, norm_output=True, qk_norm=True,
        bias=True, target_hidden_size=48, target_name="a", vocabulary_sha256="b" * 64,
    ).to(dtype)  # fmt: skip
    write_eagle3(net, tmp_path, layout)
    again = read_eagle3(tmp_path)
    assert again.config == net.config
    assert again.dtype == dtype
    assert again.vocab.ids_S.tolist() == USED
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), again.state_dict().values(), strict=True))


def test_a_layout_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="safeailab, specforge, speculators"):
        write_eagle3(random_head(vocab=9), tmp_path, "mine")


def test_the_weights_file_itself_and_half_precision_are_taken(tmp_path: Path) -> None:
    folder = by_hand(tmp_path / "in", "specforge")
    weights = {n: t.half() if t.is_floating_point() else t for n, t in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "eagle.safetensors")
    net = read_eagle3(folder / "eagle.safetensors")
    assert net.dtype == torch.float32
    assert torch.equal(net.fc.weight, weights["fc.weight"].float())


def test_target_hidden_size_is_written_only_where_it_differs(tmp_path: Path) -> None:
    """Its presence tells some readers not to share the target's embedding."""
    for name, width, stated in (("same", 64, False), ("other", 48, True)):
        write_eagle3(random_head(vocab=9, target_hidden_size=width), tmp_path / name, "safeailab")
        assert ("target_hidden_size" in json.loads((tmp_path / name / "config.json").read_text())) == stated


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    folder = by_hand(tmp_path / "a", "specforge")
    with pytest.raises(ModelFileError, match=r"lacks the tensors midlayer\.hidden_norm\.weight, d2t that"):
        read_eagle3(edit(folder, midlayer__hidden_norm__weight=None, d2t=None))
    folder = by_hand(tmp_path / "b", "speculators")
    with pytest.raises(ModelFileError, match=r"has the tensor mask_hidden that an EAGLE-3 head"):
        read_eagle3(edit(folder, mask_hidden=torch.zeros(1, 192)))
    with pytest.raises(ModelFileError, match=r"lacks the tensor layers\.0\.mlp\.up_proj\.weight that"):
        read_eagle3(edit(folder, mask_hidden=None, layers__0__mlp__up_proj__weight=None))
    folder = by_hand(tmp_path / "c", "specforge")
    with pytest.raises(ModelFileError, match=r"fc\.weight has shape \[64, 64\].*\[64, 192\]"):
        read_eagle3(edit(folder, fc__weight=torch.zeros(64, 64)))
    folder = by_hand(tmp_path / "d", "specforge", fc_norm=True)
    with pytest.raises(ModelFileError, match=r"lacks the tensors fc_norm\.0\.weight, fc_norm\.1\.weight"):
        read_eagle3(folder)
    folder = by_hand(tmp_path / "e", "specforge")
    with pytest.raises(ModelFileError, match=r"has the tensor input_norm\.weight"):
        read_eagle3(edit(folder, input_norm__weight=torch.zeros(192)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_without_lm_head_shares_the_targets(layout: str, tmp_path: Path) -> None:
    net = random_head(vocab=VOCAB, draft_ids=USED, own_head=False)
    write_eagle3(net, tmp_path, layout)
    assert "lm_head.weight" not in stored(tmp_path)
    again = read_eagle3(tmp_path)
    assert again.config == net.config
    assert not again.config.own_head
    assert again.vocab.ids_S.tolist() == USED


def test_copies_of_the_targets_tensors_are_passed_over(tmp_path: Path) -> None:
    folder = edit(by_hand(tmp_path / "a", "speculators"), verifier_norm__weight=torch.ones(64))
    assert "verifier_norm.weight" not in read_eagle3(folder).state_dict()


def test_d2t_holds_offsets(tmp_path: Path) -> None:
    """Ids in the place of offsets are noticed, and so is a t2d of another head."""
    folder = by_hand(tmp_path / "a", "specforge")
    with pytest.raises(ModelFileError, match=r"d2t\[5\] = 130 makes draft token 5 the target's 135.*offsets"):
        read_eagle3(edit(folder, d2t=torch.tensor(USED)))
    edit(folder, d2t=torch.tensor(USED) - torch.arange(len(USED)), t2d=torch.zeros(VOCAB, dtype=torch.bool))
    with pytest.raises(ModelFileError, match="t2d and d2t disagree about token 2"):
        read_eagle3(folder)
    with pytest.raises(ModelFileError, match=r"d2t holds torch\.float32"):
        read_eagle3(edit(folder, d2t=torch.zeros(len(USED))))
    assert read_eagle3(edit(folder, d2t=torch.zeros(len(USED), dtype=torch.int32), t2d=None)).vocab.ids_S.tolist() == [
        0, 1, 2, 3, 4, 5,
    ]  # fmt: skip


def test_offsets_name_the_targets_tokens() -> None:
    vocab = ReducedVocab.from_tensors("x", torch.tensor([2, 2, 5]), None, 10)
    assert vocab.ids_S.tolist() == [2, 3, 7]
    assert vocab.offsets().tolist() == [2, 2, 5]
    assert vocab.columns().tolist() == [-1, -1, 0, 1, -1, -1, -1, 2, -1, -1]


def test_a_head_of_the_whole_vocabulary_needs_no_maps(tmp_path: Path) -> None:
    write_eagle3(random_head(vocab=9), tmp_path, "specforge")
    net = read_eagle3(edit(tmp_path, d2t=None, t2d=None))
    assert net.vocab.ids_S.tolist() == list(range(9))


class Escape:
    """Runs code when it is unpickled without care."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (Path.touch, (Path("escaped"),))


def test_a_pickle_that_holds_more_than_tensors_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = by_hand(tmp_path / "a", "safeailab")
    for bad in (tensors("midlayer") | {"x": Escape()}, [1, 2]):
        torch.save(bad, folder / "pytorch_model.bin")
        with pytest.raises(ModelFileError, match=r"pytorch_model\.bin"):
            read_eagle3(folder)
    (folder / "pytorch_model.bin").write_bytes(b"no checkpoint")
    with pytest.raises(ModelFileError, match="damaged"):
        read_eagle3(folder)
    assert not (tmp_path / "escaped").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"speculators_model_type": "peagle"}, "'peagle', expected 'eagle3'"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1]}}, "layer numbers >= 0"),
        ({"fc_norm": True, "norm_before_fc": True}, "exclude each other"),
        ({"draft_vocab_size": 200}, "draft_vocab_size 200 of a vocabulary of 131"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "'yarn' is not supported"),
        ({"hidden_size": "wide"}, "expected a whole number"),
    ],
)
def test_configurations_that_are_not_computed_are_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=said):
        read_eagle3(by_hand(tmp_path / "a", "specforge", **changes))


def test_paths_that_lead_to_no_head(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="does not exist"):
        read_eagle3(tmp_path / "nowhere")
    with pytest.raises(ModelFileError, match="neither"):
        read_eagle3(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(OutriderError, match=r"config\.json"):
        read_eagle3(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelFileError, match="cannot be read"):
        read_eagle3(tmp_path)
    (tmp_path / "head.gguf").write_bytes(b"junk")
    with pytest.raises(ModelFileError, match="no draft head"):
        read_eagle3(tmp_path / "head.gguf")
    with pytest.raises(ConfigError, match="weights file"):
        write_head(tmp_path, {}, {}, file="model.pt")


# Which target a head fits

ME = TargetIdentity(("smollm2-135m", "SmolLM2-135M-Instruct.Q4_1.gguf"), "a" * 64)


def ride(
    identity: TargetIdentity | None = ME, layers: int = 8, options: dict[str, Any] | None = None, **fields: Any
) -> Any:
    target = tiny_decoder(n_layers=layers)
    head = random_head(**({"vocab": VOCAB} | fields))
    return Eagle3Drafter(target=target, head=head, identity=identity, **(options or {}))


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ({"target_hidden_size": 48}, "hidden states of 48 numbers and tiny-0 has 64"),
        ({"vocab": 130}, "vocabulary of 130 and tiny-0 has 131 tokens"),
        ({"vocab": 132}, "vocabulary of 132 and tiny-0 has 131 tokens"),
        ({"layer_ids": (1, 9)}, r"its configuration says the inputs of the layers \[1, 9\], and tiny-0 has 8 layers"),
        ({"layer_ids": (3, 3)}, "ascending"),
        ({"layers": 3}, r"by default it reads the inputs of the layers \[2, 1, 0\]"),
        ({"hidden_size": 32, "head_dim": 8, "target_hidden_size": 64}, "is 32 wide, has no embed_tokens of its own"),
        (
            {"hidden_size": 32, "head_dim": 8, "target_hidden_size": 64, "own_embedding": True, "own_head": False},
            "is 32 wide, has no lm_head of its own.*take a head with lm_head.weight",
        ),
        ({"target_name": "org/Qwen3-8B"}, "trained for org/Qwen3-8B and the target is smollm2-135m"),
        (
            {"target_name": "x", "vocabulary_sha256": "b" * 64},
            "hash bbbbbbbbbbbb; those of smollm2-135m have aaaaaaaaaaaa",
        ),
    ],
)
def test_a_head_of_another_target_is_refused_with_both_values(case: dict[str, Any], said: str) -> None:
    with pytest.raises(PairingError, match=said):
        ride(**case)


def test_a_head_of_this_target_is_taken() -> None:
    named = ride(target_name="HuggingFaceTB/SmolLM2-135M-Instruct", vocabulary_sha256="a" * 64)
    assert named.wants == (1, 3, 4)  # the inputs of layers 2, 4 and 5 are the outputs of 1, 3 and 4
    assert ride(target_name="org/Qwen3-8B", options={"other_target": True}).wants == (1, 3, 4)
    assert ride(identity=None, target_name="org/Qwen3-8B").wants == (1, 3, 4)
    assert ride(layer_ids=(0, 1, 8)).wants == (0, 7)


@pytest.mark.skipif(not kernels.available(), reason="without kernels nothing is packed")
@pytest.mark.parametrize("dtype", ["auto", "int8", "int4", "bfloat16", "float32"])
def test_every_precision_is_one_of_the_kernels(dtype: str) -> None:
    drafter = ride(options={"dtype": dtype})
    assert drafter.dtype == torch.float32  # of the activations
    packed = drafter.net.fc.packed.dtype
    assert packed == {"auto": "Q4_0", "int8": "Q8_0", "int4": "Q4_0"}.get(dtype, getattr(torch, dtype, None))


@pytest.mark.parametrize("dtype", ["quantised", "float16"])
def test_other_precisions_are_refused(dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"dtype = '{dtype}' is not allowed: choose one of auto, int4, int8"):
        ride(options={"dtype": dtype})


def test_without_kernels_torch_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.kernels.available", lambda: False)
    assert ride().dtype == torch.float32
    assert ride(options={"dtype": "bfloat16"}).dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="dtype = 'int8' needs the CPU kernels"):
        ride(options={"dtype": "int8"})


def test_a_target_that_hands_out_nothing_is_refused() -> None:
    from tests.tiny import random_table

    with pytest.raises(PairingError, match="does not hand out its hidden states"):
        Eagle3Drafter(target=random_table(VOCAB), head=random_head(vocab=VOCAB))
