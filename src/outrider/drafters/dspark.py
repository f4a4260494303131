"""Drafter `dspark`: a block head whose tokens each know the one before (DSpark, Cheng et al. 2026, 2607.05147).

The backbone says a whole block in one pass; its tokens are then drawn from left to right, and each adds what a Markov
head learned to follow from it to the logits of the next. A confidence head says how probably a token will be accepted
before that token is known, so a draft may end by it without bias (2607.05147, appendix A).
"""

from __future__ import annotations

from outrider.drafters.block_drafter import BlockDrafter
from outrider.drafters.block_net import BlockConfig
from outrider.errors import PairingError


class DSparkDrafter(BlockDrafter):
    """A block head with a Markov head; see `BlockDrafter`."""

    name = "dspark"

    @classmethod
    def _require_kind(cls, what: str, config: BlockConfig) -> None:
        if not config.markov_rank:
            raise PairingError(f"{what} has no Markov head, so its tokens are independent: use the drafter dflash")
