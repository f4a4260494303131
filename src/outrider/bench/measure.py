"""`bench`: the same prompts through plain and every lane, in one process, alternating, with the answers compared.

Speeds of two lanes can be compared only when both saw the same machine: so the lanes take turns prompt by prompt, in an
order that rotates, and a speed-up is always a ratio of times of one run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from outrider.bench.compare import Comparison, Outcome, compare_completions, is_error
from outrider.bench.lanes import PLAIN, Lane, comparable, plain_lane
from outrider.bench.peer import Peer, PeerAnswer
from outrider.bench.timing import Stopwatch, timed
from outrider.core.stats import SpecStats
from outrider.core.types import SamplingParams
from outrider.core.verdict import Origin
from outrider.engine.llm import LLM
from outrider.engine.prompt_file import Conversation
from outrider.engine.request import Result, TokenEvent
from outrider.errors import ConfigError

PEER = "peer"
WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Run:
    """One answer of one lane to turn `turn` (from 0) of `question`; `prompt` names the two.

    `decode_s` is the time after the prefill, `total_s` the wall time of the request, `ttft_s` that to its first
    token. `tpot_s` is seconds a token after the first chunk, None when one chunk was all. `target_s` and `draft_s` are
    the parts of `decode_s` spent in target passes and in drafting. `round_tokens` are the tokens emitted by each round.
    `counts_known`: whether `stats` counts rounds.
    """

    lane: str
    prompt: str
    question: str
    turn: int
    category: str
    repetition: int
    prompt_tokens: int
    tokens: int
    decode_s: float
    total_s: float
    ttft_s: float | None
    tpot_s: float | None
    stats: SpecStats
    target_s: float
    draft_s: float
    text: str
    token_ids: tuple[int, ...] = ()
    method: str = ""
    rule: str = ""
    finish_reason: str = ""
    seed: int = 0
    round_tokens: tuple[int, ...] = ()
    counts_known: bool = True


@dataclass(frozen=True, slots=True)
class Measured:
    """All runs of a bench, and what comparing the answers found: by lane and prompt, where they differ from plain."""

    lanes: list[Lane]
    params: SamplingParams
    runs: list[Run]
    differences: dict[tuple[str, str], Comparison]
    notes: list[str]
    peer: Peer | None = None

    def comparable(self, lane: str) -> bool:
        """Whether this lane's answers must equal plain's."""
        rule = next((one.rule for one in self.lanes if one.name == lane), None)
        return rule is not None and comparable(rule, self.params)

    @property
    def lane_names(self) -> list[str]:
        return [PLAIN, *(lane.name for lane in self.lanes), *([PEER] if self.peer else [])]


class _Timed(NamedTuple):
    """An LLM, and what keeps its times."""

    llm: LLM
    watch: Stopwatch


@dataclass(frozen=True, slots=True)
class _Ways:
    """What answers in the lanes of a fixed K, and in a governor's."""

    fixed: _Timed
    governed: _Timed

    def of(self, lane: Lane) -> _Timed:
        return self.governed if lane.governed else self.fixed


@dataclass(frozen=True, slots=True)
class _Item:
    """One request, a turn of a question: its token ids, and its conversation for a peer."""

    id: str
    question: str
    turn: int
    category: str
    prompt_ids: list[int]
    messages: list[dict[str, str]] = field(default_factory=list)
    text: str | None = None


def bench(
    llm: LLM,
    prompts: Seq[Conversation],
    params: SamplingParams,
    lanes: Seq[Lane],
    *,
    repeat: int = 1,
    warm_up: int = 1,
    raw: bool = False,
    peer: Peer | None = None,
    ungoverned: LLM | None = None,
    on_run: Callable[[], None] = lambda: None,
) -> Measured:
    """Runs every prompt `repeat` times through plain, the lanes and the peer. `on_run` is called after each answer.

    `ungoverned` answers in the lanes of a fixed K where `llm` has a governor: the same target and drafters without one.
    `raw` gives the prompts as text, else they go through the chat template. Of a prompt with several turns, each is
    measured; the later ones continue from plain's answers, so that all lanes get the same prompt.
    """
    check_counts(repeat, warm_up)
    if len({lane.rule for lane in lanes}) != 1:
        raise ConfigError("bench compares lanes of one acceptance rule: name exactly one")
    everyone = [plain_lane(lanes[0].rule), *lanes]
    if params.seed is None:
        params = replace(params, seed=0)
    runs: list[Run] = []
    items: dict[str, _Item] = {}
    with _timed_ways(llm, ungoverned) as ways:
        _warm_up(ways, prompts[0], params, everyone, warm_up, raw, peer)
        for index, prompt in enumerate(prompts):
            answer = ""
            for item in _items(llm, prompt, raw, lambda: answer):  # noqa: B023 (read at once, in this very round)
                items[item.id] = item
                for repetition in range(repeat):
                    for run in _alternate(ways, item, params, everyone, index + repetition, repetition, peer):
                        runs.append(run)
                        answer = run.text if run.lane == PLAIN else answer
                        on_run()
    differences = _differences(llm, items, params, runs)
    return Measured(list(lanes), params, runs, differences, _notes(runs, lanes, params), peer)


@contextmanager
def _timed_ways(llm: LLM, ungoverned: LLM | None) -> Iterator[_Ways]:
    with timed(llm) as watch:
        own = _Timed(llm, watch)
        if ungoverned is None:
            yield _Ways(own, own)
            return
        with timed(ungoverned) as other:
            yield _Ways(_Timed(ungoverned, other), own)


def check_counts(repeat: int, warm_up: int) -> None:
    """Raises ConfigError for numbers of answers that cannot be."""
    if repeat < 1:
        raise ConfigError(f"--repeat {repeat} is not allowed: give an integer >= 1")
    if warm_up < 0:
        raise ConfigError(f"--warm-up {warm_up} is not allowed: give an integer >= 0")


def _items(llm: LLM, prompt: Conversation, raw: bool, last_answer: Callable[[], str]) -> Iterator[_Item]:
    """The requests of a prompt, one a turn."""
    if raw:
        if len(prompt.turns) > 1:
            raise ConfigError(f"prompt {prompt.id} has {len(prompt.turns)} turns: a raw prompt is one text (--turns 1)")
        ids = llm.encode_prompt(prompt.turns[0])
        yield _Item(prompt.id, prompt.id, 0, prompt.category, ids, text=prompt.turns[0])
        return
    messages: list[dict[str, str]] = []
    for number, turn in enumerate(prompt.turns):
        if number:
            messages = [*messages, {"role": "assistant", "content": last_answer()}]
        messages = [*messages, {"role": "user", "content": turn}]
        name = f"{prompt.id}/{number + 1}" if number else prompt.id
        yield _Item(name, prompt.id, number, prompt.category, llm.encode_prompt(messages), messages)


def _warm_up(
    ways: _Ways,
    prompt: Conversation,
    params: SamplingParams,
    everyone: Seq[Lane],
    times: int,
    raw: bool,
    peer: Peer | None,
) -> None:
    short = replace(params, max_tokens=min(params.max_tokens or WARM_UP_TOKENS, WARM_UP_TOKENS))
    for _ in range(times):
        for _ in _alternate(ways, next(_items(ways.fixed.llm, prompt, raw, str)), short, everyone, 0, 0, peer):
            pass


def _alternate(
    ways: _Ways,
    item: _Item,
    params: SamplingParams,
    everyone: Seq[Lane],
    turn: int,
    repetition: int,
    peer: Peer | None,
) -> Iterator[Run]:
    """One answer of each lane, beginning with another one each turn."""
    takers: list[Lane | Peer] = [*everyone, *([peer] if peer else [])]
    start = turn % len(takers)
    for taker in takers[start:] + takers[:start]:
        if isinstance(taker, Lane):
            yield _run(*ways.of(taker), item, params, taker, repetition)
        else:
            yield _peer_run(taker.answer(item.messages or None, item.text, params), item, repetition)


def _run(llm: LLM, watch: Stopwatch, item: _Item, params: SamplingParams, lane: Lane, repetition: int) -> Run:
    watch.target_s = watch.draft_s = 0.0
    arrivals: list[tuple[float, Origin]] = []
    result: Result | None = None
    began = time.perf_counter()
    for event in llm.generate([item.prompt_ids], params, stream=True, speculation=lane.speculation):
        if isinstance(event, TokenEvent):
            arrivals.append((time.perf_counter() - began, event.origin))
        else:
            result = event
    total_s = time.perf_counter() - began
    assert result is not None
    completion = result.completions[0]
    return Run(
        lane=lane.name,
        prompt=item.id,
        question=item.question,
        turn=item.turn,
        category=item.category,
        repetition=repetition,
        prompt_tokens=result.timings.prompt_n,
        tokens=result.timings.predicted_n,
        decode_s=result.timings.predicted_ms / 1000,
        total_s=total_s,
        ttft_s=arrivals[0][0] if arrivals else None,
        tpot_s=_seconds_per_token(arrivals),
        stats=completion.stats,
        target_s=watch.target_s,
        draft_s=watch.draft_s,
        text=completion.text,
        token_ids=tuple(completion.token_ids),
        method=completion.method,
        rule=completion.rule,
        finish_reason=completion.finish_reason,
        seed=completion.seed,
        round_tokens=_round_tokens(completion.origins),
    )


def _round_tokens(origins: Seq[Origin]) -> tuple[int, ...]:
    """Tokens of each round: a round ends with the rule's own token, or with the answer."""
    ends = [i for i, origin in enumerate(origins, 1) if origin is not Origin.ACCEPTED or i == len(origins)]
    return tuple(stop - start for start, stop in zip([0, *ends], ends, strict=False))


def _seconds_per_token(arrivals: Seq[tuple[float, Origin]]) -> float | None:
    """Time from the first chunk to the last token, by the tokens in between: a chunk of several is not a free gift."""
    first_chunk = next((i for i, (_, origin) in enumerate(arrivals, 1) if origin is not Origin.ACCEPTED), len(arrivals))
    later = len(arrivals) - first_chunk
    return (arrivals[-1][0] - arrivals[0][0]) / later if later else None


def _peer_run(answer: PeerAnswer, item: _Item, repetition: int) -> Run:
    stats = SpecStats(drafted=answer.draft_n, accepted=answer.draft_n_accepted, emitted=answer.tokens)
    return Run(
        lane=PEER,
        prompt=item.id,
        question=item.question,
        turn=item.turn,
        category=item.category,
        repetition=repetition,
        prompt_tokens=answer.prompt_tokens,
        tokens=answer.tokens,
        decode_s=answer.decode_s,
        total_s=answer.total_s,
        ttft_s=None,
        tpot_s=None,
        stats=stats,
        target_s=0.0,
        draft_s=0.0,
        text=answer.text,
        finish_reason=answer.finish_reason,
        counts_known=False,
    )


def _differences(
    llm: LLM, items: dict[str, _Item], params: SamplingParams, runs: Seq[Run]
) -> dict[tuple[str, str], Comparison]:
    """Where an answer is not plain's: the verdict on the first repetition in which it is not."""
    plain = {run.prompt: run for run in reversed(runs) if run.lane == PLAIN}
    found: dict[tuple[str, str], Comparison] = {}
    for run in runs:
        key = (run.lane, run.prompt)
        if run.lane == PEER or key in found:
            continue
        comparison = compare_completions(llm, items[run.prompt].prompt_ids, params, plain[run.prompt], run)
        if comparison.outcome is not Outcome.IDENTICAL:
            found[key] = comparison
    return found


def _notes(runs: Seq[Run], lanes: Seq[Lane], params: SamplingParams) -> list[str]:
    """What a table of speeds must not hide."""
    notes = []
    for lane in lanes:
        mine = [run for run in runs if run.lane == lane.name]
        total = SpecStats()
        for run in mine:
            total.add(run.stats)
        if not total.drafted:
            notes.append(
                f"{lane.name}: speculation never happened: no token was drafted, so this lane is plain decoding"
            )
        failed = 0 if lane.governed else sum(run.method != lane.method for run in mine)
        if failed:
            notes.append(f"{lane.name}: the drafter failed in {failed} of {len(mine)} answers, which went on plain")
        notes += [f"{lane.name}: {n} draft tokens dropped: {why}" for why, n in sorted(total.dropped.items())]
    if not lanes[0].lossless:
        notes.append(f"rule {lanes[0].rule!r} is lossy: its answers do not follow the target's distribution")
    if not comparable(lanes[0].rule, params):
        notes.append(
            f"under rule {lanes[0].rule!r} at temperature {params.temperature} answers and their lengths differ by "
            "chance, so speeds are compared as tokens a second over all rows; --rule coupled makes answers comparable"
        )
    errors = sorted({run.finish_reason for run in runs if is_error(run.finish_reason)})
    return notes + [f"answers ended early: {error}" for error in errors]
