"""The one place where a token becomes final.

A round decides several tokens at once; each goes through `Transcript._commit_one`, in order, and when one of them ends
the answer the rest of the block is dropped. Plain and speculative decoding therefore stop at the same token, with the
same text, whatever the draft length.
"""

from __future__ import annotations

import torch

from outrider.core.step import Decided
from outrider.core.types import Sequence, Switch
from outrider.engine.request import Completion, TokenEvent, TokenLogprob
from outrider.models.detokenizer import IncrementalDetokenizer, StopMatcher
from outrider.models.tokenizer import Tokenizer


class Transcript:
    """The growing answer of one sequence: text, events, logprobs. Token ids alone when there is no tokenizer."""

    def __init__(self, request: int, seq: Sequence, context_length: int, tokenizer: Tokenizer | None) -> None:
        params = seq.params
        self.request = request
        self.seq = seq
        self.context_length = context_length
        self.events: list[TokenEvent] = []
        self.text = ""
        self.stop_reason: str | int | None = None
        self._detokenizer = (
            IncrementalDetokenizer(tokenizer, skip_special=params.skip_special, continuation=True)
            if tokenizer
            else None
        )
        self._stops = StopMatcher(params.stop, include_stop=params.include_stop)

    def commit(self, decided: list[Decided]) -> list[TokenEvent]:
        """Makes tokens final until one ends the answer; returns their events (at least one)."""
        events = []
        for token in decided:
            events.append(self._commit_one(token))
            if self.seq.finished:
                break
        self.events.extend(events)
        return events

    def _commit_one(self, decided: Decided) -> TokenEvent:
        seq, params = self.seq, self.seq.params
        seq.tokens.append(decided.token)
        if seq.constraint is not None:
            seq.constraint.advance(decided.token)
        text = ""
        if decided.token in seq.stop_ids:
            seq.finish_reason, self.stop_reason = "stop", decided.token
        else:
            text = self._extend(self._detokenizer.push(decided.token) if self._detokenizer else "")
        full = seq.output_len == params.max_tokens or len(seq.tokens) >= self.context_length
        if full and not seq.finished:
            seq.finish_reason = "length"
        if seq.finished and not isinstance(self.stop_reason, str):
            text += self._flush()
        self.text += text
        return TokenEvent(
            self.request,
            seq.choice,
            decided.token,
            text,
            decided.origin,
            decided.source,
            _logprob(decided, params.logprobs) if params.logprobs is not None else None,
            seq.finish_reason,
        )

    def _extend(self, new_text: str) -> str:
        """The part of the text that no stop string can still claim; ends the answer when a stop string completes."""
        if self.seq.output_len < self.seq.params.min_tokens:
            return self._stops.flush() + new_text
        safe, matched = self._stops.push(new_text)
        if matched is not None:
            self.seq.finish_reason, self.stop_reason = "stop", matched
        return safe

    def _flush(self) -> str:
        """Text held back at the end of the answer: half a character, or the beginning of a stop that never came."""
        text = self._extend(self._detokenizer.flush()) if self._detokenizer else ""
        return text if isinstance(self.stop_reason, str) else text + self._stops.flush()

    def completion(self, method: str, switches: tuple[Switch, ...] = ()) -> Completion:
        """The finished answer."""
        seq = self.seq
        assert seq.finish_reason is not None, "the answer is not finished"
        logprobs = [event.logprob for event in self.events if event.logprob is not None]
        return Completion(
            index=seq.choice,
            text=self.text,
            token_ids=seq.tokens[seq.prompt_len :],
            finish_reason=seq.finish_reason,
            stop_reason=self.stop_reason,
            origins=[event.origin for event in self.events],
            logprobs=logprobs if seq.params.logprobs is not None else None,
            seed=seq.seed,
            rule=seq.rule.name,
            lossless=seq.rule.lossless,
            method=method,
            stats=seq.stats,
            switches=switches,
        )


def _logprob(decided: Decided, top: int) -> TokenLogprob:
    logprobs_V = torch.log_softmax(decided.logits_V.to(torch.float64), dim=0)
    likeliest = logprobs_V.topk(min(top, logprobs_V.numel()))
    return TokenLogprob(
        decided.token,
        float(logprobs_V[decided.token]),
        list(zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)),
    )
