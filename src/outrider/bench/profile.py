"""`profile`: what a target pass costs by its number of rows, and what of that is memory, prefill, sampling, overhead.

The numbers of rows take turns, round by round, in an order that rotates: a disturbance hits all of them alike. Plain
rounds of the engine follow one another, as in decoding: behind a wide pass one takes far longer.

Shapes: M rows, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from torch import Tensor

from outrider.bench.bandwidth import Bandwidth, read_bandwidth
from outrider.bench.memory import Memory, file_nbytes, forget_peak, kv_nbytes, pass_nbytes, peak_rss
from outrider.bench.prompts import builtin_prompts
from outrider.bench.summary import Spread
from outrider.bench.timing import plain_rounds
from outrider.core.draft import SeqDraft
from outrider.core.protocols import KVCache, LanguageModel, Segment
from outrider.core.registry import verifier_class
from outrider.core.rng import CounterRng
from outrider.core.step import PREFILL_CHUNK
from outrider.core.types import SamplingParams, Sequence
from outrider.core.warp import RowContext, warp
from outrider.engine.llm import LLM
from outrider.errors import ConfigError

SCHEMA = "outrider.profile/1"
PREFILL_TOKENS = 512
PREFILL_REPEAT = 3
STEADY = 1.2
"""Bandwidths before and after that are further apart than this factor are no measure of a pass between them."""
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95)
SAMPLED_RULE = "block"
GREEDY = SamplingParams()

OnStep = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one thing done several times."""

    spread: Spread
    best_s: float

    @classmethod
    def of(cls, seconds: Seq[float]) -> Times:
        spread = Spread.of(seconds)
        assert spread is not None, "nothing was timed"
        return cls(spread, min(seconds))

    @property
    def median_s(self) -> float:
        return self.spread.median

    def to_json(self) -> dict[str, float]:
        return {**self.spread.to_json(), "best": self.best_s}


@dataclass(frozen=True, slots=True)
class Profile:
    """By number of rows: `passes`, and `sampled` and `greedy`: warping and judging these rows, no pass included.

    `rounds` and `overheads` are whole rounds of plain decoding, and the part outside the pass; None where the context
    left no room for a round. The read bandwidth was measured before the passes and after them.
    """

    context: int
    repeat: int
    passes: dict[int, Times]
    sampled: dict[int, Times]
    greedy: dict[int, Times]
    prefill_tokens: int
    prefill: Times
    rounds: Times | None
    overheads: Times | None
    load_s: float
    memory: Memory
    bandwidth_before: Bandwidth
    bandwidth_after: Bandwidth

    @property
    def bandwidth(self) -> Bandwidth:
        """The better of the two."""
        return max(self.bandwidth_before, self.bandwidth_after, key=lambda found: found.gbps)

    @property
    def steady(self) -> bool:
        """Whether both bandwidths are about the same."""
        return self.bandwidth.gbps <= STEADY * min(self.bandwidth_before.gbps, self.bandwidth_after.gbps)

    def of_rows(self, rows: Seq[int]) -> Profile:
        """These of its numbers of rows only."""
        passes, sampled, greedy = (
            {count: found[count] for count in rows} for found in (self.passes, self.sampled, self.greedy)
        )
        return replace(self, passes=passes, sampled=sampled, greedy=greedy)

    def v(self, rows: int) -> float:
        """The pass over `rows` rows relative to one row."""
        return self.passes[rows].median_s / self.passes[1].median_s

    def gbps(self, rows: int) -> float | None:
        """1e9 bytes a second that the pass read; None where its bytes are not known."""
        nbytes = self.memory.per_pass
        return None if nbytes is None else nbytes / self.passes[rows].median_s / 1e9

    def share(self, rows: int) -> float | None:
        """Of the machine's read bandwidth; None where that was not steady. Above 1 where a cache held part of the
        weights."""
        gbps = self.gbps(rows)
        return None if gbps is None or not self.steady else gbps / self.bandwidth.gbps

    def sampling_s(self, rows: int) -> float:
        """What sampling adds to a round over `rows` rows, relative to greedy."""
        return self.sampled[rows].median_s - self.greedy[rows].median_s

    @property
    def prefill_per_s(self) -> float:
        return self.prefill_tokens / self.prefill.median_s

    def notes(self) -> list[str]:
        """What makes a figure doubtful."""
        if not self.steady:
            before, after = self.bandwidth_before.gbps, self.bandwidth_after.gbps
            return [
                f"memory read at {before:.1f} GB/s before the passes and at {after:.1f} after: the machine was not "
                "steady, so no share of the bandwidth is given; repeat this when it is idle"
            ]
        shares = {rows: self.share(rows) for rows in self.passes}
        fast = [str(rows) for rows, share in shares.items() if share is not None and share > 1]
        if not fast:
            return []
        return [
            f"passes over {', '.join(fast)} rows read faster than the machine's read bandwidth: a cache holds part of "
            "the weights, or the machine was busy while the bandwidth was measured"
        ]

    def to_json(self) -> dict[str, object]:
        """The figures of the document; see docs/reference/profile-json.md."""
        memory, by_rows = self.memory, _by_rows(self.passes)
        peak = memory.peak_rss
        return {
            "target_seconds": by_rows(lambda rows: self.passes[rows].median_s),
            "target_spread": by_rows(lambda rows: self.passes[rows].to_json()),
            "v": by_rows(self.v),
            "bytes_per_pass": {"weights": memory.pass_weights, "kv": memory.kv, "total": memory.per_pass},
            "read_bandwidth": {
                **self.bandwidth.to_json(),
                "before": self.bandwidth_before.to_json(),
                "after": self.bandwidth_after.to_json(),
            },
            "achieved_gbps": by_rows(self.gbps),
            "bandwidth_share": by_rows(self.share),
            "prefill_tokens": self.prefill_tokens,
            "prefill_seconds": self.prefill.to_json(),
            "prefill_tokens_per_second": self.prefill_per_s,
            "round_seconds": self.rounds.median_s if self.rounds else None,
            "overhead_seconds": self.overheads.median_s if self.overheads else None,
            "sampling_seconds": by_rows(self.sampling_s),
            "sampling_share": by_rows(lambda rows: self.sampling_s(rows) / self.passes[rows].median_s),
            "sampled_seconds": by_rows(lambda rows: self.sampled[rows].median_s),
            "greedy_seconds": by_rows(lambda rows: self.greedy[rows].median_s),
            "load_seconds": self.load_s,
            "file_bytes": memory.file,
            "weights_bytes": memory.weights,
            "peak_rss_bytes": peak,
            "rss_before_load_bytes": memory.rss_before_load,
            "peak_to_file": None if peak is None else peak / memory.file,
            "model_peak_to_file": memory.model_peak_to_file,
        }


def _by_rows(passes: dict[int, Times]) -> Callable[[Callable[[int], object]], dict[str, object]]:
    return lambda value: {str(rows): value(rows) for rows in passes}


def parse_rows(text: str) -> tuple[int, ...]:
    """Numbers of rows from "1,2,5", in order, each once; 1 is always among them. Raises ConfigError."""
    try:
        rows = {int(part) for part in text.split(",")}
    except ValueError:
        raise ConfigError(
            f"--rows {text!r} is not allowed: give integers >= 1 separated by commas, as in 1,2,5"
        ) from None
    if (least := min(rows)) < 1:
        raise ConfigError(f"--rows {least} is not allowed: give integers >= 1, as in 1,2,5")
    return tuple(sorted(rows | {1}))


def check_sizes(context: int, repeat: int) -> None:
    """Raises ConfigError for what no model can do."""
    if context < 1:
        raise ConfigError(f"--context {context} is not allowed: give an integer >= 1, the tokens before the pass")
    if repeat < 1:
        raise ConfigError(f"--repeat {repeat} is not allowed: give an integer >= 1")


def check_room(name: str, context_length: int, context: int, most: int) -> None:
    """Raises ConfigError where a pass over `most` rows behind `context` tokens is more than the model's context."""
    room = context_length - most
    if context > room:
        remedy = f"give --context {room} or less, or fewer rows" if room > 0 else "give fewer rows"
        raise ConfigError(
            f"--context {context} and {most} rows do not fit {name}, whose context holds {context_length} tokens: "
            f"{remedy}"
        )


def steps(rows: Seq[int], repeat: int) -> int:
    """How often `profile` calls `on_step`."""
    return len(rows) * (2 * repeat + 1) + PREFILL_REPEAT + 2


def profile(
    llm: LLM,
    rows: Seq[int],
    *,
    context: int = 512,
    repeat: int = 11,
    rss_before_load: int | None = None,
    on_step: OnStep = lambda: None,
) -> Profile:
    """Times passes of the target behind `context` tokens; the engine must be idle. `rows` as `parse_rows` gives them.

    The peak of memory leaves out what measuring the bandwidth takes. Raises ConfigError where the context of the model
    is too short.
    """
    check_sizes(context, repeat)
    model, opened, most = llm.engine.target, llm.opened, max(rows)
    assert opened is not None, "profile needs a model that was loaded by name"
    check_room(llm.name, model.context_length, context, most)
    peak, before = peak_rss(), read_bandwidth()
    peak_known = forget_peak()
    on_step()
    ids = text_ids(llm, max(context + 1, PREFILL_TOKENS))
    prefill_ids = ids[: min(PREFILL_TOKENS, model.context_length)]
    cache = _filled(model, ids[:context])
    try:
        kv_bytes = kv_nbytes(cache, context)
        tokens = _continued(model, cache, ids[context], most)
        passes = time_passes(model, cache, tokens, rows, repeat=repeat, on_step=on_step)
        with plain_rounds(llm, ids[: context + 1], repeat + 1) as plain:
            for _ in range(repeat + 1):
                plain.step()
        logits_MV = model.forward([Segment(cache, tokens)]).logits_MV
        assert logits_MV is not None
        sampled, greedy = judging_times(logits_MV, ids[: context + 1], tokens, rows, repeat, on_step)
    finally:
        cache.free()
    prefill = Times.of([_prefill_s(model, prefill_ids, on_step) for _ in range(PREFILL_REPEAT)])
    later = peak_rss()
    peak = max(peak, later) if peak is not None and later is not None and peak_known else peak
    after = read_bandwidth()
    on_step()
    return Profile(
        context=context,
        repeat=repeat,
        passes=passes,
        sampled=sampled,
        greedy=greedy,
        prefill_tokens=len(prefill_ids),
        prefill=prefill,
        rounds=_but_the_first(plain.seconds),
        overheads=_but_the_first(plain.outside_s),
        load_s=opened.load_s,
        memory=Memory(file_nbytes(opened.path), opened.size_bytes, pass_nbytes(model), kv_bytes, peak, rss_before_load),
        bandwidth_before=before,
        bandwidth_after=after,
    )


def time_passes(
    model: LanguageModel,
    cache: KVCache,
    tokens: Seq[int],
    rows: Seq[int],
    *,
    repeat: int,
    on_step: OnStep = lambda: None,
) -> dict[int, Times]:
    """Passes with logits over the first 1, 2, ... of `tokens` behind `cache`, which keeps its length. The first of
    `repeat` + 1 rounds warms up."""
    seconds: dict[int, list[float]] = {count: [] for count in rows}
    for turn in range(repeat + 1):
        first = turn % len(rows)
        for count in [*rows[first:], *rows[:first]]:
            segment = Segment(cache, tokens[:count])
            began = time.perf_counter()
            model.forward([segment])
            seconds[count].append(time.perf_counter() - began)
            on_step()
    return _times({count: measured[1:] for count, measured in seconds.items()})


def _but_the_first(seconds: Seq[float]) -> Times | None:
    """Without the one that warmed up, where there are others; None where there is none."""
    return Times.of(seconds[1:] or seconds) if seconds else None


def _times(seconds: dict[int, list[float]]) -> dict[int, Times]:
    return {count: Times.of(measured) for count, measured in seconds.items()}


def text_ids(llm: LLM, count: int) -> list[int]:
    """`count` tokens of ordinary text, over and over."""
    text = "\n\n".join(turn for prompt in builtin_prompts() for turn in prompt.turns)
    ids = llm.tokenizer.encode(text, add_special=True) if llm.tokenizer else []
    known = [token for token in ids if 0 <= token < llm.engine.target.vocab_size] or [0]
    return (known * (count // len(known) + 1))[:count]


def _filled(model: LanguageModel, tokens: Seq[int]) -> KVCache:
    """A cache with these tokens committed."""
    cache = model.new_cache()
    fill(model, cache, tokens)
    return cache


def fill(model: LanguageModel, cache: KVCache, tokens: Seq[int]) -> None:
    """Commits these tokens behind what `cache` holds, in chunks as a prompt is run."""
    for start in range(0, len(tokens), PREFILL_CHUNK):
        chunk = tokens[start : start + PREFILL_CHUNK]
        model.forward([Segment(cache, chunk)], logits=False)
        cache.keep(range(len(chunk)))


def _continued(model: LanguageModel, cache: KVCache, token: int, count: int) -> list[int]:
    """`token`, and the model's own greedy text after it, `count` in all: what a good draft would be. The cache is left
    as it was."""
    length, tokens = cache.length, [token]
    while len(tokens) < count:
        logits_MV = model.forward([Segment(cache, tokens[-1:])]).logits_MV
        assert logits_MV is not None
        cache.keep([0])
        tokens.append(int(logits_MV[0].argmax()))
    cache.truncate(length)
    return tokens


def _prefill_s(model: LanguageModel, tokens: Seq[int], on_step: OnStep) -> float:
    began = time.perf_counter()
    cache = _filled(model, tokens)
    seconds = time.perf_counter() - began
    cache.free()
    on_step()
    return seconds


def judging_times(
    logits_MV: Tensor,
    ids: list[int],
    tokens: Seq[int],
    rows: Seq[int],
    repeat: int,
    on_step: OnStep = lambda: None,
) -> tuple[dict[int, Times], dict[int, Times]]:
    """(sampled, greedy): seconds from logits to verdict, by rows, in turn. Every turn draws with another seed."""
    sampled: dict[int, list[float]] = {count: [] for count in rows}
    greedy: dict[int, list[float]] = {count: [] for count in rows}
    _judge_s(logits_MV, SAMPLED, SAMPLED_RULE, ids, tokens, 0)
    for turn in range(repeat):
        for count in rows:
            first_MV, first = logits_MV[:count], tokens[:count]
            sampled[count].append(_judge_s(first_MV, SAMPLED, SAMPLED_RULE, ids, first, turn))
            greedy[count].append(_judge_s(first_MV, GREEDY, "greedy", ids, first, turn))
            on_step()
    return _times(sampled), _times(greedy)


def _judge_s(
    logits_MV: Tensor, params: SamplingParams, rule: str, ids: list[int], tokens: Seq[int], seed: int
) -> float:
    """Seconds to warp the rows and to judge the chain `tokens[1:]` behind `ids` by them."""
    seq, draft, judge = Sequence(0, ids, params, seed=seed), SeqDraft.chain(tokens[1:]), verifier_class(rule)()
    began = time.perf_counter()
    p = warp(logits_MV, [RowContext(seq, tuple(draft.tokens[:i])) for i in range(len(tokens))])
    judge.verify(draft, p, CounterRng(), seq.seed, 0)
    return time.perf_counter() - began
