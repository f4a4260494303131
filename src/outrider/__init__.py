"""Outrider: speculative decoding that keeps the target model's own distribution.

from outrider import LLM, SamplingParams
print(LLM().generate("The quick brown fox", SamplingParams(max_tokens=40))[0].text)
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.core.trace import StepTrace
    from outrider.core.types import SamplingParams
    from outrider.engine.llm import LLM
    from outrider.engine.request import Completion, Result, Speculation, TokenEvent
    from outrider.errors import OutriderError, UserError

__version__ = version("outrider")
__all__ = [
    "LLM",
    "Completion",
    "OutriderError",
    "Result",
    "SamplingParams",
    "Speculation",
    "StepTrace",
    "TokenEvent",
    "UserError",
    "__version__",
]

_HOME = {
    "LLM": "outrider.engine.llm",
    "Completion": "outrider.engine.request",
    "Result": "outrider.engine.request",
    "Speculation": "outrider.engine.request",
    "TokenEvent": "outrider.engine.request",
    "SamplingParams": "outrider.core.types",
    "StepTrace": "outrider.core.trace",
    "OutriderError": "outrider.errors",
    "UserError": "outrider.errors",
}


def __getattr__(name: str) -> object:
    """Loads a public name when it is first used, so that `outrider --help` need not import torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
