"""The native decoder: Llama, Mistral, SmolLM2, Qwen2 and Qwen3 in one readable file, over ragged rows and trees.

A pass is one flat hidden state over the rows of all segments: every matrix is read once, whatever the batch; only
attention looks at one sequence at a time. Activations are float32. On a GPU, passes of few rows are recorded and
replayed (`models/static.py`); all others go operation by operation.

Shapes: M rows of a pass, d model width, H query heads, G key-value heads, D head width, I feed-forward width,
V vocabulary, F feature width, N x K one matrix.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from outrider import kernels
from outrider.core.protocols import EarlyExit, HeadHost, LanguageModel, Pass, Segment
from outrider.core.rope import Rope, inverse_frequencies
from outrider.errors import ConfigError
from outrider.kernels import CacheRows, Stack, build_stack
from outrider.models.attention import PassRows, Plan, plan_pass, why_not_kernels
from outrider.models.kv import DecoderCache
from outrider.models.linear import Embedding, Linear
from outrider.models.loader.checkpoint import Checkpoint
from outrider.models.slots import Arena, SlotCache
from outrider.models.static import CudaGraphs, Out, StaticPasses, StaticSize
from outrider.models.weights import Layer, WeightReader


class Decoder:
    """A `LanguageModel` over a checkpoint's weights; see `from_checkpoint`.

    One decoder serves any number of caches, from one thread at a time.
    """

    trees = True

    def __init__(
        self,
        reader: WeightReader,
        embedding: Embedding,
        layers: list[Layer],
        norm_d: Tensor,
        head: Linear,
        *,
        vocab_size: int,
        kv_dtype: torch.dtype,
        context_length: int,
        name: str,
        static: StaticSize | None = None,
    ) -> None:
        self.config = reader.config
        self.device = reader.device
        self.vocab_size = vocab_size
        self.name = name
        self.context_length = context_length
        self.layers = layers
        self.kv_dtype = kv_dtype
        self._reader = reader
        self._embedding = embedding
        self._norm_d = norm_d
        self._head = head
        self._fast = why_not_kernels(self.config.head_dim, self.device) is None
        frequencies_R = inverse_frequencies(self.config.head_dim, self.config.rope_theta, self.config.rope_scaling)
        self._rope = Rope(frequencies_R.to(self.device))
        self._stack = self._build_stack()
        self._static_size = static
        self._static: StaticPasses | None = None

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype | None = torch.float32,
        four_bits: bool = False,
        device: torch.device | str = "cpu",
        vocab_size: int | None = None,
        kv_dtype: torch.dtype | None = None,
        context_length: int | None = None,
        name: str = "decoder",
        static: StaticSize | None = None,
    ) -> Decoder:
        """Reads the weights layer by layer. `dtype` is that of the matrices, None for the file's own quantised blocks
        (`four_bits`: encoded anew where they take more); norms and biases are float32.

        `vocab_size` leaves out rows of the head that stand for no token (padding): they are never computed, so never
        emitted. `kv_dtype` defaults to float32 on a CPU and to `dtype` elsewhere; `context_length` can shorten the
        model's own. `static` sizes the caches of passes of fixed shape, which a GPU has unless told otherwise.
        """
        assert dtype in (torch.float32, torch.bfloat16, None), f"weights of {dtype}"
        config = checkpoint.config
        reader = WeightReader(checkpoint, dtype, torch.device(device), four_bits=four_bits)
        if static is None and reader.device.type == "cuda":
            static = StaticSize()
        rows = min(vocab_size or config.vocab_size, config.vocab_size)
        head = reader.head(range(rows))  # first: while the largest matrix is packed, its source is in memory too
        return cls(
            reader,
            reader.embedding(),
            [reader.layer(index) for index in range(config.n_layers)],
            reader.vector("norm.weight"),
            head,
            vocab_size=rows,
            kv_dtype=kv_dtype or (torch.float32 if reader.device.type == "cpu" or dtype is None else dtype),
            context_length=min(context_length or config.context_length, config.context_length),
            name=name,
            static=static,
        )

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def tappable(self) -> int:
        return self.n_layers

    @property
    def embedding_rows(self) -> int:
        return self.config.vocab_size

    @torch.inference_mode()
    def embed(self, tokens: Seq[int]) -> Tensor:
        """float32 [T, d] on the model's device."""
        return self._embedding(torch.tensor(list(tokens), dtype=torch.int64, device=self.device))

    @torch.inference_mode()
    def last_norm(self, x_Md: Tensor) -> Tensor:
        """float32 [M, d]: outputs of the last layer as the head reads them."""
        return kernels.rms_norm(x_Md, self._norm_d, self.config.norm_eps)

    def head_rows(self, ids: Seq[int]) -> Linear:
        """The head with these rows only, in this order; see `HeadHost`."""
        return self._reader.head(ids)

    def head_weights(self, ids: Seq[int]) -> Tensor:
        """float32 [len(ids), d]: these rows of the head as numbers."""
        return self._reader.head_weights(ids)

    def layer_weights(self, index: int) -> dict[str, Tensor]:
        """A layer's weights as float32 numbers, by short name: what a head may begin its training from."""
        return self._reader.layer_weights(index)

    @property
    def norm_weight(self) -> Tensor:
        """float32 [d]: of the final norm."""
        return self._norm_d

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices."""
        return self.pass_nbytes + self._embedding.nbytes

    @property
    def pass_nbytes(self) -> int:
        """Bytes of the matrices that a pass with logits reads whole: those of the layers, and the head."""
        matrices = [m for layer in self.layers for m in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        return sum(m.nbytes for m in matrices) + self._head.nbytes

    @property
    def static_calls(self) -> dict[str, int]:
        """Passes of fixed shape so far: recorded, replayed, direct (see `StaticPasses`). For tests that they ran."""
        return {} if self._static is None else dict(self._static.calls)

    def new_cache(self) -> DecoderCache:
        """An empty cache for one sequence; it holds no memory before its first pass, but for the static block that all
        sequences of a GPU share."""
        if self._static_size is not None:
            self._static = self._static or self._build_static(self._static_size)
            return SlotCache(self._static.arena, context_length=self.context_length)
        config = self.config
        return DecoderCache(
            len(self.layers),
            config.n_kv_heads,
            config.head_dim,
            context_length=self.context_length,
            dtype=self.kv_dtype,
            device=self.device,
        )

    def first_layers(self, count: int) -> Decoder:
        """The decoder made of the first `count` layers, the final norm and the head; shares the weights."""
        if not 1 <= count <= self.n_layers:
            raise ConfigError(f"{self.name} has {self.n_layers} layers, {count} asked: give 1 to {self.n_layers}")
        exit_early = copy.copy(self)
        exit_early.layers = self.layers[:count]
        exit_early.name = f"{self.name}[:{count}]"
        exit_early._stack = exit_early._build_stack()
        exit_early._static = None
        return exit_early

    def with_head_rows(self, ids: Seq[int]) -> Decoder:
        """This decoder with only these rows of its head, in this order; shares all other weights."""
        narrow = copy.copy(self)
        narrow._head = self._reader.head(ids)
        narrow.vocab_size = len(ids)
        narrow._static = None
        return narrow

    def _build_stack(self) -> Stack | None:
        """All layers as one call; None unless the kernels hold every matrix."""
        packed = [layer.for_stack() for layer in self.layers]
        whole = [layer for layer in packed if layer is not None]
        if not self._fast or len(whole) < len(packed):
            return None
        config = self.config
        heads = (config.n_heads, config.n_kv_heads, config.head_dim)
        return build_stack(whole, self._norm_d, heads=heads, eps=config.norm_eps, cache_dtype=self.kv_dtype)

    def _build_static(self, size: StaticSize) -> StaticPasses:
        """The passes of fixed shape and their caches, whose memory is taken here."""
        config = self.config
        arena = Arena(
            self.n_layers,
            config.n_kv_heads,
            config.head_dim,
            slots=size.slots,
            length=min(size.length, self.context_length),
            dtype=self.kv_dtype,
            device=self.device,
        )
        return StaticPasses(
            arena,
            self._rope,
            self._run_rows,
            group=config.n_heads // config.n_kv_heads,
            window=config.sliding_window,
            capture=CudaGraphs(self.device) if self.device.type == "cuda" else None,
        )

    def _run_rows(self, rows: PassRows, logits: bool, taps: Seq[int]) -> Out:
        inner_Md, features_MF = self._layers_one_by_one(self._embedding(rows.tokens_M), rows, taps)
        return self._head(inner_Md) if logits else None, features_MF

    @torch.inference_mode()
    def forward(self, segments: Seq[Segment], *, logits: bool = True, taps: Seq[int] = ()) -> Pass:
        """One pass; see `LanguageModel`. Feature blocks are the outputs of the layers `taps` (0-based), on the model's
        device; logits are handed out on the CPU, where the rules and samplers work."""
        assert all(0 <= tap < self.n_layers for tap in taps), f"taps {list(taps)} of {self.n_layers} layers"
        done = None if self._static is None else self._static.forward(segments, logits=logits, taps=taps)
        if done is None:
            done = self._forward_ragged(segments, logits=logits, taps=taps)
        return done if done.logits_MV is None else Pass(done.logits_MV.cpu(), done.features_MF)

    def _forward_ragged(self, segments: Seq[Segment], *, logits: bool, taps: Seq[int]) -> Pass:
        plan = plan_pass(
            segments, self._rope, context_length=self.context_length, window=self.config.sliding_window, fast=self._fast
        )
        x_Md = self._embedding(plan.tokens_M)
        run = self._layers_one_by_one if self._stack is None else self._layers_at_once
        inner_Md, features_MF = run(x_Md, plan, taps)
        return Pass(self._head(inner_Md) if logits else None, features_MF)

    def _layers_at_once(self, x_Md: Tensor, plan: Plan, taps: Seq[int]) -> tuple[Tensor, Tensor | None]:
        assert self._stack is not None, "these layers have no stack"
        spans = [
            CacheRows(s.stop - s.start, s.cache.store, s.length, s.lengths_m, s.starts_m, s.ancestors_mm)
            for s in plan.spans
        ]
        return self._stack.run(x_Md, plan.positions_M, plan.cos_TR, plan.sin_TR, spans, taps)

    def _layers_one_by_one(self, x_Md: Tensor, plan: PassRows, taps: Seq[int]) -> tuple[Tensor, Tensor | None]:
        """(normed output [M, d], features [M, F]); adds every layer's output to x in place. The stack's twin."""
        eps = self.config.norm_eps
        inner_Md = kernels.rms_norm(x_Md, self.layers[0].attn_norm_d, eps)
        norms = [*(layer.attn_norm_d for layer in self.layers[1:]), self._norm_d]
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            mixed_Md = self._attention(index, layer, inner_Md, plan)
            inner_Md = kernels.add_rms_norm_(x_Md, mixed_Md, layer.ffn_norm_d, eps)
            fed_Md = layer.down(kernels.swiglu(layer.gate_up(inner_Md)))
            inner_Md = kernels.add_rms_norm_(x_Md, fed_Md, norms[index], eps)
            if index in taps:
                tapped[index] = x_Md.clone()
        return inner_Md, torch.cat([tapped[tap] for tap in taps], dim=-1) if taps else None

    def _attention(self, index: int, layer: Layer, inner_Md: Tensor, plan: PassRows) -> Tensor:
        """[M, d]; writes the rows' keys and values into the caches."""
        rows, n_heads, n_kv = len(inner_Md), self.config.n_heads, self.config.n_kv_heads
        qkv_MHD = layer.qkv(inner_Md).view(rows, n_heads + 2 * n_kv, self.config.head_dim)
        q_MHD, k_MGD, v_MGD = torch.tensor_split(qkv_MHD, (n_heads, n_heads + n_kv), dim=1)
        if layer.q_norm_D is not None and layer.k_norm_D is not None:
            q_MHD = self._head_norm(q_MHD, layer.q_norm_D)
            k_MGD = self._head_norm(k_MGD, layer.k_norm_D)
        kernels.rope_(q_MHD, k_MGD, plan.cos_TR, plan.sin_TR, plan.positions_M)
        return layer.o(plan.mix(index, q_MHD, k_MGD, v_MGD).reshape(rows, -1))

    def _head_norm(self, x_MHD: Tensor, weight_D: Tensor) -> Tensor:
        return kernels.rms_norm(x_MHD.reshape(-1, x_MHD.shape[-1]), weight_D, self.config.norm_eps).view(x_MHD.shape)


_model: type[LanguageModel] = Decoder
_exit: type[EarlyExit] = Decoder
_host: type[HeadHost] = Decoder
