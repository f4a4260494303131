"""`outrider train` from prompts to a head that serves: stages, resumption, refusals."""

from __future__ import annotations

import inspect
import json
import shutil
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider import LLM, SamplingParams, Speculation
from outrider.cli.main import main
from outrider.cli.train import train as train_command
from outrider.drafters.head_files import MEDUSA, SAFETENSORS
from outrider.errors import ConfigError
from outrider.train import finish as finish_module
from outrider.train import trainer as trainer_module
from outrider.train.evaluate import Served
from outrider.train.harvest import HarvestSettings
from outrider.train.heads import HeadSettings
from outrider.train.recipes import RECIPES
from outrider.train.shards import read_shards, write_whole
from outrider.train.trainer import Trainer, TrainSettings, read_checkpoint
from tests.tiny_folder import broken_model, write_tiny_model

KINDS = tuple(RECIPES)
SMALL = [
    "--max-tokens", "24", "--batch", "4", "--batch-tokens", "256", "--epochs", "2", "--draft-vocab", "0",
    "--temperatures", "0,1",
]  # fmt: skip
STEPS, BLOCKS = ["--steps", "2"], ["--anchors", "4", "--block-size", "3"]
OF_KIND = {
    "eagle3": STEPS,
    "mtp": STEPS,
    "medusa": STEPS,
    "dflash": BLOCKS,
    "dspark": [*BLOCKS, "--markov-rank", "32"],
    "draft_model": [],
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("train")
    prompts = root / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"prompt number {i}"}) for i in range(52)]
    prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {
        "root": root,
        "prompts": prompts,
        "target": write_tiny_model(root / "target", layers=6),
        "draft": write_tiny_model(root / "draft", layers=1, seed=3),
    }


def command(world: dict[str, Path], kind: str, out: Path, *more: str) -> list[str]:
    if kind == "draft_model":
        more = ("--draft-model", str(world["draft"]), *more)
    given = {"--model": world["target"], "--prompts": world["prompts"], "--data": world["root"] / "data", "--out": out}
    return [
        "train",
        kind,
        *(str(part) for pair in given.items() for part in pair),
        *SMALL,
        *OF_KIND.get(kind, []),
        *more,
    ]


@pytest.fixture(scope="module", params=KINDS)
def trained(request: pytest.FixtureRequest, world: dict[str, Path]) -> tuple[str, Path]:
    out = world["root"] / request.param
    assert main(command(world, request.param, out, "--quiet")) == 0
    return request.param, out


def test_the_head_serves_and_changes_no_answer(world: dict[str, Path], trained: tuple[str, Path]) -> None:
    kind, out = trained
    llm = LLM(
        str(world["target"]), drafter=kind, draft_model=str(out / "head"), k=3, min_confidence=0.0, dtype="float32"
    )
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    prompts = ["hello", "prompt number 7", "x"]
    drafted = llm.generate(prompts, params)
    plain = llm.generate(prompts, params, speculation=Speculation("none"))
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    assert all(r.stats.drafted > 0 for r in drafted)


def test_card_log_and_plot_say_what_was_done(world: dict[str, Path], trained: tuple[str, Path]) -> None:
    kind, out = trained
    card = json.loads((out / "head" / "card.json").read_text())
    assert card["drafter"] == kind
    assert card["harvests"][0]["n_prompts"] == 52
    assert card["as_served"]["greedy"]["rounds"] > 0
    assert card["as_recommended"]["greedy"]["rounds"] > 0
    assert card["min_confidence"] == 0.15
    assert card.get("copy") == (1.5 if kind in ("eagle3", "mtp") else None)
    assert 1 <= card["test"]["acceptance_length"] <= 1 + card["test"]["k"]
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, lines[-1]["steps"] + 1))
    assert lines[-1]["held_out"]["agreement"]
    assert "<svg" in (out / "plot.svg").read_text()
    assert json.loads((out / "run.json").read_text())["made_with"]["torch"] == torch.__version__


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "dspark"])
def test_products_of_bfloat16_learn_nearly_the_same(world: dict[str, Path], tmp_path: Path, kind: str) -> None:
    losses = []
    for precision in ("float32", "bfloat16"):
        out = tmp_path / precision
        assert main(command(world, kind, out, "--precision", precision, "--quiet")) == 0
        assert json.loads((out / "run.json").read_text())["made_with"]["products"] == precision
        last = json.loads((out / "log.jsonl").read_text().splitlines()[-1])
        losses.append(last["held_out"]["loss"])
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_a_finished_run_is_not_trained_again(world: dict[str, Path], trained: tuple[str, Path]) -> None:
    kind, out = trained
    weights = out / "head" / (MEDUSA if kind == "medusa" else SAFETENSORS)
    before = (out / "log.jsonl").read_text(), weights.read_bytes()
    shards = [shard.path.stat().st_mtime_ns for shard in read_shards(world["root"] / "data")]
    assert main(command(world, kind, out, "--quiet")) == 0
    assert ((out / "log.jsonl").read_text(), weights.read_bytes()) == before
    assert [shard.path.stat().st_mtime_ns for shard in read_shards(world["root"] / "data")] == shards


def test_a_run_that_was_stopped_equals_one_that_was_not(
    world: dict[str, Path], trained: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, optimiser, step and draft vocabulary, bit for bit; and the log."""
    kind, out = trained
    again, steps = tmp_path / "again", 0
    real = Trainer._one_step

    def stopping(self: Trainer, *given: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise KeyboardInterrupt
        return real(self, *given)

    monkeypatch.setattr(Trainer, "_one_step", stopping)
    monkeypatch.setattr(trainer_module, "SAVE_EVERY", 2)
    assert main(command(world, kind, again, "--quiet")) == 130
    assert read_checkpoint(again)["step"] == 2
    assert main(command(world, kind, again, "--quiet")) == 0
    whole, parts = read_checkpoint(out), read_checkpoint(again)
    assert whole["step"] == parts["step"]
    assert torch.equal(whole["draft_ids"], parts["draft_ids"])
    assert all(torch.equal(whole["net"][name], parts["net"][name]) for name in whole["net"])
    states = zip(whole["optimizer"]["state"].values(), parts["optimizer"]["state"].values(), strict=True)
    assert all(torch.equal(a["exp_avg_sq"], b["exp_avg_sq"]) for a, b in states)
    assert (again / "log.jsonl").read_text() == (out / "log.jsonl").read_text()


def test_a_harvest_that_was_stopped_equals_one_that_was_not(
    world: dict[str, Path], trained: tuple[str, Path], tmp_path: Path
) -> None:
    """A lost shard's conversations are answered again, to the same tokens and hidden states."""
    found = {}
    for name in ("whole", "again"):
        data = tmp_path / name
        shutil.copytree(world["root"] / "data", data)
        if name == "again":
            next(iter(read_shards(data))).path.unlink()
            ask = command(world, "eagle3", tmp_path / "run")
            ask[ask.index("--data") + 1] = str(data)
            assert main([*ask, "--quiet"]) == 0
        found[name] = {
            (shard.conversations[i], shard.turns[i]): shard.sequence(i, 1000)
            for shard in read_shards(data)
            for i in range(len(shard))
        }
    assert found["whole"].keys() == found["again"].keys()
    for key, expected in found["whole"].items():
        again = found["again"][key]
        assert again.tokens == expected.tokens
        assert torch.equal(again.features_TF, expected.features_TF)
        assert torch.equal(again.likeliest_AC, expected.likeliest_AC)


def test_a_second_harvest_is_learned_from_too(
    world: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, alone, both, more = "medusa", tmp_path / "alone", tmp_path / "both", tmp_path / "more"
    assert main(command(world, kind, alone, "--quiet")) == 0
    shutil.copytree(world["root"] / "data", more)
    assert main(command(world, kind, both, "--more-data", str(more), "--quiet")) == 0
    one, two = (json.loads((run / "head" / "card.json").read_text()) for run in (alone, both))
    assert two["tokens_per_epoch"] == 2 * one["tokens_per_epoch"]
    assert two["harvests"] == 2 * one["harvests"]
    manifest = json.loads((more / "harvest.json").read_text())
    (more / "harvest.json").write_text(json.dumps(manifest | {"layers": [0]}))
    assert main(command(world, kind, tmp_path / "other", "--more-data", str(more), "--quiet")) == 2
    assert "is a harvest with layers = [0]" in capsys.readouterr().err
    older = {key: value for key, value in manifest.items() if key not in ("hidden_size", "weights")}
    (more / "harvest.json").write_text(json.dumps(older))
    assert main(command(world, kind, tmp_path / "older", "--more-data", str(more), "--dry-run", "--quiet")) == 0


def test_a_harvest_of_another_target_is_refused(
    world: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the same name and tokens: its weights tell it, or else the width of its hidden states."""
    assert main(command(world, "medusa", tmp_path / "first", "--quiet")) == 0
    data = shutil.copytree(world["root"] / "data", tmp_path / "data")
    twin = {**world, "target": write_tiny_model(tmp_path / "twin" / "target", layers=6, seed=9)}
    manifest = json.loads((data / "harvest.json").read_text()) | {"target": str(twin["target"])}
    (data / "harvest.json").write_text(json.dumps(manifest))
    ask = _replaced(command(twin, "medusa", tmp_path / "out", "--quiet"), ["--data", str(data)])
    capsys.readouterr()
    assert main(ask) == 2
    assert "was begun with weights = '" in capsys.readouterr().err
    fresh = _replaced(ask, ["--data", str(tmp_path / "fresh")])
    assert main([*fresh, "--more-data", str(data)]) == 2
    assert "is a harvest with weights = '" in capsys.readouterr().err
    assert manifest["hidden_size"] == 64
    older = {key: value for key, value in manifest.items() if key not in ("hidden_size", "weights")}
    (data / "harvest.json").write_text(json.dumps(older))
    for shard in read_shards(data):
        tensors = load_file(shard.path)
        save_file(tensors | {"features": tensors["features"][:, 1:].contiguous()}, shard.path)
    for given in ([*fresh, "--more-data", str(data)], ask):
        assert main(given) == 2
        assert "hidden states of 191 numbers a token, and this run's are of 192" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_another_setting_for_a_run_that_was_begun_is_refused(
    world: dict[str, Path], trained: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    kind, out = trained
    assert main(command(world, kind, out, "--lr", "0.01")) == 2
    said = capsys.readouterr().err
    assert "was begun with train.lr = 0.0008 and is asked to go on with 0.01" in said
    assert "give the same setting, or another folder" in said


def test_a_dry_run_says_what_it_takes_and_writes_nothing(
    world: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = _replaced(command(world, "eagle3", tmp_path / "out", "--dry-run"), ["--data", str(tmp_path / "data")])
    assert main(ask) == 0
    said = capsys.readouterr().err
    assert "conversations: 52, of which 52 are left to harvest" in said
    assert "bytes a token" in said
    assert "answers as long as they may be, so at most" in said
    assert " MB as bfloat16 (eagle3: " in said
    assert "trial: 1 held-out prompts at K = 5 (answers of at most 96 tokens through the engine" in said
    assert not list(tmp_path.iterdir())
    assert main([*ask, "--json", "--quiet"]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert (out.count("\n"), err, told["schema"]) == (1, "", "outrider.train_dry_run/1")
    assert (told["conversations"], told["left"], told["harvested"]) == (52, 52, 0)
    assert told["steps"] > 0
    assert not list(tmp_path.iterdir())


def test_a_dry_run_foretells_a_harvest_that_is_there(
    world: dict[str, Path], trained: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is left, the steps that the training really took, and the head's own numbers."""
    kind, out = trained
    ask = command(world, kind, tmp_path / "out", "--dry-run", "--json", "--quiet")
    assert main(ask) == 0
    told = json.loads(capsys.readouterr().out)
    last = json.loads((out / "log.jsonl").read_text().splitlines()[-1])
    assert (told["conversations"], told["left"]) == (52, 0)
    assert told["harvested"] == sum(len(shard) for shard in read_shards(world["root"] / "data"))
    assert told["steps"] == pytest.approx(last["steps"], rel=0.1)
    assert told["parameters"] == sum(weight.numel() for weight in _weights(out, kind))
    assert main([*ask, "--conversations", "102"]) == 0
    more = json.loads(capsys.readouterr().out)
    assert (more["left"], more["trial_prompts"]) == (50, 2)
    assert more["steps"] == pytest.approx(2 * told["steps"], rel=0.1)


def _weights(out: Path, kind: str) -> list[torch.Tensor]:
    """Those that were trained; what is tied is one."""
    net = read_checkpoint(out)["net"]
    return list({weight.data_ptr(): weight for weight in net.values() if weight.is_floating_point()}.values())


@pytest.mark.parametrize("trained", ["medusa", "draft_model"], indirect=True)
@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ((2.5, 2.45), ["this head drafts: 2.45 tokens a pass as served, greedy, on 1 held-out prompt(s), where plain"]),
        ((1.1, 1.08), ["this head brings next to nothing: 1.08 tokens a pass as served"]),
        ((2.5, 2.0), ["this head drafts: 2.00", "lost 20% of the acceptance length (2.50 as trained, 2.00 as served"]),
    ],
)
def test_the_last_lines_say_what_the_head_is_worth(
    world: dict[str, Path],
    trained: tuple[str, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    lengths: tuple[float, float],
    said: list[str],
) -> None:
    kind, out = trained
    left = [*lengths, 1.0, 1.0, 1.0]

    def serve(*_: object, **__: object) -> Served:
        return Served(10, 10, 10, 5, left.pop(0), [0.5])

    monkeypatch.setattr(finish_module, "serve", serve)
    monkeypatch.setattr(finish_module, "ENOUGH_PROMPTS", 1)
    assert main(command(world, kind, out, "--json")) == 0
    printed, err = capsys.readouterr()
    verdict = json.loads(printed)["verdict"]
    assert err.splitlines()[-len(said) :] == [f"verdict: {sentence}" for sentence in verdict]
    for sentence, part in zip(verdict, said, strict=True):
        assert part in sentence
    if lengths[1] < 1.2:
        assert "more conversations (--conversations), more epochs (--epochs) or a higher --lr" in verdict[0]
    if len(said) > 1:
        other = "serve it with --draft-dtype bfloat16"
        remedy = "train with a larger --rounded, or serve it with --draft-dtype int8"
        assert verdict[1].endswith(other if kind == "draft_model" else remedy)


def test_few_held_out_prompts_tell_little() -> None:
    """Neither what packing lost is said, nor is it hidden how few they were."""
    trained, served = (Served(10, 10, 10, 5, length, [0.5]) for length in (2.0, 1.5))
    said = finish_module.verdict(trained, served, 3, rounds=True)
    assert "on 3 held-out prompt(s)" in said[0]
    assert said[1:] == [
        "3 held-out prompt(s) are too few to tell much: one conversation in 50 is held out, so 200 (--conversations) "
        "give 4"
    ]
    assert "packing the weights for serving lost 25%" in finish_module.verdict(trained, served, 4, rounds=True)[1]


@pytest.mark.parametrize(
    ("kind", "option", "value", "kinds"),
    [
        ("eagle3", "--depth", "3", "dflash, dspark, medusa"),
        ("mtp", "--anchors", "9", "dflash, dspark"),
        ("dflash", "--markov-rank", "64", "dspark"),
        ("dspark", "--steps", "3", "eagle3, mtp, medusa"),
        ("medusa", "--tv", "0.5", "eagle3, mtp"),
    ],
)
def test_an_option_of_another_kind_of_head_is_refused(
    world: dict[str, Path], capsys: pytest.CaptureFixture[str], kind: str, option: str, value: str, kinds: str
) -> None:
    assert main([*command(world, kind, world["root"] / "other"), option, value, "--dry-run"]) == 2
    assert f"is not for {kind}: it is for {kinds}; leave it out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["--draft-vocab", "9999"], "draft_vocab = 9999 is not allowed: the target has 257 tokens"),
        (["--layers", "1,77"], "layers = (1, 77) is not allowed"),
        (["--layers", "one"], "--layers 'one' is not allowed"),
        (["--epochs", "0"], "epochs = 0 is not allowed"),
        (["--lr", "0"], "lr = 0.0 is not allowed"),
        (["--precision", "half"], "precision = 'half' is not allowed: give auto, float32 or bfloat16"),
        (["--follow-ups", "2"], "follow_ups = 2.0 is not allowed"),
        (["--readings", "-1"], "readings = -1.0 is not allowed"),
        (["--readings", "0.6"], "readings = 0.6 and written = 0.5 are not allowed together"),
        (["--conversations", "-3"], "conversations = -3 is not allowed"),
        (["--block-size", "1"], "block_size = 1 is not allowed"),
        (["--block-size", "1024"], "block_size = 1024 is not allowed: give an integer from 2 to 1023"),
        (["--depth", "65"], "depth = 65 is not allowed: give an integer from 1 to 64"),
        (["--markov-rank", "65537"], "markov_rank = 65537 is not allowed: give an integer from 1 to 65536"),
        (["--steps", "65"], "steps = 65 is not allowed: give an integer from 1 to 64"),
        (["--anchors", "0"], "anchors = 0 is not allowed"),
        (["--batch", "0"], "batch = 0 is not allowed"),
        (["--out", __file__], "is a file: give a folder"),
        (
            ["--seed", "9" * 23],
            "seed = 99999999999999999999999 is not allowed: give an integer from 0 to 9223372036854",
        ),
        (["--seed", "-1"], "seed = -1 is not allowed"),
        (["--from", "t/nosuch"], "t/nosuch does not exist. Give the folder of a draft head"),
        (["--more-data", "t/nosuch"], "t/nosuch is no harvest, for it holds no harvest.json"),
        (["--markov-head", "gated"], "markov_head_type = 'gated' is not allowed"),
        (["--temperatures", "0,hot"], "--temperatures '0,hot' is not allowed"),
        (["--k", "0"], "k = 0 is not allowed"),
        (["--k", "65"], "K = 65 is not allowed"),
        (["--conversations", "49"], "conversations = 49 is not allowed: give an integer >= 50, for one in 50 is"),
    ],
)
def test_bad_options_are_one_line(
    world: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: list[str], said: str
) -> None:
    ask = command(world, "dspark", tmp_path / "out")
    assert main([*ask, *changes, "--quiet"] if changes[0] not in ask else [*_replaced(ask, changes), "--quiet"]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "what"), [("nosuch", "does not exist"), ("prompts.jsonl", "is no folder")])
def test_a_draft_model_that_is_not_there_is_said_so(
    world: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, what: str
) -> None:
    ask = command(world, "draft_model", tmp_path / "out", "--quiet")
    given = str(world["root"] / name)
    assert main(_replaced(ask, ["--draft-model", given])) == 2
    said = capsys.readouterr().err
    assert said.strip() == f"outrider: {given} {what}: give the folder of the model to train (--draft-model)"
    assert not (tmp_path / "out").exists()


def test_an_unknown_kind_is_refused(world: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(world, "eagle4", tmp_path / "out", "--quiet")) == 2
    assert "did you mean 'eagle3'" in capsys.readouterr().err


def _replaced(ask: list[str], changes: list[str]) -> list[str]:
    at = ask.index(changes[0])
    return [*ask[:at], *changes, *ask[at + 2 :]]


def test_a_target_that_cannot_answer_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "x"}\n', encoding="utf-8")
    ask = ["train", "medusa", "--model", str(broken_model(tmp_path / "broken")), "--prompts", str(prompts)]
    ask += ["--conversations", "50"]
    assert main([*ask, "--out", str(tmp_path / "out"), *SMALL, "--quiet"]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert "cannot answer: error: the target's logits are NaN" in said[-1]


def test_a_disk_that_fails_is_one_line_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.write_text("half")
        raise OSError("No space left on device")

    with pytest.raises(ConfigError, match="No space left on device"):
        write_whole(tmp_path / "shard", fail)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_one_line(
    world: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(command(world, "medusa", tmp_path / "file" / "out", "--quiet")) == 2
    said = capsys.readouterr().err.strip()
    assert "file/out: not a directory; make room, or give another folder" in said
    assert len(said.splitlines()) == 1


def test_a_run_may_start_from_a_finished_head(
    world: dict[str, Path], trained: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It keeps the head's draft vocabulary, begins with its weights, and refuses one of other settings."""
    kind, out = trained
    ask = command(world, kind, tmp_path / "more", "--from", str(out / "head"), "--quiet")
    if kind == "draft_model":
        assert main(ask) == 2
        assert "cannot start from a head" in capsys.readouterr().err
        return
    assert main([*_replaced(ask, ["--epochs", "1"]), "--lr", "1e-9"]) == 0
    whole, more = read_checkpoint(out), read_checkpoint(tmp_path / "more")
    assert torch.equal(whole["draft_ids"], more["draft_ids"])
    assert all(torch.allclose(whole["net"][name], more["net"][name], rtol=0.01, atol=0.01) for name in whole["net"])
    if kind in ("dspark", "dflash"):
        other = command(world, kind, tmp_path / "other", "--from", str(out / "head"), "--depth", "3", "--quiet")
        assert main(other) == 2
        assert "was trained with n_layers = 2 and is asked to go on with 3" in capsys.readouterr().err
        assert not (tmp_path / "other").exists()
    if kind == "medusa":
        asked, said = ["--steps", "3"], "was trained with n_heads = 2 and is asked to go on with 3"
        given = out / "head"
    else:
        asked, said = [], "layer.rope_theta = 20000.0 and is asked to go on with 10000.0"
        given = shutil.copytree(out / "head", tmp_path / "turned")
        config = json.loads((given / "config.json").read_text())
        for told in (config, config.get("transformer_layer_config", {})):
            told["rope_theta"] = 20000.0
        (given / "config.json").write_text(json.dumps(config))
    ask = _replaced(command(world, kind, tmp_path / "turning", "--dry-run"), asked or ["--epochs", "2"])
    assert main([*ask, "--from", str(given), "--quiet"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        (
            "dflash",
            ["--layout", "deepspec"],
            "layout 'deepspec' is not allowed for dflash: choose one of zlab",
        ),
        ("medusa", ["--layout", "zlab"], "it has one layout, so give none"),
        ("eagle3", ["--draft-model", "x"], "--draft-model names the model that draft_model trains"),
    ],
)
def test_what_would_fail_at_the_end_is_refused_before_anything_is_made(
    world: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, more: list[str], said: str
) -> None:
    assert main(command(world, kind, tmp_path / "out", *more, "--quiet")) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_command_and_the_settings_have_the_same_defaults() -> None:
    told = inspect.signature(train_command).parameters
    for settings in (HarvestSettings, HeadSettings, TrainSettings):
        for own in fields(settings):
            if own.name in told and own.default not in (MISSING, "", ()) and own.name != "temperatures":
                assert told[own.name].default == own.default, own.name
