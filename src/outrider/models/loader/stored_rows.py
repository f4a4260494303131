"""Rows of a tensor that stay in their file and are read when they are asked for."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.errors import ModelFileError


class Place(NamedTuple):
    """Where a tensor's bytes begin."""

    file: Path
    start: int


class StoredRows:
    """Rows of `nbytes` bytes each from `place` on.

    The file is held open and not mapped: one that others delete or replace stays as it was, and one that they shorten
    or overwrite is an error with a name, where a mapping would end the process or give other weights.
    """

    def __init__(self, place: Place, nbytes: int) -> None:
        self._place, self._nbytes = place, nbytes
        self._file = place.file.open("rb", buffering=0)
        self._seen = self._signature()
        self._one_reader = threading.Lock()

    def read(self, rows: Seq[int]) -> Tensor:
        """uint8 [rows, nbytes]. Raises ModelFileError for a file that changed since it was opened."""
        out = torch.empty((len(rows), self._nbytes), dtype=torch.uint8)
        with self._one_reader:
            if self._signature() != self._seen:
                raise self._changed()
            for at, row in enumerate(rows):
                self._file.seek(self._place.start + row * self._nbytes)
                if self._file.readinto(out[at].numpy().data) != self._nbytes:
                    raise self._changed()
        return out

    def _signature(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns

    def _changed(self) -> ModelFileError:
        return ModelFileError(
            f"{self._place.file} was changed after it was loaded, and its embeddings are read from it; "
            "load the model again"
        )
