"""The `device` option: names, and what is said where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.engine.llm import LLM
from outrider.errors import ConfigError
from outrider.models.device import require_device


def test_the_cpu_is_always_there() -> None:
    assert require_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["gpu", "meta", "cuda:x", "", "cuda:-1"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"device '{name}' is not allowed: give cpu, cuda or cuda:N"):
        require_device(name)


def test_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before anything is looked for or loaded."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"device 'cuda' is not possible here: torch .* sees no CUDA GPU; give cpu"):
        LLM(str(tmp_path / "nowhere"), device="cuda")


def test_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert require_device("cuda").type == "cuda"
    assert require_device("cuda:0").index == 0
    with pytest.raises(ConfigError, match="device 'cuda:1' is not possible here: give cuda:0 to cuda:0, or cpu"):
        require_device("cuda:1")
