"""What followed the last time that a text went as it goes now.

Shapes: T tokens.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from outrider.kernels.dispatch import CHOICE

MOST_MATCHED = 5
"""Tokens that are compared at most, as in csrc/chain.h."""


def find_copy(text_T: Tensor) -> tuple[int, int]:
    """(how many of the last tokens stood together earlier in the text, at most MOST_MATCHED; the token that followed
    them there). Of several places the one where most did, of equals the latest. (0, 0): the last token is new.

    `text_T` is int64, contiguous, on the CPU.
    """
    assert text_T.dtype == torch.int64, f"a text of {text_T.dtype}"
    assert text_T.is_contiguous(), "tokens must follow one another"
    if CHOICE.level is None:
        return find_copy_reference(text_T)
    matched, token = importlib.import_module("outrider.kernels._kernels").find_copy(text_T.data_ptr(), len(text_T))
    return matched, token


def find_copy_reference(text_T: Tensor) -> tuple[int, int]:
    """The twin in plain torch."""
    matched, token = 0, 0
    ends = (text_T[:-1] == text_T[-1:]).nonzero().flatten().tolist()
    text = text_T.tolist()
    for end in reversed(ends):
        length = 1
        while length < min(MOST_MATCHED, end + 1) and text[end - length] == text[-1 - length]:
            length += 1
        if length > matched:
            matched, token = length, text[end + 1]
        if matched == MOST_MATCHED:
            break
    return matched, token
