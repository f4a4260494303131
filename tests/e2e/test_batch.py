"""Several sequences at once: each answer equals its solo run, and one bad request or drafter harms nobody else."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from outrider import LLM, SamplingParams, Speculation
from outrider.core.draft import Draft, DraftLaw, SeqDraft
from outrider.drafters.draft_model import DraftModelDrafter
from outrider.drafters.fixed import FixedDrafter
from outrider.engine.request import Request
from outrider.errors import ConfigError, RequestError
from outrider.models.table import TableModel
from tests.tiny import random_table

V = 11


class Scripted:
    """A drafter made of one function (seq, budget) -> SeqDraft."""

    laws = frozenset({DraftLaw.POINT, DraftLaw.IID})
    trees = False
    wants = ()

    def __init__(self, name, draft):
        self.name, self._draft, self.open_ids = name, draft, set()

    def open(self, seq):
        self.open_ids.add(seq.id)

    def commit(self, seq, committed):
        assert seq.id in self.open_ids

    def close(self, seq):
        self.open_ids.discard(seq.id)

    def propose(self, seqs, budgets, rng):
        return Draft([self._draft(seq, k) for seq, k in zip(seqs, budgets, strict=True)])


def nan_q(seq, k):
    return SeqDraft.chain([1] * k, DraftLaw.IID, [torch.full((V,), torch.nan, dtype=torch.float64)] * k)


ADVERSARIES = {
    "always_one": lambda seq, k: SeqDraft.chain([1] * k),
    "random": lambda seq, k: SeqDraft.chain([random.Random(len(seq.tokens)).randrange(V) for _ in range(k)]),
    "constant_eos": lambda seq, k: SeqDraft.chain([0] * k),
    "minus_one": lambda seq, k: SeqDraft.chain([-1] * k),
    "v": lambda seq, k: SeqDraft.chain([1, V, 1][:k]),
    "v_plus_one": lambda seq, k: SeqDraft.chain([V + 1] * k),
    "nan_q": nan_q,
    "empty": lambda seq, k: SeqDraft.empty(),
    "too_long": lambda seq, k: SeqDraft.chain([1] * (k + 7)),
}


def raises(seq, k):
    raise RuntimeError("the draft model broke")


def adversarial_llm(model: TableModel, **options) -> LLM:
    drafters = {name: Scripted(name, draft) for name, draft in {**ADVERSARIES, "raises": raises}.items()}
    small = DraftModelDrafter(model=random_table(V, seed=77))
    return LLM.from_parts(model, {**drafters, "draft_model": small}, k=4, **options)


@pytest.mark.parametrize("name", [*ADVERSARIES, "raises"])
def test_c3_adversarial_drafters_change_nothing(name):
    llm = adversarial_llm(random_table(V, seed=1))
    params = SamplingParams(max_tokens=30, stop_token_ids=(0,))
    [plain] = llm.generate([2], params, speculation=Speculation(method="none"))
    [result] = llm.generate([2], params, speculation=Speculation(method=name))
    assert result.token_ids == plain.token_ids
    assert result.completions[0].finish_reason == plain.completions[0].finish_reason
    result.stats.check()
    if name in ("minus_one", "v", "v_plus_one", "nan_q", "too_long", "raises"):
        assert result.stats.dropped, "what was dropped must be counted under a reason"
    assert result.completions[0].method == ("none" if name == "raises" else name)
    llm.engine.check_integrity()


def test_sampled_text_under_coupled_survives_adversaries():
    llm = adversarial_llm(random_table(V, seed=1, sharpness=1.0), rule="coupled")
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=30)
    texts = {
        tuple(llm.generate([2], params, speculation=Speculation(method=name))[0].token_ids)
        for name in ["none", *ADVERSARIES, "raises"]
    }
    assert len(texts) == 1


@pytest.mark.parametrize("max_batch", [1, 2, 5])
def test_every_answer_in_a_mixed_batch_equals_its_solo_run(max_batch):
    llm = adversarial_llm(random_table(V, order=2, seed=4, sharpness=1.0), max_batch=max_batch)
    rng = random.Random(0)
    prompts, params, speculation = [], [], []
    for _ in range(24):
        prompts.append([rng.randrange(V) for _ in range(rng.randrange(1, 9))])
        params.append(
            SamplingParams(
                temperature=rng.choice([0.0, 0.7, 1.3]),
                top_k=rng.choice([0, 3]),
                frequency_penalty=rng.choice([0.0, 1.0]),
                seed=rng.randrange(100),
                max_tokens=rng.randrange(1, 20),
                stop_token_ids=(0,),
                n=rng.choice([1, 1, 2]),
            )
        )
        rule = rng.choice(["auto", "chain", "block", "match", "coupled"])
        speculation.append(
            Speculation(rng.choice([*ADVERSARIES, "none", "draft_model", "draft_model"]), rng.randrange(5), rule)
        )
    together = llm.generate(prompts, params, speculation=speculation)
    for i, result in enumerate(together):
        [alone] = llm.generate([prompts[i]], params[i], speculation=speculation[i])
        assert [c.token_ids for c in result.completions] == [c.token_ids for c in alone.completions]
        assert [c.stats for c in result.completions] == [c.stats for c in alone.completions]
    llm.engine.check_integrity()
    assert not any(d.open_ids for d in llm.engine.router.drafters.values() if isinstance(d, Scripted))


def test_joins_leaves_and_cancels_leave_nothing_behind():
    llm = adversarial_llm(random_table(V, seed=9, sharpness=1.0), max_batch=3)
    engine, rng = llm.engine, random.Random(1)
    results, cancelled = {}, set()
    wanted = {}
    for _ in range(120):
        if rng.random() < 0.3:
            params = SamplingParams(temperature=1.0, seed=rng.randrange(99), max_tokens=rng.randrange(1, 12))
            prompt = [rng.randrange(V)]
            wanted[engine.add(Request(prompt, params, Speculation(rng.choice(list(ADVERSARIES)))))] = (prompt, params)
        if wanted and rng.random() < 0.1:
            victim = rng.choice(list(wanted))
            engine.cancel(victim)
            cancelled.add(victim)
        results.update(engine.step()[1])
    while not engine.idle:
        results.update(engine.step()[1])
    engine.check_integrity()
    assert set(results) | cancelled == set(wanted)
    for request_id, result in results.items():
        assert len(result.token_ids) == wanted[request_id][1].max_tokens


def test_two_streams_at_once_do_not_steal_each_others_tokens():
    llm = adversarial_llm(random_table(V, seed=9, sharpness=1.0))
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=15)
    first, second = llm.generate([3], params, stream=True), llm.generate([4], params, stream=True)
    found = {0: [], 1: []}
    for one, other in itertools.zip_longest(first, second):
        for lane, item in ((0, one), (1, other)):
            if hasattr(item, "token_id"):
                found[lane].append(item.token_id)
    assert found[0] == llm.generate([3], params)[0].token_ids
    assert found[1] == llm.generate([4], params)[0].token_ids
    llm.engine.check_integrity()


def test_an_abandoned_stream_is_cancelled():
    llm = adversarial_llm(random_table(V, seed=9))
    stream = llm.generate([[3], [4]], SamplingParams(max_tokens=50), stream=True)
    next(stream)
    stream.close()
    assert llm.engine.idle
    llm.engine.check_integrity()


def test_a_rule_that_cannot_judge_the_drafts_is_refused_before_anything_runs():
    model = random_table(V, seed=1)
    coupled = DraftModelDrafter(model=model, draft_sample_method="coupled")
    trees = FixedDrafter(script=lambda seq, k: SeqDraft([1, 2][:k], [-1, -1][:k]), trees=True)
    llm = LLM.from_parts(model, {"draft_model": coupled, "fixed": trees}, k=2, rule="coupled")
    sampled = SamplingParams(temperature=1.0, seed=1, max_tokens=6)
    with pytest.raises(ConfigError, match="takes chains only"):
        llm.generate([1], sampled, speculation=Speculation("fixed", rule="block"))
    [tree], [plain] = (llm.generate([1], sampled, speculation=Speculation(m)) for m in ("fixed", "none"))
    assert tree.token_ids == plain.token_ids
    [judged] = llm.generate([1], sampled, speculation=Speculation("draft_model", rule="chain"))
    assert judged.stats.drafted == 0
    assert any("cannot judge shared_noise" in reason for reason in judged.stats.dropped)
    llm.engine.check_integrity()


def test_nan_logits_fail_their_own_request_only():
    table = random_table(V, seed=1)

    def row(context):
        logits = table._row(context)
        return torch.full_like(logits, torch.nan) if context[0] == 5 and len(context) > 3 else logits

    llm = LLM.from_parts(TableModel(row, V), {}, k=2)
    good, bad = llm.generate([[1], [5]], SamplingParams(max_tokens=8))
    assert len(good.token_ids) == 8
    assert bad.completions[0].finish_reason.startswith("error: ")
    assert len(bad.token_ids) == 3
    llm.engine.check_integrity()


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt is empty"),
        ([V], {}, "ids run from 0 to 10"),
        ([1] * 50, {}, "context of table holds 50"),
        ([1], {"params": SamplingParams(logit_bias={99: 1.0})}, "logit_bias names token id 99"),
        ([1], {"params": SamplingParams(stop=("x",))}, "need a tokenizer"),
        ([1], {"speculation": Speculation(method="ngrm")}, "choose one of"),
        ([1], {"speculation": Speculation(rule="blok")}, "did you mean 'block'"),
        ([1], {"speculation": Speculation(k=-1)}, "K = -1"),
        ([1], {"speculation": Speculation(k=500)}, "K = 500 is not allowed: give an integer from 0 to 64"),
        ("text", {}, "needs a tokenizer"),
    ],
)
def test_bad_requests_are_refused_in_one_line_and_change_nothing(prompt, options, message):
    model = random_table(V, seed=1)
    model.context_length = 50
    llm = LLM.from_parts(model, {}, k=2)
    with pytest.raises((RequestError, ConfigError), match=message) as caught:
        llm.generate(prompt, **options)
    assert "\n" not in str(caught.value)
    llm.engine.check_integrity()


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": float("nan")},
        {"temperature": -1.0},
        {"top_k": -1},
        {"top_p": 0.0},
        {"min_p": 1.0},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 3.0},
        {"max_tokens": 0},
        {"n": 0},
        {"logprobs": -1},
        {"stop": ("",)},
        {"logit_bias": {1: float("inf")}},
        {"max_tokens": 2.5},
        {"temperature": "1"},
        {"seed": "abc"},
        {"n": 1.5},
        {"top_k": True},
        {"stop": 5},
        {"stop_token_ids": ("x",)},
        {"min_tokens": 1.5},
        {"json_schema": 5},
        {"logit_bias": {"a": 1.0}},
        {"repetition_penalty": 1e-320},
        {"min_tokens": 3, "json_schema": {}},
    ],
)
def test_sampling_params_name_field_value_and_what_is_allowed(field):
    with pytest.raises(RequestError, match=f"{next(iter(field))} = .* is not allowed: give "):
        SamplingParams(**field)


class Nothing:
    """A drafter that goes wrong in one way: `propose` returns `offer`, or `close` raises."""

    laws = frozenset({DraftLaw.POINT})
    trees = False
    wants = ()

    def __init__(self, name, offer, breaks_on_close=False):
        self.name, self._offer, self._breaks_on_close = name, offer, breaks_on_close

    def open(self, seq): ...
    def commit(self, seq, committed): ...

    def close(self, seq):
        if self._breaks_on_close:
            raise RuntimeError("cannot close")

    def propose(self, seqs, budgets, rng):
        return self._offer(seqs)


def test_a_malformed_result_of_a_drafter_costs_its_drafts_only():
    model = random_table(V, seed=1)
    broken = [
        Nothing("short", lambda seqs: Draft([])),
        Nothing("none_token", lambda seqs: Draft([SeqDraft.chain([None]) for _ in seqs])),
        Nothing("no_draft", lambda seqs: None),
        Nothing("no_close", lambda seqs: Draft([SeqDraft.empty() for _ in seqs]), breaks_on_close=True),
    ]
    llm = LLM.from_parts(model, {d.name: d for d in broken}, k=3)
    params = SamplingParams(max_tokens=8)
    results = llm.generate([[1]] * 5, params, speculation=[Speculation(d.name) for d in broken] + [Speculation("none")])
    assert len({tuple(result.token_ids) for result in results}) == 1
    llm.engine.check_integrity()


def test_ids_that_cannot_occur_are_refused_and_harm_no_neighbour():
    llm = LLM.from_parts(random_table(V, seed=1), {}, k=2)
    for stop in ((V,), (-1,)):
        with pytest.raises(RequestError, match=f"stop_token_ids names token id {stop[0]}: ids run from 0 to 10"):
            llm.generate([[1], [2]], [SamplingParams(max_tokens=3), SamplingParams(stop_token_ids=stop, min_tokens=2)])
        llm.engine.check_integrity()
    assert len(llm.generate([1], SamplingParams(max_tokens=3))[0].token_ids) == 3


@pytest.mark.parametrize(("own", "length"), [(None, 6.0), (2, 3.0), (8, 6.0)])
def test_a_request_may_ask_for_fewer_than_the_engines_k(own, length):
    model = random_table(V, seed=1)
    llm = LLM.from_parts(model, {"draft_model": DraftModelDrafter(model=model)}, k=5)
    [result] = llm.generate([1], SamplingParams(max_tokens=18), speculation=Speculation(k=own))
    assert result.stats.acceptance_length == length


def test_a_prediction_is_drafted_from_or_refused():
    model = random_table(V, seed=1)
    llm = LLM.from_parts(model, {"draft_model": DraftModelDrafter(model=model)}, k=4)
    params = SamplingParams(max_tokens=20)
    [plain] = llm.generate([1], params, speculation=Speculation("none"))
    [result] = llm.generate([1], params, prediction=plain.token_ids)
    assert result.completions[0].method == "prediction"
    assert result.stats.accepted > 0
    assert result.token_ids == plain.token_ids
    with pytest.raises(RequestError, match="does not read a prediction"):
        llm.generate([1], params, prediction=plain.token_ids, speculation=Speculation("draft_model"))
