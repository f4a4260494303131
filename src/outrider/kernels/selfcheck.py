"""Every kernel of the active level on small inputs against its twin: does this build compute right on this processor?

Shapes: as in reference.py and stack.py; X is any shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels import (
    chain,
    chain_reference,
    dispatch,
    ggml,
    ops,
    quantised,
    reference,
    stack,
    walk,
    walk_reference,
)

ROWS, INPUTS, OUTPUTS = 5, 256, 72
HEADS, KV_HEADS, WIDTH, POSITIONS = 4, 2, 32, 40
EPS = 1e-5
FLOAT_TOLERANCE = 1e-4
CODE_TOLERANCE = 2e-3
"""Of the largest number: float sums in another order; and activations whose 8-bit code may round the other way."""
_F16_AT = {"Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q4_1": (0, 2), "Q5_1": (0, 2)}

Pair = tuple[Tensor, Tensor]
Run = Callable[[torch.Generator], Pair]


@dataclass(frozen=True, slots=True)
class Check:
    """`difference` is the largest, as a share of the twin's largest number; `ran`: the call was counted as fast;
    `error` is what the kernel raised, if it did."""

    name: str
    difference: float
    tolerance: float
    ran: bool
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.ran and self.error is None and self.difference <= self.tolerance

    @property
    def sentence(self) -> str:
        if self.error is not None:
            return f"{self.name} failed: {self.error}"
        if not self.ran:
            return f"{self.name} did not run in C++"
        word = "equals" if self.ok else "differs from"
        return f"{self.name} {word} its twin: {self.difference:.2g} of the largest number, allowed {self.tolerance:g}"


@dataclass(frozen=True, slots=True)
class _Case:
    """`run` gives what the kernel and what its twin compute; `counted` is the operation's name in `fast_calls`."""

    name: str
    counted: str
    tolerance: float
    run: Run


def check_kernels() -> list[Check]:
    """One check a kernel; none where no kernel runs. Same inputs at every call."""
    return [_check(case) for case in _cases()] if dispatch.available() else []


def _check(case: _Case) -> Check:
    before = dispatch.fast_calls().get(case.counted, 0)
    try:
        found_X, expected_X = case.run(torch.Generator().manual_seed(0))
    except Exception as error:  # whatever a broken kernel raises is the finding
        return Check(case.name, math.inf, case.tolerance, False, f"{type(error).__name__}: {error}")
    ran = dispatch.fast_calls().get(case.counted, 0) > before
    scale = max(float(expected_X.abs().max()), 1e-30)
    return Check(case.name, float((found_X.float() - expected_X.float()).abs().max()) / scale, case.tolerance, ran)


def _cases() -> Iterator[_Case]:
    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        yield _Case(f"linear {name}", "linear", FLOAT_TOLERANCE, _linear(dtype))
        yield _Case(f"attention {name}", "attention", FLOAT_TOLERANCE, _attention(dtype))
    for kind in ggml.FORMATS:
        yield _Case(f"linear {kind}", "quantised_linear", CODE_TOLERANCE, _quantised(kind))
        yield _Case(f"dequantise {kind}", "dequantise", 0.0, _dequantise(kind))
    yield _Case("encode_q4_0", "encode_q4_0", CODE_TOLERANCE, _encode_q4_0)
    yield _Case("rms_norm", "rms_norm", FLOAT_TOLERANCE, _rms_norm)
    yield _Case("add_rms_norm_", "add_rms_norm_", FLOAT_TOLERANCE, _add_rms_norm)
    yield _Case("swiglu", "swiglu", FLOAT_TOLERANCE, _swiglu)
    yield _Case("rope_", "rope_", FLOAT_TOLERANCE, _rope)
    yield _Case("stack", "stack", FLOAT_TOLERANCE, _stack)
    yield _Case("chain", "chain", FLOAT_TOLERANCE, _chain)
    yield _Case("walk", "walk", FLOAT_TOLERANCE, _walk)
    yield _Case("softmax", "softmax", FLOAT_TOLERANCE, _softmax)


def _random(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=draw)


def _blocks(draw: torch.Generator, kind: str, outputs: int, inputs: int) -> Tensor:
    """Random blocks: any bytes are valid but for the f16 scales."""
    block = ggml.FORMATS[kind]
    shape = (outputs * inputs // block.inputs, block.nbytes)
    raw_BX = torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw)
    for at in _F16_AT.get(kind, (0,)):
        raw_BX[:, at : at + 2] = _random(draw, len(raw_BX), 1).mul(0.01).half().view(torch.uint8)
    return raw_BX.flatten()


def _linear(dtype: torch.dtype) -> Run:
    def run(draw: torch.Generator) -> Pair:
        weight_NK, bias_N = _random(draw, OUTPUTS, INPUTS).to(dtype), _random(draw, OUTPUTS)
        x_MK = _random(draw, ROWS, INPUTS)
        return ops.pack_linear(weight_NK, bias_N)(x_MK), reference.linear(x_MK, weight_NK, bias_N)

    return run


def _quantised(kind: str) -> Run:
    """A narrow pass and a wide one."""

    def run(draw: torch.Generator) -> Pair:
        raw, bias_N = _blocks(draw, kind, OUTPUTS, INPUTS), _random(draw, OUTPUTS)
        x_MK = _random(draw, ROWS + max(ROWS, dispatch.wide_rows()), INPUTS)
        packed = quantised.pack_quantised(raw, kind, (OUTPUTS, INPUTS), bias_N)
        found_MN = torch.cat([packed(x_MK[:ROWS]), packed(x_MK[ROWS:])])
        return found_MN, ggml.linear(x_MK, raw, kind, bias_N)

    return run


def _dequantise(kind: str) -> Run:
    def run(draw: torch.Generator) -> Pair:
        raw = _blocks(draw, kind, 8, INPUTS)
        return quantised.dequantise(raw, kind, (8, INPUTS), torch.float32), ggml.dequantise(raw, kind, INPUTS)

    return run


def _encode_q4_0(draw: torch.Generator) -> Pair:
    """Compared by the squared error of each block: where two guesses at a unit are equally good, either may win."""
    weight_NK = _random(draw, 8, INPUTS)

    def errors_B(raw: Tensor) -> Tensor:
        return (ggml.dequantise(raw, "Q4_0", INPUTS) - weight_NK).square().reshape(-1, 32).sum(1)

    return errors_B(quantised.encode_q4_0(weight_NK)), errors_B(ggml.encode_q4_0(weight_NK))


def _attention(dtype: torch.dtype) -> Run:
    """A small tree behind a committed text."""

    def run(draw: torch.Generator) -> Pair:
        q_MHD = _random(draw, ROWS, HEADS, WIDTH)
        keys_TGD = _random(draw, POSITIONS, KV_HEADS, WIDTH).to(dtype)
        values_TGD = _random(draw, POSITIONS, KV_HEADS, WIDTH).to(dtype)
        lengths_M = torch.full((ROWS,), POSITIONS - ROWS, dtype=torch.int32)
        ancestors_MS = torch.eye(ROWS, dtype=torch.bool)
        ancestors_MS[:, 0] = True
        seen = (q_MHD, keys_TGD, values_TGD, lengths_M, ancestors_MS)
        return ops.attention(*seen), reference.attention(*seen)

    return run


def _rms_norm(draw: torch.Generator) -> Pair:
    x_MK, weight_K = _random(draw, ROWS, INPUTS), _random(draw, INPUTS)
    return ops.rms_norm(x_MK, weight_K, EPS), reference.rms_norm(x_MK, weight_K, EPS)


def _add_rms_norm(draw: torch.Generator) -> Pair:
    x_MK, delta_MK, weight_K = _random(draw, ROWS, INPUTS), _random(draw, ROWS, INPUTS), _random(draw, INPUTS)
    twin_MK = x_MK.clone()
    found_MK = ops.add_rms_norm_(x_MK, delta_MK, weight_K, EPS)
    expected_MK = reference.add_rms_norm_(twin_MK, delta_MK, weight_K, EPS)
    return torch.cat([found_MK, x_MK]), torch.cat([expected_MK, twin_MK])


def _swiglu(draw: torch.Generator) -> Pair:
    gate_up_M2I = 4 * _random(draw, ROWS, 2 * INPUTS)
    return ops.swiglu(gate_up_M2I), reference.swiglu(gate_up_M2I)


def _rope(draw: torch.Generator) -> Pair:
    q_MHD, k_MGD = _random(draw, ROWS, HEADS, WIDTH), _random(draw, ROWS, KV_HEADS, WIDTH)
    angles_TR = _random(draw, POSITIONS, WIDTH // 2)
    turn = (angles_TR.cos(), angles_TR.sin(), torch.arange(ROWS) + 7)
    twin_MHD, twin_MGD = q_MHD.clone(), k_MGD.clone()
    ops.rope_(q_MHD, k_MGD, *turn)
    reference.rope_(twin_MHD, twin_MGD, *turn)
    return torch.cat([q_MHD, k_MGD], dim=1), torch.cat([twin_MHD, twin_MGD], dim=1)


def _layer(draw: torch.Generator, reads: int | None = None) -> tuple[dict[str, Tensor], Tensor, stack.Stack]:
    """Random weights by role, a norm for all places, and the stack made of them."""
    hidden, feed, attended = HEADS * WIDTH, 96, HEADS * WIDTH
    weights = {
        "qkv": _random(draw, attended + 2 * KV_HEADS * WIDTH, hidden) / 16,
        "o": _random(draw, hidden, attended) / 16,
        "gate_up": _random(draw, 2 * feed, hidden) / 16,
        "down": _random(draw, hidden, feed) / 16,
    }
    norm_d, heads = 1 + _random(draw, hidden) / 8, (HEADS, KV_HEADS, WIDTH)
    packed = {role: (ops.pack_linear(weight),) for role, weight in weights.items()}
    layer = stack.StackLayer(norm_d, packed["qkv"], None, None, packed["o"], norm_d, packed["gate_up"], packed["down"])
    built = stack.build_stack([layer], norm_d, heads=heads, eps=EPS, cache_dtype=torch.float32, reads=reads)
    assert built is not None, "packed matrices are a stack"
    return weights, norm_d, built


def _stack(draw: torch.Generator) -> Pair:
    """One layer as one call, and the same layer out of the twins; behind a committed text."""
    weights, norm_d, built = _layer(draw)
    x_Md = _random(draw, ROWS, len(norm_d))
    store = _random(draw, 1, 2, POSITIONS, KV_HEADS, WIDTH)
    angles_TR = _random(draw, POSITIONS, WIDTH // 2)
    length = POSITIONS - ROWS
    positions_M = torch.arange(length, POSITIONS)
    lengths_M = (positions_M + 1).int()
    expected_Md = _layer_of_twins(x_Md.clone(), weights, norm_d, store.clone(), angles_TR, positions_M)
    rows = stack.CacheRows(ROWS, store, length, lengths_M, None, None)
    return built.run(x_Md, positions_M, angles_TR.cos(), angles_TR.sin(), [rows])[0], expected_Md


def _layer_of_twins(
    x_Md: Tensor, weights: dict[str, Tensor], norm_d: Tensor, store: Tensor, angles_TR: Tensor, positions_M: Tensor
) -> Tensor:
    """[M, d]; adds to x and writes keys and values into `store`."""
    inner_Md = reference.rms_norm(x_Md, norm_d, EPS)
    qkv_MHD = reference.linear(inner_Md, weights["qkv"]).view(len(x_Md), -1, WIDTH)
    q_MHD, k_MGD, v_MGD = torch.tensor_split(qkv_MHD, (HEADS, HEADS + KV_HEADS), dim=1)
    reference.rope_(q_MHD, k_MGD, angles_TR.cos(), angles_TR.sin(), positions_M)
    store[0, 0, positions_M], store[0, 1, positions_M] = k_MGD, v_MGD
    read_MHD = reference.attention(q_MHD, store[0, 0], store[0, 1], (positions_M + 1).int())
    mixed_Md = reference.linear(read_MHD.flatten(1), weights["o"])
    inner_Md = reference.add_rms_norm_(x_Md, mixed_Md, norm_d, EPS)
    fed_Md = reference.linear(reference.swiglu(reference.linear(inner_Md, weights["gate_up"])), weights["down"])
    return reference.add_rms_norm_(x_Md, fed_Md, norm_d, EPS)


def _chain(draw: torch.Generator) -> Pair:
    """Tokens, probabilities, and what goes on, behind a text without keys and values."""
    hidden, limit = HEADS * WIDTH, 4
    weights, norm_d, built = _layer(draw, hidden)
    joint, head = _random(draw, hidden, 2 * hidden) / 16, _random(draw, OUTPUTS, hidden) / 16
    table, ids_S, angles_TR = _random(draw, 99, hidden), torch.arange(OUTPUTS) + 9, _random(draw, POSITIONS, WIDTH // 2)
    inputs = chain.ChainInputs(norm_d, norm_d, ops.pack_linear(joint), norm_d)
    whole = chain.build_chain(built, inputs, ops.pack_linear(head), ids_S, chain.TokenTable(table, None))
    assert whole is not None, "packed matrices are a chain"
    stores = torch.zeros(2, 1, 2, POSITIONS, KV_HEADS, WIDTH)
    begin, given = table[:ROWS], _random(draw, ROWS, hidden)
    seen = 0

    def layer(embedded_Md: Tensor, handed_Md: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal seen
        both = [reference.rms_norm(rows, norm_d, EPS) for rows in (embedded_Md, handed_Md)]
        x_Md = reference.linear(torch.cat(both, dim=1), joint)
        positions_M = torch.arange(seen, seen + len(x_Md))
        seen += len(x_Md)
        return _layer_of_twins(x_Md, weights, norm_d, stores[1], angles_TR, positions_M)[-1:], x_Md[-1:]

    tokens, shares, carried_1d = chain_reference.draft(begin, given, layer, head, ids_S, table, limit)
    rows = chain.ChainRows(ROWS, stores[0, 0], 0, 0, POSITIONS, limit, (), 0.0)
    (found,), carried_nd = whole.draft(begin, given, angles_TR.cos(), angles_TR.sin(), [rows])
    sides = ((found.tokens, found.shares, carried_nd), (tokens, shares, carried_1d))
    one, other = (torch.cat([torch.tensor(t) / 99, torch.tensor(s), g_1d[0]]) for t, s, g_1d in sides)
    return one, other


def _walk(draw: torch.Generator) -> Pair:
    """Two sequences; what the walk added to the rows is compared too."""
    table_Vr, weight_Sr, twin_MS = _random(draw, 99, 32), _random(draw, OUTPUTS, 32), _random(draw, ROWS, OUTPUTS)
    packed, logits_MS, ids_S = ops.pack_linear(weight_Sr), twin_MS.clone(), torch.arange(OUTPUTS) + 9
    whose = [ROWS - 2, 2], [3, 50]
    found = walk.Walk(ids_S, 99, table_Vr, packed)(logits_MS, *whose, shares=True)
    expected = walk_reference.walk_(twin_MS, *whose, [None, None], table_Vr, packed, ids_S, shares=True)
    return torch.cat([torch.tensor(found), logits_MS.T]), torch.cat([torch.tensor(expected), twin_MS.T])


def _softmax(draw: torch.Generator) -> Pair:
    logits_S = 8 * _random(draw, OUTPUTS)
    found_S, expected_S = walk.softmax(logits_S, 0.7), walk_reference.softmax(logits_S, 0.7)
    assert found_S is not None, "finite logits have a softmax"
    assert expected_S is not None, "finite logits have a softmax"
    return found_S, expected_S
