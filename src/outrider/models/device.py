"""Where a model runs: the name of a device, checked before anything is loaded."""

from __future__ import annotations

import torch

from outrider.errors import ConfigError


def require_device(name: str) -> torch.device:
    """The device called `name`: cpu, cuda, or cuda:N. Raises ConfigError when there is none such here."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not allowed: give cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise ConfigError(
                f"device {name!r} is not possible here: torch {torch.__version__} sees no CUDA GPU; give cpu, or "
                "install a torch that was built for CUDA on a machine with a GPU"
            )
        if device.index is not None and device.index >= count:
            raise ConfigError(f"device {name!r} is not possible here: give cuda:0 to cuda:{count - 1}, or cpu")
    return device
