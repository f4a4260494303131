"""Files of block heads: every layout both ways, and each trap that would silently change what a head computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.drafters.block_files import LAYOUTS, read_block, write_block
from outrider.drafters.block_net import BlockNet
from outrider.errors import ConfigError, ModelFileError, ModelNotFoundError
from tests.tiny_block import DFLASH, DSPARK, random_block

VOCAB, IDS = 40, [1, 4, 5, 9, 12, 20, 33, 39]
KNOWN = {"target_name": "owner/target", "vocabulary_sha256": "ab" * 32}
KINDS: list[dict[str, Any]] = [
    DSPARK | KNOWN,
    DSPARK | {"markov_head_type": "rnn", "draft_ids": IDS, "own_head": True},
    DSPARK | {"qk_norm": True, "own_embedding": True, "layer_ids": (-1, 1, 2)},
    DSPARK | {"confidence_with_markov": False, "bias": True},
    {"markov_rank": 4, "target_hidden_size": 48},
    DFLASH | KNOWN | {"qk_norm": True},
    DFLASH | {"draft_ids": IDS, "own_head": True, "layer_ids": (1, 3, 5)},
    {},
]


def head(**fields: Any) -> BlockNet:
    return random_block(vocab=VOCAB, **fields)


def fits(net: BlockNet, layout: str) -> bool:
    mask_only = not net.config.sample_from_anchor
    return layout == "speculators" or mask_only == (layout == "zlab")


def rewrite(
    folder: Path, config: dict[str, Any] | None = None, tensors: dict[str, Tensor | None] | None = None
) -> Path:
    """Changes keys of the configuration and tensors of the file; None takes them out."""
    file, weights = folder / "config.json", folder / "model.safetensors"
    fields = json.loads(file.read_text()) | (config or {})
    file.write_text(json.dumps({key: value for key, value in fields.items() if value is not None}))
    changed = load_file(weights) | (tensors or {})
    save_file({name: tensor.contiguous() for name, tensor in changed.items() if tensor is not None}, weights)
    return folder


def written(folder: Path, layout: str, **fields: Any) -> Path:
    write_block(head(**fields), folder, layout)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind) or "plain")
def test_what_is_written_is_read_again(kind: dict[str, Any], layout: str, tmp_path: Path) -> None:
    net = head(**kind)
    if not fits(net, layout):
        with pytest.raises(ConfigError, match=f"cannot be written as {layout}: choose speculators"):
            write_block(net, tmp_path, layout)
        return
    write_block(net, tmp_path, layout)
    again = read_block(tmp_path)
    assert again.config.layer == net.config.layer
    for field in ("n_layers", "block_size", "mask_token_id", "layer_ids", "sample_from_anchor", "markov_rank"):
        assert getattr(again.config, field) == getattr(net.config, field), field
    for field in ("draft_vocab_size", "target_hidden_size", "confidence", "own_embedding", "own_head", "target_name"):
        assert getattr(again.config, field) == getattr(net.config, field), field
    assert again.config.vocabulary_sha256 == net.config.vocabulary_sha256
    assert again.vocab.ids_S.tolist() == net.vocab.ids_S.tolist()
    ours, theirs = net.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_bfloat16_stays_and_float16_widens(tmp_path: Path) -> None:
    write_block(head(**DSPARK).bfloat16(), tmp_path, "deepspec")
    assert read_block(tmp_path).dtype == torch.bfloat16
    rewrite(tmp_path, tensors={name: t.half() for name, t in load_file(tmp_path / "model.safetensors").items()})
    assert read_block(tmp_path / "model.safetensors").dtype == torch.float32


def test_layer_ids_mean_outputs_but_inputs_in_speculators(tmp_path: Path) -> None:
    """The same head, read from both: outputs of the layers 0, 1 and 2 are inputs of 1, 2 and 3."""
    names = {"speculators": "aux_hidden_state_layer_ids", "deepspec": "target_layer_ids"}
    for layout, stated in (("speculators", [1, 2, 3]), ("deepspec", [0, 1, 2])):
        folder = written(tmp_path / layout, layout, **DSPARK)
        assert json.loads((folder / "config.json").read_text())[names[layout]] == stated
        assert read_block(folder).config.layer_ids == (0, 1, 2)
    rewrite(tmp_path / "speculators", {"aux_hidden_state_layer_ids": [0, 2, 3]})
    assert read_block(tmp_path / "speculators").config.layer_ids == (-1, 1, 2)


@pytest.mark.parametrize(
    ("layout", "kind", "change", "anchored"),
    [
        ("speculators", DFLASH, {"sample_from_anchor": None}, False),
        ("speculators", DSPARK, {"sample_from_anchor": None}, True),
        ("speculators", DSPARK, {"sample_from_anchor": False}, False),
        ("speculators", DFLASH, {"sample_from_anchor": True}, True),
        ("deepspec", DSPARK, {}, True),
        ("zlab", DFLASH, {}, False),
        ("zlab", DFLASH, {"shift_label": True}, True),
        ("zlab", DFLASH, {"architectures": ["DSparkDraftModel"]}, True),
    ],
)
def test_whether_the_anchor_speaks(
    layout: str, kind: dict[str, Any], change: dict[str, Any], anchored: bool, tmp_path: Path
) -> None:
    folder = rewrite(written(tmp_path, layout, **kind), change)
    config = read_block(folder).config
    assert config.sample_from_anchor is anchored
    assert config.n_drafts == (4 if anchored else 3)


def test_sequential_heads_under_dflash_config(tmp_path: Path) -> None:
    """SpecForge keeps the keys of the sequential heads beside those of the method."""
    folder = written(tmp_path, "deepspec", **DSPARK)
    keys = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    moved = (*keys, "mask_token_id", "target_layer_ids")
    fields = json.loads((folder / "config.json").read_text())
    method = {"projector_type": "dspark", **{key: fields[key] for key in moved}}
    rewrite(folder, dict.fromkeys(moved) | {"architectures": ["DFlashDraftModel"], "dflash_config": method})
    config = read_block(folder).config
    assert (config.markov_rank, config.confidence, config.confidence_with_markov) == (8, True, True)
    assert (config.sample_from_anchor, config.layer_ids, config.mask_token_id) == (True, (0, 1, 2), VOCAB - 1)


def test_copies_of_the_targets_matrices_may_be_there_or_not(tmp_path: Path) -> None:
    folder = written(tmp_path, "deepspec", **DSPARK, own_embedding=True, own_head=True)
    both = read_block(folder)
    assert both.embed_tokens is not None
    assert both.lm_head is not None
    rewrite(folder, tensors={"lm_head.weight": None})
    assert (read_block(folder).config.own_embedding, read_block(folder).config.own_head) == (True, False)
    rewrite(folder, tensors={"embed_tokens.weight": None, "verifier_norm.weight": torch.ones(64)})
    neither = read_block(folder)
    assert neither.embed_tokens is None
    assert neither.lm_head is None


def test_d2t_holds_offsets(tmp_path: Path) -> None:
    folder = written(tmp_path, "speculators", **DSPARK, draft_ids=IDS)
    offsets = load_file(folder / "model.safetensors")["d2t"]
    assert (offsets + torch.arange(len(IDS))).tolist() == IDS
    rewrite(folder, tensors={"t2d": None})
    assert read_block(folder).vocab.ids_S.tolist() == IDS
    with pytest.raises(ModelFileError, match="d2t holds offsets"):
        read_block(rewrite(folder, tensors={"d2t": torch.tensor(IDS)}))
    with pytest.raises(ModelFileError, match="lacks the tensor d2t"):
        read_block(rewrite(folder, tensors={"d2t": None}))


@pytest.mark.parametrize(
    ("config", "tensors", "said"),
    [
        ({}, {"fc.weight": None}, "lacks the tensor fc.weight"),
        ({}, {"layers.1.mlp.up_proj.weight": None}, "lacks the tensor layers.1.mlp.up_proj.weight"),
        ({}, {"confidence_head.proj.bias": None}, "lacks the tensor confidence_head.proj.bias"),
        ({}, {"layers.2.mlp.up_proj.weight": torch.ones(2, 2)}, "has the tensor layers.2.mlp.up_proj.weight"),
        ({}, {"candidate_selector.x": torch.ones(2)}, "has the tensor candidate_selector.x that a block head"),
        ({}, {"layers.0.self_attn.q_norm.weight": torch.ones(16)}, "lacks the tensors layers.0.self_attn.k_norm"),
        ({}, {"fc.weight": torch.ones(64, 64)}, r"tensor fc.weight has shape \[64, 64\], and config.json says"),
        ({"markov_rank": 0}, {}, "reads the Markov head's embedding, and markov_rank is 0"),
        ({"enable_confidence_head": False}, {}, "has the tensors confidence_head.proj"),
        ({"markov_head_type": "gated"}, {}, "markov_head_type is 'gated', supported are vanilla, rnn"),
        (
            {"markov_rank": 4},
            {},
            r"tensor confidence_head.proj.weight has shape \[1, 72\], and config.json says \[1, 68\]",
        ),
        ({"mask_token_id": 40}, {}, "mask_token_id is 40, allowed are 0 to 39"),
        ({"mask_token_id": None}, {}, "'mask_token_id' is missing"),
        ({"block_size": 0}, {}, "block_size is 0, allowed are 1 to 1024"),
        ({"num_hidden_layers": 65}, {}, "num_hidden_layers is 65"),
        ({"draft_vocab_size": 41}, {}, "draft_vocab_size is 41, allowed are 1 to 40"),
        ({"target_layer_ids": [0, "1"]}, {}, "'target_layer_ids' is .*, expected a list of layer numbers"),
        ({"target_layer_ids": None}, {}, "'target_layer_ids' is None"),
        ({"layer_types": ["sliding_attention"] * 2}, {}, "layer_types are .*, supported is full_attention alone"),
        ({"projector_type": "domino"}, {}, "projector_type is 'domino', supported are dflash and dspark"),
        ({"speculators_model_type": "eagle3"}, {}, "speculators_model_type is 'eagle3', expected 'dflash' or 'dspark'"),
    ],
    ids=str,
)
def test_what_would_compute_something_else_is_refused(
    config: dict[str, Any], tensors: dict[str, Tensor | None], said: str, tmp_path: Path
) -> None:
    folder = written(tmp_path, "deepspec", **DSPARK)
    with pytest.raises(ModelFileError, match=said):
        read_block(rewrite(folder, config, tensors))


def test_no_file_and_no_layout(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="does not exist"):
        read_block(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="layout 'gguf' is not allowed: choose one of speculators, deepspec, zlab"):
        write_block(head(), tmp_path, "gguf")
