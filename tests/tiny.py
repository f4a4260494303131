"""Small things that tests share: exact models, a byte-level tokenizer, and LLMs made of them."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from outrider import LLM
from outrider.core.protocols import Drafter
from outrider.models.table import TableModel
from outrider.models.tokenizer import Tokenizer

EOS = 256


def random_table(vocab_size: int, order: int = 1, *, seed: int = 0, sharpness: float = 2.0) -> TableModel:
    """A random Markov model; larger `sharpness` means more peaked rows."""
    generator = torch.Generator().manual_seed(seed)
    shape = (vocab_size,) * (order + 1)
    return TableModel.from_table(torch.randn(shape, generator=generator, dtype=torch.float64) * sharpness)


def cycle_model(text: str, *, vocab_size: int = 257, eos_after: int | None = None) -> TableModel:
    """A model over bytes (and EOS = 256) that repeats `text` for ever; after `eos_after` tokens it prefers EOS.

    It continues from the number of tokens so far, so the prompt's content does not matter.
    """
    data = text.encode()

    def row(context: tuple[int, ...]) -> torch.Tensor:
        logits = torch.zeros(vocab_size, dtype=torch.float64)
        logits[data[(len(context) - 1) % len(data)]] = 8.0
        if eos_after is not None and len(context) > eos_after:
            logits[EOS] = 16.0
        return logits

    return TableModel(row, vocab_size)


def byte_tokenizer() -> Tokenizer:
    """256 byte tokens and EOS = 256: every text has one token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    by_byte = {bytes_of(char): char for char in alphabet}
    vocab = {by_byte[bytes([i])]: i for i in range(256)}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend, [*(bytes([i]) for i in range(256)), b"<eos>"], special_ids=[EOS], eos_ids=[EOS])


def bytes_of(char: str) -> bytes:
    """The byte that a character of the byte-level alphabet stands for."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return bytes([ord(char) if ord(char) < 256 else others[ord(char) - 256]])


def tiny_llm(target: TableModel, *drafters: Drafter, **options: object) -> LLM:
    """An LLM over a byte model with the byte tokenizer."""
    return LLM.from_parts(target, {d.name: d for d in drafters}, tokenizer=byte_tokenizer(), **options)  # type: ignore[arg-type]
