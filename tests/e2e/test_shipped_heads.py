"""Heads that come with the package: found for their target and no other, chosen by default, tried when loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider import LLM, SamplingParams, Speculation
from outrider.bench import bandwidth
from outrider.cli.main import main
from outrider.core.draft import Draft, SeqDraft
from outrider.core.types import Decision
from outrider.drafters.block_drafter import BlockDrafter
from outrider.drafters.block_files import write_block
from outrider.drafters.eagle3_files import write_eagle3
from outrider.drafters.head_card import CardTest, write_card
from outrider.engine import shipped
from outrider.engine.opening import identity_of, open_model
from outrider.errors import ConfigError, ModelFileError, PairingError
from tests.tiny_block import random_block
from tests.tiny_folder import EOS, write_tiny_model
from tests.tiny_head import random_head

NAME, K = "tiny-target", 3
PLAIN = Speculation("none")
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
PROMPTS = [list(b"hello"), list(b"one two"), list(b"zz")]
SCRAMBLED = "looks wrong for this target"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target with heads of two kinds, one of the same tokens and another name, and one of other tokens."""
    root = tmp_path_factory.mktemp("world")
    made = {
        "target": write_tiny_model(root / NAME, layers=4),
        "other": write_tiny_model(root / "other", layers=4),
        "foreign": write_tiny_model(root / "foreign" / NAME, layers=4, shuffled=True),
        "heads": root / "heads",
    }
    target = open_model(str(made["target"]), dtype="float32")
    plain = LLM.from_parts(target.model, {}, k=0)
    texts = [prompt + plain.generate(prompt, PARAMS)[0].token_ids for prompt in PROMPTS]
    known = {"target_name": NAME, "vocabulary_sha256": identity_of(target).vocabulary_sha256}
    dspark, eagle3 = (made["heads"] / NAME / kind for kind in ("dspark", "eagle3"))
    write_block(bigrams(texts, **known), dspark, "deepspec")
    write_eagle3(random_head(vocab=EOS + 1, layer_ids=(1, 2, 3), **known), eagle3, "specforge")
    llm = LLM(str(made["target"]), drafter="dspark", draft_model=str(dspark), k=K, dtype="float32")
    reached = [llm.generate(p, PARAMS)[0].stats for p in PROMPTS]
    length = sum(stats.emitted for stats in reached) / sum(stats.rounds for stats in reached)
    assert length > 2, "a head that knows which tokens follow which should do better"
    for folder, acceptance_length in ((dspark, length), (eagle3, 1.0)):
        card = {"drafter": folder.name, "target": NAME, "vocabulary_sha256": known["vocabulary_sha256"], "k": K}
        write_card(folder, card, CardTest(tuple(map(tuple, PROMPTS)), 24, K, acceptance_length))
    return made


def bigrams(texts: list[list[int]], **known: Any) -> Any:
    """A block head whose rows say nothing and whose Markov head says what followed each token in the texts."""
    net = random_block(vocab=EOS + 1, markov_rank=256, **known)
    with torch.no_grad():
        net.norm.weight.zero_()
        net.markov_head.markov_w1.weight.zero_()
        net.markov_head.markov_w1.weight[:256].copy_(torch.eye(256))
        net.markov_head.markov_w2.weight.zero_()
        for before, after in {pair for text in texts for pair in pairwise(text)}:
            net.markov_head.markov_w2.weight[after, before] = 8.0
    return net


@pytest.fixture
def heads(world: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package's heads, to be spoiled: the target's folder of them."""
    root = shutil.copytree(world["heads"], tmp_path / "heads")
    monkeypatch.setattr(shipped, "HEADS", root)
    return root / NAME


@pytest.fixture
def load(world: dict[str, Path], heads: Path) -> Callable[..., LLM]:
    def made(target: str = "target", **options: Any) -> LLM:
        return LLM(str(world[target]), dtype="float32", **options)

    return made


def decisions(llm: LLM, field: str) -> list[Decision]:
    return [decision for decision in llm.plan if decision.field == field]


def change_card(folder: Path, **changes: Any) -> None:
    """Sets keys of the card, or of its test where it has them."""
    card = json.loads((folder / "card.json").read_text())
    for key, value in changes.items():
        (card["test"] if key in card["test"] else card)[key] = value
    (folder / "card.json").write_text(json.dumps(card))


def scramble(folder: Path) -> None:
    """Sound files, and rows of a matrix in each other's places."""
    tensors = load_file(folder / "model.safetensors")
    tensors["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"].roll(7, 0).contiguous()
    save_file(tensors, folder / "model.safetensors")


def test_the_targets_head_drafts_by_default_and_changes_no_answer(load: Callable[..., LLM]) -> None:
    llm = load()
    [drafter], [k] = decisions(llm, "drafter"), decisions(llm, "k")
    assert (llm.engine.method, drafter.value, llm.k, k.value) == ("cascade", "cascade", K, str(K))
    assert "suffix copies what repeats, and eagle3 drafts the rest" in drafter.reason
    assert f"the card of {NAME}/eagle3 says" in k.reason
    assert [(d.value, "comes with the package" in d.reason) for d in decisions(llm, "head")] == [
        (f"{NAME}/eagle3", True)
    ]
    assert [d.value for d in decisions(llm, "head test")] == ["passed"]
    assert llm.warnings == []
    for prompt in PROMPTS:
        [drafted], [plain] = llm.generate(prompt, PARAMS), llm.generate(prompt, PARAMS, speculation=PLAIN)
        assert drafted.token_ids == plain.token_ids
        assert drafted.stats.drafted > 0


def test_preference_goes_from_eagle3_over_dspark_to_suffix_alone(load: Callable[..., LLM], heads: Path) -> None:
    shutil.rmtree(heads / "eagle3")
    llm = load()
    assert llm.engine.method == "cascade"
    assert [d.value for d in decisions(llm, "head")] == [f"{NAME}/dspark"]
    (heads / "dspark" / "card.json").unlink()
    llm = load()
    assert (llm.engine.method, llm.k) == ("suffix", 5)
    assert "no head comes with" in decisions(llm, "drafter")[0].reason


def test_a_card_says_how_sure_a_draft_must_be(load: Callable[..., LLM], heads: Path) -> None:
    """What was asked for goes before it; the head is tried on drafts of full length."""
    change_card(heads / "dspark", min_confidence=1.0)
    for options, value, drafts in (
        ({"drafter": "dspark"}, ["1"], False),
        ({"drafter": "cascade", "drafter_options": {"cascade": {"members": {"dspark": {}}}}}, ["1"], False),
        ({"drafter": "dspark", "min_confidence": 0.0}, [], True),
        ({"drafter": "dspark", "drafter_options": {"dspark": {"min_confidence": 0.0}}}, [], True),
    ):
        llm = load(**options)
        assert [d.value for d in decisions(llm, "min_confidence")] == value, options
        assert [d.value for d in decisions(llm, "head test")] == ["passed"]
        [drafted], [plain] = llm.generate(PROMPTS[0], PARAMS), llm.generate(PROMPTS[0], PARAMS, speculation=PLAIN)
        assert drafted.token_ids == plain.token_ids
        assert (drafted.stats.drafted > 0) == drafts, options
    with pytest.raises(ConfigError, match=r"min_confidence = 0\.5 is not for suffix: it is an option of heads"):
        load(drafter="suffix", min_confidence=0.5)
    change_card(heads / "dspark", min_confidence=1.5)
    with pytest.raises(ModelFileError, match=r"'min_confidence' is 1\.5, expected a number from 0 to 1"):
        load(drafter="dspark")


def test_a_card_says_how_far_the_text_is_copied(load: Callable[..., LLM], heads: Path) -> None:
    """The head is tried alone; what was asked for goes before the card."""
    change_card(heads / "eagle3", copy=20.0)
    text = "one two three four five six seven eight. one two three four five six seven eight. one two three"
    drafted = {}
    for name, options, value in (
        ("card", {}, ["20"]),
        ("asked", {"drafter_options": {"eagle3": {"copy": 0.0}}}, []),
        ("asked more", {"drafter_options": {"eagle3": {"copy": 10.0}}}, ["10"]),
    ):
        llm = load(drafter="eagle3", **options)
        found = decisions(llm, "copy")
        assert [d.value for d in found] == value
        assert [("the card of" in d.reason) for d in found] == [name == "card"] * len(value)
        assert [d.value for d in decisions(llm, "head test")] == ["passed"]
        [own], [plain] = llm.generate(text, PARAMS), llm.generate(text, PARAMS, speculation=PLAIN)
        assert own.token_ids == plain.token_ids
        drafted[name] = (own.stats.drafted, own.stats.accepted)
    assert drafted["card"] != drafted["asked"]
    change_card(heads / "dspark", copy=1.5)
    with pytest.raises(ModelFileError, match=r"card\.json of the head .*dspark recommends copy, which dspark does not"):
        load(drafter="dspark")
    change_card(heads / "eagle3", copy=20.5)
    with pytest.raises(ModelFileError, match=r"'copy' is 20\.5, expected a number from 0 to 20"):
        load(drafter="eagle3")


def test_a_head_whose_card_says_so_drafts_by_name_alone(load: Callable[..., LLM], heads: Path) -> None:
    change_card(heads / "eagle3", by_default=False)
    llm = load()
    assert (llm.engine.method, llm.k, decisions(llm, "head")) == ("suffix", 5, [])
    assert "eagle3 comes with the package, to be asked for by name" in decisions(llm, "drafter")[0].reason
    assert [d.value for d in decisions(load(drafter="cascade"), "head")] == [f"{NAME}/eagle3"]


@pytest.mark.parametrize("target", ["other", "foreign"])
def test_another_target_gets_no_head(load: Callable[..., LLM], target: str) -> None:
    """The same token ids under another name, and the same name with other token ids."""
    llm = load(target)
    assert (llm.engine.method, llm.k, decisions(llm, "head")) == ("suffix", 5, [])
    with pytest.raises(ConfigError, match=rf"--draft-model; one comes with the package for {NAME}\)"):
        load(target, drafter="dspark")


def test_a_head_that_does_not_come_with_the_package_is_refused_before_loading(heads: Path) -> None:
    with pytest.raises(ConfigError, match=r"'mtp' needs a head's folder.*none comes with the package"):
        LLM("/no/such/model", drafter="mtp")


def test_what_is_asked_for_goes_before_the_head(load: Callable[..., LLM], heads: Path) -> None:
    for options, method, k, ridden in (
        ({"drafter": "suffix"}, "suffix", 5, []),
        ({"k": 0}, "suffix", 0, []),
        ({"k": 2}, "cascade", 2, ["eagle3"]),
        ({"drafter": "cascade"}, "cascade", K, ["eagle3"]),
        ({"drafter": "eagle3"}, "eagle3", K, ["eagle3"]),
        ({"drafter": ["suffix", "dspark"]}, "suffix", 5, ["dspark"]),
    ):
        llm = load(**options)
        found = [decision.value.split("/")[1] for decision in decisions(llm, "head")]
        assert (llm.engine.method, llm.k, found) == (method, k, ridden), options


def test_a_card_that_recommends_no_k_leaves_the_default(load: Callable[..., LLM], heads: Path) -> None:
    card = json.loads((heads / "dspark" / "card.json").read_text())
    del card["k"]
    (heads / "dspark" / "card.json").write_text(json.dumps(card))
    assert load(drafter="dspark").k == 5


def test_several_heads_ride_on_one_target(load: Callable[..., LLM]) -> None:
    llm = load(drafter=["suffix", "eagle3", "dspark"])
    assert [d.value for d in decisions(llm, "head")] == [f"{NAME}/eagle3", f"{NAME}/dspark"]
    assert [d.reason.split(":")[0] for d in decisions(llm, "head test")] == ["eagle3", "dspark"]
    [plain] = llm.generate(PROMPTS[0], PARAMS, speculation=PLAIN)
    for method in ("eagle3", "dspark"):
        [drafted] = llm.generate(PROMPTS[0], PARAMS, speculation=Speculation(method))
        assert drafted.token_ids == plain.token_ids
        assert drafted.stats.drafted > 0


def test_a_head_that_is_given_goes_before_that_of_the_package(
    load: Callable[..., LLM], heads: Path, tmp_path: Path
) -> None:
    given = shutil.copytree(heads / "dspark", tmp_path / "given")
    (given / "card.json").unlink()
    llm = load(drafter="dspark", draft_model=str(given))
    assert [d.value for d in decisions(llm, "head")] == [str(given)]
    assert [(d.value, "has no card.json" in d.reason) for d in decisions(llm, "head test")] == [("none", True)]
    assert llm.k == 5


def test_a_cascade_ends_with_the_head(load: Callable[..., LLM], heads: Path) -> None:
    llm = load(drafter="cascade")
    assert [d.value for d in decisions(llm, "head")] == [f"{NAME}/eagle3"]
    assert [d.value for d in decisions(llm, "head test")] == ["passed"]
    [drafted], [plain] = llm.generate(PROMPTS[0], PARAMS), llm.generate(PROMPTS[0], PARAMS, speculation=PLAIN)
    assert drafted.token_ids == plain.token_ids
    named = load(drafter="cascade", drafter_options={"cascade": {"members": {"ngram": {}, "dspark": {}}}})
    assert [d.value for d in decisions(named, "head")] == [f"{NAME}/dspark"]
    assert decisions(load("other", drafter="cascade"), "head") == []


def test_scrambled_weights_are_told_from_a_hard_text(
    load: Callable[..., LLM], heads: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scramble(heads / "dspark")
    llm = load(drafter="dspark")
    assert [d.value for d in decisions(llm, "head test")] == ["FAILED"]
    assert [SCRAMBLED in warning and "fetch the head again" in warning for warning in llm.warnings] == [True]
    assert SCRAMBLED in caplog.text
    [drafted], [plain] = llm.generate(PROMPTS[0], PARAMS), llm.generate(PROMPTS[0], PARAMS, speculation=PLAIN)
    assert drafted.token_ids == plain.token_ids


def test_prompts_that_the_target_cannot_be_asked_are_left_out(load: Callable[..., LLM], heads: Path) -> None:
    change_card(heads / "dspark", prompts=[PROMPTS[0], [5, 999], [1] * 5000])
    llm = load(drafter="dspark")
    assert [(d.value, "1 of 3 prompts" in d.reason) for d in decisions(llm, "head test")] == [("passed", True)]
    change_card(heads / "dspark", prompts=[[999]])
    llm = load(drafter="dspark")
    assert [(d.value, "none of the 1 prompts" in d.reason) for d in decisions(llm, "head test")] == [
        ("not tried", True)
    ]
    assert "could not be tried" in llm.warnings[0]
    assert SCRAMBLED not in llm.warnings[0]


def test_a_head_that_drafts_nothing_fails(
    load: Callable[..., LLM], heads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        BlockDrafter, "propose", lambda self, seqs, *_: Draft([SeqDraft.empty(self.name) for _ in seqs])
    )
    [tried] = decisions(load(drafter="dspark"), "head test")
    assert (tried.value, "acceptance length 1.00 (nothing was drafted) on 3 of 3" in tried.reason) == ("FAILED", True)


def test_a_head_whose_numbers_are_none_is_refused_whatever_its_card_says(load: Callable[..., LLM], heads: Path) -> None:
    tensors = {name: tensor * torch.nan for name, tensor in load_file(heads / "eagle3" / "model.safetensors").items()}
    maps = {name: tensor for name, tensor in load_file(heads / "eagle3" / "model.safetensors").items() if "2" in name}
    save_file(tensors | maps, heads / "eagle3" / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"model\.safetensors: tensor \S+ holds NaN or infinite numbers"):
        load(drafter="eagle3")


def test_a_card_of_another_head_is_refused(load: Callable[..., LLM], heads: Path) -> None:
    """Of another kind; or of another target than the one that it is loaded for, or than its configuration names."""
    card, config = heads / "dspark" / "card.json", heads / "dspark" / "config.json"
    sound, fields = card.read_text(), json.loads(config.read_text())
    given: dict[str, Any] = {"drafter": "dspark", "draft_model": str(heads / "dspark")}
    change_card(heads / "dspark", drafter="eagle3")
    with pytest.raises(PairingError, match=r"is a draft head of eagle3, and dspark cannot use it: name eagle3"):
        load(**given)
    card.write_text(sound)
    for key, other in (("target", "qwen"), ("vocabulary_sha256", "ab" * 32)):
        change_card(heads / "dspark", **{key: other})
        with pytest.raises(ModelFileError, match=rf"card\.json: '{key}' is '{other[:9]}.*config\.json says"):
            load(**given)
        silent = {**fields, "outrider": {**fields["outrider"], key: None}}
        config.write_text(json.dumps(silent))
        with pytest.raises(PairingError, match="was trained for"):
            load(**given)
        config.write_text(json.dumps(fields))
        card.write_text(sound)
    change_card(heads / "dspark", target="qwen")
    config.write_text(json.dumps({**fields, "outrider": {"target": None, "vocabulary_sha256": None}}))
    llm = load(**given, drafter_options={"dspark": {"other_target": True}})
    assert [d.value for d in decisions(llm, "head test")] == ["passed"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompts": []}, "test.prompts is no list of prompts"),
        ({"prompts": [[]]}, "test.prompts is no list of prompts"),
        ({"prompts": [["text"]]}, "test.prompts is no list of prompts"),
        ({"prompts": [[-1]]}, "test.prompts is no list of prompts"),
        ({"max_tokens": 0}, "'max_tokens' is 0, expected a whole number from 1 to 128"),
        ({"k": 65}, "'k' is 65, expected a whole number from 1 to 64"),
        ({"max_tokens": 129}, "'max_tokens' is 129, expected a whole number from 1 to 128"),
        ({"prompts": [[1, 2]] * 17}, "test.prompts are 17, expected at most 16"),
        ({"acceptance_length": "long"}, "'acceptance_length' is 'long', expected a finite number"),
        ({"acceptance_length": -5}, "'acceptance_length' is -5.0, expected a number from 1 to 4 (k + 1)"),
        ({"acceptance_length": 4.01}, "'acceptance_length' is 4.01, expected a number from 1 to 4 (k + 1)"),
        ({"target": 7}, "'target' is '7', expected text"),
        ({"drafter": 7}, "'drafter' is '7', expected text"),
        ({"test": 7}, "'test' is '7', expected an object"),
        (None, "its JSON cannot be read"),
    ],
)
def test_a_bad_card_is_one_line(
    world: dict[str, Path], heads: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any] | None, said: str
) -> None:
    if changes is None:
        (heads / "dspark" / "card.json").write_text("{")
    else:
        change_card(heads / "dspark", **changes)
    ask = ["generate", "hello", "--model", str(world["target"]), "--raw", "--quiet", "-n", "4"]
    assert main(ask) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "card.json" in err
    assert len(err.strip().splitlines()) == 1
    assert main([*ask, "-d", "suffix"]) == 0


def test_a_damaged_head_is_one_line(load: Callable[..., LLM], heads: Path) -> None:
    (heads / "eagle3" / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        load()


def test_the_commands_say_what_drafts(world: dict[str, Path], heads: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = ["--dtype", "float32", "--raw", "--json", "--quiet"]
    assert main(["generate", "hello", "--model", str(world["target"]), "-n", "12", *target]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["drafter"], answer["k"], answer["draft_model"]) == ("cascade", K, None)
    assert answer["timings"]["draft_n"] > 0
    lanes = ["-d", "suffix,eagle3,dspark", "--k", "2", "--limit", "1", "-n", "12"]
    assert main(["bench", str(world["target"]), *lanes, *target]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [lane.get("drafter") for lane in document["lanes"]][-3:] == ["suffix", "eagle3", "dspark"]
    assert all(lane["all"]["answers"]["diverged"] == 0 for lane in document["lanes"][1:])


def test_models_and_doctor_list_them(
    world: dict[str, Path], heads: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    heads.rename(heads.with_name("smollm2-135m"))
    monkeypatch.setattr(bandwidth, "BLOCK_NBYTES", 1 << 20)
    assert main(["models", "list", "--json"]) == 0
    listed = {model["name"]: model["heads"] for model in json.loads(capsys.readouterr().out)["models"]}
    assert listed.pop("smollm2-135m") == ["dspark", "eagle3"]
    assert not any(listed.values())
    assert main(["models", "list"]) == 0
    assert "dspark, eagle3" in capsys.readouterr().out
    for name, found in (("target", ["dspark", "eagle3"]), ("other", [])):
        assert main(["models", "info", str(world[name]), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["heads_of_the_package"] == found
    assert main(["models", "info", str(world["other"])]) == 0
    assert "heads of the package" in capsys.readouterr().out
    assert main(["doctor", str(world["target"]), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["heads"] == ["smollm2-135m/dspark", "smollm2-135m/eagle3"]
    assert [d["value"] for d in document["model"]["plan"] if d["field"] == "drafter"] == ["cascade"]
