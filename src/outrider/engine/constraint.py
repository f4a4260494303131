"""JSON schemas as constraints on tokens. llguidance holds the grammar; this asks it about draft paths and rolls back.

Shapes: V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from torch import Tensor

from outrider.errors import RequestError
from outrider.models.tokenizer import Tokenizer


class _Vocabulary:
    """The tokenizer as llguidance wants to see it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        known = range(tokenizer.vocab_size)
        self.eos_token_id = min(tokenizer.eos_ids)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(i) if i in known else b"" for i in range(vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(plain, add_special=False)


class ConstraintFactory:
    """Compiles schemas for one model's vocabulary; the vocabulary is prepared once."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        if not tokenizer.eos_ids:
            raise RequestError("json_schema needs a model with an end-of-sequence token: this tokenizer names none")
        self.vocab_size = vocab_size
        eos = sorted(i for i in tokenizer.eos_ids if i < vocab_size)
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer, vocab_size)), vocab_size, eos)

    def json_schema(self, schema: str | Mapping[str, object]) -> JsonConstraint:
        """A constraint for one sequence. Raises RequestError when the schema cannot be compiled."""
        try:
            data = json.loads(schema) if isinstance(schema, str) else dict(schema)
            grammar = LLMatcher.grammar_from_json_schema(data)
        except ValueError as error:
            raise RequestError(f"json_schema is not valid JSON: {error}; give a JSON schema object") from None
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            reason = matcher.get_error().splitlines()[0]
            raise RequestError(f"json_schema cannot be used: {reason}; simplify the schema")
        return JsonConstraint(matcher, self.vocab_size)


class JsonConstraint:
    """The state of one answer's grammar; `allowed` looks ahead along a path and rolls back."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._bitmask = allocate_token_bitmask(1, vocab_size)

    def allowed(self, path: Seq[int]) -> Tensor | None:
        """bool [V]; None after a path that the grammar forbids (the target gives such a path no probability)."""
        taken = self._matcher.try_consume_tokens(list(path)) if path else 0
        mask_V = None
        if taken == len(path):
            fill_next_token_bitmask(self._matcher, self._bitmask)
            bits_V = np.unpackbits(self._bitmask[0].view(np.uint8), bitorder="little")[: self._vocab_size]
            mask_V = torch.from_numpy(bits_V.astype(np.bool_))
        if taken:
            self._matcher.rollback(taken)
        return mask_V

    def advance(self, token: int) -> None:
        consumed = self._matcher.consume_token(token)
        assert consumed, f"token {token} breaks the grammar: {self._matcher.get_error()}"
