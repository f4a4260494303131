"""Any other causal LM, through `transformers`: the same protocol, slower. One sequence at a time, chains only.

Shapes: M rows of a pass, m rows of one segment, V vocabulary, F feature width, T positions.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.core.protocols import KVCache, LanguageModel, Pass, Segment
from outrider.core.tree import is_chain
from outrider.errors import ConfigError, MissingExtraError, ModelFileError

Untyped = Any  # transformers has no usable types


class TransformersCache:
    """Rolls a `DynamicCache` back by cropping. Made without a config, that cache keeps every position of every layer,
    sliding window or not, so that cropping is exact."""

    def __init__(self, dynamic: Untyped) -> None:
        self.dynamic = dynamic
        self.length = 0

    def crop(self, length: int) -> None:
        """Drops everything behind the first `length` positions, pending rows included."""
        extra = self.dynamic.get_seq_length() - length
        if extra > 0:
            self.dynamic.crop(-extra)
        self.length = length

    def keep(self, rows: Seq[int]) -> None:
        assert list(rows) == list(range(len(rows))), f"rows {list(rows)}: only a prefix of a chain can be kept"
        assert self.length + len(rows) <= self.dynamic.get_seq_length(), f"{len(rows)} rows were never written"
        self.crop(self.length + len(rows))

    def truncate(self, length: int) -> None:
        assert 0 <= length <= self.length, f"cannot truncate {self.length} positions to {length}"
        self.crop(length)

    def free(self) -> None:
        self.dynamic.reset()
        self.length = 0

    def digest(self) -> str:
        digest = hashlib.sha256(str(self.length).encode())
        for layer in self.dynamic.layers if self.length else ():
            for part in (layer.keys, layer.values):
                committed = part[..., : self.length, :].contiguous().cpu()
                digest.update(committed.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def check_integrity(self) -> None:
        assert 0 <= self.length <= self.dynamic.get_seq_length()


class TransformersModel:
    """A `LanguageModel` over a loaded `transformers` causal LM; `trees` says that it takes chain segments only.

    Construction runs three tokens, rolls two back and runs them again: a model whose state cannot be rolled back
    (recurrent layers, its own cache class) raises `ModelFileError`.
    """

    trees = False
    vocab_size: int
    """Columns of the logits; the loader lowers it where the model has rows for which there is no token."""

    def __init__(self, model: Untyped, name: str, new_dynamic_cache: Untyped) -> None:
        self._model = model.eval()
        self._new_dynamic_cache = new_dynamic_cache
        text = model.config.get_text_config(decoder=True)
        self.name = name
        self.vocab_size = text.vocab_size
        self.context_length: int = getattr(text, "max_position_embeddings", None) or 2048
        self.n_layers: int = text.num_hidden_layers
        self.tappable: int = text.num_hidden_layers - 1
        self.hidden_size: int = text.hidden_size
        self.embedding_rows: int = text.vocab_size
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._check_rollback()

    @classmethod
    def from_folder(
        cls, folder: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> TransformersModel:
        """Loads safetensors weights only, runs no code of the folder, and looks nothing up online.

        Raises `MissingExtraError` without `transformers`, `ModelFileError` when the folder cannot be loaded.
        """
        try:
            transformers: Untyped = importlib.import_module("transformers")
        except ImportError:
            raise MissingExtraError(
                f"{folder} needs the optional package transformers: pip install 'outrider[transformers]'"
            ) from None
        transformers.utils.logging.disable_progress_bar()
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                str(folder),
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                weights_only=True,
                local_files_only=True,
            )
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ModelFileError(
                f"transformers cannot load {folder}: {reason}. Needed: config.json of a causal LM that transformers "
                "itself knows, and its weights as *.safetensors"
            ) from None
        return cls(model.to(device), Path(folder).name, transformers.DynamicCache)

    @property
    def device(self) -> torch.device:
        device: torch.device = self._model.device
        return device

    @property
    def module(self) -> Untyped:
        """The model of `transformers` itself, for training."""
        return self._model

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(weight.nbytes for weight in self._model.parameters())

    @torch.inference_mode()
    def embed(self, tokens: Seq[int]) -> Tensor:
        """float32 [T, d]: the rows of the model's input embedding."""
        rows: Tensor = self._model.get_input_embeddings()(torch.tensor(list(tokens), device=self.device))
        return rows.float()

    def last_norm(self, x_Md: Tensor) -> Tensor:
        """Refused: transformers hands out the last layer's output only behind the final norm."""
        raise ConfigError(
            f"{self.name} runs through transformers, which gives the last layer's output only after the final norm: "
            "take a head that reads earlier layers alone"
        )

    def head_rows(self, ids: Seq[int]) -> Callable[[Tensor], Tensor]:
        """The head with these rows only; see `HeadHost`."""
        weight_Sd = self.head_weights(ids)
        return lambda x_Md: torch.nn.functional.linear(x_Md, weight_Sd)

    def head_weights(self, ids: Seq[int]) -> Tensor:
        """float32 [len(ids), d]: these rows of the head as numbers."""
        weight_Vd: Tensor = self._model.get_output_embeddings().weight
        return weight_Vd.detach()[torch.tensor(list(ids), device=self.device)].float()

    def new_cache(self) -> TransformersCache:
        """An empty cache for one sequence."""
        return TransformersCache(self._new_dynamic_cache())

    @torch.inference_mode()
    def forward(self, segments: Seq[Segment], *, logits: bool = True, taps: Seq[int] = ()) -> Pass:
        """One pass a segment; see `LanguageModel`. Raises `ConfigError` for a tree, or a tap on the last layer."""
        if any(not 0 <= tap < self.tappable for tap in taps):
            raise ConfigError(
                f"taps {list(taps)} of {self.name}: transformers gives the outputs of layers 0 to {self.n_layers - 2} "
                "(the last one only after the final norm)"
            )
        logits_mV: list[Tensor] = []
        features_mF: list[Tensor] = []
        for segment in segments:
            out = self._run(segment, logits, bool(taps))
            if logits:
                logits_mV.append(out.logits[0, :, : self.vocab_size].float())
            if taps:
                features_mF.append(torch.cat([out.hidden_states[tap + 1][0] for tap in taps], dim=-1).float())
        return Pass(torch.cat(logits_mV) if logits else None, torch.cat(features_mF) if taps else None)

    def _run(self, segment: Segment, logits: bool, hidden: bool) -> Untyped:
        cache, parents = segment.cache, segment.parents
        assert isinstance(cache, TransformersCache), f"a {type(cache).__name__} is not a cache of this model"
        if parents is not None and not is_chain(parents):
            raise ConfigError(
                f"{self.name} runs through transformers, which takes chain drafts only: use no tree drafter"
            )
        end = cache.length + len(segment.tokens)
        assert end <= self.context_length, f"position {end - 1} of {self.context_length}"
        cache.crop(cache.length)
        ids = torch.tensor([list(segment.tokens)], device=self.device)
        part = self._model if logits else self._model.base_model
        options = {self._cache_argument: cache.dynamic, "use_cache": True, "output_hidden_states": hidden}
        return part(input_ids=ids, **options)

    def _check_rollback(self) -> None:
        try:
            cache = self.new_cache()
            first = self.forward([Segment(cache, [0, 1, 2])]).logits_MV
            cache.keep([0])
            again = self.forward([Segment(cache, [1, 2])]).logits_MV
            assert first is not None
            assert again is not None
            sound = torch.allclose(first[1:], again, rtol=1e-2, atol=1e-2 * float(first.abs().max()))
            reason = "it answers differently after a roll-back"
        except (AssertionError, AttributeError, TypeError, ValueError, IndexError, RuntimeError) as error:
            sound, reason = False, f"{type(error).__name__}: {error}"
        if not sound:
            raise ModelFileError(
                f"{self.name} ({type(self._model).__name__}) keeps a state that cannot be rolled back ({reason}): "
                "speculation needs a model whose layers all attend over a plain key-value cache"
            )


_model: type[LanguageModel] = TransformersModel
_cache: type[KVCache] = TransformersCache
