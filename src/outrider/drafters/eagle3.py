"""Drafter `eagle3`: a one-layer head on the target's hidden states (EAGLE-3, Li et al. 2025, 2503.01840, section 3).

Shapes: T positions, d head width, F target features.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from outrider.drafters.chain import Run
from outrider.drafters.eagle3_files import read_eagle3
from outrider.drafters.eagle3_net import Eagle3Net
from outrider.drafters.recurrent import RecurrentDrafter
from outrider.drafters.recurrent_state import RecurrentState
from outrider.errors import PairingError


class Eagle3Drafter(RecurrentDrafter[Eagle3Net]):
    """Drafts with an EAGLE-3 head; see `RecurrentDrafter` for its options."""

    name = "eagle3"

    def _read(self, path: str | Path) -> Eagle3Net:
        return read_eagle3(path)

    def _layers(self, what: str, net: Eagle3Net, target: str) -> tuple[int, ...]:
        """The head's ids are *inputs* of layers: id i is the output of layer i - 1, id 0 the embedding."""
        n_layers, stated = self.host.n_layers, net.config.layer_ids
        ids = stated or (2, n_layers // 2, n_layers - 3)
        if any(a >= b for a, b in pairwise(ids)) or not 0 <= ids[0] <= ids[-1] <= n_layers or ids[-1] == 0:
            said = "its configuration says" if stated else "by default it reads"
            raise PairingError(
                f"{what}: {said} the inputs of the layers {list(ids)}, and {target} has {n_layers} layers: needed are "
                f"ascending ids from 0 to {n_layers}"
            )
        self.layer_ids = ids
        return tuple(layer - 1 for layer in ids if layer > 0)

    def _fused(self, run: Run[RecurrentState], start: int, stop: int) -> Tensor:
        features_TF = run.state.features(start, stop)
        if self.layer_ids[0] == 0:
            embedded_Td = self.host.embed(run.seq.tokens[start:stop])
            features_TF = torch.cat([embedded_Td.to(features_TF.dtype), features_TF], dim=1)
        return self.net.fuse(features_TF)
