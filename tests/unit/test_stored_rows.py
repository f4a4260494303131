"""Embeddings that stay in their file: what others do to the file meanwhile."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from outrider.core.protocols import Segment
from outrider.errors import ModelFileError
from outrider.models.load import LoadedModel, load_model
from outrider.models.loader.stored_rows import Place, StoredRows
from tests.tiny_folder import write_tiny_model


def _logits(loaded: LoadedModel, tokens: list[int]) -> torch.Tensor:
    logits_MV = loaded.model.forward([Segment(loaded.model.new_cache(), tokens)]).logits_MV
    assert logits_MV is not None
    return logits_MV


def _shorten(file: Path) -> None:
    os.truncate(file, 100)


def _overwrite(file: Path) -> None:
    stat = file.stat()
    file.write_bytes(bytes(stat.st_size))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))


@pytest.mark.parametrize("change", [_shorten, _overwrite])
def test_a_file_changed_after_loading_is_an_error_that_names_it(tmp_path: Path, change: Callable[[Path], None]) -> None:
    loaded = load_model(write_tiny_model(tmp_path / "tiny"))
    before = _logits(loaded, [104, 105])
    assert torch.equal(_logits(loaded, [104, 105]), before)
    change(tmp_path / "tiny" / "model.safetensors")
    with pytest.raises(
        ModelFileError, match=r"model\.safetensors was changed after it was loaded.*load the model again"
    ):
        _logits(loaded, [104, 105])


def test_a_file_deleted_or_replaced_after_loading_stays_as_it_was(tmp_path: Path) -> None:
    loaded = load_model(write_tiny_model(tmp_path / "tiny"))
    before = _logits(loaded, [104, 105])
    other = tmp_path / "other"
    other.write_bytes(b"something else")
    os.replace(other, tmp_path / "tiny" / "model.safetensors")
    assert torch.equal(_logits(loaded, [104, 105]), before)
    shutil.rmtree(tmp_path / "tiny")
    assert torch.equal(_logits(loaded, [104, 105]), before)


def test_rows_are_read_in_the_order_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    file.write_bytes(bytes(range(100)))
    rows = StoredRows(Place(file, 7), 3)
    assert rows.read([4, 0, 4]).tolist() == [[19, 20, 21], [7, 8, 9], [19, 20, 21]]
    assert rows.read([]).shape == (0, 3)
    with pytest.raises(ModelFileError, match="changed"):
        rows.read([31])
