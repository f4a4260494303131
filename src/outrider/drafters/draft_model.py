"""Drafter `draft_model`: a smaller model of the same vocabulary runs ahead. See `ChainDrafter` for its round.

Shapes: n sequences in a step.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from outrider.core.protocols import LanguageModel
from outrider.core.rng import Rng
from outrider.core.types import Sequence
from outrider.drafters.chain import GREEDY_BELOW_TEMPERATURE, ChainDrafter, Run
from outrider.drafters.draft_cache import DraftState, advance, prefill
from outrider.drafters.draft_vocab import DraftVocab
from outrider.drafters.options import require_int


class DraftModelDrafter(ChainDrafter[DraftState]):
    """Drafts chains with `model`.

    vocab_size           the target's vocabulary size; None: the same as the model's
    draft_sample_method  "greedy" (likeliest token, POINT), "probabilistic" (drawn from q, IID), "coupled" (the noise
                         that the target races, SHARED_NOISE), or "auto": greedy at temperature 0, coupled under the
                         rule of that name, else probabilistic where the rule weighs q and the temperature is at
                         least `greedy_below_temperature`, else greedy
    draft_vocab          token ids that drafts may use; None: all. See `DraftVocab`
    min_confidence       a draft ends before the first place where the product of q's largest probabilities, from the
                         draft's first place on, is less than this

    A sequence is no longer drafted, with a reason in its stats, when it outgrows the draft model's context, holds a
    token that the model has no embedding for, or when the model fails on it.
    """

    name = "draft_model"
    needs = frozenset({"model", "vocab_size"})

    def __init__(
        self,
        *,
        model: LanguageModel,
        vocab_size: int | None = None,
        draft_sample_method: str = "auto",
        greedy_below_temperature: float = GREEDY_BELOW_TEMPERATURE,
        draft_vocab: Seq[int] | None = None,
        min_confidence: float = 0.0,
    ) -> None:
        super().__init__(draft_sample_method, greedy_below_temperature, min_confidence)
        size = model.vocab_size if vocab_size is None else require_int(self.name, "vocab_size", vocab_size, 1)
        self.vocab = DraftVocab(model, size, draft_vocab)
        self.columns = self.vocab.columns

    @property
    def model(self) -> LanguageModel:
        return self.vocab.model

    def _new_state(self) -> DraftState:
        return DraftState()

    def _ready(self, seq: Sequence, state: DraftState, budget: int) -> int:
        state.catch_up(seq.tokens)
        limit = min(budget, self.model.context_length - len(seq.tokens) + 1)
        if limit < 1:
            self._stop(seq, state, "draft context is full")
            return 0
        if self.vocab.unknown(state.missing):
            self._stop(seq, state, "draft model does not know a token")
            return 0
        return limit

    def _prepare(self, runs: list[Run[DraftState]], rng: Rng) -> None:
        prefill(self.model, [run.state for run in runs])

    def _next_logits(self, runs: list[Run[DraftState]]) -> Tensor:
        rows = [run.tokens[-1:] or run.state.missing for run in runs]
        logits_n = advance(self.model, [run.state for run in runs], rows, logits=True)
        return self.vocab.own_columns(logits_n) if logits_n.numel() else logits_n
