"""Next-token modules and Medusa heads through the front doors: answers are plain ones, what is trained is served."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outrider import LLM, SamplingParams, Speculation
from outrider.cli.main import main
from outrider.core.protocols import Drafter, Segment
from outrider.drafters.head_training import Lesson, Losses
from outrider.drafters.medusa import MedusaDrafter
from outrider.drafters.medusa_files import write_medusa
from outrider.drafters.medusa_net import medusa_losses
from outrider.drafters.mtp import MtpDrafter
from outrider.drafters.mtp_files import write_mtp
from outrider.drafters.mtp_net import mtp_losses
from outrider.engine.opening import identity_of, open_model
from outrider.errors import ConfigError, PairingError
from outrider.models.decoder import Decoder
from outrider.models.loader.checkpoint import open_checkpoint
from tests.tiny_decoder import VOCAB, random_tokens, tiny_decoder, write_reference
from tests.tiny_folder import EOS, write_tiny_model
from tests.tiny_head import random_medusa, random_module

PLAIN = Speculation("none")
IDS = list(range(10, 200, 2))
KINDS = ("mtp", "medusa")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    made = {"target": write_tiny_model(root / "target"), "foreign": write_tiny_model(root / "foreign", shuffled=True)}
    identity = identity_of(open_model(str(made["target"]), dtype="float32"))
    known = {"target_name": "target", "vocabulary_sha256": identity.vocabulary_sha256}
    write_mtp(random_module(vocab=EOS + 1, draft_ids=IDS, own_head=False, **known), root / "mtp", "speculators")
    write_medusa(random_medusa(vocab=EOS + 1, draft_ids=IDS, own_heads=False, **known), root / "medusa")
    return {name: str(root / name) for name in (*made, *KINDS)}


def served(folders: dict[str, str], kind: str, target: str = "target", **options: Any) -> LLM:
    given = {"dtype": "float32", "k": 4} | options
    return LLM(folders[target], drafter=kind, draft_model=folders[kind], **given)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_are_the_plain_ones_alone_and_in_a_batch(folders: dict[str, str], kind: str) -> None:
    llm = served(folders, kind)
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["chain", "block", "match", "coupled"])
def test_sampled_answers(folders: dict[str, str], kind: str, rule: str) -> None:
    llm = served(folders, kind)
    params = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.9, seed=4)
    [result] = llm.generate("hello", params, speculation=Speculation(rule=rule))
    [again] = llm.generate("hello", params, speculation=Speculation(rule=rule))
    assert result.token_ids == again.token_ids
    assert result.stats.drafted > 0
    if rule == "coupled":
        [plain] = llm.generate("hello", params, speculation=Speculation("none", rule="coupled"))
        assert result.token_ids == plain.token_ids


def test_medusa_drafts_no_more_tokens_than_there_are_heads(folders: dict[str, str]) -> None:
    traces: list[Any] = []
    llm = served(folders, "medusa", k=8, on_trace=traces.append)
    [result] = llm.generate("hello", SamplingParams(max_tokens=12, ignore_eos=True))
    assert max(len(trace.nodes) for trace in traces) == 3
    assert result.stats.draft_passes == sum(bool(trace.nodes) for trace in traces)


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_line_takes_the_head(folders: dict[str, str], kind: str, capsys: Any) -> None:
    ask = ["generate", "hello", "--model", folders["target"], "--dtype", "float32", "--raw", "--json", "-n", "12"]
    answers = []
    for more in (["-d", "none"], ["-d", kind, "--draft-model", folders[kind], "--k", "3"]):
        assert main([*ask, *more]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    plain, drafted = answers
    assert drafted["drafter"] == kind
    assert drafted["timings"]["draft_n"] > 0
    assert plain["text"] == drafted["text"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_of_another_tokenizer_or_misused_is_refused(folders: dict[str, str], kind: str) -> None:
    with pytest.raises(PairingError, match="token ids have the hash"):
        served(folders, kind, "foreign")
    with pytest.raises(ConfigError, match=f"{kind}: min_confidence"):
        served(folders, kind, drafter_options={kind: {"min_confidence": 2.0}})


def trained(net: nn.Module, loss: Callable[[Lesson], Losses], target: Decoder, tokens: list[int], steps: int) -> float:
    """Overfits the head on one text; returns the share of the first loss that is left."""
    out = target.forward([Segment(target.new_cache(), tokens)], taps=[target.n_layers - 1])
    assert out.logits_MV is not None
    assert out.features_MF is not None
    logp, likeliest = (20 * out.logits_MV.clone()).log_softmax(-1).topk(8)
    counted = torch.ones(1, len(tokens), dtype=torch.bool)
    lesson = Lesson(torch.tensor([tokens]), out.features_MF.clone()[None], likeliest[None], logp[None], counted)
    optimiser = torch.optim.AdamW(net.parameters(), lr=8e-3, weight_decay=0.0)
    totals = []
    for _ in range(steps):
        losses = loss(lesson)
        optimiser.zero_grad()
        losses.total.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        totals.append(float(losses.total.detach()))
    return totals[-1] / totals[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("own_head", [True, False])
def test_overfit_on_one_prompt_and_served_acceptance_is_one(kind: str, own_head: bool) -> None:
    """Trained with the loss on the hidden states of one answer, the head drafts that answer."""
    torch.manual_seed(0)
    target = tiny_decoder(n_layers=4)
    prompt = random_tokens(6)
    answer = LLM.from_parts(target, {}, k=0).generate(prompt, SamplingParams(max_tokens=24))[0].token_ids
    table, rows = target.embed(range(VOCAB)).clone(), target.head_weights(range(VOCAB))
    drafter: Drafter
    if kind == "mtp":
        module = random_module(vocab=VOCAB, own_head=own_head)

        def learn(lesson: Lesson) -> Losses:
            return mtp_losses(module, lesson, last_norm=target.last_norm, embedding_Vd=table, head_Sd=rows, steps=3)

        left = trained(module, learn, target, prompt + answer, 150)
        drafter = MtpDrafter(target=target, head=module)
    else:
        heads = random_medusa(vocab=VOCAB, own_heads=own_head)

        def listen(lesson: Lesson) -> Losses:
            return medusa_losses(heads, lesson, last_norm=target.last_norm, head_Sd=rows)

        left = trained(heads, listen, target, prompt + answer, 150)
        drafter = MedusaDrafter(target=target, head=heads)
    assert left < 0.3
    [result] = LLM.from_parts(target, {kind: drafter}, k=3).generate(prompt, SamplingParams(max_tokens=24))
    assert result.token_ids == answer
    assert result.stats.acceptance_rate > 0.95


@pytest.mark.parametrize("kind", KINDS)
def test_heads_read_the_last_hidden_state_behind_the_norm(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `transformers` gives as the last hidden state."""
    model = write_reference(tmp_path, "llama", num_hidden_layers=4)
    target, prompt = Decoder.from_checkpoint(open_checkpoint(tmp_path)), random_tokens(11)
    read: list[Tensor] = []
    norm = target.last_norm
    monkeypatch.setattr(target, "last_norm", lambda x: (read.append(norm(x)), norm(x))[1])
    drafter = (
        MtpDrafter(target=target, head=random_module(vocab=VOCAB))
        if kind == "mtp"
        else MedusaDrafter(target=target, head=random_medusa(vocab=VOCAB))
    )
    [result] = LLM.from_parts(target, {kind: drafter}, k=2).generate(prompt, SamplingParams(max_tokens=2))
    hidden = model(input_ids=torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0, :-1]
    assert result.stats.drafted > 0
    expected = hidden if kind == "mtp" else hidden[-1:]
    assert torch.allclose(read[0], expected, atol=1e-4)
