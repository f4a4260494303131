"""The oracle: generation as plainly as it can be written, one token and one whole forward pass at a time.

It shares `warp` and the random keys with the engine (they define what is to be generated) and nothing else: no cache,
no drafts, no rounds, no batch.
"""

from __future__ import annotations

from outrider.core.protocols import LanguageModel, Segment
from outrider.core.rng import CounterRng, Key, Purpose
from outrider.core.types import SamplingParams, Sequence
from outrider.core.warp import RowContext, warp


def naive_tokens(
    model: LanguageModel, prompt: list[int], params: SamplingParams, *, stop_ids: frozenset[int] = frozenset()
) -> list[int]:
    """The answer's token ids; sampling races the noise of each output position (rule `coupled`)."""
    assert params.max_tokens is not None
    seq = Sequence(0, prompt, params, seed=params.seed or 0, stop_ids=stop_ids)
    while seq.output_len < params.max_tokens:
        out = model.forward([Segment(model.new_cache(), seq.tokens)])
        assert out.logits_MV is not None
        rows = warp(out.logits_MV[-1:], [RowContext(seq)])
        key = Key(seq.seed, seq.output_len, Purpose.RACE)
        token = rows[0].likeliest() if params.greedy else CounterRng().race(rows[0], key)
        seq.tokens.append(token)
        if token in stop_ids:
            break
    return seq.tokens[seq.prompt_len :]
