"""DFlash and DSpark through the front doors: answers equal plain ones, outputs are read, what is trained is served."""

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
from outrider.drafters.block_files import write_block
from outrider.drafters.block_net import BlockNet
from outrider.drafters.block_training import block_loss
from outrider.drafters.dflash import DFlashDrafter
from outrider.drafters.dspark import DSparkDrafter
from outrider.drafters.head_training import Lesson
from outrider.engine.opening import identity_of, open_model
from outrider.errors import ConfigError, PairingError
from outrider.models.decoder import Decoder
from outrider.models.hf import TransformersModel
from outrider.models.loader.checkpoint import open_checkpoint
from tests.tiny_block import DFLASH, DSPARK, random_block
from tests.tiny_decoder import VOCAB, random_tokens, tiny_decoder, write_reference
from tests.tiny_folder import EOS, write_tiny_model

PLAIN = Speculation("none")
IDS = list(range(10, 200, 2))
KINDS: dict[str, dict[str, Any]] = {"dflash": DFLASH, "dspark": DSPARK}
CLASSES = {"dflash": DFlashDrafter, "dspark": DSparkDrafter}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = {
        "target": write_tiny_model(root / "target", layers=4),
        "foreign": write_tiny_model(root / "foreign", layers=4, shuffled=True),
        "shallow": write_tiny_model(root / "shallow", layers=2),
    }
    identity = identity_of(open_model(str(made["target"]), dtype="float32"))
    known = {"target_name": "target", "vocabulary_sha256": identity.vocabulary_sha256}
    for name, kind in KINDS.items():
        made[name] = root / name
        write_block(random_block(vocab=EOS + 1, draft_ids=IDS, **kind, **known), made[name], "speculators")
    return made


@pytest.fixture(scope="module", params=list(KINDS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def llm(folders: dict[str, Path], name: str) -> LLM:
    return LLM(str(folders["target"]), drafter=name, draft_model=str(folders[name]), k=3, dtype="float32")


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
        [plain] = llm.generate("hello", params, speculation=Speculation("none", rule="coupled"))
        assert result.token_ids == plain.token_ids


def test_penalties_and_bans_reach_the_drafts(llm: LLM) -> None:
    params = SamplingParams(max_tokens=16, ignore_eos=True, repetition_penalty=1.3, bad_token_ids=(101, 104))
    [plain] = llm.generate("hello", params, speculation=PLAIN)
    [result] = llm.generate("hello", params)
    assert result.token_ids == plain.token_ids
    assert result.stats.drafted > 0


def test_plan_and_command_line_name_the_head(folders: dict[str, Path], llm: LLM, name: str, capsys: Any) -> None:
    assert [d.value for d in llm.plan if d.field == "head"] == [str(folders[name])]
    assert not llm.warnings
    ask = ["generate", "hello", "--model", str(folders["target"]), "--dtype", "float32", "--raw", "--json", "-n", "12"]
    answers = []
    for more in (["-d", "none"], ["-d", name, "--draft-model", str(folders[name]), "--k", "3"]):
        assert main([*ask, *more]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    plain, drafted = answers
    assert drafted["drafter"] == name
    assert drafted["draft_model"] == str(folders[name])
    assert drafted["timings"]["draft_n"] > 0
    assert plain["text"] == drafted["text"]
    assert main([*ask, "-d", name]) == 2
    assert "needs a head's folder or file" in capsys.readouterr().err


def test_a_head_of_another_target_or_kind_is_refused(folders: dict[str, Path], name: str) -> None:
    head, other = str(folders[name]), next(kind for kind in KINDS if kind != name)
    with pytest.raises(PairingError, match="token ids have the hash"):
        LLM(str(folders["foreign"]), drafter=name, draft_model=head, dtype="float32")
    anyway = {name: {"other_target": True}}
    with pytest.raises(PairingError, match=r"reads the outputs of the layers \[0, 1, 2\], and .* has 2 layers"):
        LLM(str(folders["shallow"]), drafter=name, draft_model=head, dtype="float32", drafter_options=anyway)
    with pytest.raises(PairingError, match=f"is a draft head of {name}, and {other} cannot use it: name {name}"):
        LLM(str(folders["target"]), drafter=other, draft_model=head, dtype="float32")
    with pytest.raises(ConfigError, match="read different things from one draft_model"):
        LLM(str(folders["target"]), drafter=[name, "draft_model"], draft_model=head)
    options = {name: {"min_confidence": 2.0}}
    with pytest.raises(ConfigError, match=f"{name}: min_confidence"):
        LLM(str(folders["target"]), drafter=name, draft_model=head, dtype="float32", drafter_options=options)


def drafter_of(target: Any, head: BlockNet) -> DFlashDrafter | DSparkDrafter:
    return (DSparkDrafter if head.config.markov_rank else DFlashDrafter)(target=target, head=head)


def test_layer_ids_are_outputs_of_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`transformers` numbers hidden states by the layer that reads them: the output of layer i is number i + 1."""
    model = write_reference(tmp_path, "llama", num_hidden_layers=4)
    target = Decoder.from_checkpoint(open_checkpoint(tmp_path))
    ids, prompt = (-1, 0, 2), random_tokens(11)
    drafter = drafter_of(target, random_block(vocab=VOCAB, **DSPARK, layer_ids=ids))
    fed: list[Tensor] = []
    context = drafter.parts.backbone.context
    monkeypatch.setattr(drafter.parts.backbone, "context", lambda f, at: (fed.append(f), context(f, at))[1])
    served = LLM.from_parts(target, {"dspark": drafter}, k=2)
    [result] = served.generate(prompt, SamplingParams(max_tokens=2))
    hidden = model(input_ids=torch.tensor([prompt]), output_hidden_states=True).hidden_states
    expected = torch.cat([hidden[layer + 1][0, :-1] for layer in ids], dim=1)
    assert result.stats.drafted > 0
    assert torch.allclose(torch.cat(fed)[: len(prompt) - 1], expected, atol=1e-4)


def test_a_target_that_runs_through_transformers(tmp_path: Path) -> None:
    write_reference(tmp_path, "llama", num_hidden_layers=4)
    target = TransformersModel.from_folder(tmp_path)
    head = random_block(vocab=VOCAB, **DSPARK)
    served = LLM.from_parts(target, {"dspark": drafter_of(target, head)}, k=3)
    params = SamplingParams(max_tokens=12)
    [result] = served.generate(random_tokens(9), params)
    assert result.stats.drafted > 0
    assert not result.stats.dropped
    assert result.token_ids == served.generate(random_tokens(9), params, speculation=PLAIN)[0].token_ids


@pytest.mark.parametrize("window", [4, 300])
def test_prompts_longer_than_the_window_and_than_a_chunk(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts depend on the last `window` positions and not on how the prompt came in."""
    target = tiny_decoder(n_layers=4)
    prompt, drafts = random_tokens(120), []
    for chunk in (512, 7):
        monkeypatch.setattr("outrider.core.step.PREFILL_CHUNK", chunk)
        monkeypatch.setattr("outrider.drafters.block_drafter.PREFILL_CHUNK", chunk)
        head = random_block(vocab=VOCAB, **DSPARK, context_length=window)
        traces: list[Any] = []
        served = LLM.from_parts(target, {"dspark": drafter_of(target, head)}, k=3, on_trace=traces.append)
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


def train(head: BlockNet, target: Decoder, tokens: list[int], *, steps: int) -> list[float]:
    """On the hidden states and the likeliest tokens of one text."""
    out = target.forward([Segment(target.new_cache(), tokens)], taps=[0, 1, 2])
    assert out.logits_MV is not None
    assert out.features_MF is not None
    logp, likeliest = (20 * out.logits_MV.clone()).log_softmax(-1).topk(8)
    counted = torch.ones(1, len(tokens), dtype=torch.bool)
    lesson = Lesson(torch.tensor([tokens]), out.features_MF.clone()[None], likeliest[None], logp[None], counted)
    embedding, rows = target.embed(range(VOCAB)).clone(), target.head_weights(range(VOCAB)).clone()
    optimiser = torch.optim.AdamW(head.parameters(), lr=6e-3, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        loss = block_loss(
            head, lesson, embedding_Vd=embedding, head_Sd=rows, anchors_per_sequence=99, ce=0.1, tv=1.8
        ).total
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimiser.step()
        losses.append(float(loss.detach()))
    return losses


def test_overfit_on_one_prompt_and_served_acceptance_is_one(name: str) -> None:
    """Trained with the loss on the hidden states of one answer, the head drafts that answer, in 8 bits too."""
    torch.manual_seed(0)
    target = tiny_decoder(n_layers=4)
    prompt = random_tokens(6)
    tokens = answers_of(target, prompt, 24)
    head = random_block(vocab=VOCAB, **KINDS[name])
    losses = train(head, target, tokens, steps=120)
    assert losses[-1] < 0.3 * losses[0]
    served = LLM.from_parts(target, {name: drafter_of(target, head)}, k=3)
    [result] = served.generate(prompt, SamplingParams(max_tokens=24))
    assert result.token_ids == tokens[len(prompt) :]
    assert result.stats.acceptance_rate > 0.95
