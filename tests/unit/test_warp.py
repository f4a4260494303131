"""The processors, each against numbers worked out by hand; every row with the context of its own path."""

from __future__ import annotations

import math

import pytest
import torch

from outrider.core.types import SamplingParams, Sequence
from outrider.core.warp import RowContext, Rows, distribution, warp

LOGITS = [1.0, 3.0, 2.0, 3.0]


def processed(
    params: SamplingParams,
    logits: list[float] = LOGITS,
    *,
    tokens: tuple[int, ...] = (0,),
    prompt_len: int = 1,
    path: tuple[int, ...] = (),
    stop_ids: frozenset[int] = frozenset(),
    dtype: torch.dtype = torch.float64,
) -> Rows:
    seq = Sequence(0, list(tokens[:prompt_len]), params, seed=0, stop_ids=stop_ids)
    seq.tokens = list(tokens)
    logits_MV = torch.tensor([logits], dtype=dtype)
    before = logits_MV.clone()
    rows = warp(logits_MV, [RowContext(seq, path)])
    assert torch.equal(logits_MV.nan_to_num(), before.nan_to_num()), "warp must not write to the logits"
    return rows


def law(params: SamplingParams, logits: list[float] = LOGITS, **where: object) -> list[float]:
    row_V = processed(params, logits, **where)[0].to_dense()
    assert row_V.dtype == torch.float64
    assert float(row_V.sum()) == pytest.approx(1.0, abs=1e-15)
    return row_V.tolist()


def softmax(*logits: float) -> list[float]:
    weights = [math.exp(x) for x in logits]
    return [w / sum(weights) for w in weights]


OFF = -math.inf


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1e-8), SamplingParams(1.0, top_k=1)])
def test_greedy_is_one_hot_at_the_lowest_index_of_a_tie(params: SamplingParams) -> None:
    rows = processed(params)
    assert rows[0].only == 1
    assert rows[0].to_dense().tolist() == [0.0, 1.0, 0.0, 0.0]
    assert [rows[0][token] for token in range(4)] == [0.0, 1.0, 0.0, 0.0]


def test_ties_in_a_large_vocabulary() -> None:
    """Also where a vectorised argmax works in lanes."""
    logits = [0.0] * 5000
    logits[1234] = logits[1235] = logits[4999] = 7.0
    for dtype in (torch.float32, torch.float64):
        assert processed(SamplingParams(), logits, dtype=dtype)[0].only == 1234


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature(temperature: float) -> None:
    assert law(SamplingParams(temperature)) == pytest.approx(softmax(*(x / temperature for x in LOGITS)), abs=1e-15)


def test_the_coldest_temperature_that_is_not_greedy() -> None:
    assert law(SamplingParams(1e-5), [1e4, -1e4, 1e4, 0.0]) == [0.5, 0.0, 0.5, 0.0]


def test_top_k_keeps_the_lowest_index_of_a_tie_at_the_border() -> None:
    assert law(SamplingParams(1.0, top_k=2), [3.0, 1.0, 1.0, 1.0]) == pytest.approx(softmax(3.0, 1.0, OFF, OFF))
    assert law(SamplingParams(1.0, top_k=3)) == pytest.approx(softmax(OFF, 3.0, 2.0, 3.0))
    assert law(SamplingParams(1.0, top_k=9)) == pytest.approx(softmax(*LOGITS))


def test_top_k_with_fewer_possible_tokens_than_k() -> None:
    params = SamplingParams(1.0, top_k=3, bad_token_ids=(1, 2, 3))
    assert law(params) == [1.0, 0.0, 0.0, 0.0]


def test_top_p_is_the_smallest_set_with_that_mass() -> None:
    logits = [math.log(p) for p in (0.1, 0.5, 0.25, 0.15)]
    assert law(SamplingParams(1.0, top_p=0.49), logits) == pytest.approx([0, 1, 0, 0])
    assert law(SamplingParams(1.0, top_p=0.51), logits) == pytest.approx([0, 2 / 3, 1 / 3, 0])
    assert law(SamplingParams(1.0, top_p=0.8), logits) == pytest.approx([0, 5 / 9, 2.5 / 9, 1.5 / 9])
    assert law(SamplingParams(1.0, top_p=1e-9), logits) == [0.0, 1.0, 0.0, 0.0]


def test_top_p_ranks_equals_by_index() -> None:
    assert law(SamplingParams(1.0, top_p=0.5), [0.0, 0.0, 0.0, 0.0]) == [0.5, 0.5, 0.0, 0.0]


def test_min_p_compares_with_the_likeliest() -> None:
    logits = [math.log(p) for p in (0.1, 0.5, 0.25, 0.15)]
    assert law(SamplingParams(1.0, min_p=0.4), logits) == pytest.approx([0, 2 / 3, 1 / 3, 0])


def test_top_k_comes_before_top_p() -> None:
    """After top-k 2 the likeliest holds two thirds, which is enough for top-p 0.6; before it held a half."""
    logits = [math.log(p) for p in (0.1, 0.5, 0.25, 0.15)]
    assert law(SamplingParams(1.0, top_k=2, top_p=0.6), logits) == [0.0, 1.0, 0.0, 0.0]


def test_presence_and_frequency_count_output_and_path_but_not_the_prompt() -> None:
    params = SamplingParams(1.0, presence_penalty=0.5, frequency_penalty=0.25)
    got = law(params, tokens=(3, 0, 1), prompt_len=1, path=(1,))
    assert got == pytest.approx(softmax(1.0 - 0.75, 3.0 - 1.0, 2.0, 3.0), abs=1e-15)


def test_repetition_penalty_counts_prompt_output_and_path() -> None:
    params = SamplingParams(1.0, repetition_penalty=2.0)
    got = law(params, [1.0, -3.0, 2.0, 3.0], tokens=(0, 1), prompt_len=1, path=(2,))
    assert got == pytest.approx(softmax(0.5, -6.0, 1.0, 3.0), abs=1e-15)


def test_penalties_make_greedy_choose_otherwise() -> None:
    params = SamplingParams(frequency_penalty=2.0)
    assert processed(params, tokens=(0, 1), prompt_len=1)[0].only == 3
    assert processed(params, tokens=(0, 1), prompt_len=1, path=(3,))[0].only == 2


def test_bias_and_bans() -> None:
    params = SamplingParams(1.0, logit_bias={0: 2.0, 2: -1.0}, bad_token_ids=(3,))
    assert law(params) == pytest.approx(softmax(3.0, 3.0, 1.0, OFF), abs=1e-15)


def test_a_ban_beats_a_bias() -> None:
    assert processed(SamplingParams(logit_bias={3: 100.0}, bad_token_ids=(3,)))[0].only == 1


def test_min_tokens_counts_the_path() -> None:
    params = SamplingParams(min_tokens=3)
    where = {"tokens": (0, 1), "prompt_len": 1, "stop_ids": frozenset({1})}
    assert processed(params, path=(0,), **where)[0].only == 3
    assert processed(params, path=(0, 0), **where)[0].only == 1


class OnlyEven:
    """A grammar: even tokens after an even number of path tokens, anything after an odd one."""

    def allowed(self, path) -> torch.Tensor | None:
        return torch.tensor([True, False, True, False]) if len(path) % 2 == 0 else None

    def advance(self, token: int) -> None:
        return


def test_grammar_sees_the_path() -> None:
    seq = Sequence(0, [0], SamplingParams(1.0), seed=0)
    seq.constraint = OnlyEven()
    rows = warp(torch.tensor([LOGITS, LOGITS], dtype=torch.float64), [RowContext(seq), RowContext(seq, (0,))])
    assert rows[0].to_dense().tolist() == pytest.approx(softmax(1.0, OFF, 2.0, OFF))
    assert rows[1].to_dense().tolist() == pytest.approx(softmax(*LOGITS))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.0)])
def test_unusable_logits_are_flagged(params: SamplingParams, bad: float) -> None:
    assert processed(params, [0.0, bad, 1.0, 2.0]).bad_M == [True]


def test_no_token_left_is_flagged() -> None:
    assert processed(SamplingParams(1.0, bad_token_ids=(0, 1, 2, 3))).bad_M == [True]


def test_rows_of_a_batch_do_not_touch_each_other() -> None:
    """Greedy, sampled, penalised and bad rows in one call equal the same rows alone."""
    cases = [
        SamplingParams(),
        SamplingParams(0.7, top_p=0.8),
        SamplingParams(1.0, frequency_penalty=1.0),
        SamplingParams(1.0, bad_token_ids=(0, 1, 2, 3)),
    ]
    contexts = []
    for params in cases:
        seq = Sequence(0, [0], params, seed=0)
        seq.tokens = [0, 1]
        contexts.append(RowContext(seq))
    logits_MV = torch.tensor([LOGITS] * 4, dtype=torch.float32)
    together = warp(logits_MV, contexts)
    for m, context in enumerate(contexts):
        alone = warp(logits_MV[m : m + 1], [context])
        assert together[m] == alone[0]
        assert (together[m].only, together.bad_M[m]) == (alone[0].only, alone.bad_M[0])


def test_float32_logits_are_processed_in_float64() -> None:
    logits = [0.1, 0.2, 0.3, 0.7]
    widened = torch.tensor(logits, dtype=torch.float32).to(torch.float64).tolist()
    assert law(SamplingParams(0.3), logits, dtype=torch.float32) == law(SamplingParams(0.3), widened)


def plainly(logits_V: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """top-k, top-p and min-p as they are defined: on a sorted vocabulary."""
    weight_V, order_V = torch.softmax(logits_V.to(torch.float64) / params.temperature, 0).sort(
        descending=True, stable=True
    )
    weight_V[params.top_k or len(weight_V) :] = 0.0
    weight_V /= weight_V.sum()
    if params.top_p < 1:
        weight_V[weight_V.cumsum(0) - weight_V >= params.top_p] = 0.0
    weight_V[weight_V < params.min_p * weight_V[0]] = 0.0
    p_V = torch.zeros_like(weight_V)
    p_V[order_V] = weight_V / weight_V.sum()
    return p_V


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab_size", [100, 5000, 30_011])
@pytest.mark.parametrize("slope", [0.0, 0.3, 1.0, 1.6, 4.0])
def test_selection_equals_sorting_the_vocabulary(slope: float, vocab_size: int, dtype: torch.dtype) -> None:
    """From flat rows, which need a look at every token, to steep ones; with ties, and with forbidden tokens."""
    generator = torch.Generator().manual_seed(vocab_size)
    rank_V = torch.randperm(vocab_size, generator=generator) + 1.0
    smooth_V = (-slope * rank_V.log() + 0.05 * torch.randn(vocab_size, generator=generator)).to(dtype)
    for logits_V in (smooth_V, (4 * smooth_V).round() / 4, smooth_V.masked_fill(rank_V % 3 == 0, -math.inf)):
        for params in (
            SamplingParams(1.0, top_p=0.95),
            SamplingParams(1.5, top_p=0.6),
            SamplingParams(0.7, top_p=0.999, min_p=0.01),
            SamplingParams(1.0, top_k=50, top_p=0.9),
            SamplingParams(1.0, top_k=3000, top_p=0.99),
            SamplingParams(1.0, min_p=0.02),
            SamplingParams(0.5),
        ):
            got_V, expected_V = distribution(logits_V, params).to_dense(), plainly(logits_V, params)
            assert torch.equal(got_V > 0, expected_V > 0), params
            assert torch.allclose(got_V, expected_V, rtol=1e-12, atol=0.0), params
            assert abs(float(got_V.sum()) - 1.0) < 1e-12


def test_top_p_is_exact_where_float32_is_not() -> None:
    """The sum ends at the border token to within 1e-9, either side: a float32 sum cannot tell."""
    tail_V = torch.rand(20_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    p_V = torch.cat([torch.tensor([0.3, 0.25, 0.2], dtype=torch.float64), 0.25 * tail_V / tail_V.sum()])
    for top_p, kept in ((0.75 - 1e-9, 3), (0.75 + 1e-9, 4)):
        assert distribution(p_V.log(), SamplingParams(1.0, top_p=top_p)).weight_S.numel() == kept


def test_a_row_does_not_change_when_its_sequence_goes_on() -> None:
    """Rows are made when asked for; what they depend on is what it was when the pass was made."""
    seq = Sequence(0, [0], SamplingParams(1.0, frequency_penalty=1.0, top_p=0.9), seed=0)
    logits_MV = torch.tensor([LOGITS])
    early, late = (warp(logits_MV, [RowContext(seq)]) for _ in range(2))
    before = early[0]
    seq.tokens += [1, 1, 1]
    assert late[0] == before
    assert late[0] is late[0]
