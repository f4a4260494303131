"""What the drafters share whose head rides on the target's hidden states."""

from __future__ import annotations

import copy
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from outrider.core.protocols import Committed, HeadHost, LanguageModel
from outrider.core.types import Sequence, TargetIdentity
from outrider.drafters.chain import ChainDrafter
from outrider.drafters.chain_state import HeadState
from outrider.drafters.head_fit import TrainedFor, require_fit, require_host, require_taps


class HeadConfig(Protocol):
    """What every head's configuration says."""

    def trained_for(self, *, by_name: bool) -> TrainedFor: ...


class HeadNet(Protocol):
    """A network of one of the kinds of heads."""

    @property
    def config(self) -> Any: ...


N = TypeVar("N", bound=HeadNet)
H = TypeVar("H", bound=HeadState)


class HeadDrafter(ChainDrafter[H]):
    """`host` is the target, `wants` the layers whose outputs it hands out; `passes` are those of the head so far.

    A sequence is not drafted while the features of its latest position are not known (a prompt of one token).
    """

    needs = frozenset({"target", "head", "identity"})

    def __init__(self, draft_sample_method: str, greedy_below_temperature: float, min_confidence: float) -> None:
        super().__init__(draft_sample_method, greedy_below_temperature, min_confidence)
        self.passes = 0

    def _take_up(
        self,
        head: str | Path | N,
        read: Callable[[str | Path], N],
        noun: str,
        *,
        target: LanguageModel,
        identity: TargetIdentity | None,
        other_target: bool,
    ) -> tuple[str, N]:
        """(what errors call it, the network) of files or of a network, which is copied, when it fits the target.

        Raises ModelFileError for a bad file and PairingError for a head of another target.
        """
        if isinstance(head, (str, Path)):
            what, net = f"the {noun} {head}", read(head)
        else:
            what, net = f"the {noun}", copy.deepcopy(head)
        self.host: HeadHost = require_host(self.name, target)
        config: HeadConfig = net.config
        require_fit(what, config.trained_for(by_name=not other_target), target, self.host, identity)
        return what, net

    def _tap(self, what: str, layers: tuple[int, ...], target: LanguageModel) -> None:
        """Asks for the outputs of these layers. Raises PairingError where the target does not hand them out."""
        require_taps(what, layers, target, self.host)
        self.wants = layers

    def head_alone(self) -> Self:
        """This drafter, at work on nothing yet, as its head was trained: nothing else says what q is, and drafts are as
        long as is asked for."""
        return self.full_length()

    def commit(self, seq: Sequence, committed: Committed) -> None:
        """Keeps the features of the positions that the target's cache gained."""
        state = self._states[seq.id]
        if committed.features_TF is not None and not state.stopped:
            state.add(committed.features_TF, seq.cache.length)

    def _ready(self, seq: Sequence, state: H, budget: int) -> int:
        return budget if state.held == len(seq.tokens) - 1 > 0 else 0

    def _count(self, states: Seq[H]) -> None:
        """One pass for all of them."""
        self.passes += 1
        for state in states:
            state.count_pass()
