"""The parts of a block head as they draft: packed for the kernels where those run, with what the target shares.

Shapes: M rows, n sequences in a step, d head width, r rank of the Markov head, S draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import lru_cache

import torch
from torch import Tensor, nn

from outrider.core.protocols import HeadHost
from outrider.drafters.block_backbone import make_backbone
from outrider.drafters.block_net import BlockNet, MarkovHead
from outrider.drafters.block_state import Said
from outrider.drafters.columns import Columns
from outrider.drafters.head_kernels import as_linear, choose_dtype
from outrider.drafters.head_layer import PackedMatrix, pack_matrix
from outrider.drafters.reduced_vocab import ReducedVocab
from outrider.kernels import Walk

REMEMBERED = 4096
"""Tokens whose embedding is remembered: nearly all of a text are among so many."""


def prepare_parts(drafter: str, net: BlockNet, host: HeadHost, vocab_size: int, dtype: str) -> Parts:
    """`net` on the target's device, in the `dtype` of `choose_dtype`. Uses up `net`. Raises ConfigError."""
    device = host.embed([0]).device
    activations, packed = choose_dtype(drafter, dtype, device, net.dtype)
    _narrow_(net, vocab_size)
    return Parts(net.to(device, activations).eval(), host, vocab_size, packed)


class Parts:
    """`columns` are those of the logits; `backbone` runs the layers; `mask_1d` is what a mask's row reads. `walk` picks
    the likeliest tokens of whole blocks; a recurrent Markov head goes through them one by one (None)."""

    def __init__(self, net: BlockNet, host: HeadHost, size: int, packed: str | None) -> None:
        self.columns = Columns(net.vocab.ids_S, size)
        self._host, self._embedding, self._dtype = host, net.embed_tokens, net.dtype
        self._row = lru_cache(REMEMBERED)(self._read_row)
        self.mask_1d = self._read_row(net.config.mask_token_id)
        self._confidence = None if net.confidence_head is None else ConfidenceRows(net)
        self._markov: MarkovHead | None = net.markov_head
        self._own_head = net.lm_head is not None
        self._head = self._make_head(net, packed)
        net.markov_head = net.confidence_head = net.lm_head = net.embed_tokens = None
        if self._markov is not None:
            self._bias = self._make_bias(self._markov, packed)
        self.walk = self._make_walk(net.vocab.ids_S.cpu(), net.config.vocab_size)
        self.backbone = make_backbone(net, packed)

    def _make_head(self, net: BlockNet, packed: str | None) -> Callable[[Tensor], Tensor]:
        """The target's rows, where they are shared, are packed as the head is."""
        own, ids = net.lm_head, net.vocab.ids_S.tolist()
        if packed is None:
            return self._host.head_rows(ids) if own is None else own
        return pack_matrix(as_linear(self._host.head_weights(ids)) if own is None else own, packed)

    def _make_bias(self, markov: MarkovHead, packed: str | None) -> Callable[[Tensor], Tensor]:
        """From what the Markov head reads to what it adds to the logits. In 4 bits it would say too little."""
        if packed is None:
            return markov.markov_w2
        dtype = "int8" if packed == "int4" else packed
        if markov.recurrent:
            setattr(markov, "joint_proj", PackedMatrix(markov.joint_proj, dtype))  # noqa: B010
        return pack_matrix(markov.markov_w2, dtype)

    def _make_walk(self, ids_S: Tensor, tokens: int) -> Walk | None:
        if self._markov is None:
            return Walk(ids_S, tokens)
        table_Vr = self._markov.markov_w1.weight.detach()
        return None if self._markov.recurrent else Walk(ids_S, tokens, table_Vr, self._bias)

    @property
    def has_confidence(self) -> bool:
        """Whether the head says how probably a token will be accepted."""
        return self._confidence is not None

    def embed(self, token: int) -> Tensor:
        """float32 [1, d]: what a token's row reads. The latest are remembered: a target may have them in a file."""
        return self._row(token)

    def _read_row(self, token: int) -> Tensor:
        if self._embedding is None:
            return self._host.embed([token])
        return self._embedding.weight.detach()[token : token + 1].float()

    def logits(self, h_Md: Tensor) -> Tensor:
        """float32 [M, S]: of every draft token, without what follows from the token before it."""
        return self._head(h_Md.to(self._dtype) if self._own_head else h_Md).float().cpu()

    def confidence_rows(self, h_Md: Tensor) -> list[float]:
        """[M]: logits of the confidences, without what follows from the token before; [] for a head without."""
        return [] if self._confidence is None else self._confidence.rows(h_Md)

    def confidence_behind(self, logit: float, before: int) -> float:
        """The logit of the probability that the token behind `before` is accepted."""
        assert self._confidence is not None, "a head without confidences"
        return self._confidence.behind(logit, before)

    def behind(self, places: Seq[tuple[Said, int, int]]) -> Tensor:
        """[n, S] logits of a draft token each: (what its block says, its number in it, the token before)."""
        if not places:
            return torch.empty(0, 0)
        logits_nS = _rows([block.logits_KS[k : k + 1] for block, k, _ in places])
        markov = self._markov
        if markov is None:
            return logits_nS
        table_Vr = markov.markov_w1.weight.detach()
        read_nr = _rows([table_Vr[token : token + 1] for _, _, token in places])
        if markov.recurrent:
            h_nd = _rows([block.h_Kd[k : k + 1] for block, k, _ in places]).to(read_nr)
            states = [block.markov_1r for block, _, _ in places if block.markov_1r is not None]
            read_nr, state_nr = markov.step(read_nr, h_nd, _rows(states) if states else None)
            assert state_nr is not None, "a recurrent head without a state"
            for n, (block, _, _) in enumerate(places):
                block.markov_1r = state_nr[n : n + 1]
        return logits_nS.add_(self._bias(read_nr).to(logits_nS))


def _rows(parts: list[Tensor]) -> Tensor:
    """One below the other; one alone as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class ConfidenceRows:
    """The confidence head, cut in two: what the row says, and what the token before says, worked out for all tokens."""

    def __init__(self, net: BlockNet) -> None:
        assert net.confidence_head is not None, "a head without confidences"
        proj, width = net.confidence_head.proj, net.config.layer.hidden_size
        weight_K = proj.weight.detach().float()[0]
        self._weight_d, self._bias = weight_K[:width], float(proj.bias.detach())
        self._before: list[float] = []
        if net.config.confidence_with_markov and net.markov_head is not None:
            self._before = (net.markov_head.markov_w1.weight.detach().float() @ weight_K[width:]).tolist()

    def rows(self, h_Md: Tensor) -> list[float]:
        """[M]: a row's number is the same whatever the other rows."""
        found: list[float] = (h_Md * self._weight_d).sum(1).tolist()
        return found

    def behind(self, logit: float, before: int) -> float:
        """A row's number and what the token before it adds."""
        return logit + self._bias + (self._before[before] if self._before else 0.0)


def _narrow_(net: BlockNet, size: int) -> None:
    """Leaves out draft tokens from the target id `size` on: padding that the target never emits."""
    kept_S = net.vocab.ids_S < size
    if bool(kept_S.all()):
        return
    net.vocab = ReducedVocab(net.vocab.ids_S[kept_S], net.vocab.size)
    for linear in (net.lm_head, net.markov_head.markov_w2 if net.markov_head is not None else None):
        if linear is not None:
            linear.weight = nn.Parameter(linear.weight.detach()[kept_S])
            linear.out_features = len(net.vocab.ids_S)
