"""Rotary positions: what a configuration says of them, frequencies, and tables. For target models and draft heads.

Shapes: T positions, D head width, R = D / 2 rotation pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from outrider.core.json_file import JsonObject
from outrider.errors import ModelFileError


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotations are slowed for long contexts; the last three fields are used by "llama3" only."""

    kind: Literal["linear", "llama3"]
    factor: float
    original_context: int = 8192
    low_freq: float = 1.0
    high_freq: float = 4.0


class Rope:
    """Cosines and sines of every position's rotation, as tables that grow with the longest position asked for."""

    def __init__(self, inv_freq_R: Tensor) -> None:
        self.inv_freq_R = inv_freq_R
        self._cos_TR = self._sin_TR = inv_freq_R.new_empty((0, len(inv_freq_R)))

    def tables(self, end: int) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [T, R] with T >= end."""
        if end > len(self._cos_TR):
            size = max(256, 1 << (end - 1).bit_length())
            angles_TR = torch.outer(torch.arange(size, device=self.inv_freq_R.device).float(), self.inv_freq_R)
            self._cos_TR, self._sin_TR = angles_TR.cos(), angles_TR.sin()
        return self._cos_TR, self._sin_TR


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """[R] radians a position. "linear" slows every pair (2306.15595, section 2.2); "llama3" only those whose wavelength
    is long against the original context, with a ramp between (Llama 3, 2407.21783, section 3.2)."""
    frequency_R = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    if scaling is None:
        return frequency_R
    if scaling.kind == "linear":
        return frequency_R / scaling.factor
    turns_R = scaling.original_context * frequency_R / (2 * math.pi)
    kept_R = ((turns_R - scaling.low_freq) / (scaling.high_freq - scaling.low_freq)).clamp(0, 1)
    return frequency_R * (kept_R + (1 - kept_R) / scaling.factor)


def read_rope(config: JsonObject, context: int) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) as a `transformers` configuration states them, in the spelling of any version."""
    rope = config.child("rope_parameters")
    scaling = rope if rope.values else config.child("rope_scaling")
    theta = rope.number("rope_theta", config.number("rope_theta", 10000.0))
    return theta, _rope_scaling(scaling, context)


def _rope_scaling(rope: JsonObject, context: int) -> RopeScaling | None:
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise ModelFileError(
            f"{rope.path}: rotary scaling {kind[:40]!r} is not supported, allowed are default, linear and llama3. "
            "Load this model through transformers instead"
        )
    factor = rope.number("factor")
    if not (factor > 0 and math.isfinite(factor)):
        raise ModelFileError(f"{rope.path}: rotary scaling factor {factor}, it must be positive")
    if kind == "linear":
        return RopeScaling("linear", factor)
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if not low < high:
        raise ModelFileError(f"{rope.path}: low_freq_factor {low} is not below high_freq_factor {high}")
    llama3: Literal["llama3"] = "llama3"
    return RopeScaling(llama3, factor, rope.whole("original_max_position_embeddings", context), low, high)
