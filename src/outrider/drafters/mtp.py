"""Drafter `mtp`: a next-token module on the target's last hidden state (DeepSeek-V3, 2412.19437, section 2.2).

Shapes: T positions, d width of module and target.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from outrider.drafters.chain import Run
from outrider.drafters.mtp_files import read_mtp
from outrider.drafters.mtp_net import MtpNet
from outrider.drafters.recurrent import RecurrentDrafter
from outrider.drafters.recurrent_state import RecurrentState


class MtpDrafter(RecurrentDrafter[MtpNet]):
    """Drafts with a next-token module; see `RecurrentDrafter` for its options."""

    name = "mtp"

    def _read(self, path: str | Path) -> MtpNet:
        return read_mtp(path)

    def _layers(self, what: str, net: MtpNet, target: str) -> tuple[int, ...]:
        return (self.host.n_layers - 1,)

    def _fused(self, run: Run[RecurrentState], start: int, stop: int) -> Tensor:
        return self.net.fuse(self.host.last_norm(run.state.features(start, stop)))
