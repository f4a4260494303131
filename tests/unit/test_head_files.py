"""Files of heads of every kind that hold what no head may hold: one line that names the file, and nothing is cast."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.drafters.block_files import read_block, write_block
from outrider.drafters.eagle3_files import read_eagle3, write_eagle3
from outrider.drafters.head_files import MEDUSA, PICKLE, SAFETENSORS
from outrider.drafters.medusa_files import read_medusa, write_medusa
from outrider.drafters.mtp_files import read_mtp, write_mtp
from outrider.errors import ModelFileError
from tests.tiny_block import DSPARK, random_block
from tests.tiny_head import random_head, random_medusa, random_module

IDS = [1, 4, 5, 9]
SMALL: dict[str, Any] = {"vocab": 40, "draft_ids": IDS}
WRITERS: dict[str, Callable[[Path], None]] = {
    "eagle3": lambda folder: write_eagle3(random_head(**SMALL), folder, "safeailab"),
    "mtp": lambda folder: write_mtp(random_module(**SMALL), folder, "speculators"),
    "medusa": lambda folder: write_medusa(random_medusa(**SMALL), folder),
    "dspark": lambda folder: write_block(random_block(**DSPARK, **SMALL), folder, "deepspec"),
}
READERS: dict[str, Callable[[Path], Any]] = {
    "eagle3": read_eagle3,
    "mtp": read_mtp,
    "medusa": read_medusa,
    "dspark": read_block,
}
PICKLES = {"eagle3": PICKLE, "medusa": MEDUSA}
MATRIX = {
    "eagle3": "fc.weight",
    "mtp": "mtp_layers.0.input_proj.weight",
    "medusa": "0.0.linear.weight",
    "dspark": "fc.weight",
}


def change(folder: Path, kind: str, edit: Callable[[Tensor], Tensor], name: str | None = None) -> Path:
    """Edits a tensor of the head, by default the matrix that reads the target's features."""
    file, name = folder / PICKLES.get(kind, SAFETENSORS), name or MATRIX[kind]
    tensors = torch.load(file) if kind in PICKLES else load_file(file)
    tensors[name] = edit(tensors[name])
    torch.save(tensors, file) if kind in PICKLES else save_file(tensors, file)
    return folder


def configure(folder: Path, changes: dict[str, Any]) -> Path:
    """Changes the configuration, and what it says of the layer where that stands apart."""
    config = json.loads((folder / "config.json").read_text())
    for fields in (config, config.get("transformer_layer_config", {})):
        fields |= changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def refused(kind: str, folder: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        READERS[kind](folder)
    said = str(caught.value)
    assert str(folder) in said
    assert len(said.splitlines()) == 1
    return said


@pytest.fixture(params=WRITERS)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    WRITERS[request.param](tmp_path)
    READERS[request.param](tmp_path)
    return request.param, tmp_path


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_refused_by_name(written: tuple[str, Path], value: float) -> None:
    kind, folder = written
    change(folder, kind, lambda tensor: tensor.index_fill(0, torch.tensor([1]), value))
    assert f"tensor {MATRIX[kind]} holds NaN or infinite numbers" in refused(kind, folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.bool, torch.int64])
def test_weights_of_another_type_are_not_cast(written: tuple[str, Path], dtype: torch.dtype) -> None:
    kind, folder = written
    change(folder, kind, lambda tensor: tensor.to(dtype))
    said = refused(kind, folder)
    assert f"tensor {MATRIX[kind]} holds {dtype}, supported are float16, bfloat16, float32, float64" in said


def test_maps_hold_whole_numbers(written: tuple[str, Path]) -> None:
    kind, folder = written
    change(folder, kind, lambda tensor: tensor.float(), "t2d")
    assert "tensor t2d holds torch.float32, supported are bool, uint8" in refused(kind, folder)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", PICKLES)
@pytest.mark.parametrize(
    "edit",
    [
        lambda tensor: tensor.to("meta"),
        lambda tensor: tensor.to_sparse(),
        lambda tensor: tensor.to_sparse_csr(),
        lambda tensor: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8),
        lambda tensor: torch.nested.nested_tensor(list(tensor)),
        lambda tensor: tensor[:1, :1].clone().expand(tensor.shape),
    ],
    ids=["meta", "sparse", "csr", "quantised", "nested", "expanded"],
)
def test_a_pickle_of_tensors_that_are_not_all_there_is_refused(
    tmp_path: Path, kind: str, edit: Callable[[Tensor], Tensor]
) -> None:
    WRITERS[kind](tmp_path)
    change(tmp_path, kind, edit)
    assert f"lacks numbers of the tensor {MATRIX[kind]}" in refused(kind, tmp_path)


@pytest.mark.parametrize("kind", PICKLES)
def test_complex_weights_are_not_cast(tmp_path: Path, kind: str) -> None:
    WRITERS[kind](tmp_path)
    change(tmp_path, kind, lambda tensor: tensor.to(torch.complex64))
    assert f"tensor {MATRIX[kind]} holds torch.complex64" in refused(kind, tmp_path)


LARGEST = 2**31 - 2


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "dspark"])
@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": LARGEST, "intermediate_size": LARGEST},
        {"num_attention_heads": LARGEST, "num_key_value_heads": LARGEST, "head_dim": LARGEST},
        {"intermediate_size": LARGEST},
        {"head_dim": LARGEST},
        {"target_hidden_size": 10**30},
        {"target_hidden_size": -1},
        {"vocab_size": 2**31 - 1},
        {"vocab_size": 2**24 + 1, "draft_vocab_size": 2**24 + 1},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_huge_sizes_are_one_line(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    WRITERS[kind](tmp_path)
    refused(kind, configure(tmp_path, changes))


def test_sizes_of_which_there_is_no_tensor_are_said_so(tmp_path: Path) -> None:
    WRITERS["eagle3"](tmp_path)
    configure(tmp_path, {"hidden_size": LARGEST, "intermediate_size": LARGEST})
    assert "an EAGLE-3 head of these sizes cannot be made (Storage size" in refused("eagle3", tmp_path)


def test_a_matrix_without_dimensions_is_one_line(tmp_path: Path) -> None:
    write_medusa(random_medusa(**SMALL, own_heads=True), tmp_path)
    change(tmp_path, "medusa", lambda tensor: tensor.sum(), "0.1.weight")
    assert "tensor 0.1.weight has shape []" in refused("medusa", tmp_path)
