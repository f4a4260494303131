"""`outrider models`: what there is, fetching it, looking inside, and whether two models pair. Runs no model."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import common
from outrider.cli.terminal import count, megabytes, table

if TYPE_CHECKING:
    from outrider.models.loader.checkpoint import Checkpoint
    from outrider.models.pairing import Pairing
    from outrider.models.tokenizer import Tokenizer

EXIT_INCOMPATIBLE = 1

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List, fetch, inspect and pair models.")

Name = Annotated[str, typer.Argument(metavar="NAME", help=f"A model: {common.MODEL_NAMES}.")]
Draft = Annotated[str, typer.Argument(metavar="DRAFT", help="The smaller model that would draft for it.")]
Load = Annotated[
    bool, typer.Option("--load", help="Also load the weights: their memory and the time it takes, measured.")
]


@app.command("list")
def list_(json: common.Json = False) -> None:
    """The catalogue, and what of it is on this machine."""
    from outrider.engine.shipped import shipped_heads
    from outrider.models.loader.sources import list_models, models_folder

    listed, shipped = list_models(), shipped_heads()
    heads = {model.entry.name: [h.drafter for h in shipped if h.model == model.entry.name] for model in listed}
    if json:
        models = [
            {
                "name": model.entry.name,
                "aliases": list(model.entry.aliases),
                "description": model.entry.description,
                "licence": model.entry.licence,
                "size_bytes": model.entry.size_bytes,
                "sha256": model.entry.sha256,
                "path": str(model.path) if model.path is not None else None,
                "heads": heads[model.entry.name],
            }
            for model in listed
        ]
        common.print_json({"folder": str(models_folder()), "models": models})
        return
    rows = [
        (
            model.entry.name,
            megabytes(model.entry.size_bytes),
            model.entry.licence,
            "yes" if model.path is not None else "no",
            ", ".join(heads[model.entry.name]) or "-",
            model.entry.description,
        )
        for model in listed
    ]
    print(table(rows, ("name", "size", "licence", "cached", "heads", "what it is")))
    print(f"\nCached in {models_folder()}. A model may also be {common.MODEL_NAMES}.")


@app.command()
def pull(name: Name, offline: common.Offline = False, json: common.Json = False, quiet: common.Quiet = False) -> None:
    """Fetch a model, check it, and print where it is. A cached one is checked again."""
    from outrider.cli.progress import download_bar
    from outrider.models.loader.sources import resolve

    with download_bar(quiet=quiet) as progress:
        path = resolve(name, offline=offline, progress=progress, verify=True)
    if json:
        common.print_json({"name": name, "path": str(path), "size_bytes": _bytes_on_disk(path)})
    else:
        print(path)


@app.command()
def info(name: Name, load: Load = False, offline: common.Offline = False, json: common.Json = False) -> None:
    """Architecture, sizes, quantisation, context, tokenizer, chat template and memory of a model."""
    facts = _inspect(name, offline).facts()
    if load:
        facts |= _measured(name, offline)
    if json:
        common.print_json(facts)
        return
    width = max(map(len, facts))
    for key, value in facts.items():
        print(f"{key.removesuffix('_bytes').replace('_', ' '):{width}}  {_told(key, value)}")


@app.command()
def check(
    target: common.Target,
    draft: Draft,
    offline: common.Offline = False,
    json: common.Json = False,
) -> None:
    """Whether DRAFT can draft for TARGET: their tokenizers id by id, and their sizes. Exit code 1 if it cannot."""
    from outrider.models.pairing import compare_tokenizers

    ours, theirs = _inspect(target, offline), _inspect(draft, offline)
    pairing = compare_tokenizers(ours.tokenizer, theirs.tokenizer)
    warnings = list(pairing.notes)
    if theirs.n_parameters >= ours.n_parameters:
        warnings.append(
            f"the draft {draft} ({count(theirs.n_parameters)} parameters) is no smaller than the target {target} "
            f"({count(ours.n_parameters)}): it cannot pay; swap them, or use a smaller draft"
        )
    if json:
        common.print_json(_check_document(ours, theirs, pairing, warnings))
    else:
        print(f"{'usable' if pairing.usable else 'NOT usable'}: {draft} as a draft for {target}")
        print(f"tokenizers: {pairing.sentence}")
        for label, model in (("target", ours), ("draft", theirs)):
            size = f"{count(model.n_parameters)} parameters, {megabytes(_bytes_on_disk(model.path))} on disk"
            print(f"{label}: {model.name}, {size}")
        for warning in warnings:
            print(f"warning: {warning}")
    if not pairing.usable:
        raise typer.Exit(EXIT_INCOMPATIBLE)


@dataclass(frozen=True, slots=True)
class _Inspected:
    """A model's files, opened and checked; no weights in memory."""

    name: str
    path: Path
    checkpoint: Checkpoint
    tokenizer: Tokenizer

    @property
    def n_parameters(self) -> int:
        return sum(prod(self.checkpoint.shape(name)) for name in self.checkpoint.names())

    @property
    def heads(self) -> list[str]:
        """The drafters whose heads come with the package for this model."""
        from outrider.engine.opening import identify
        from outrider.engine.shipped import shipped_for

        return list(shipped_for(identify(self.tokenizer, (self.name, self.path.name, self.path.stem))))

    def facts(self) -> dict[str, object]:
        config, tokenizer = self.checkpoint.config, self.tokenizer
        return {
            "name": self.name,
            "path": str(self.path),
            "architecture": config.architecture,
            "parameters": self.n_parameters,
            "layers": config.n_layers,
            "hidden_size": config.hidden_size,
            "ffn_size": config.ffn_size,
            "heads": config.n_heads,
            "kv_heads": config.n_kv_heads,
            "head_size": config.head_dim,
            "context_length": config.context_length,
            "vocabulary_rows": config.vocab_size,
            "vocabulary_used": tokenizer.used_size,
            "end_of_text_ids": list(tokenizer.eos_ids),
            "tokenizer_digest": tokenizer.digest[:16],
            "chat_template": "present" if self.checkpoint.chat_template is not None else "absent",
            "heads_of_the_package": self.heads,
            "quantisation": self.checkpoint.quantisation,
            "weights_on_disk_bytes": self.checkpoint.size_bytes,
            "weights_in_bfloat16_bytes": 2 * self.n_parameters,
            "weights_in_float32_bytes": 4 * self.n_parameters,
        }


def _inspect(name: str, offline: bool) -> _Inspected:
    """Opens a model's files, fetching them if need be. Raises UserError or FetchError."""
    from outrider.cli.progress import download_bar
    from outrider.models.loader.checkpoint import open_checkpoint
    from outrider.models.loader.sources import resolve
    from outrider.models.tokenizer import Tokenizer

    with download_bar(quiet=False) as progress:
        path = resolve(name, offline=offline, progress=progress)
    checkpoint = open_checkpoint(path)
    return _Inspected(name, path, checkpoint, Tokenizer.of(checkpoint))


def _measured(name: str, offline: bool) -> dict[str, object]:
    from outrider.engine.opening import open_model

    opened = open_model(name, offline=offline)
    decisions = {decision.field: f"{decision.value} ({decision.reason})" for decision in opened.decisions}
    return {"memory_as_loaded_bytes": opened.size_bytes, "load_s": round(opened.load_s, 2), **decisions}


def _told(key: str, value: object) -> object:
    """A fact for people."""
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return megabytes(value) if key.endswith("_bytes") and isinstance(value, (int, float)) else value


def _bytes_on_disk(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def _check_document(ours: _Inspected, theirs: _Inspected, pairing: Pairing, warnings: list[str]) -> dict[str, object]:
    return {
        "target": ours.name,
        "draft": theirs.name,
        "usable": pairing.usable,
        "verdict": pairing.verdict.value,
        "sentence": pairing.sentence,
        "common_ids": pairing.n_common,
        "overlap": pairing.overlap,
        "different_ids": pairing.n_different,
        "first_differences": [
            {"token_id": d.token_id, "target": _shown(d.target), "draft": _shown(d.draft)} for d in pairing.differences
        ],
        "target_parameters": ours.n_parameters,
        "draft_parameters": theirs.n_parameters,
        "warnings": warnings,
    }


def _shown(token: bytes | None) -> str | None:
    return None if token is None else token.decode("utf-8", "backslashreplace")
