"""Two models at once: which drafts fit, what is said about a pair, and what is refused (C8, C9)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider import LLM, SamplingParams, Speculation
from outrider.errors import ConfigError, PairingError
from tests.tiny_folder import EOS, write_tiny_model

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "target": write_tiny_model(root / "target", layers=3),
        "twin": write_tiny_model(root / "twin", layers=3),
        "small": write_tiny_model(root / "small", seed=1, layers=1),
        "padded": write_tiny_model(root / "padded", layers=2, vocab=EOS + 1 + 63, wild_padding=True),
        "padded_small": write_tiny_model(
            root / "padded_small", seed=1, layers=1, vocab=EOS + 1 + 31, wild_padding=True
        ),
        "foreign": swap_two_tokens(write_tiny_model(root / "foreign", seed=1, layers=1)),
    }


def swap_two_tokens(folder: Path) -> Path:
    """Exchanges what ids 65 and 66 stand for."""
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    vocab = data["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    path.write_text(json.dumps(data))
    return folder


def test_a_real_decoder_with_a_draft_model_equals_plain_greedy_and_coupled(folders):
    llm = LLM(str(folders["target"]), draft_model=str(folders["small"]), k=8, dtype="float32", rule="coupled")
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=temperature, seed=3)
        [plain] = llm.generate("hello", params, speculation=Speculation("none"))
        for k in (1, 2, 3, 5, 8):
            [result] = llm.generate("hello", params, speculation=Speculation(k=k))
            assert result.token_ids == plain.token_ids
            assert result.stats.drafted > 0
            assert result.stats.draft_passes > 0
    llm.engine.check_integrity()


def test_c4_the_target_as_its_own_draft_is_always_accepted(folders):
    llm = LLM(str(folders["target"]), draft_model=str(folders["twin"]), k=4, dtype="float32", draft_dtype="float32")
    [greedy] = llm.generate("hello", SamplingParams(max_tokens=25, ignore_eos=True))
    assert greedy.stats.acceptance_rate == 1.0
    assert greedy.stats.acceptance_length == 5.0
    sampled = SamplingParams(max_tokens=25, ignore_eos=True, temperature=1.0, seed=5)
    [result] = llm.generate("hello", sampled)
    assert result.completions[0].rule == "block"
    assert result.stats.acceptance_rate == 1.0


def test_c4_holds_under_the_defaults(folders):
    """No loss of precision where a model drafts for itself."""
    llm = LLM(str(folders["target"]), draft_model=str(folders["target"]), k=4)
    [greedy] = llm.generate("hello", SamplingParams(max_tokens=25, ignore_eos=True))
    assert greedy.stats.acceptance_rate == 1.0


@pytest.mark.parametrize(
    ("target", "draft"), [("target", "padded_small"), ("padded", "small"), ("padded", "padded_small")]
)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_c8_padded_vocabularies_pair_and_padding_is_never_emitted(folders, target, draft, temperature):
    llm = LLM(str(folders[target]), draft_model=str(folders[draft]), k=4, dtype="float32")
    assert any(d.field == "pairing" for d in llm.plan)
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=temperature, seed=1)
    for method in ("none", "draft_model"):
        [result] = llm.generate("hello", params, speculation=Speculation(method))
        assert max(result.token_ids) <= EOS
        assert not result.stats.dropped


def test_c8_a_foreign_vocabulary_is_refused_with_names_and_ids(folders):
    with pytest.raises(PairingError) as caught:
        LLM(str(folders["target"]), draft_model=str(folders["foreign"]))
    message = str(caught.value)
    assert "\n" not in message
    for part in ("target", "foreign", "65", "'A'", "'B'"):
        assert part in message


def test_c9_an_unused_draft_and_a_swapped_pair_are_warned_about(folders):
    unused = LLM(str(folders["target"]), draft_model=str(folders["small"]), drafter="none")
    assert ["loaded but unused" in warning for warning in unused.warnings] == [True]
    swapped = LLM(str(folders["small"]), draft_model=str(folders["target"]), draft_dtype="bfloat16")
    [warning] = swapped.warnings
    assert "as large as the target" in warning
    assert " x plain" in warning
    assert not LLM(str(folders["target"]), draft_model=str(folders["small"])).warnings


def test_rule_greedy_is_for_temperature_zero(folders):
    llm = LLM(str(folders["target"]), rule="greedy", drafter="ngram")
    [result] = llm.generate("hello", PARAMS)
    assert result.completions[0].rule == "greedy"
    with pytest.raises(ConfigError, match="takes temperature 0 only: above it give auto, chain"):
        llm.generate("hello", SamplingParams(temperature=0.7))
    llm.engine.check_integrity()


def test_parts_are_not_names():
    with pytest.raises(ConfigError, match="takes a LanguageModel"):
        LLM.from_parts("smollm2-135m", {})  # type: ignore[arg-type]


def test_drafters_that_need_a_draft_model_say_so(folders):
    with pytest.raises(ConfigError, match="needs a draft model: give one"):
        LLM(str(folders["target"]), drafter="draft_model")
    with pytest.raises(ConfigError, match="options"):
        LLM(str(folders["target"]), drafter="ngram", drafter_options={"ngram": {"lookup": 3}})


@pytest.mark.parametrize("name", ["ngram", "suffix", "prediction", "layer_skip", "cascade"])
def test_every_drafter_by_name_equals_plain_on_a_real_decoder(folders, name):
    llm = LLM(str(folders["target"]), drafter=name, k=5, dtype="float32")
    [plain] = llm.generate("abcabcabc", PARAMS, speculation=Speculation("none"))
    [result] = llm.generate("abcabcabc", PARAMS, prediction=plain.token_ids if name == "prediction" else None)
    assert result.completions[0].method == name
    assert result.token_ids == plain.token_ids
    if name == "prediction":
        assert result.stats.acceptance_rate > 0.5
    llm.engine.check_integrity()
