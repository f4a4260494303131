"""What ends an answer ends it at the same token, with the same text, at every draft length."""

from __future__ import annotations

import itertools

import pytest

from outrider import LLM, SamplingParams, Speculation
from outrider.core.draft import Draft, DraftLaw, SeqDraft
from outrider.core.protocols import LanguageModel, Segment
from outrider.engine.request import Completion
from tests.naive import naive_tokens
from tests.tiny import EOS, cycle_model, random_table, tiny_llm

TEXT = "for i in range(10): print(i) # naïve ☂ "


class Oracle:
    """Drafts what the target will greedily say; from `wrong_from` on it drafts something else."""

    laws = frozenset({DraftLaw.POINT})
    trees = False
    wants = ()

    def __init__(self, model: LanguageModel, name: str = "oracle", wrong_from: int = 10**9) -> None:
        self.model, self.name, self.wrong_from = model, name, wrong_from

    def open(self, seq): ...
    def commit(self, seq, committed): ...
    def close(self, seq): ...

    def propose(self, seqs, budgets, rng):
        return Draft([self._draft(list(seq.tokens), k) for seq, k in zip(seqs, budgets, strict=True)])

    def _draft(self, tokens, k):
        drafted = []
        for i in range(k):
            logits = self.model.forward([Segment(self.model.new_cache(), tokens + drafted)]).logits_MV[-1]
            best = int(logits.argmax())
            drafted.append(best if i < self.wrong_from else (best + 1) % self.model.vocab_size)
        return SeqDraft.chain(drafted, source=self.name)


def llm_with_oracles(model) -> LLM:
    return tiny_llm(model, Oracle(model), Oracle(model, "half", wrong_from=2), k=8)


def answers(llm: LLM, params: SamplingParams, prompt: str = "x") -> dict[tuple[str, int], Completion]:
    """The same request plain, and under both drafters at every K from 1 to 8."""
    lanes = [("none", 0), *itertools.product(("oracle", "half"), range(1, 9))]
    found = {}
    for method, k in lanes:
        [result] = llm.generate(prompt, params, speculation=Speculation(method=method, k=k))
        found[method, k] = result.completions[0]
        result.stats.check()
        assert result.timings.predicted_n == len(result.token_ids)
        assert result.timings.draft_n == result.stats.drafted
        llm.engine.check_integrity()
    return found


def assert_all_equal(found: dict[tuple[str, int], Completion]) -> Completion:
    plain = found["none", 0]
    for lane, completion in found.items():
        same = (completion.token_ids, completion.text, completion.finish_reason, completion.stop_reason)
        assert same == (plain.token_ids, plain.text, plain.finish_reason, plain.stop_reason), lane
        assert completion.stats.emitted == len(completion.token_ids)
        if lane[0] == "oracle":
            assert completion.stats.rounds < plain.stats.rounds or plain.stats.rounds == 1
    return plain


@pytest.mark.parametrize("max_tokens", range(1, 21))
def test_c2_max_tokens_at_every_k(max_tokens):
    plain = assert_all_equal(answers(llm_with_oracles(cycle_model(TEXT)), SamplingParams(max_tokens=max_tokens)))
    assert len(plain.token_ids) == max_tokens
    assert plain.finish_reason == "length"


@pytest.mark.parametrize("place", range(1, 14))
def test_eos_at_every_offset_of_a_block(place):
    params = SamplingParams(max_tokens=40)
    plain = assert_all_equal(answers(llm_with_oracles(cycle_model(TEXT, eos_after=place)), params))
    assert plain.finish_reason == "stop"
    assert plain.stop_reason == EOS
    assert plain.token_ids.index(EOS) == len(plain.token_ids) - 1 == place
    assert plain.text == TEXT.encode()[:place].decode(errors="replace")


@pytest.mark.parametrize("stop", ["r", "range", "(10): print(i)", "ï", "☂", "# na", "int", "never there"])
@pytest.mark.parametrize("include_stop", [False, True])
def test_stop_strings_across_tokens_and_rounds(stop, include_stop):
    params = SamplingParams(max_tokens=60, stop=("zzz", stop), include_stop=include_stop)
    plain = assert_all_equal(answers(llm_with_oracles(cycle_model(TEXT)), params))
    full = (TEXT * 3).encode()[:60].decode(errors="replace")
    if stop not in full:
        assert (plain.finish_reason, plain.text) == ("length", full)
        return
    cut = full.index(stop) + (len(stop) if include_stop else 0)
    assert (plain.finish_reason, plain.stop_reason, plain.text) == ("stop", stop, full[:cut])


def test_the_earliest_end_wins_and_stop_beats_length():
    params = SamplingParams(max_tokens=TEXT.index("in ") + 3, stop=("in range", "in "))
    plain = assert_all_equal(answers(llm_with_oracles(cycle_model(TEXT)), params))
    assert (plain.finish_reason, plain.stop_reason, plain.text) == ("stop", "in ", "for i ")


def test_stop_token_ids_ignore_eos_and_min_tokens():
    llm = llm_with_oracles(cycle_model(TEXT, eos_after=6))
    colon = ord(":")
    by_id = assert_all_equal(answers(llm_with_oracles(cycle_model(TEXT)), SamplingParams(stop_token_ids=(colon,))))
    assert (by_id.stop_reason, by_id.text) == (colon, TEXT[: TEXT.index(":")])
    ignoring = assert_all_equal(answers(llm, SamplingParams(max_tokens=12, ignore_eos=True)))
    assert (ignoring.finish_reason, len(ignoring.token_ids)) == ("length", 12)
    late = assert_all_equal(answers(llm, SamplingParams(max_tokens=40, min_tokens=11)))
    assert late.token_ids.index(EOS) == 11
    string = SamplingParams(max_tokens=40, min_tokens=10, stop=("i",))
    assert assert_all_equal(answers(llm_with_oracles(cycle_model(TEXT)), string)).text == TEXT[: TEXT.index("int(")]


def test_the_context_ends_inside_a_block():
    model = cycle_model(TEXT)
    model.context_length = 17
    plain = assert_all_equal(answers(llm_with_oracles(model), SamplingParams(max_tokens=None)))
    assert (len(plain.token_ids), plain.finish_reason) == (16, "length")


@pytest.mark.parametrize("penalty", [2.0, -2.0])
def test_c5_penalties_see_the_tokens_of_the_same_block(penalty):
    for params in (
        SamplingParams(max_tokens=24, frequency_penalty=penalty),
        SamplingParams(max_tokens=24, presence_penalty=penalty, repetition_penalty=1.3, logit_bias={7: 1.5}),
        SamplingParams(max_tokens=24, bad_token_ids=(3, 5), min_tokens=9),
    ):
        model = random_table(12, seed=3)
        found = answers_by_ids(model, params)
        assert len({tuple(tokens) for tokens in found.values()}) == 1
        assert found["none", 0] == naive_tokens(model, [1], params)


def answers_by_ids(model, params, seed_rule="auto"):
    llm = LLM.from_parts(model, {d.name: d for d in (Oracle(model), Oracle(model, "half", 1))}, k=8, rule=seed_rule)
    lanes = [("none", 0), *itertools.product(("oracle", "half"), (1, 2, 3, 5, 8))]
    return {
        lane: llm.generate([1], params, speculation=Speculation(method=lane[0], k=lane[1]))[0].token_ids
        for lane in lanes
    }


def test_coupled_text_is_a_function_of_prompt_and_seed():
    model = random_table(9, order=2, seed=5, sharpness=1.0)
    for seed in range(6):
        params = SamplingParams(temperature=0.9, top_p=0.95, seed=seed, max_tokens=20)
        found = answers_by_ids(model, params, "coupled")
        assert len({tuple(tokens) for tokens in found.values()}) == 1
        assert found["none", 0] == naive_tokens(model, [1], params)


@pytest.mark.parametrize("temperature", [0.0, 1e-8])
def test_cold_is_greedy_without_overflow_and_ties_go_to_the_lowest_index(temperature):
    model = cycle_model("ab")
    model._row = lambda context: (context[-1] % 2) * 1e30 * (1 - 2 * (0 * model_row()))
    for top_k in (0, 1):
        params = SamplingParams(temperature=temperature, top_k=top_k, max_tokens=6)
        assert set(answers_by_ids(model, params)["none", 0]) == {0}


def model_row():
    import torch

    return torch.zeros(257, dtype=torch.float64)


def test_c6_one_logprob_entry_a_token_streamed_and_equal_to_plain():
    llm = llm_with_oracles(cycle_model(TEXT))
    params = SamplingParams(max_tokens=20, logprobs=5)
    found = answers(llm, params)
    plain = assert_all_equal(found)
    for completion in found.values():
        assert len(completion.logprobs) == len(completion.token_ids)
        for mine, theirs in zip(completion.logprobs, plain.logprobs, strict=True):
            assert mine.token_id == theirs.token_id
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-9)
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
    events = [e for e in llm.generate("x", params, stream=True) if hasattr(e, "token_id")]
    assert [e.token_id for e in events] == plain.token_ids
    assert all(e.logprob is not None and len(e.logprob.top) == 5 for e in events)


def test_streamed_text_is_the_text_and_never_shows_half_a_stop_or_half_a_character():
    for params in (SamplingParams(max_tokens=41, stop=("☂ for i in rage",)), SamplingParams(max_tokens=35)):
        for method, k in (("none", 0), ("oracle", 8), ("half", 3)):
            stream = llm_with_oracles(cycle_model(TEXT)).generate(
                "x", params, stream=True, speculation=Speculation(method=method, k=k)
            )
            items = list(stream)
            pieces = [item.text for item in items[:-1]]
            assert "".join(pieces) == items[-1].text
            assert all("�" not in piece for piece in pieces[:-1])
            assert items[-2].finish_reason == items[-1].completions[0].finish_reason


def test_c4_a_draft_that_equals_the_target_commits_k_plus_one_every_full_round():
    model = cycle_model(TEXT)
    [result] = tiny_llm(model, Oracle(model), k=4).generate("x", SamplingParams(max_tokens=25))
    assert result.stats.acceptance_rate == 1.0
    assert (result.stats.rounds, result.stats.acceptance_length) == (5, 5.0)
    assert [str(o) for o in result.completions[0].origins] == (["accepted"] * 4 + ["bonus"]) * 5


def test_c10_k_zero_makes_no_drafts():
    model = cycle_model(TEXT)
    llm = tiny_llm(model, Oracle(model), k=4)
    before = model.passes
    [result] = llm.generate("x", SamplingParams(max_tokens=6), speculation=Speculation(k=0))
    assert result.stats.drafted == 0
    assert model.passes - before == 6


def test_c11_n_choices_are_distinct_reproducible_and_summed():
    llm = LLM.from_parts(random_table(16, seed=2, sharpness=0.5), {}, k=3)
    params = SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=12)
    [first], [second] = llm.generate([1], params), llm.generate([1], params)
    texts = [tuple(c.token_ids) for c in first.completions]
    assert len(set(texts)) == 3
    assert texts == [tuple(c.token_ids) for c in second.completions]
    assert [c.index for c in first.completions] == [0, 1, 2]
    assert first.stats.emitted == sum(len(t) for t in texts) == first.timings.predicted_n
    [alone] = llm.generate([1], SamplingParams(temperature=1.0, seed=7, max_tokens=12))
    assert tuple(alone.token_ids) == texts[0]
