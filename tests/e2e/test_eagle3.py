"""EAGLE-3 through the front doors: answers equal plain ones, features are the target's, what is trained is served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider import LLM, SamplingParams, Speculation
from outrider.cli.main import main
from outrider.core.protocols import Segment
from outrider.drafters.eagle3 import Eagle3Drafter
from outrider.drafters.eagle3_files import write_eagle3
from outrider.drafters.eagle3_net import Eagle3Net, training_time_test
from outrider.drafters.head_kinds import kind_of_head
from outrider.drafters.head_training import Lesson
from outrider.drafters.recurrent_state import RecurrentState
from outrider.engine.opening import identity_of, open_model
from outrider.errors import ConfigError, PairingError
from outrider.models.decoder import Decoder
from outrider.models.hf import TransformersModel
from outrider.models.loader.checkpoint import open_checkpoint
from tests.tiny_decoder import VOCAB, random_tokens, tiny_decoder, write_reference
from tests.tiny_folder import EOS, write_tiny_model
from tests.tiny_head import random_head

PLAIN = Speculation("none")
IDS = list(range(10, 200, 2))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = {
        "target": write_tiny_model(root / "target", layers=8),
        "foreign": write_tiny_model(root / "foreign", layers=8, shuffled=True),
        "head": root / "head",
    }
    identity = identity_of(open_model(str(made["target"]), dtype="float32"))
    known = {"target_name": "target", "vocabulary_sha256": identity.vocabulary_sha256}
    write_eagle3(random_head(vocab=EOS + 1, draft_ids=IDS, **known), made["head"], "speculators")
    return made


@pytest.fixture(scope="module")
def llm(folders: dict[str, Path]) -> LLM:
    return LLM(str(folders["target"]), drafter="eagle3", draft_model=str(folders["head"]), k=4, dtype="float32")


def test_greedy_answers_are_the_plain_ones_alone_and_in_a_batch(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    prompts = ["x", "hello", "a longer prompt, with commas", "zz" * 40]
    plain = llm.generate(prompts, params, speculation=PLAIN)
    together = llm.generate(prompts, params)
    alone = [llm.generate(prompt, params)[0] for prompt in prompts]
    for expected, batched, solo in zip(plain, together, alone, strict=True):
        assert expected.token_ids == batched.token_ids == solo.token_ids
        assert batched.stats.drafted == solo.stats.drafted > 0
        assert batched.stats.draft_passes > 0
        assert not batched.stats.dropped
    llm.engine.check_integrity()


@pytest.mark.parametrize("rule", ["chain", "block", "match", "coupled"])
def test_sampled_answers(llm: LLM, rule: str) -> None:
    params = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.9, seed=4)
    [result] = llm.generate("hello", params, speculation=Speculation(rule=rule))
    [again] = llm.generate("hello", params, speculation=Speculation(rule=rule))
    assert result.token_ids == again.token_ids
    assert result.stats.drafted > 0
    if rule == "coupled":
        assert llm.generate("hello", params, speculation=PLAIN)[0].token_ids != []
        [plain] = llm.generate("hello", params, speculation=Speculation("none", rule="coupled"))
        assert result.token_ids == plain.token_ids


def test_plan_and_command_line_name_the_head(folders: dict[str, Path], llm: LLM, capsys: Any) -> None:
    assert [d.value for d in llm.plan if d.field == "head"] == [str(folders["head"])]
    assert not llm.warnings
    ask = ["generate", "hello", "--model", str(folders["target"]), "--dtype", "float32", "--raw", "--json", "-n", "12"]
    answers = []
    for more in (["-d", "none"], ["-d", "eagle3", "--draft-model", str(folders["head"]), "--k", "3"]):
        assert main([*ask, *more]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    plain, drafted = answers
    assert drafted["drafter"] == "eagle3"
    assert drafted["draft_model"] == str(folders["head"])
    assert drafted["timings"]["draft_n"] > 0
    assert plain["text"] == drafted["text"]
    assert main([*ask, "-d", "eagle3"]) == 2
    assert "needs a head's folder or file" in capsys.readouterr().err


def test_a_head_of_another_tokenizer_or_misused_is_refused(folders: dict[str, Path]) -> None:
    head = str(folders["head"])
    with pytest.raises(PairingError, match="token ids have the hash"):
        LLM(str(folders["foreign"]), drafter="eagle3", draft_model=head, dtype="float32")
    with pytest.raises(ConfigError, match="read different things from one draft_model"):
        LLM(str(folders["target"]), drafter=["eagle3", "draft_model"], draft_model=head)
    with pytest.raises(ConfigError, match="eagle3: min_confidence"):
        LLM(
            str(folders["target"]),
            drafter="eagle3",
            draft_model=head,
            dtype="float32",
            drafter_options={"eagle3": {"min_confidence": 2.0}},
        )


def test_layer_ids_are_inputs_of_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`transformers` numbers hidden states by the layer that reads them; 0 is the embedding."""
    model = write_reference(tmp_path, "llama", num_hidden_layers=4)
    target = Decoder.from_checkpoint(open_checkpoint(tmp_path))
    ids, prompt = (0, 1, 3), random_tokens(11)
    drafter = Eagle3Drafter(target=target, head=random_head(vocab=VOCAB, layer_ids=ids))
    fed: list[Tensor] = []
    fuse = drafter.net.fuse
    monkeypatch.setattr(drafter.net, "fuse", lambda features: (fed.append(features), fuse(features))[1])
    served = LLM.from_parts(target, {"eagle3": drafter}, k=2)
    [result] = served.generate(prompt, SamplingParams(max_tokens=2))
    hidden = model(input_ids=torch.tensor([prompt]), output_hidden_states=True).hidden_states
    expected = torch.cat([hidden[layer][0, :-1] for layer in ids], dim=1)
    assert result.stats.drafted > 0
    assert torch.allclose(torch.cat(fed)[: len(prompt) - 1], expected, atol=1e-4)


def test_a_target_that_runs_through_transformers(tmp_path: Path) -> None:
    write_reference(tmp_path, "llama", num_hidden_layers=4)
    target = TransformersModel.from_folder(tmp_path)
    head = random_head(vocab=VOCAB, layer_ids=(0, 1, 3))
    served = LLM.from_parts(target, {"eagle3": Eagle3Drafter(target=target, head=head)}, k=3)
    native = Eagle3Drafter(target=Decoder.from_checkpoint(open_checkpoint(tmp_path)), head=head)
    assert torch.equal(target.embed([5, 7]), native.host.embed([5, 7]))
    params = SamplingParams(max_tokens=12)
    [result] = served.generate(random_tokens(9), params)
    assert result.stats.drafted > 0
    assert not result.stats.dropped
    assert result.token_ids == served.generate(random_tokens(9), params, speculation=PLAIN)[0].token_ids


def test_a_gap_in_the_features_starts_the_window_anew() -> None:
    """A resumed sequence whose first hidden states never came: the head sees what came since."""
    state = RecurrentState(window=4)
    state.add(torch.zeros(2, 3), 2)
    state.add(torch.ones(3, 3), 9)
    assert (state.settled, state.held, state.cache.start) == (6, 9, 6)
    assert state.features(6, 9).tolist() == torch.ones(3, 3).tolist()
    state.add(torch.full((3, 3), 2.0), 12)
    assert (state.settled, state.held, state.cache.start) == (8, 12, 8)
    assert state.features(8, 12)[:, 0].tolist() == [1, 2, 2, 2]
    state.catch_up()
    state.stop("why not")
    assert (state.stopped, state.held) == ("why not", 0)


@pytest.mark.parametrize("window", [4, 300])
def test_prompts_longer_than_the_window_and_than_a_chunk(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts depend on the last `window` positions and not on how the prompt came in."""
    target = tiny_decoder(n_layers=4)
    prompt, drafts = random_tokens(120), []
    for chunk in (512, 7):
        monkeypatch.setattr("outrider.core.step.PREFILL_CHUNK", chunk)
        monkeypatch.setattr("outrider.drafters.recurrent.PREFILL_CHUNK", chunk)
        head = random_head(vocab=VOCAB, layer_ids=(1, 2, 3), context_length=window)
        traces: list[Any] = []
        served = LLM.from_parts(
            target, {"eagle3": Eagle3Drafter(target=target, head=head)}, k=3, on_trace=traces.append
        )
        [result] = served.generate(prompt, SamplingParams(max_tokens=30))
        [plain] = served.generate(prompt, SamplingParams(max_tokens=30), speculation=PLAIN)
        assert result.token_ids == plain.token_ids
        served.engine.check_integrity()
        drafts.append([(trace.position, [node.token for node in trace.nodes]) for trace in traces])
    assert drafts[0] == drafts[1]
    assert any(tokens for _, tokens in drafts[0])


def answers_of(target: Decoder, prompt: list[int], count: int) -> list[int]:
    served = LLM.from_parts(target, {}, k=0)
    return prompt + served.generate(prompt, SamplingParams(max_tokens=count))[0].token_ids


@pytest.mark.parametrize("own_head", [True, False])
def test_overfit_on_one_prompt_and_served_acceptance_is_one(own_head: bool) -> None:
    """Trained with the loss on the hidden states of one answer, the head drafts that answer."""
    torch.manual_seed(0)
    target = tiny_decoder(n_layers=4)
    prompt = random_tokens(6)
    tokens = answers_of(target, prompt, 24)
    head = random_head(vocab=VOCAB, layer_ids=(1, 2, 3), own_head=own_head)
    losses = train(head, target, tokens, steps=120)
    assert losses[-1] < 0.2 * losses[0]
    served = LLM.from_parts(target, {"eagle3": Eagle3Drafter(target=target, head=head)}, k=3)
    [result] = served.generate(prompt, SamplingParams(max_tokens=24))
    assert result.token_ids == tokens[len(prompt) :]
    assert result.stats.acceptance_rate > 0.95


def train(head: Eagle3Net, target: Decoder, tokens: list[int], *, steps: int) -> list[float]:
    out = target.forward([Segment(target.new_cache(), tokens)], taps=[0, 1, 2])
    assert out.logits_MV is not None
    assert out.features_MF is not None
    logp, likeliest = (20 * out.logits_MV.clone()).log_softmax(-1).topk(8)
    counted = torch.ones(1, len(tokens), dtype=torch.bool)
    lesson = Lesson(torch.tensor([tokens]), out.features_MF.clone()[None], likeliest[None], logp[None], counted)
    table, rows = target.embed(range(VOCAB)).clone(), target.head_weights(range(VOCAB))
    optimiser = torch.optim.AdamW(head.parameters(), lr=8e-3, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        step = training_time_test(head, lesson, embedding_Vd=table, head_Sd=rows, steps=3)
        optimiser.zero_grad()
        step.total.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimiser.step()
        losses.append(float(step.total.detach()))
    return losses


def test_a_layer_that_transformers_does_not_hand_out_is_refused_at_once(tmp_path: Path) -> None:
    write_reference(tmp_path, "llama", num_hidden_layers=4)
    target = TransformersModel.from_folder(tmp_path)
    with pytest.raises(PairingError, match=r"reads the output of layer 3 and .* hands out those of layers 0 to 2 of 4"):
        Eagle3Drafter(target=target, head=random_head(vocab=VOCAB, layer_ids=(1, 2, 4)))


def test_a_model_beside_a_head_is_no_head(folders: dict[str, Path], tmp_path: Path) -> None:
    assert kind_of_head(folders["head"] / "model.safetensors") == "eagle3"
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for said in ((folders["head"] / "config.json").read_text(), "{"):
        (tmp_path / "config.json").write_text(said)
        assert kind_of_head(tmp_path / "model.gguf") is None


def test_a_head_says_itself_what_drafts_with_it(folders: dict[str, Path]) -> None:
    """Alone, and at the end of a cascade; drafters that cannot use it are named."""
    target, head = str(folders["target"]), str(folders["head"])
    assert LLM(target, draft_model=head, dtype="float32").engine.method == "eagle3"
    cascade = LLM(target, drafter="cascade", draft_model=head, dtype="float32")
    assert [d.name for d in cascade.engine.router.drafters["cascade"].drafters] == ["suffix", "eagle3"]
    for names, wrong in (("ngram", "ngram"), (["ngram", "suffix"], "ngram, suffix"), (["eagle3", "dspark"], "dspark")):
        with pytest.raises(PairingError, match=f"is a draft head of eagle3, and {wrong} cannot use it: name eagle3"):
            LLM(target, drafter=names, draft_model=head)
