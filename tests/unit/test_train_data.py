"""What is harvested is what the target computes, and lessons put it where losses look for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.core.protocols import Segment
from outrider.engine.opening import identity_of, open_model
from outrider.engine.prompt_file import Conversation
from outrider.errors import ConfigError, ModelFileError
from outrider.models.decoder import Decoder
from outrider.models.load import LoadedModel
from outrider.train.harvest import LEFT_OUT, Harvester, HarvestSettings
from outrider.train.lessons import HELD_OUT_EVERY, Lessons, frequent_tokens, is_held_out
from outrider.train.questions import WRITTEN_KINDS, Written
from outrider.train.shards import Shard, read_shards
from tests.tiny_folder import EOS, write_tiny_model

LAYERS = (0, 2, 3)
SETTINGS = HarvestSettings(
    conversations=54,
    layers=LAYERS,
    max_tokens=12,
    temperatures=(0.0, 1.0),
    follow_ups=1.0,
    readings=0.3,
    written=0.4,
    likeliest=5,
)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return open_model(str(write_tiny_model(tmp_path_factory.mktemp("target"), layers=4)), dtype="float32")


@pytest.fixture(scope="module")
def shards(opened: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> list[Shard]:
    folder = tmp_path_factory.mktemp("data")
    prompts = [Conversation(str(i), "any", (f"say {i * i}",)) for i in range(20)]
    told: list[int] = []
    Harvester(opened, identity_of(opened), prompts, SETTINGS, folder).run(5, told.append)
    assert len(told) == SETTINGS.conversations
    return read_shards(folder)


def test_features_and_likeliest_tokens_are_those_of_a_pass_over_the_whole_text(
    opened: LoadedModel, shards: list[Shard]
) -> None:
    """The position of every row: features of t are layer outputs at t, likeliest row of t the law of token t + 1."""
    target = opened.model
    assert isinstance(target, Decoder)
    for i in range(0, len(shards[0]), 7):
        found = shards[0].sequence(i, 1000)
        out = target.forward([Segment(target.new_cache(), found.tokens)], taps=LAYERS)
        assert out.logits_MV is not None
        assert out.features_MF is not None
        assert torch.allclose(found.features_TF[:-1].float(), out.features_MF[:-1], rtol=1e-2, atol=1e-2)
        assert not found.features_TF[-1].any()
        assert 0 < found.learn_from <= found.prompt_len
        behind = out.logits_MV[found.learn_from - 1 : -1].log_softmax(-1)
        assert len(found.logp_AC) == len(found.tokens) - found.learn_from == len(behind)
        expected = behind.gather(-1, found.likeliest_AC.long())
        assert torch.allclose(found.logp_AC.float(), expected, atol=0.05)
        assert torch.allclose(found.logp_AC.float(), behind.topk(5).values, atol=0.05)


def test_greedy_answers_are_the_likeliest_tokens(shards: list[Shard]) -> None:
    greedy = [i for i in range(len(shards[0])) if shards[0].conversations[i] % 2 == 0]
    for i in greedy[:5]:
        found = shards[0].sequence(i, 1000)
        answer = slice(found.prompt_len - found.learn_from, None)
        likeliest_AC, logp_AC = found.likeliest_AC[answer], found.logp_AC[answer]
        said_AC = likeliest_AC == torch.tensor(found.tokens[found.prompt_len :])[:, None]
        assert torch.equal(said_AC.sum(-1), torch.ones(len(said_AC)))
        assert float((logp_AC[:, 0] - logp_AC[said_AC]).max()) < 0.05, "features are kept in bfloat16: ties may turn"


def test_equal_answers_that_end_together_are_both_kept(opened: LoadedModel, tmp_path: Path) -> None:
    settings = replace(SETTINGS, conversations=4, temperatures=(0.0,), follow_ups=0.0, written=0.0)
    Harvester(opened, identity_of(opened), [Conversation("0", "any", ("say it",))], settings, tmp_path).run(4, print)
    (shard,) = read_shards(tmp_path)
    assert sorted(shard.conversations) == [0, 1, 2, 3]
    first, *others = (shard.sequence(i, 1000) for i in range(4))
    assert all(other.tokens == first.tokens for other in others)
    assert all(torch.equal(other.features_TF, first.features_TF) for other in others)


def test_answers_that_end_by_themselves_may_be_followed_up(shards: list[Shard]) -> None:
    """A second turn is there for answers that ended, and only for those."""
    every = [(shard, i) for shard in shards for i in range(len(shard))]
    by_turn = {(shard.conversations[i], shard.turns[i]): shard.sequence(i, 9999) for shard, i in every}
    for (conversation, turn), found in by_turn.items():
        if turn == 0:
            assert ((conversation, 1) in by_turn) == (found.tokens[-1] == EOS)


def test_lessons_hold_each_sequence_once_and_count_what_is_to_be_learned(shards: list[Shard]) -> None:
    lessons = Lessons(shards, LAYERS, (3, 0), longest=30, batch_tokens=120, seed=1)
    first, second = lessons.epoch(0), lessons.epoch(1)
    assert sorted((p.shard, p.index) for b in first for p in b) == sorted((p.shard, p.index) for p in lessons.places)
    assert first == lessons.epoch(0)
    assert first != second
    assert all(len(batch) * max(p.length for p in batch) <= 120 or len(batch) == 1 for batch in first)
    for batch in first[:4]:
        lesson = lessons.lesson(batch)
        for b, place in enumerate(batch):
            found = shards[place.shard].sequence(place.index, 30)
            learned = range(found.learn_from - 1, len(found.tokens) - 1)
            assert lesson.counted_BT[b].nonzero().flatten().tolist() == list(learned)
            answers = lessons.lesson(batch, answers_only=True).counted_BT[b].nonzero().flatten().tolist()
            assert answers == list(range(found.prompt_len - 1, len(found.tokens) - 1))
            assert lesson.tokens_BT[b, : len(found.tokens)].tolist() == found.tokens
            assert torch.equal(lesson.likeliest_BTC[b, learned.start : learned.stop], found.likeliest_AC.long())
            blocks = found.features_TF.chunk(3, dim=1)
            assert torch.equal(lesson.features_BTF[b, : len(found.tokens)], torch.cat([blocks[2], blocks[0]], dim=1))


def test_held_out_conversations_are_not_trained_on_and_not_counted(shards: list[Shard]) -> None:
    lessons = Lessons(shards, LAYERS, (3,), longest=30, batch_tokens=120, seed=1)
    conversations = {shards[p.shard].conversations[p.index] for p in lessons.places}
    assert not any(is_held_out(c) for c in conversations)
    assert {shards[p.shard].conversations[p.index] for p in lessons.held_out} == {HELD_OUT_EVERY - 1}


def test_the_draft_vocabulary_is_what_the_target_would_most_often_say(shards: list[Shard]) -> None:
    vocab = frequent_tokens(shards, 20, EOS + 1, rows=EOS + 1)
    counts = torch.zeros(EOS + 1, dtype=torch.int64)
    for shard in shards:
        for i in range(len(shard)):
            if not is_held_out(shard.conversations[i]):
                said = shard.sequence(i, 9999).likeliest_AC[:, 0]
                counts += torch.bincount(said.long(), minlength=EOS + 1)
    inside = torch.zeros(EOS + 1, dtype=torch.bool)
    inside[vocab.ids_S] = True
    assert int(counts[inside].min()) >= int(counts[~inside].max())
    assert len(frequent_tokens(shards, 0, EOS + 1, rows=EOS + 1).ids_S) == EOS + 1


def test_a_layer_that_was_not_harvested_is_refused(shards: list[Shard]) -> None:
    with pytest.raises(ConfigError, match=r"reads the layers \[1\] and the harvest has \[0, 2, 3\]: layer 1"):
        Lessons(shards, LAYERS, (1,), longest=30, batch_tokens=120, seed=1)


def test_a_damaged_shard_is_one_line_that_says_what_to_do(shards: list[Shard], tmp_path: Path) -> None:
    whole = shards[0].path.read_bytes()
    for data in (whole[: len(whole) // 2], b"", b"x" * 64):
        (tmp_path / "shard-00000.safetensors").write_bytes(data)
        with pytest.raises(ModelFileError, match="Delete it: its conversations are then answered again"):
            read_shards(tmp_path)


def test_other_settings_for_a_harvest_that_was_begun_are_refused(opened: LoadedModel, shards: list[Shard]) -> None:
    prompts = [Conversation(str(i), "any", (f"say {i * i}",)) for i in range(20)]
    other = replace(SETTINGS, max_tokens=13)
    with pytest.raises(ConfigError, match="was begun with max_tokens = 12 and is asked to go on with 13"):
        Harvester(opened, identity_of(opened), prompts, other, shards[0].path.parent)


def test_conversations_that_gave_nothing_are_not_tried_again(opened: LoadedModel, tmp_path: Path) -> None:
    """A prompt that is too long, and one that the target wrote too long."""
    template = len(
        opened.tokenizer.encode(opened.template.render([{"role": "user", "content": ""}]), add_special=False)
    )
    prompts = [Conversation("0", "any", ("s" * 99,)), Conversation("1", "any", ("s",))]
    settings = replace(SETTINGS, conversations=12, longest_prompt=template + 10, follow_ups=0.0, readings=0.0)
    told: list[int] = []
    first = Harvester(opened, identity_of(opened), prompts, settings, tmp_path)
    first.run(4, told.append)
    written = [c for c in range(12) if isinstance(first._questions.first(c), Written)]
    done = {c for shard in read_shards(tmp_path) for c in shard.conversations}
    assert len(told) == 12
    assert set(written) - done, "the target wrote a message that was too long"
    assert set(range(12)) - done - set(written), "a prompt was too long"
    again = Harvester(opened, identity_of(opened), prompts, settings, tmp_path)
    assert again.left == []
    more = Harvester(opened, identity_of(opened), prompts, replace(settings, conversations=14), tmp_path)
    assert more.left == [12, 13]
    (tmp_path / LEFT_OUT).write_text('{"conversations": ["one"]}')
    with pytest.raises(ModelFileError, match="Delete it: they are then tried again"):
        Harvester(opened, identity_of(opened), prompts, settings, tmp_path)


def test_some_conversations_ask_about_a_text_of_several_prompts(opened: LoadedModel, shards: list[Shard]) -> None:
    asked = [opened.tokenizer.decode(shards[0].prompt(i)) for i in range(len(shards[0])) if shards[0].turns[i] == 0]
    read = [text for text in asked if text.count("say ") > 1]
    assert 0.1 * len(asked) < len(read) < 0.6 * len(asked)
    assert any("Summarize the following text." in text for text in read)


def test_some_conversations_begin_with_what_the_target_writes(opened: LoadedModel, shards: list[Shard]) -> None:
    """All of that is learned from, but for the opening; of the other questions, all but the template's tokens."""
    firsts = [(shard, i) for shard in shards for i in range(len(shard)) if shard.turns[i] == 0]
    asked = [opened.tokenizer.decode(shard.prompt(i)) for shard, i in firsts]
    written = [(shard, i) for (shard, i), text in zip(firsts, asked, strict=True) if "say " not in text]
    assert 0.2 * len(firsts) < len(written) < 0.6 * len(firsts)
    openings = [w.opening for kind in WRITTEN_KINDS for w in kind]
    shown = opened.template.render([{"role": "user", "content": "@"}])
    before = opened.tokenizer.encode(shown[: shown.index("@")], add_special=False)
    for shard, i in written:
        text = opened.tokenizer.decode(shard.prompt(i)[len(before) :])
        assert any(text.startswith(opening) for opening in openings)
        assert len(before) <= shard.learn_from[i] <= len(before) + max(map(len, openings))
    for shard, i in set(firsts) - set(written):
        assert shard.learn_from[i] == len(before)
