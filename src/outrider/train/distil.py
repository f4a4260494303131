"""A separate small model, taught to say what the target says (DistillSpec, Zhou et al. 2023, 2310.08461, section 4).

It learns the target's distributions on the target's own answers. The pairing counts for more than the size: a model
that was never shown its target's style drafts it badly.

Shapes: B sequences, T positions, M positions that count, d its width, S its vocabulary.
"""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.core.types import TargetIdentity
from outrider.drafters.head_loss import fused_loss
from outrider.drafters.head_training import Aims, Lesson, Losses, mean
from outrider.drafters.reduced_vocab import ReducedVocab
from outrider.errors import ModelNotFoundError
from outrider.models.decoder import Decoder
from outrider.models.hf import TransformersModel
from outrider.models.load import load_model
from outrider.models.pairing import require_compatible
from outrider.models.tokenizer import Tokenizer
from outrider.train.heads import HeadSettings, TargetParts, TrainedHead

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


class DraftInTraining(TrainedHead):
    """A causal LM of a Hugging Face folder, whose tokenizer must be the target's."""

    def __init__(self, parts: TargetParts, vocab: ReducedVocab, settings: HeadSettings) -> None:
        self._folder, self.wants = Path(settings.draft_model), ()
        if not self._folder.is_dir():
            what = "is no folder" if self._folder.exists() else "does not exist"
            raise ModelNotFoundError(f"{self._folder} {what}: give the folder of the model to train (--draft-model)")
        loaded = TransformersModel.from_folder(self._folder)
        tokenizer = Tokenizer.from_folder(self._folder, vocab_size=loaded.vocab_size)
        own = parts.opened.tokenizer
        require_compatible(own, tokenizer, target_name=parts.opened.name, draft_name=self._folder.name)
        self._net: Any = loaded.module.train()
        self.vocab = ReducedVocab(torch.arange(loaded.vocab_size), max(vocab.size, loaded.vocab_size))

    @property
    def net(self) -> nn.Module:
        net: nn.Module = self._net
        return net

    @property
    def packed(self) -> list[Tensor]:
        """None: it is served in the precision in which it is written."""
        return []

    def loss(self, lesson: Lesson, generator: torch.Generator, progress: float) -> Losses:
        hidden_BTd: Tensor = self._net.base_model(input_ids=lesson.tokens_BT, use_cache=False).last_hidden_state
        counted_M = lesson.counted_BT.flatten().nonzero().flatten()
        aims = Aims(lesson.likeliest_BTC.flatten(0, 1), lesson.logp_BTC.flatten(0, 1), self.vocab)
        usable_M = aims.usable_X[counted_M]
        found = fused_loss(
            hidden_BTd.flatten(0, 1)[counted_M],
            self._net.get_output_embeddings().weight,
            aims,
            counted_M,
            weight_M=usable_M / usable_M.sum().clamp(min=1),
        )
        shares = [float(found.loss.detach())], [mean(found.agrees_M)], [mean(found.overlap_M)]
        return Losses(found.loss, *shares)

    def write(self, folder: Path, layout: str | None = None) -> None:
        """As a folder like the one that it came from."""
        self._net.save_pretrained(folder, safe_serialization=True)
        for name in TOKENIZER_FILES:
            if (self._folder / name).exists():
                shutil.copyfile(self._folder / name, folder / name)

    def _parts(self, target: Decoder, identity: TargetIdentity, folder: Path | None) -> dict[str, object]:
        if folder is not None:
            model: Any = load_model(folder, draft=True).model
        else:
            transformers: Any = importlib.import_module("transformers")
            model = TransformersModel(self._net, "in training", transformers.DynamicCache)
        return {"model": model, "vocab_size": target.vocab_size}
