"""`outrider plan`: does it fit this machine? Reads the headers of models, checks a head, loads nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import common

if TYPE_CHECKING:
    from outrider.bench.plan import Plan

EXIT_DOES_NOT_FIT = 1

PlannedDrafter = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        "-d",
        metavar="NAME",
        parser=common.one_drafter,
        help="With the name of a head (eagle3, mtp, medusa, dflash, dspark), --draft-model is its folder, unless "
        "it comes with the package. [default: as in generate]",
    ),
]
Context = Annotated[
    int | None,
    typer.Option(metavar="N", help="Tokens of a sequence, prompt and answer. [default: the model's, at most 4096]"),
]
Batch = Annotated[int, typer.Option(metavar="N", help="Sequences at a time.")]
DraftLength = Annotated[
    int, typer.Option("--k", "-k", metavar="K", parser=common.one_length, help="Draft tokens a round, up to 64.")
]


def plan(
    target: common.Target,
    drafter: PlannedDrafter = None,
    draft_model: common.DraftModel = None,
    context: Context = None,
    batch: Batch = 1,
    k: DraftLength = 5,
    dtype: common.Dtype = "auto",
    draft_dtype: common.DraftDtype = "auto",
    offline: common.Offline = False,
    json: common.Json = False,
    quiet: common.Quiet = False,
) -> None:
    """What the weights, caches and scratch of target and draft take in memory, before anything is loaded.

    Models that are not here are downloaded: their headers are read.
    Exit code 1 where it does not fit this machine; then it says what would.
    """
    from outrider.bench.head_size import Head
    from outrider.bench.plan import Model, Work, shipped_head, usual_context
    from outrider.bench.plan import plan as planned

    rides = _rides(drafter, draft_model, dtype, draft_dtype)
    ours = Model.open(target, _resolved(target, offline, quiet), dtype)
    theirs = head = None
    if draft_model is None:
        if (shipped := shipped_head(ours, drafter, k)) is not None:
            head = Head.open(shipped.drafter, shipped.path, draft_dtype)
    elif rides is not None:
        head = Head.open(rides, _resolved(draft_model, offline, quiet), draft_dtype)
    else:
        path = _resolved(draft_model, offline, quiet)
        theirs = Model.open(draft_model, path, draft_dtype, draft=True, keeps_precision=draft_model == target)
    length = usual_context(ours) if context is None else context
    found = planned(Work(ours, theirs, head, length, batch, k))
    if json:
        common.print_json(found.to_json())
    else:
        _print(found)
    if found.fits is False:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def _rides(drafter: str | None, draft_model: str | None, dtype: str, draft_dtype: str) -> str | None:
    """The drafter whose head --draft-model is; None where it is no head. Raises ConfigError for an unknown drafter or
    dtype, or a drafter that lacks its model."""
    from outrider.drafters.head_kinds import kind_of_head
    from outrider.engine.choosing import asked_for, check_options
    from outrider.engine.opening import needs_of

    names = asked_for(drafter, draft_model)
    common.check_drafters(names)
    check_options(names, "auto", None, None, dtype=dtype, draft_dtype=draft_dtype, draft_model=draft_model)
    if draft_model is None:
        return None
    return kind_of_head(draft_model) or next((name for name in names if "head" in needs_of(name)), None)


def _resolved(name: str, offline: bool, quiet: bool) -> Path:
    from outrider.cli.progress import download_bar
    from outrider.models.loader.sources import resolve

    with download_bar(quiet=quiet) as progress:
        return resolve(name, offline=offline, progress=progress)


def _print(found: Plan) -> None:
    from outrider.cli.terminal import megabytes, table

    work = found.work
    rows = [(item.name, ("" if item.exact else "about ") + megabytes(item.nbytes), item.how) for item in found.items]
    total = f"{work.batch} sequence(s) of {work.context} tokens, K = {work.k}"
    print(table([*rows, ("in all", megabytes(found.needed), total)], ("what", "memory", "how")))
    if found.available is None:
        print("this system does not tell how much memory is available")
        return
    print(f"available now: {megabytes(found.available)} (this process already holds {megabytes(found.process or 0)})")
    if found.fits:
        print("it fits, tightly: other programs may not take more" if found.tight else "it fits")
        return
    print(f"it does NOT fit: {megabytes(found.needed - found.available)} are missing")
    remedies = found.remedies()
    print(f"it would with: {', or '.join(remedies)}" if remedies else "no single change is enough: take smaller models")
