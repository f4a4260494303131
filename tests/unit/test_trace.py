"""Traces: what `spec_step` writes down, and the way to JSON and back."""

from __future__ import annotations

import json

import pytest

from outrider import LLM
from outrider.control.fixed import FixedController
from outrider.core.registry import verifier_class
from outrider.core.rng import CounterRng, RecordingRng, Rng
from outrider.core.step import spec_step
from outrider.core.trace import TRACE_VERSION, StepTrace, TracedDraw, trace_of
from outrider.core.types import SamplingParams, Sequence
from outrider.drafters.draft_model import DraftModelDrafter
from tests.laws.rounds import TableDrafter, commit, table_model

PARAMS = SamplingParams(temperature=1.0, max_tokens=24)


def traced(rule: str, seed: int, rng: Rng, params: SamplingParams = PARAMS) -> tuple[Sequence, list[StepTrace]]:
    target = table_model(4, 1, seed=1)
    drafter = TableDrafter(table_model(4, 1, seed=2), params)
    seq = Sequence(9, [0], params, seed=seed)
    seq.rule, seq.cache = verifier_class(rule)(), target.new_cache()
    traces: list[StepTrace] = []
    while not seq.finished:
        [done] = spec_step([seq], target, drafter, FixedController(3), rng, commit)
        traces.append(trace_of(done, rng.take(seq.id) if isinstance(rng, RecordingRng) else []))
    return seq, traces


@pytest.mark.parametrize("rule", ["chain", "block", "match", "coupled"])
def test_a_trace_tells_the_whole_text(rule: str) -> None:
    seq, traces = traced(rule, 3, RecordingRng())
    text: list[int] = []
    for trace in traces:
        assert (trace.seq_id, trace.rule, trace.lossless, trace.position) == (9, rule, True, len(text))
        block = [*(trace.nodes[node].token for node in trace.path), trace.next_token]
        assert [i for i, node in enumerate(trace.nodes) if node.accepted] == trace.path
        text += block[: trace.emitted]
    assert text == seq.tokens[1:]


def test_recording_and_tracing_do_not_change_the_text() -> None:
    assert traced("block", 3, RecordingRng())[0].tokens == traced("block", 3, CounterRng())[0].tokens


def test_probabilities_and_draws() -> None:
    _, traces = traced("chain", 4, RecordingRng())
    accepts = [(trace, draw) for trace in traces for draw in trace.draws if draw.purpose == "accept"]
    assert accepts
    for trace, draw in accepts:
        node = trace.nodes[draw.offset]
        assert draw.probability == pytest.approx(min(1.0, node.p / node.q))
        assert draw.uniform is not None
        assert node.accepted == bool(draw.outcome) == (draw.uniform < draw.probability)


def test_residual_is_what_the_recovered_token_was_drawn_from() -> None:
    _, traces = traced("chain", 5, RecordingRng())
    recovered = [trace for trace in traces if trace.origin == "recovered"]
    assert recovered
    for trace in recovered:
        tokens = [token for token, _ in trace.residual]
        assert trace.next_token in tokens
        assert trace.nodes[len(trace.path)].token not in tokens
        assert sum(p for _, p in trace.residual) == pytest.approx(1.0)
    assert all(trace.residual == [] for trace in traces if trace.origin == "bonus")


def test_traces_of_two_sequences_with_one_seed_are_kept_apart() -> None:
    target, drafts = table_model(4, 1, seed=1), table_model(4, 1, seed=2)
    drafter = DraftModelDrafter(model=drafts, greedy_below_temperature=0.0)
    traces: list[StepTrace] = []
    llm = LLM.from_parts(target, {"draft_model": drafter}, k=3, on_trace=traces.append)
    params = SamplingParams(temperature=1.0, max_tokens=12, seed=7)

    def draws_by_sequence() -> list[list[tuple[int, list[TracedDraw]]]]:
        found: dict[int, list[tuple[int, list[TracedDraw]]]] = {}
        for trace in traces:
            found.setdefault(trace.seq_id, []).append((trace.position, trace.draws))
        traces.clear()
        return list(found.values())

    llm.generate([[0], [1]], params)
    together = draws_by_sequence()
    for start in (0, 1):
        llm.generate([start], params)
        [alone] = draws_by_sequence()
        assert alone in together
        assert any(draw.purpose == "draft" for _, draws in alone for draw in draws)


def test_without_a_recording_generator_there_are_no_draws() -> None:
    assert all(trace.draws == [] and trace.residual == [] for trace in traced("block", 3, CounterRng())[1])


def test_json_round_trip() -> None:
    for rule in ("block", "coupled"):
        for trace in traced(rule, 6, RecordingRng())[1]:
            text = trace.to_json()
            assert "\n" not in text
            assert StepTrace.from_json(text) == trace


def test_another_version_is_refused() -> None:
    data = json.loads(traced("block", 6, RecordingRng())[1][0].to_json())
    data["version"] = TRACE_VERSION + 1
    with pytest.raises(ValueError, match="version"):
        StepTrace.from_json(json.dumps(data))
