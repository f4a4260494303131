"""Batches for training, out of shards: which sequences go together, and how they become tensors.

The order is a function of seed and epoch alone, so a run that stops and goes on sees the same batches.

Shapes: B sequences, T positions, F features, C likeliest tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from outrider.drafters.head_training import Lesson
from outrider.drafters.reduced_vocab import ReducedVocab
from outrider.errors import ConfigError
from outrider.train.shards import Shard

HELD_OUT_EVERY = 50
"""One conversation in this many is never trained on."""
WINDOW = 256
"""Sequences that are sorted by length among themselves, so that batches hold little padding."""


@dataclass(frozen=True, slots=True)
class Place:
    """One sequence: its shard, its number there, and its tokens that are used."""

    shard: int
    index: int
    length: int


class Lessons:
    """The sequences of some shards, cut to `longest` tokens, in batches of at most `batch_tokens` with padding."""

    def __init__(
        self, shards: Seq[Shard], layers: Seq[int], wants: Seq[int], *, longest: int, batch_tokens: int, seed: int
    ) -> None:
        if missing := sorted(set(wants) - set(layers)):
            raise ConfigError(
                f"the head reads the layers {list(wants)} and the harvest has {list(layers)}: layer {missing[0]} is "
                "not there. Give another folder for the harvest, or a head of those layers"
            )
        self._shards, self._longest, self._batch_tokens, self._seed = list(shards), longest, batch_tokens, seed
        self._blocks = [list(layers).index(layer) for layer in wants]
        self._n_layers = len(layers)
        places = [
            (shard.conversations[i], Place(s, i, min(shard.length(i), longest)))
            for s, shard in enumerate(self._shards)
            for i in range(len(shard))
            if shard.prompt_lens[i] + 1 < longest
        ]
        self.places = [place for conversation, place in places if not is_held_out(conversation)]
        self.held_out = [place for conversation, place in places if is_held_out(conversation)]
        if not self.places:
            raise ConfigError(f"no sequence has a prompt of fewer than {longest} tokens: there is nothing to train on")

    @property
    def tokens(self) -> int:
        """Of an epoch, prompts included."""
        return sum(place.length for place in self.places)

    def epoch(self, number: int) -> list[list[Place]]:
        """All batches of an epoch, in order."""
        order = random.Random(f"{self._seed} {number}")
        places = list(self.places)
        order.shuffle(places)
        batches = self.in_batches(places)
        order.shuffle(batches)
        return batches

    def in_batches(self, places: Seq[Place]) -> list[list[Place]]:
        """The places in batches, similar lengths together."""
        batches: list[list[Place]] = []
        for start in range(0, len(places), WINDOW):
            batch: list[Place] = []
            for place in sorted(places[start : start + WINDOW], key=lambda place: -place.length):
                if batch and batch[0].length * (len(batch) + 1) > self._batch_tokens:
                    batches.append(batch)
                    batch = []
                batch.append(place)
            batches.append(batch)
        assert all(batches), "a batch of nothing"
        return batches

    def lesson(self, batch: Seq[Place], *, answers_only: bool = False) -> Lesson:
        """The batch as tensors; what the target answered counts, and what it was asked unless `answers_only`."""
        found = [self._shards[place.shard].sequence(place.index, self._longest) for place in batch]
        size, length, likeliest = len(found), max(len(h.tokens) for h in found), found[0].likeliest_AC.shape[1]
        width = found[0].features_TF.shape[1] // self._n_layers
        tokens_BT = torch.zeros((size, length), dtype=torch.int64)
        features_BTF = torch.zeros((size, length, len(self._blocks) * width), dtype=torch.bfloat16)
        likeliest_BTC = torch.zeros((size, length, likeliest), dtype=torch.int64)
        logp_BTC = torch.full((size, length, likeliest), -torch.inf)
        counted_BT = torch.zeros((size, length), dtype=torch.bool)
        for b, h in enumerate(found):
            tokens_BT[b, : len(h.tokens)] = torch.tensor(h.tokens)
            by_layer = h.features_TF.view(len(h.tokens), self._n_layers, width)
            features_BTF[b, : len(h.tokens)] = by_layer[:, self._blocks].flatten(1)
            learned = slice(h.learn_from - 1, h.learn_from - 1 + len(h.likeliest_AC))
            likeliest_BTC[b, learned], logp_BTC[b, learned] = h.likeliest_AC.long(), h.logp_AC.float()
            counted_BT[b, h.prompt_len - 1 if answers_only else learned.start : learned.stop] = True
        return Lesson(tokens_BT, features_BTF, likeliest_BTC, logp_BTC, counted_BT)


def is_held_out(conversation: int) -> bool:
    """Whether a conversation is kept for the evaluation."""
    return conversation % HELD_OUT_EVERY == HELD_OUT_EVERY - 1


def frequent_tokens(shards: Seq[Shard], size: int, vocab_size: int, *, rows: int) -> ReducedVocab:
    """The `size` tokens that are most often the target's likeliest (ties: the lower id), out of `vocab_size`; 0: every
    token.

    `rows` is the vocabulary of the target's embedding, its padding included.
    """
    if size in (0, vocab_size):
        return ReducedVocab(torch.arange(vocab_size), rows)
    counts_V = torch.zeros(vocab_size, dtype=torch.int64)
    for shard in shards:
        for i in range(len(shard)):
            if not is_held_out(shard.conversations[i]):
                counts_V += torch.bincount(shard.likeliest(i).long(), minlength=vocab_size)
    chosen_S = counts_V.argsort(descending=True, stable=True)[:size]
    return ReducedVocab(chosen_S.sort().values, rows)
