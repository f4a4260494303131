"""The kinds of draft heads whose files are known: who reads them, and which kind a folder says that it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from outrider.core.json_file import JsonObject
from outrider.drafters.block_files import read_block
from outrider.drafters.eagle3_files import read_eagle3
from outrider.drafters.head_card import CARD
from outrider.drafters.head_files import CONFIG
from outrider.drafters.medusa_files import read_medusa
from outrider.drafters.mtp_files import read_mtp

READERS: Mapping[str, Callable[[str | Path], Any]] = MappingProxyType(
    {"eagle3": read_eagle3, "mtp": read_mtp, "medusa": read_medusa, "dflash": read_block, "dspark": read_block}
)
"""By drafter: from a file or folder to its network."""
WEIGHTS = (".safetensors", ".bin", ".pt")
"""Endings of files that may be a head's; what lies beside any other says nothing of it."""
ARCHITECTURES = MappingProxyType({"Eagle3": "eagle3", "DSpark": "dspark", "DFlash": "dflash"})
"""Kinds of heads by what the names of their architectures hold."""


def kind_of_head(head: str | Path) -> str | None:
    """The drafter of the head in this folder or file, by its card, else by its configuration; None where it is no head
    of these kinds, or not on this machine. Raises ModelFileError for a card or configuration that cannot be read."""
    path = Path(head).expanduser()
    if not path.exists() or (path.is_file() and path.suffix not in WEIGHTS):
        return None
    folder = path if path.is_dir() else path.parent
    card, config = (JsonObject.read(folder / name, optional=True) for name in (CARD, CONFIG))
    kind = card.text("drafter", "") or _stated_kind(config)
    return kind if kind in READERS else None


def _stated_kind(config: JsonObject) -> str:
    """What kind of head a configuration in one of the public layouts is of; empty: of none. A vocabulary of its own is
    stated by heads alone: flat ones of EAGLE-3 and of next-token modules call themselves what their layer is."""
    if kind := config.text("speculators_model_type", ""):
        return kind
    if "medusa_num_heads" in config.values:
        return "medusa"
    if config.child("dflash_config").text("projector_type", "") == "dspark":
        return "dspark"
    architectures = str(config.values.get("architectures"))
    named = next((kind for name, kind in ARCHITECTURES.items() if name in architectures), "")
    if named or "draft_vocab_size" not in config.values:
        return named
    return "mtp" if "mtp_num_hidden_layers" in config.values else "eagle3"
