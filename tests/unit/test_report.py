"""Results as JSON: the field's names, and figures that add up."""

import json
import math

import pytest

from outrider import SamplingParams
from outrider.core.stats import SpecStats
from outrider.drafters.ngram import NgramDrafter
from outrider.engine.report import (
    acceptance_histogram,
    conditional_acceptance,
    logprob_json,
    metrics_json,
    result_json,
    token_text,
)
from outrider.engine.request import TokenLogprob
from tests.tiny import byte_tokenizer, cycle_model, tiny_llm


def stats_of(*rounds):
    """Stats of rounds given as (drafted, accepted), none cut."""
    stats = SpecStats()
    for drafted, accepted in rounds:
        stats.record(range(drafted), accepted, own_tokens=1, cut=0)
    return stats


@pytest.mark.parametrize("rounds", [[(4, 2), (4, 4), (0, 0), (3, 0)], [(0, 0)], []])
def test_metrics_add_up(rounds):
    stats = stats_of(*rounds)
    metrics = metrics_json(stats)["speculative_decoding"]
    histogram = metrics["acceptance_histogram"]
    assert histogram == acceptance_histogram(stats) == [sum(a == j for _, a in rounds) for j in range(len(histogram))]
    assert sum(histogram) == len(rounds) == metrics["num_spec_steps"]
    assert sum(j * n for j, n in enumerate(histogram)) == metrics["num_accepted_draft_tokens"] == stats.accepted
    assert set(metrics) == {
        "mean_acceptance_length",
        "draft_acceptance_rate",
        "acceptance_histogram",
        "num_spec_steps",
        "num_accepted_draft_tokens",
        "num_draft_tokens",
    }


def test_conditional_acceptance():
    assert conditional_acceptance(stats_of((2, 2), (2, 1), (2, 0), (2, 0))) == [0.5, 0.5]
    assert conditional_acceptance(stats_of((2, 0))) == [0.0, 0.0]
    assert conditional_acceptance(stats_of((0, 0), (2, 2))) == [1.0, 1.0]
    assert conditional_acceptance(SpecStats()) == []


def test_a_result_in_the_names_of_the_field():
    llm = tiny_llm(cycle_model("abc"), NgramDrafter(), k=4)
    [result] = llm.generate("abcabc", SamplingParams(max_tokens=12, n=2, logprobs=1))
    report = json.loads(json.dumps(result_json(result, llm.tokenizer), allow_nan=False))
    assert [choice["index"] for choice in report["choices"]] == [0, 1]
    assert report["usage"] == {"prompt_tokens": 6, "completion_tokens": 24, "total_tokens": 30}
    assert report["timings"]["predicted_n"] == 24
    assert report["metrics"]["speculative_decoding"]["num_spec_steps"] == result.stats.rounds
    assert (report["drafter"], report["rule"], report["lossless"]) == ("ngram", "greedy", True)
    assert report["text"] == report["choices"][0]["text"] == result.text
    assert [entry["token"] for entry in report["logprobs"]] == list(result.text)


def test_logprobs_without_a_tokenizer_and_of_the_impossible():
    entry = TokenLogprob(97, -0.5, [(97, -0.5), (0xFF, -math.inf)])
    found = logprob_json(entry, byte_tokenizer())
    assert found["top"][1] == {"token_id": 0xFF, "token": "\ufffd", "logprob": None}
    assert (found["token"], token_text(97, None)) == ("a", "")
