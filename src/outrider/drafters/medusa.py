"""Drafter `medusa`: heads on the target's last hidden state that say what comes after the next token (2401.10774).

The target's features are known of the position before the last committed token, which its own head has decided: head 1
drafts the token behind it, head 2 the one after that, and so on, each without knowing what the others drafted.

Shapes: n sequences in a step, K draft tokens, d width, S draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from outrider.core.protocols import LanguageModel
from outrider.core.rng import Rng
from outrider.core.types import Sequence, TargetIdentity
from outrider.drafters.chain import GREEDY_BELOW_TEMPERATURE, Run
from outrider.drafters.chain_state import HeadState
from outrider.drafters.columns import Columns
from outrider.drafters.head_drafter import HeadDrafter
from outrider.drafters.head_kernels import as_linear, choose_dtype, use_kernels_
from outrider.drafters.head_layer import pack_matrix
from outrider.drafters.medusa_files import read_medusa
from outrider.drafters.medusa_net import MedusaNet


class MedusaState(HeadState):
    """Of one sequence the latest features, and what the heads say of them."""

    def __init__(self) -> None:
        super().__init__(window=1)
        self.logits_KS: Tensor | None = None

    @property
    def unread(self) -> int:
        """All of them: nothing is read ahead, and the window keeps the latest alone."""
        return 0

    def _begin_at(self, start: int) -> None:
        """Nothing but features is kept."""

    def free(self) -> None:
        super().free()
        self.logits_KS = None


class MedusaDrafter(HeadDrafter[MedusaState]):
    """Drafts chains of at most as many tokens as there are heads, with `head`: a folder or file, or a network.

    The options are those of `RecurrentDrafter`, but for `copy`, and so are the errors.
    """

    name = "medusa"

    def __init__(
        self,
        *,
        target: LanguageModel,
        head: str | Path | MedusaNet,
        identity: TargetIdentity | None = None,
        other_target: bool = False,
        dtype: str = "auto",
        draft_sample_method: str = "auto",
        greedy_below_temperature: float = GREEDY_BELOW_TEMPERATURE,
        min_confidence: float = 0.0,
    ) -> None:
        super().__init__(draft_sample_method, greedy_below_temperature, min_confidence)
        what, net = self._take_up(
            head, read_medusa, "heads", target=target, identity=identity, other_target=other_target
        )
        self._tap(what, (self.host.n_layers - 1,), target)
        device = self.host.embed([0]).device
        self.dtype, packed = choose_dtype(self.name, dtype, device, next(net.parameters()).dtype)
        self.net = net.to(device, self.dtype).eval()
        ids_S = net.vocab.proposable(target.vocab_size)
        self.columns = Columns(ids_S, target.vocab_size)
        for k, own in enumerate(net.lm_heads):
            assert isinstance(own, nn.Linear)
            net.lm_heads[k] = as_linear(own.weight[: len(ids_S)])
        self._shared = None if net.config.own_heads else self._shared_head(ids_S.tolist(), packed)
        if packed is not None:
            use_kernels_(self.net, packed)

    def _new_state(self) -> MedusaState:
        return MedusaState()

    def _ready(self, seq: Sequence, state: MedusaState, budget: int) -> int:
        return super()._ready(seq, state, min(budget, self.net.config.n_heads))

    @torch.inference_mode()
    def _prepare(self, runs: list[Run[MedusaState]], rng: Rng) -> None:
        """All heads at once, as many as the longest draft needs."""
        if not runs:
            return
        self._count([run.state for run in runs])
        features_nd = torch.cat([run.state.features(run.state.held - 1, run.state.held) for run in runs])
        h_nd = self.host.last_norm(features_nd).to(self.dtype)
        read = [self.net.read(h_nd, k) for k in range(max(run.limit for run in runs))]
        if self._shared is not None:
            logits_KnS = self._shared(torch.cat(read)).view(len(read), len(runs), -1)
        else:
            logits_KnS = torch.stack([head(x_nd) for head, x_nd in zip(self.net.lm_heads, read, strict=False)])
        for run, logits_KS in zip(runs, logits_KnS.float().cpu().unbind(1), strict=True):
            run.state.logits_KS = logits_KS

    def _next_logits(self, runs: list[Run[MedusaState]]) -> Tensor:
        """The next head of every run."""
        return torch.stack([run.state.logits_KS[len(run.tokens)] for run in runs if run.state.logits_KS is not None])

    def _shared_head(self, ids: list[int], packed: str | None) -> Callable[[Tensor], Tensor]:
        """Rows of the target's head, in the precision of the heads where the kernels run."""
        if packed is not None:
            return pack_matrix(as_linear(self.host.head_weights(ids)), packed)
        rows = self.host.head_rows(ids)
        return lambda x_Md: rows(x_Md.float())
