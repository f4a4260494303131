"""The drafters `dflash` and `dspark` at work: their drafts are what the network says, on the kernels and in torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from outrider import kernels
from outrider.core.draft import SeqDraft
from outrider.core.protocols import Committed, Segment
from outrider.core.registry import verifier_class
from outrider.core.rng import CounterRng
from outrider.core.types import SamplingParams, Sequence
from outrider.drafters.block_backbone import KernelBackbone, TorchBackbone, make_backbone
from outrider.drafters.block_habits import MOST, ROWS, Habits
from outrider.drafters.block_net import BlockNet
from outrider.drafters.block_state import BlockState
from outrider.drafters.columns import Columns
from outrider.drafters.dflash import DFlashDrafter
from outrider.drafters.dspark import DSparkDrafter
from outrider.drafters.head_cache import HeadCache, Span
from outrider.errors import ConfigError, PairingError
from outrider.models.decoder import Decoder
from tests.block_reference import said
from tests.tiny_block import DFLASH, DSPARK, random_block
from tests.tiny_decoder import VOCAB, random_tokens, tiny_decoder

IDS = list(range(3, VOCAB, 3))
OWN = {"own_embedding": True, "own_head": True}
KINDS: list[dict[str, Any]] = [
    DSPARK,
    DFLASH,
    DSPARK | {"markov_head_type": "rnn"},
    DSPARK | {"confidence": False, "qk_norm": True},
    DSPARK | {"layer_ids": (-1, 2), "head_dim": 8, "draft_ids": IDS},
    DSPARK | OWN | {"bias": True, "draft_ids": IDS, "confidence_with_markov": False},
    DFLASH | {"sample_from_anchor": True, "draft_ids": IDS, "n_layers": 1},
]
needs_kernels = pytest.mark.skipif(not kernels.available(), reason="no kernels here")


@pytest.fixture(scope="module")
def target() -> Decoder:
    return tiny_decoder()


def drafter_of(target: Decoder, head: BlockNet, **options: Any) -> DFlashDrafter | DSparkDrafter:
    kind = DSparkDrafter if head.config.markov_rank else DFlashDrafter
    return kind(target=target, head=head, **({"dtype": "float32"} | options))


def begun(
    drafter: DFlashDrafter | DSparkDrafter, target: Decoder, tokens: list[int], seq_id: int = 0, **params: Any
) -> Sequence:
    """A sequence whose features are committed in two parts."""
    seq = Sequence(seq_id, tokens, SamplingParams(**params), seed=7)
    seq.rule = verifier_class("greedy" if seq.params.greedy else "block")()
    seq.cache = target.new_cache()
    drafter.open(seq)
    half = len(tokens) // 2
    for start, stop in ((0, half), (half, len(tokens) - 1)):
        out = target.forward([Segment(seq.cache, tokens[start:stop])], logits=False, taps=drafter.wants)
        seq.cache.keep(range(stop - start))
        drafter.commit(seq, Committed(tokens[start:stop], 0, out.features_MF))
    return seq


def expected(target: Decoder, head: BlockNet, tokens: list[int], drafts: int) -> tuple[list[int], list[float]]:
    """The greedy walk along what the reference says, and the products of its confidences."""
    ids, config = head.vocab.ids_S.tolist(), head.config
    out = target.forward([Segment(target.new_cache(), tokens[:-1])], taps=[i for i in config.layer_ids if i >= 0])
    assert out.features_MF is not None
    table = target.embed(range(VOCAB))
    features = out.features_MF
    if -1 in config.layer_ids:
        features = torch.cat([target.embed(tokens[:-1]), features], dim=1)
    found, product = [tokens[-1]], []
    for k in range(drafts):
        walk = said(head, features, len(tokens) - 1, found, table, target.head_weights(ids))
        logits, sure = walk[k]
        found.append(ids[int(logits.argmax())])
        share = float(logits.softmax(0).max()) if sure is None else float(sure)
        product.append(share * (product[-1] if product else 1.0))
    return found[1:], product


def propose(drafter: DFlashDrafter | DSparkDrafter, seqs: list[Sequence], budgets: list[int]) -> list[SeqDraft]:
    return drafter.propose(seqs, budgets, CounterRng()).seqs


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind))
def test_drafts_are_what_the_network_says(kind: dict[str, Any], target: Decoder) -> None:
    head = random_block(vocab=VOCAB, **kind)
    drafter = drafter_of(target, head)
    texts = [random_tokens(9, seed=1), random_tokens(30, seed=2), random_tokens(4, seed=3)]
    seqs = [begun(drafter, target, text, n) for n, text in enumerate(texts)]
    budgets = [9, 2, 3]
    for draft, text, budget in zip(propose(drafter, seqs, budgets), texts, budgets, strict=True):
        tokens, confidence = expected(target, head, text, min(budget, head.config.n_drafts))
        assert draft.tokens == tokens
        assert draft.confidence == pytest.approx(confidence, rel=1e-3)
    fast = kernels.available() and head.config.layer.head_dim % 16 == 0
    assert isinstance(drafter.parts.backbone, KernelBackbone if fast else TorchBackbone)


@pytest.mark.parametrize("head_dim", [16, 8], ids=["kernels", "torch"])
def test_drafting_keeps_no_gradients(target: Decoder, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = drafter_of(target, random_block(vocab=VOCAB, **DSPARK, head_dim=head_dim))
    seq, made, seen = begun(drafter, target, random_tokens(9, seed=1)), drafter.parts.logits, []

    def watched(h_Md: torch.Tensor) -> torch.Tensor:
        seen.append(torch.is_inference_mode_enabled())
        return made(h_Md)

    monkeypatch.setattr(drafter.parts, "logits", watched)
    propose(drafter, [seq], [3])
    assert seen == [True]


@needs_kernels
@pytest.mark.parametrize("fields", [{}, {"qk_norm": True, "bias": True}, {"n_layers": 1, "n_kv_heads": 1}], ids=str)
def test_the_stack_is_torchs_twin(fields: dict[str, Any]) -> None:
    head = random_block(vocab=VOCAB, **DSPARK, **fields).requires_grad_(False)
    fast, slow = make_backbone(copy.deepcopy(head), "float32"), TorchBackbone(head)
    features = torch.randn(40, 3 * 64)
    results = []
    for backbone in (fast, slow):
        caches = []
        for start, stop in ((0, 5), (3, 40)):
            cache = HeadCache(start)
            cache.append(backbone.context(features[start:stop], list(range(start, stop))))
            caches.append(cache)
        stacks = kernels.fast_calls().get("stack", 0)
        x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
        rows = backbone.rows(x, [Span(caches[0], 2, 99), Span(caches[1], 3, 20)])
        ran = kernels.fast_calls().get("stack", 0) - stacks
        stores = [cache.last(99) for cache in caches]
        results.append((rows, stores, ran))
    assert isinstance(fast, KernelBackbone)
    assert [ran for _, _, ran in results] == [1, 0]
    assert torch.allclose(results[0][0], results[1][0], rtol=1e-4, atol=1e-4)
    for a, b in zip(results[0][1], results[1][1], strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


@needs_kernels
def test_a_round_is_one_call_of_the_stack_whatever_the_dtype(target: Decoder) -> None:
    head = random_block(vocab=VOCAB, **DSPARK)
    for dtype in ("auto", "int8", "int4", "bfloat16", "float32"):
        drafter = drafter_of(target, head, dtype=dtype)
        seqs = [begun(drafter, target, random_tokens(9, seed=n), n) for n in range(3)]
        before = kernels.fast_calls().get("stack", 0)
        drafts = propose(drafter, seqs, [4, 4, 4])
        assert kernels.fast_calls()["stack"] == before + 1
        assert [draft.size for draft in drafts] == [4, 4, 4]
        assert [draft.passes for draft in drafts] == [2, 2, 2]  # the text's keys and values, then the blocks


def test_a_confidence_decides_before_its_token(target: Decoder) -> None:
    """The draft ends before the first token with which it is less sure than the limit, whatever that token would be."""
    head = random_block(vocab=VOCAB, **DSPARK)
    text = random_tokens(12, seed=4)
    free = drafter_of(target, head)
    [whole] = propose(free, [begun(free, target, text)], [4])
    stops = 2
    limit = whole.confidence[stops - 1]
    assert limit > whole.confidence[stops]
    for method in ("greedy", "probabilistic"):
        drafter = drafter_of(target, head, min_confidence=limit, draft_sample_method=method)
        [draft] = propose(drafter, [begun(drafter, target, text)], [4])
        assert draft.tokens == whole.tokens[:stops]
        assert len(draft.confidence) == draft.size
    never = drafter_of(target, head, min_confidence=1.0)
    [nothing] = propose(never, [begun(never, target, text)], [4])
    assert (nothing.size, nothing.passes) == (0, 2)


def test_rounds_without_a_budget_are_caught_up_later(target: Decoder) -> None:
    head, text = random_block(vocab=VOCAB, **DSPARK), random_tokens(20, seed=5)
    drafter = drafter_of(target, head)
    seq = begun(drafter, target, text[:8])
    for token in text[8:]:
        assert propose(drafter, [seq], [0])[0].passes == 0
        out = target.forward([Segment(seq.cache, seq.tokens[-1:])], taps=drafter.wants)
        seq.cache.keep([0])
        seq.tokens.append(token)
        drafter.commit(seq, Committed([token], 0, out.features_MF))
    fresh = drafter_of(target, head)
    assert propose(drafter, [seq], [4])[0].tokens == propose(fresh, [begun(fresh, target, text)], [4])[0].tokens


def test_the_state_keeps_its_window_and_starts_anew_behind_a_gap() -> None:
    state = BlockState(4, Habits(Columns(None, 9), 9, 4, 0.0))
    state.add(torch.zeros(2, 3), 2)
    state.add(torch.ones(3, 3), 9)
    assert (state.cache.end, state.held) == (6, 9)
    assert state.features(6, 9).tolist() == torch.ones(3, 3).tolist()
    state.add(torch.full((3, 3), 2.0), 12)
    assert (state.cache.end, state.held) == (8, 12)
    assert state.features(8, 12)[:, 0].tolist() == [1, 2, 2, 2]
    state.stop("why not")
    assert (state.stopped, state.held) == ("why not", 0)


def test_padding_is_never_drafted() -> None:
    """Draft tokens that the target has no row of are left out of every part."""
    target = tiny_decoder()
    target.vocab_size = VOCAB - 40
    head = random_block(vocab=VOCAB, **DSPARK, own_head=True)
    drafter = drafter_of(target, head)
    assert drafter.parts.columns.size == VOCAB - 40
    drafts = propose(drafter, [begun(drafter, target, random_tokens(9, seed=n), n) for n in range(9)], [4] * 9)
    assert all(token < VOCAB - 40 for draft in drafts for token in draft.tokens)


@pytest.mark.parametrize(
    ("head", "options", "error", "said"),
    [
        (DSPARK, {"dtype": "int2"}, ConfigError, "dtype = 'int2' is not allowed"),
        (DSPARK, {"min_confidence": 2.0}, ConfigError, "min_confidence = 2.0"),
        (DSPARK | {"layer_ids": (1, 3)}, {}, PairingError, r"outputs of the layers \[1, 3\], and .* has 3 layers"),
        (DSPARK | {"layer_ids": (2, 1)}, {}, PairingError, "needed are ascending ids from -1"),
        (DSPARK | {"hidden_size": 32, "target_hidden_size": 64}, {}, PairingError, "is 32 wide, has no embed_tokens"),
        (DSPARK | {"target_hidden_size": 32}, {}, PairingError, "reads hidden states of 32 numbers"),
    ],
    ids=str,
)
def test_what_is_refused(
    head: dict[str, Any], options: dict[str, Any], error: type[Exception], said: str, target: Decoder
) -> None:
    with pytest.raises(error, match=said):
        drafter_of(target, random_block(vocab=VOCAB, **head), **options)


def test_a_head_of_the_other_kind_is_refused(target: Decoder) -> None:
    with pytest.raises(PairingError, match=r"has a Markov head of rank 8.*use the drafter dspark"):
        DFlashDrafter(target=target, head=random_block(vocab=VOCAB, **DSPARK))
    with pytest.raises(PairingError, match=r"has no Markov head.*use the drafter dflash"):
        DSparkDrafter(target=target, head=random_block(vocab=VOCAB, **DFLASH))


@needs_kernels
@pytest.mark.parametrize("head", [DSPARK, DFLASH, DSPARK | {"confidence": False}], ids=str)
def test_a_greedy_draft_is_one_walk_and_begins_alike_whatever_the_budget(head: dict[str, Any], target: Decoder) -> None:
    """Blocks are run whole: fewer tokens are the first ones, and their rows are not others."""
    drafter = drafter_of(target, random_block(vocab=VOCAB, **head))
    seqs = [begun(drafter, target, random_tokens(12, seed=4), n) for n in range(2)]
    before = kernels.fast_calls().get("walk", 0)
    whole, short = propose(drafter, seqs, [drafter.config.n_drafts, 2])
    assert kernels.fast_calls()["walk"] == before + 1
    assert short.tokens == whole.tokens[:2]
    assert short.confidence == whole.confidence[:2]


def test_a_drawn_token_comes_from_its_row(target: Decoder) -> None:
    head = random_block(vocab=VOCAB, **DSPARK, draft_ids=IDS)
    drafter = drafter_of(target, head)
    text = random_tokens(12, seed=4)
    [draft] = propose(drafter, [begun(drafter, target, text, temperature=0.7)], [3])
    features = target.forward([Segment(target.new_cache(), text[:-1])], taps=[0, 1, 2]).features_MF
    walk = said(head, features, 11, [text[-1], *draft.tokens], target.embed(range(VOCAB)), target.head_weights(IDS))
    for row, (logits, _) in zip(draft.q_rows, walk, strict=False):
        assert row.token_S.tolist() == IDS
        assert row.total() == pytest.approx(1, abs=1e-13)
        assert torch.allclose(row.weight_S, (logits / 0.7).double().softmax(0), atol=1e-5)


def test_habits_move_by_what_was_said_instead() -> None:
    """Up for the pair that came, down for the drafted one, and never for a token that columns do not have."""
    habits = Habits(Columns(torch.tensor([2, 4, 6, 8]), 9), 9, 3, 0.5)
    habits.note(1, [2, 4, 6], [])
    habits.learn([2, 8])
    assert habits.pairs is not None
    row = int(habits.pairs.row_of_V[2])
    changed = dict(zip(habits.pairs.columns_RW[row].tolist(), habits.pairs.values_RW[row].tolist(), strict=True))
    assert (changed[3], changed[1]) == (0.5, -0.5)
    assert int((habits.pairs.row_of_V >= 0).sum()) == 1
    habits.learn([5, 5])  # nothing was drafted
    habits.note(1, [2], [])
    habits.learn([3])  # no column says 3
    logits = torch.zeros(4)
    habits.pairs.add_(logits, 1)
    assert logits.tolist() == [-0.5, 0, 0, 0]
    for _ in range(99):
        habits.note(1, [2], [])
        habits.learn([4])
    logits = torch.zeros(4)
    habits.pairs.add_(logits, 1)
    assert logits.tolist() == [-MOST, MOST, 0, 0]


def test_habits_forget_the_token_that_was_longest_unused() -> None:
    size = ROWS + 3
    habits = Habits(Columns(None, size), size, 1, 1.0)
    for before in [*range(ROWS), 0, ROWS]:
        habits.note(before, [0], [])
        habits.learn([1])
    assert habits.pairs is not None
    kept = (habits.pairs.row_of_V >= 0).nonzero().flatten().tolist()
    assert kept == [0, *range(2, ROWS + 1)]
    rows = habits.pairs.row_of_V[kept]
    assert len(set(rows.tolist())) == ROWS
    fresh, old = torch.zeros(size), torch.zeros(size)
    habits.pairs.add_(fresh, ROWS)
    habits.pairs.add_(old, 0)
    assert fresh[:2].tolist() == [-1, 1]
    assert old[:2].tolist() == [-2, 2]


def test_confidences_sink_where_they_were_wrong() -> None:
    habits = Habits(Columns(None, 9), 9, 2, 1.0)
    for _ in range(50):
        habits.note(0, [1, 1], [2.0, 2.0])
        habits.learn([1, 2])
    assert habits.confidence(2.0, 0) > 0.88 > 0.7 > habits.confidence(2.0, 1)


def follow(drafter: DFlashDrafter | DSparkDrafter, target: Decoder, text: list[int], start: int) -> tuple[int, int]:
    """(drafted, accepted) along a text that comes whatever is drafted."""
    seq, drafted, accepted = begun(drafter, target, text[:start]), 0, 0
    while (end := len(seq.tokens)) + 4 < len(text):
        [draft] = propose(drafter, [seq], [3])
        right = next((i for i, token in enumerate(draft.tokens) if token != text[end + i]), draft.size)
        tokens = text[end : end + right + 1]
        out = target.forward([Segment(seq.cache, [seq.tokens[-1], *tokens[:-1]])], taps=drafter.wants)
        seq.cache.keep(range(len(tokens)))
        seq.tokens += tokens
        drafter.commit(seq, Committed(tokens, right, out.features_MF))
        drafted, accepted = drafted + draft.size, accepted + right
    drafter.close(seq)
    return drafted, accepted


@pytest.mark.parametrize("head", [DSPARK, DFLASH, DSPARK | {"markov_head_type": "rnn"}], ids=str)
def test_a_repeating_text_is_learned(head: dict[str, Any], target: Decoder) -> None:
    """A random head never finds the text; what verification says of a few rounds is enough. Closing forgets it."""
    text = [5, 9, 23, 40, 17, 31] * 20
    net = random_block(vocab=VOCAB, **head)
    shares = []
    drafter = drafter_of(target, net, adapt=2.0)
    for one in (drafter_of(target, net), drafter, drafter):
        drafted, accepted = follow(one, target, text, 8)
        shares.append(accepted / drafted)
    assert shares[0] < 0.1
    assert shares[1] > 0.5
    assert shares[1] == shares[2]
