"""What draft heads are built of: norms, grouped attention with rotary positions, and a gated feed-forward.

Plain torch, for training and drafting, until `pack_` hands the matrices to the kernels. Module names are those of the
public checkpoints (self_attn.q_proj and so on).

Shapes: M rows, d model width, K inputs of the attention, H query heads, G key-value heads, D head width, R = D / 2,
I feed-forward width, T cached positions. Leading dimensions written M may be several (B x T in training).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.json_file import JsonObject
from outrider.core.rope import Rope, RopeScaling, inverse_frequencies, read_rope
from outrider.errors import ModelFileError
from outrider.kernels import (
    PackedLinear,
    QuantisedLinear,
    can_encode,
    encode_q4_0,
    encode_q8_0,
    pack_linear,
    pack_quantised,
)

BLOCKS = {"int4": (encode_q4_0, "Q4_0"), "int8": (encode_q8_0, "Q8_0")}
PACKED_DTYPES = (*BLOCKS, "bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The sizes of a head's decoder layer. `qk_norm` as in Qwen3; `bias` on the attention's matrices."""

    hidden_size: int
    ffn_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm_eps: float
    context_length: int
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False
    bias: bool = False

    @classmethod
    def read(cls, config: JsonObject) -> LayerShape:
        """From a `transformers` configuration of the Llama or Qwen families. Raises ModelFileError."""
        if (activation := config.text("hidden_act", "silu")) not in ("silu", "swish"):
            raise ModelFileError(f"{config.path}: hidden_act {activation[:40]!r} is not supported, only silu")
        if config.boolean("mlp_bias", False):
            raise ModelFileError(f"{config.path}: mlp_bias is true, and heads with it are not supported")
        width, n_heads = config.whole("hidden_size"), config.whole("num_attention_heads")
        context = config.whole("max_position_embeddings", 2048)
        theta, scaling = read_rope(config, context)
        shape = cls(
            hidden_size=width,
            ffn_size=config.whole("intermediate_size"),
            n_heads=n_heads,
            n_kv_heads=config.whole("num_key_value_heads", n_heads),
            head_dim=config.whole("head_dim", width // max(n_heads, 1)),
            norm_eps=config.number("rms_norm_eps", 1e-6),
            context_length=context,
            rope_theta=theta,
            rope_scaling=scaling,
            qk_norm=config.text("model_type", "llama") == "qwen3",
            bias=config.boolean("attention_bias", False),
        )
        shape._check(config)
        return shape

    def to_json(self) -> dict[str, object]:
        """The same as `read` takes it."""
        fields: dict[str, object] = {
            "model_type": "qwen3" if self.qk_norm else "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.ffn_size,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "max_position_embeddings": self.context_length,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "attention_bias": self.bias,
        }
        if (scaling := self.rope_scaling) is not None:
            rope: dict[str, object] = {"rope_type": scaling.kind, "type": scaling.kind, "factor": scaling.factor}
            if scaling.kind == "llama3":
                rope["original_max_position_embeddings"] = scaling.original_context
                rope |= {"low_freq_factor": scaling.low_freq, "high_freq_factor": scaling.high_freq}
            fields["rope_scaling"] = rope
        return fields

    def _check(self, config: JsonObject) -> None:
        sizes = {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.ffn_size,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.context_length,
        }
        for name, value in sizes.items():
            if not 1 <= value < 2**31:
                raise ModelFileError(f"{config.path}: {name} is {value}, allowed are 1 to 2147483647")
        if self.n_heads % self.n_kv_heads or self.head_dim % 2:
            raise ModelFileError(
                f"{config.path}: {self.n_heads} heads of {self.head_dim} over {self.n_kv_heads} key-value heads: "
                "needed are a multiple of the key-value heads and an even width"
            )
        if self.norm_eps <= 0 or self.rope_theta <= 0:
            raise ModelFileError(
                f"{config.path}: rms_norm_eps {self.norm_eps} and rope_theta {self.rope_theta} must be > 0"
            )


class RmsNorm(nn.Module):
    """x / rms(x) * weight, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight

    def add(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """(x + delta, the norm of that): the residual of a sublayer, and what the next one reads."""
        x = x + delta
        return x, self(x)


class Attention(nn.Module):
    """Projections of grouped attention over inputs of `in_width`; who sees what is the caller's."""

    def __init__(self, shape: LayerShape, in_width: int) -> None:
        super().__init__()
        self.heads, self.head_dim = (shape.n_heads, shape.n_kv_heads), shape.head_dim
        q, kv = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(in_width, q, bias=shape.bias)
        self.k_proj = nn.Linear(in_width, kv, bias=shape.bias)
        self.v_proj = nn.Linear(in_width, kv, bias=shape.bias)
        self.o_proj = nn.Linear(q, shape.hidden_size, bias=shape.bias)
        if shape.qk_norm:
            self.q_norm = RmsNorm(shape.head_dim, shape.norm_eps)
            self.k_norm = RmsNorm(shape.head_dim, shape.norm_eps)
        self._qk_norm = shape.qk_norm
        self.shape = shape
        self._rope: Rope | None = None

    def queries(self, x_MK: Tensor, positions_M: Tensor) -> Tensor:
        """[M, H, D], rotated."""
        q_MHD = self.q_proj(x_MK).unflatten(-1, (self.heads[0], self.head_dim))
        return self._rotated(self.q_norm(q_MHD) if self._qk_norm else q_MHD, positions_M)

    def keys_values(self, x_MK: Tensor, positions_M: Tensor) -> tuple[Tensor, Tensor]:
        """[M, G, D] each; keys rotated."""
        k_MGD = self.k_proj(x_MK).unflatten(-1, (self.heads[1], self.head_dim))
        v_MGD = self.v_proj(x_MK).unflatten(-1, (self.heads[1], self.head_dim))
        return self._rotated(self.k_norm(k_MGD) if self._qk_norm else k_MGD, positions_M), v_MGD

    def output(self, mixed_MHD: Tensor) -> Tensor:
        """[M, d]"""
        out: Tensor = self.o_proj(mixed_MHD.flatten(-2))
        return out

    def _rotated(self, x_MHD: Tensor, positions_M: Tensor) -> Tensor:
        """Half rotation: pair r of a head is (x[r], x[r + R])."""
        if self._rope is None:
            shape = self.shape
            self._rope = Rope(inverse_frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling))
        cos_TR, sin_TR = self._rope.tables(int(positions_M.max()) + 1)
        at_M = positions_M.to(cos_TR.device)
        cos = cos_TR[at_M].unsqueeze(-2).to(x_MHD.device)
        sin = sin_TR[at_M].unsqueeze(-2).to(x_MHD.device)
        left, right = x_MHD.float().chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x_MHD.dtype)


class Mlp(nn.Module):
    """down(silu(gate x) * up x)"""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.ffn_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.ffn_size, bias=False)
        self.down_proj = nn.Linear(shape.ffn_size, shape.hidden_size, bias=False)

    def forward(self, x_Md: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x_Md)) * self.up_proj(x_Md))
        return out


def pack_matrix(linear: nn.Linear, dtype: str) -> PackedLinear | QuantisedLinear:
    """A matrix of a head that is only drafted with, for the CPU kernels, which read it once for all rows.

    `dtype` is one of PACKED_DTYPES; a width that is no multiple of 32 stays bfloat16.
    """
    weight_NK = linear.weight.detach().contiguous()
    bias_N = None if linear.bias is None else linear.bias.detach()
    encode, kind = BLOCKS.get(dtype, (None, ""))
    if encode is None or not can_encode(weight_NK.shape[1]):
        return pack_linear(weight_NK.to(torch.float32 if dtype == "float32" else torch.bfloat16), bias_N)
    return pack_quantised(encode(weight_NK.float()), kind, (weight_NK.shape[0], weight_NK.shape[1]), bias_N)


class PackedMatrix(nn.Module):
    """The same in the place of the module that it was."""

    def __init__(self, linear: nn.Linear, dtype: str) -> None:
        super().__init__()
        self.packed = pack_matrix(linear, dtype)

    def forward(self, x_MK: Tensor) -> Tensor:
        if x_MK.dim() == 2 and x_MK.dtype == torch.float32:
            return self.packed(x_MK)
        rows = x_MK.float().reshape(-1, self.packed.in_features)
        return self.packed(rows).view(*x_MK.shape[:-1], self.packed.out_features)


def pack_(net: nn.Module, dtype: str) -> None:
    """Packs every matrix of `net`, which can no longer be trained; norms become float32, and so do all activations."""
    for module in list(net.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, PackedMatrix(child, dtype))
            elif isinstance(child, RmsNorm):
                child.float()
