"""Results as JSON, under the names that the field uses: usage (OpenAI), timings (llama.cpp), metrics (vLLM)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict

from outrider.core.stats import SpecStats
from outrider.core.types import Decision
from outrider.engine.request import Completion, Result, TokenLogprob
from outrider.models.tokenizer import Tokenizer


def result_json(result: Result, tokenizer: Tokenizer | None) -> dict[str, object]:
    """A whole result: the first answer's fields, every answer under `choices`, and the counts of all together."""
    first = result.completions[0]
    return {
        "drafter": first.method,
        "rule": first.rule,
        "lossless": first.lossless,
        **completion_json(first, tokenizer),
        "choices": [{"index": c.index, **completion_json(c, tokenizer)} for c in result.completions],
        "usage": usage_json(len(result.prompt_ids), sum(len(c.token_ids) for c in result.completions)),
        "timings": result.timings.to_json(),
        "metrics": metrics_json(result.stats),
    }


def completion_json(completion: Completion, tokenizer: Tokenizer | None) -> dict[str, object]:
    """One answer; `logprobs` only where they were asked for, `switches` only of a governor."""
    answer: dict[str, object] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "origins": [origin.value for origin in completion.origins],
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.switches:
        answer["switches"] = [asdict(switch) for switch in completion.switches]
    if completion.logprobs is not None:
        answer["logprobs"] = [logprob_json(entry, tokenizer) for entry in completion.logprobs]
    return answer


def logprob_json(entry: TokenLogprob, tokenizer: Tokenizer | None) -> dict[str, object]:
    """A token's log probability and those of the likeliest ones; null for a token that cannot occur."""
    own, *top = [
        {
            "token_id": token_id,
            "token": token_text(token_id, tokenizer),
            "logprob": logprob if math.isfinite(logprob) else None,
        }
        for token_id, logprob in [(entry.token_id, entry.logprob), *entry.top]
    ]
    return {**own, "top": top}


def token_text(token_id: int, tokenizer: Tokenizer | None) -> str:
    """A token by itself, to be looked at: bytes that are no character are U+FFFD. "" without a tokenizer."""
    return "" if tokenizer is None else tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def usage_json(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def metrics_json(stats: SpecStats) -> dict[str, object]:
    return {
        "speculative_decoding": {
            "mean_acceptance_length": stats.acceptance_length,
            "draft_acceptance_rate": stats.acceptance_rate,
            "acceptance_histogram": acceptance_histogram(stats),
            "num_spec_steps": stats.rounds,
            "num_accepted_draft_tokens": stats.accepted,
            "num_draft_tokens": stats.drafted,
        }
    }


def plan_json(plan: Iterable[Decision]) -> list[dict[str, str]]:
    return [{"field": d.field, "value": d.value, "reason": d.reason} for d in plan]


def acceptance_histogram(stats: SpecStats) -> list[int]:
    """Entry j: the number of rounds that kept exactly j draft tokens."""
    at_least = _kept_at_least(stats)
    return [n - more for n, more in zip(at_least, [*at_least[1:], 0], strict=True)]


def conditional_acceptance(stats: SpecStats) -> list[float]:
    """Acceptance at each draft position, given that a token was drafted there and those before it were accepted.

    A lower bound where drafts are of different lengths: the counts do not say which of them were accepted whole.
    """
    reached, *accepted = _kept_at_least(stats)
    rates = []
    for position, kept in enumerate(accepted):
        chances = min(stats.drafted_at[position], reached)
        rates.append(kept / chances if chances else 0.0)
        reached = kept
    return rates


def _kept_at_least(stats: SpecStats) -> list[int]:
    """Entry j: the number of rounds that kept j draft tokens or more."""
    return [stats.rounds, *(stats.accepted_at[position] for position in range(len(stats.drafted_at)))]
