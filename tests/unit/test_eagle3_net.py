"""The head's arithmetic against a plain reference of its own, and the loss that trains it."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider import kernels
from outrider.core.json_file import JsonObject
from outrider.core.rope import RopeScaling
from outrider.drafters.eagle3_net import Eagle3Net, training_time_test
from outrider.drafters.head_cache import HeadCache, Span
from outrider.drafters.head_layer import LayerShape
from outrider.drafters.head_training import Aims, Lesson
from outrider.drafters.recurrent_core import Core, StackCore, TorchCore, make_core
from outrider.errors import ModelFileError
from tests.tiny_head import SHAPE, random_head

VOCAB, IDS = 40, [1, 4, 5, 9, 12, 20, 33, 39]
SWITCHES: list[dict[str, Any]] = [
    {},
    {"fc_norm": True},
    {"norm_before_fc": True},
    {"norm_output": True},
    {"norm_before_residual": True},
    {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    {"qk_norm": True, "bias": True},
    {"rope_theta": 50.0},
    {"rope_scaling": RopeScaling("linear", 4.0)},
    {"target_hidden_size": 48},
    {"layer_ids": (1, 3)},
]


def head(**fields: Any) -> Eagle3Net:
    return random_head(vocab=VOCAB, draft_ids=IDS, own_embedding=True, **fields).double()


def inputs(net: Eagle3Net, length: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    width = net.config.n_features * net.config.target_hidden_size
    features = torch.randn(length, width, generator=generator, dtype=torch.float64)
    return features, torch.randint(VOCAB, (length,), generator=generator)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + SHAPE.norm_eps) * weight


def turned(x: Tensor, position: int, theta: float, stretch: float) -> Tensor:
    """One head's vector, pair by pair."""
    half = len(x) // 2
    out = x.clone()
    for r in range(half):
        angle = position / stretch / theta ** (2 * r / len(x))
        out[r] = x[r] * math.cos(angle) - x[r + half] * math.sin(angle)
        out[r + half] = x[r + half] * math.cos(angle) + x[r] * math.sin(angle)
    return out


def reference(net: Eagle3Net, features: Tensor, tokens: list[int], drafted: list[int]) -> Tensor:
    """[1 + drafts, S] logits: behind the committed tokens, then behind each drafted one. Row by row, from the names."""
    w = {name: tensor.detach() for name, tensor in net.state_dict().items()}
    c, shape = net.config, net.config.layer
    stretch = shape.rope_scaling.factor if shape.rope_scaling else 1.0
    layer, attn = "midlayer.", "midlayer.self_attn."
    rows: list[tuple[list[Tensor], list[Tensor]]] = []
    logits = []
    last = torch.empty(0)
    everything = [*tokens, *drafted]
    for t in range(len(everything) - 1):
        if t < len(tokens) - 1:
            f = features[t]
            if c.fc_norm:
                parts = f.split(c.target_hidden_size)
                f = torch.cat([rms(part, w[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)])
            if c.norm_before_fc:
                f = rms(f, w["input_norm.weight"])
            g = w["fc.weight"] @ f
        else:
            g = last
        u = rms(g, w[layer + "hidden_norm.weight"])
        x = torch.cat([rms(w["embed_tokens.weight"][everything[t + 1]], w[layer + "input_layernorm.weight"]), u])

        def heads(part: str, count: int, x: Tensor = x, t: int = t) -> list[Tensor]:
            y = w[attn + f"{part}_proj.weight"] @ x + w.get(attn + f"{part}_proj.bias", torch.zeros(1))
            split = list(y.split(shape.head_dim))
            assert len(split) == count
            if shape.qk_norm and part != "v":
                split = [rms(one, w[attn + f"{part}_norm.weight"]) for one in split]
            return split if part == "v" else [turned(one, t, shape.rope_theta, stretch) for one in split]

        rows.append((heads("k", shape.n_kv_heads), heads("v", shape.n_kv_heads)))
        mixed = []
        for h, q in enumerate(heads("q", shape.n_heads)):
            group = h // (shape.n_heads // shape.n_kv_heads)
            scores = torch.stack([q @ keys[group] for keys, _ in rows]) / math.sqrt(shape.head_dim)
            mixed.append(sum(s * values[group] for s, (_, values) in zip(scores.softmax(0), rows, strict=True)))
        out = w[attn + "o_proj.weight"] @ torch.cat(mixed) + w.get(attn + "o_proj.bias", torch.zeros(1))
        z = (u if c.norm_before_residual else g) + out
        n = rms(z, w[layer + "post_attention_layernorm.weight"])
        gate, up = w[layer + "mlp.gate_proj.weight"] @ n, w[layer + "mlp.up_proj.weight"] @ n
        y = z + w[layer + "mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)
        normed = rms(y, w["norm.weight"])
        last = normed if c.norm_output else y
        if t >= len(tokens) - 2:
            logits.append(w["lm_head.weight"] @ normed)
    return torch.stack(logits)


def drafted_logits(
    net: Eagle3Net, features: Tensor, tokens: list[int], drafted: list[int], core: Core | None = None
) -> Tensor:
    """The same by the network's parts and the cache, as the drafter puts them together."""
    assert net.embed_tokens is not None
    assert net.lm_head is not None
    core, cache, logits = core or TorchCore(net), HeadCache(0), []
    carried = net.fuse(features[: len(tokens) - 1])
    for t, token in enumerate([*tokens, *drafted][1:]):
        g = carried[t : t + 1] if t < len(tokens) - 1 else carried[-1:]
        rows = net.inputs(net.embed_tokens(torch.tensor([token])), g.clone())
        if t < len(tokens) - 2:
            core.fill(*rows, [Span(cache, 1, 100)])
        else:
            normed, carried = core.last(*rows, [Span(cache, 1, 100)])
            logits.append(net.lm_head(normed)[0].float())
    return torch.stack(logits)


@pytest.mark.parametrize("fields", SWITCHES, ids=lambda f: "-".join(f) or "plain")
def test_the_network_equals_a_plain_reference(fields: dict[str, Any]) -> None:
    net = head(**fields)
    features, ids = inputs(net, 6)
    tokens, drafted = ids.tolist(), [3, 9, 1]
    with torch.no_grad():
        got = drafted_logits(net, features, tokens, drafted)
    expected = reference(net, features, tokens, drafted)
    assert got.shape == (4, len(IDS))
    assert torch.allclose(got.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("switch", ["norm_output", "norm_before_residual"])
def test_switches_without_tensors_change_the_arithmetic(switch: str) -> None:
    plain, switched = head(), head(**{switch: True})
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), switched.parameters(), strict=True))
    features, ids = inputs(plain, 6)
    with torch.no_grad():
        a, b = (drafted_logits(net, features, ids.tolist(), [3, 9]) for net in (plain, switched))
    same_first = torch.equal(a[0], b[0])
    assert same_first == (switch == "norm_output")  # its first draft token does not depend on it, the next ones do
    assert not torch.allclose(a[1:], b[1:], rtol=1e-3)


def lesson_of(features: Tensor, ids: Tensor, logits: Tensor, counted: Tensor | None = None, count: int = 6) -> Lesson:
    """Of one sequence, with the `count` likeliest tokens of every position."""
    logp, likeliest = logits.log_softmax(-1).topk(count)
    counted = torch.ones(len(ids), dtype=torch.bool) if counted is None else counted
    return Lesson(ids[None], features[None], likeliest[None], logp[None], counted[None])


def random_logits(length: int, seed: int) -> Tensor:
    """Mostly on the draft vocabulary."""
    logits = torch.randn(length, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    logits[::2, IDS] += 6
    return logits


def expected_losses(net: Eagle3Net, lesson: Lesson, steps: int) -> tuple[list[float], list[float], list[float]]:
    """By drafting behind every position with the text's own tokens; the first sequence alone."""
    tokens, features = lesson.tokens_BT[0].tolist(), lesson.features_BTF[0]
    losses, agreements, overlaps = [], [], []
    for step in range(steps):
        of_step, agreed, overlap, n = [], 0, 0.0, 0
        for t in range(len(tokens) - 1 - step):
            at = t + 1 + step
            if not lesson.counted_BT[0, at]:
                continue
            n += 1
            with torch.no_grad():
                said = drafted_logits(net, features, tokens[: t + 2], tokens[t + 2 : t + 2 + step])[step].double()
            q = dict(zip(IDS, said.softmax(0).tolist(), strict=True))
            p = dict(zip(lesson.likeliest_BTC[0, at].tolist(), lesson.logp_BTC[0, at].exp().tolist(), strict=True))
            likeliest = int(lesson.likeliest_BTC[0, at, 0])
            known = {token: weight for token, weight in p.items() if token in q}
            overlap += sum(min(weight, q[token]) for token, weight in known.items())
            if likeliest in q:
                mass = sum(known.values())
                of_step.append(-sum(weight / mass * math.log(q[token]) for token, weight in known.items()))
                agreed += max(q, key=lambda token: q[token]) == likeliest
        losses.append(sum(of_step) / len(of_step))
        agreements.append(agreed / n)
        overlaps.append(overlap / n)
    return losses, agreements, overlaps


@pytest.mark.parametrize("start", [0, 4])
def test_the_loss_sees_what_drafting_sees(start: int) -> None:
    """Step i of row t is the head drafting behind position t, with the text's own tokens as its draft."""
    net = head(norm_output=True)
    features, ids = inputs(net)
    lesson = lesson_of(features, ids, random_logits(9, 1), torch.arange(9) >= start)
    got = training_time_test(net, lesson, steps=3, decay=0.5)
    losses, agreements, overlaps = expected_losses(net, lesson, 3)
    assert got.loss_by_position == pytest.approx(losses, rel=1e-4)
    assert got.agreement_by_position == pytest.approx(agreements)
    assert got.overlap_by_position == pytest.approx(overlaps, rel=1e-4)
    assert float(got.total.detach()) == pytest.approx(sum(0.5**i * loss for i, loss in enumerate(losses)), rel=1e-4)


def test_the_gradient_is_that_of_the_loss() -> None:
    """By differences, for a number of every matrix and norm. Norms and rotations are float32."""
    net = head()
    lesson = lesson_of(*inputs(net), random_logits(9, 1))
    training_time_test(net, lesson, steps=3).total.backward()
    for name, parameter in net.named_parameters():
        at = int(parameter.grad.abs().argmax()) if parameter.grad is not None else 0
        flat = parameter.data.view(-1)
        sides = []
        for shift in (1e-3, -1e-3):
            flat[at] += shift
            with torch.no_grad():
                sides.append(float(training_time_test(net, lesson, steps=3).total))
            flat[at] -= shift
        assert parameter.grad is not None, name
        assert float(parameter.grad.view(-1)[at]) == pytest.approx((sides[0] - sides[1]) / 2e-3, rel=1e-2), name


def test_a_shared_head_learns_as_its_own_would_and_stays_as_it_is() -> None:
    own = head()
    shared = head(own_head=False)
    shared.load_state_dict({name: t for name, t in own.state_dict().items() if name != "lm_head.weight"})
    assert own.lm_head is not None
    rows = own.lm_head.weight.detach().clone()
    lesson = lesson_of(*inputs(own), random_logits(9, 1))
    with pytest.raises(AssertionError, match="needs the target's rows"):
        training_time_test(shared, lesson)
    losses = [training_time_test(net, lesson, head_Sd=rows, steps=2) for net in (own, shared)]
    for loss in losses:
        loss.total.backward()
    assert losses[0].loss_by_position == losses[1].loss_by_position
    for name, parameter in shared.named_parameters():
        assert torch.equal(parameter.grad, dict(own.named_parameters())[name].grad), name  # type: ignore[arg-type]


def test_uncounted_positions_and_tokens_outside_the_vocabulary_do_not_train() -> None:
    net = head()
    features, ids = inputs(net)
    logits = torch.zeros(len(ids), VOCAB, dtype=torch.float64)
    logits[:, 0] = 9.0  # outside the draft vocabulary
    outside = training_time_test(net, lesson_of(features, ids, logits), steps=2)
    assert outside.loss_by_position == outside.agreement_by_position == [0.0, 0.0]
    logits[4, IDS[2]] = 20.0
    counted = torch.zeros(len(ids), dtype=torch.bool)
    nothing = training_time_test(net, lesson_of(features, ids, logits, counted), steps=2)
    assert float(nothing.total.detach()) == 0
    nothing.total.backward()
    counted[4] = True
    one = training_time_test(net, lesson_of(features, ids, logits, counted), steps=2)
    assert all(loss > 0 for loss in one.loss_by_position)
    one.total.backward()
    assert all(p.grad is not None for name, p in net.named_parameters() if name != "embed_tokens.weight")


def test_a_batch_is_its_rows() -> None:
    """One of them padded, and one with nothing to learn."""
    net = head()
    features, ids = inputs(net)
    counted = torch.arange(9) < 7
    parts = [
        lesson_of(features, ids, random_logits(9, 2), counted),
        lesson_of(features.flip(0), ids, random_logits(9, 3), ~counted & False),
        lesson_of(features.flip(0), ids.flip(0), random_logits(9, 4), counted),
    ]
    fields = [f.name for f in dataclasses.fields(Lesson)]
    both = training_time_test(net, Lesson(*(torch.cat([getattr(p, f) for p in parts]) for f in fields)), steps=3)
    parts[0].tokens_BT[0, 7:] = 0  # padding that nothing may depend on
    parts[0].features_BTF[0, 7:] = 1e3
    usable = [[Aims(p.likeliest_BTC[0], p.logp_BTC[0], net.vocab).usable_X[1 + i : 7].sum() for i in range(3)]
              for p in parts[::2]]  # fmt: skip
    alone = [training_time_test(net, part, steps=3) for part in parts[::2]]
    for step in range(3):
        a, b = (int(counts[step]) for counts in usable)
        mean = (a * alone[0].loss_by_position[step] + b * alone[1].loss_by_position[step]) / (a + b)
        assert both.loss_by_position[step] == pytest.approx(mean, rel=1e-5)


def test_bfloat16_is_close() -> None:
    exact, rough = head().float(), head().bfloat16()
    features, ids = inputs(exact, 6)
    with torch.no_grad():
        a, b = (drafted_logits(net, features.float(), ids.tolist(), [3]) for net in (exact, rough))
    assert b.dtype == torch.float32
    assert float((a - b).abs().max()) < 0.1 * float(a.abs().max())


def fast_and_exact(dtype: str, **fields: Any) -> tuple[Tensor, Tensor, Core]:
    """Logits of a head by torch and by the kernels, and what ran there."""
    exact = head(**fields).float()
    features, ids = inputs(exact, 6)
    fast = copy.deepcopy(exact)
    core = make_core(fast, dtype)
    assert not any(isinstance(module, torch.nn.Linear) for module in fast.modules())
    with torch.no_grad():
        a = drafted_logits(exact, features.float(), ids.tolist(), [3, 5])
        b = drafted_logits(fast, features.float(), ids.tolist(), [3, 5], core)
    return a, b, core


@pytest.mark.skipif(not kernels.available(), reason="without kernels nothing is packed")
@pytest.mark.parametrize("fields", [*SWITCHES, {"n_heads": 8, "n_kv_heads": 4, "head_dim": 8}], ids=str)
def test_the_kernels_compute_the_same(fields: dict[str, Any]) -> None:
    """In one call a token, but for heads that the attention kernel does not take."""
    before = kernels.fast_calls().get("stack", 0)
    a, b, core = fast_and_exact("float32", **fields)
    assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    in_one_call = fields.get("head_dim") != 8
    assert isinstance(core, StackCore if in_one_call else TorchCore)
    assert kernels.fast_calls().get("stack", 0) - before == (7 if in_one_call else 0)


@pytest.mark.skipif(not kernels.available(), reason="without kernels nothing is packed")
@pytest.mark.parametrize(("dtype", "error"), [("int8", 0.1), ("int4", 0.9), ("bfloat16", 0.05)])
def test_packed_matrices_are_close(dtype: str, error: float) -> None:
    a, b, _ = fast_and_exact(dtype)
    assert 0 < float((a - b).abs().max()) < error * float(a.abs().max())


@pytest.mark.skipif(not kernels.available(), reason="without kernels nothing is packed")
@pytest.mark.parametrize("window", [3, 100])
def test_rows_of_several_sequences_at_once_are_those_of_each_alone(window: int) -> None:
    """Also where torch does it, and where the window cuts."""
    net = head().float()
    fast = copy.deepcopy(net)
    cores: list[Core] = [TorchCore(net), make_core(fast, "float32")]
    generator = torch.Generator().manual_seed(3)
    first, rows, tail = (torch.randn(n, 2, 64, generator=generator) for n in (4, 5, 2))
    results = []
    for core in cores:
        by_one, together = [], []
        caches = [HeadCache(0), HeadCache(7), HeadCache(0), HeadCache(7)]

        def made(part: Tensor) -> tuple[Tensor, Tensor]:
            return net.inputs(part[:, 0], part[:, 1].clone())

        with torch.no_grad():
            for cache in caches:
                core.fill(*made(first), [Span(cache, 4, window)])
            both = [Span(caches[0], 5, window), Span(caches[1], 2, window)]
            together = list(core.last(*made(torch.cat([rows, tail])), both)[0])
            for cache, part in zip(caches[2:], (rows, tail), strict=True):
                for i in range(len(part)):
                    one = core.last(*made(part[i : i + 1]), [Span(cache, 1, window)])[0][0]
                by_one.append(one)
        for a, b in zip(together, by_one, strict=True):
            assert torch.allclose(a, b, atol=1e-5)
        results.append(torch.stack(together))
    assert torch.allclose(*results, rtol=1e-4, atol=1e-5)


def test_the_cache_keeps_its_window_and_forgets_drafts() -> None:
    cache, rows = HeadCache(10), torch.randn(2, 2, 200, 1, 4)
    cache.append(rows[:, :, :150])
    cache.append(rows[:, :, 150:])
    before = cache.last(20)
    cache.append(rows[:, :, :3])
    cache.truncate(210)
    cache.keep_last(20)
    assert (cache.start, cache.end, cache.length) == (190, 210, 20)
    assert torch.equal(cache.last(20), before)
    assert torch.equal(before, rows[:, :, 180:])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"num_attention_heads": 3}, "3 heads"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"intermediate_size": 0}, "intermediate_size is 0"),
    ],
)
def test_layers_that_are_not_computed_are_refused(fields: dict[str, object], said: str, tmp_path: Any) -> None:
    config = SHAPE.to_json() | fields
    with pytest.raises(ModelFileError, match=said):
        LayerShape.read(JsonObject(tmp_path / "config.json", config))


@pytest.mark.parametrize(
    "rope",
    [None, RopeScaling("linear", 4.0), RopeScaling("llama3", 8.0, 16, 1.0, 4.0)],
    ids=["none", "linear", "llama3"],
)
def test_rope_settings_are_read_as_written(rope: RopeScaling | None, tmp_path: Any) -> None:
    shape = LayerShape(
        **{n: getattr(SHAPE, n) for n in LayerShape.__slots__} | {"rope_theta": 5e5, "rope_scaling": rope}
    )
    assert LayerShape.read(JsonObject(tmp_path / "config.json", shape.to_json())) == shape
