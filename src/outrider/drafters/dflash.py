"""Drafter `dflash`: a block head that says all tokens of a block at once (DFlash, Chen et al. 2026, 2602.06036).

The tokens of a block are independent given the text: q of each is its own row's.
"""

from __future__ import annotations

from outrider.drafters.block_drafter import BlockDrafter
from outrider.drafters.block_net import BlockConfig
from outrider.errors import PairingError


class DFlashDrafter(BlockDrafter):
    """A block head without a Markov head; see `BlockDrafter`."""

    name = "dflash"

    @classmethod
    def _require_kind(cls, what: str, config: BlockConfig) -> None:
        if config.markov_rank:
            raise PairingError(
                f"{what} has a Markov head of rank {config.markov_rank}, which makes a token depend on the one before "
                "it: use the drafter dspark"
            )
