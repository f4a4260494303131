"""`outrider train`: a draft head for a target, from prompts to a head that was tried as it will be served."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from outrider.cli import common
from outrider.errors import ConfigError

N = TypeVar("N", int, float)

if TYPE_CHECKING:
    from outrider.models.load import LoadedModel
    from outrider.train.evaluate import Served
    from outrider.train.finish import Finished
    from outrider.train.run import TrainRun
    from outrider.train.trainer import Progressed

Kind = Annotated[
    str, typer.Argument(metavar="HEAD", help="What is trained: eagle3, mtp, medusa, dflash, dspark, draft_model.")
]
TargetOption = Annotated[str, typer.Option("--model", "-m", metavar="MODEL", help=f"The target: {common.MODEL_NAMES}.")]
PromptFile = Annotated[
    Path, typer.Option("--prompts", metavar="FILE", help="Prompts to answer, a JSON object a line; may be gzipped.")
]
Out = Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the run lies. The same command goes on.")]
Data = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Where the harvest lies; several runs may share one. [default: OUT/harvest]"),
]
MoreData = Annotated[
    list[str] | None,
    typer.Option("--more-data", metavar="FOLDER", help="A finished harvest of the same target to learn from, too."),
]
Conversations = Annotated[
    int | None, typer.Option(metavar="N", help="Conversations to harvest. [default: one for each prompt]")
]
AnswerLength = Annotated[int, typer.Option("--max-tokens", "-n", metavar="N", help="Longest answer, in tokens.")]
Temperatures = Annotated[str, typer.Option(metavar="T[,T...]", help="Of the answers, taken in turn.")]
FollowUps = Annotated[float, typer.Option(metavar="SHARE", help="Of the conversations, those with a second turn.")]
Readings = Annotated[
    float,
    typer.Option(metavar="SHARE", help="Of the conversations, those that ask about a longer text."),
]
WrittenShare = Annotated[
    float, typer.Option("--written", metavar="SHARE", help="Of the conversations, those that the target itself begins.")
]
Batch = Annotated[int, typer.Option(metavar="N", help="Conversations that are answered at a time.")]
Epochs = Annotated[int, typer.Option(metavar="N", help="Times that the harvest is gone through.")]
Rate = Annotated[float, typer.Option("--lr", metavar="RATE", help="The highest learning rate.")]
BatchTokens = Annotated[int, typer.Option(metavar="N", help="Tokens of a training step.")]
Precision = Annotated[
    str, typer.Option(metavar="TYPE", help="Of the products: bfloat16, float32; auto: what is fastest here.")
]
Rounded = Annotated[
    float, typer.Option(metavar="SHARE", help="Of the steps, the last ones, with weights rounded as a CPU serves them.")
]
DraftVocab = Annotated[int, typer.Option(metavar="N", help="Tokens that the head can say, the frequent ones; 0: all.")]
Layers = Annotated[
    str | None,
    typer.Option(metavar="I[,I...]", help="Target layers whose outputs are read. [default: low, middle, high, last]"),
]
Depth = Annotated[int, typer.Option(metavar="N", help="The head's own layers (dflash, dspark, medusa).")]
BlockSize = Annotated[int, typer.Option(metavar="N", help="Tokens of a block (dflash, dspark).")]
Rank = Annotated[int, typer.Option(metavar="N", help="Of the Markov head (dspark).")]
Markov = Annotated[str, typer.Option(metavar="KIND", help="The Markov head: vanilla, rnn (dspark).")]
Anchors = Annotated[int, typer.Option(metavar="N", help="Blocks of a sequence that a step learns (dflash, dspark).")]
Steps = Annotated[int, typer.Option(metavar="N", help="Draft tokens learned (eagle3, mtp); heads (medusa).")]
Distance = Annotated[
    float,
    typer.Option("--tv", metavar="SHARE", help="Of the loss, the distance of p and q; the rest: cross-entropy."),
]
DraftFolder = Annotated[
    str | None, typer.Option("--draft-model", metavar="FOLDER", help="The model to train on (draft_model).")
]
DraftLength = Annotated[
    int,
    typer.Option(
        "--k",
        "-k",
        metavar="K",
        parser=common.one_length,
        help="Draft tokens a round when the head is tried, and what its card recommends.",
    ),
]
Start = Annotated[
    str | None,
    typer.Option("--from", metavar="FOLDER", help="A head of these sizes to train on. [default: a new one]"),
]
Layout = Annotated[str | None, typer.Option(metavar="NAME", help="The layout of the finished head's files.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done and what it takes, and do nothing.")]


def train(
    kind: Kind,
    prompts: PromptFile,
    out: Out,
    model: TargetOption = "smollm2-135m",
    data: Data = None,
    more_data: MoreData = None,
    conversations: Conversations = None,
    max_tokens: AnswerLength = 192,
    temperatures: Temperatures = "0,0,1",
    follow_ups: FollowUps = 0.2,
    readings: Readings = 0.1,
    written: WrittenShare = 0.5,
    batch: Batch = 32,
    epochs: Epochs = 3,
    lr: Rate = 8e-4,
    batch_tokens: BatchTokens = 1024,
    precision: Precision = "auto",
    rounded: Rounded = 0.3,
    draft_vocab: DraftVocab = 8192,
    layers: Layers = None,
    depth: Depth = 2,
    block_size: BlockSize = 5,
    markov_rank: Rank = 32,
    markov_head: Markov = "vanilla",
    anchors: Anchors = 32,
    steps: Steps = 4,
    tv: Distance = 0.0,
    draft_model: DraftFolder = None,
    start: Start = None,
    k: DraftLength = 5,
    seed: Annotated[int, typer.Option(metavar="N", help="Of everything that is drawn.")] = 0,
    layout: Layout = None,
    threads: common.Threads = None,
    offline: common.Offline = False,
    dry_run: DryRun = False,
    json: common.Json = False,
    quiet: common.Quiet = False,
) -> None:
    """Let the target answer prompts, train a head on what it says and thinks, try the head as it will be served.

    A run that was stopped goes on with the same command. The finished head lies in OUT/head, with its card.
    """
    from outrider.cli.terminal import print_plan
    from outrider.core.json_file import JsonObject
    from outrider.drafters.head_card import CARD
    from outrider.drafters.options import require_int
    from outrider.engine.prompt_file import read_prompts
    from outrider.train.harvest import HarvestSettings
    from outrider.train.heads import HeadSettings, harvested_layers
    from outrider.train.plan import foretell
    from outrider.train.recipes import require_kind
    from outrider.train.run import RunSettings, TrainRun, native
    from outrider.train.trainer import TrainSettings

    require_kind(kind, layout)
    require_int("train", "batch", batch, 1)
    chosen = read_prompts(prompts)
    head = HeadSettings(
        draft_vocab=draft_vocab,
        layers=_parsed("layers", layers, int) if layers else (),
        depth=depth,
        block_size=block_size,
        markov_rank=markov_rank,
        markov_head_type=markov_head,
        anchors=anchors,
        steps=steps,
        tv=tv,
        draft_model=draft_model or "",
        start=start or "",
    )
    training = TrainSettings(
        epochs=epochs, lr=lr, batch_tokens=batch_tokens, precision=precision, rounded=rounded, seed=seed
    )
    opened = _open(model, threads, offline, quiet)
    harvest = HarvestSettings(
        conversations=len(chosen) if conversations is None else conversations,
        layers=harvested_layers(native(opened).n_layers, head.layers),
        max_tokens=max_tokens,
        temperatures=_parsed("temperatures", temperatures, float),
        follow_ups=follow_ups,
        readings=readings,
        written=written,
        seed=seed,
    )
    settings = RunSettings(kind, harvest, head, training, k, tuple(more_data or ()))
    run = TrainRun(opened, chosen, settings, out, data or out / "harvest")
    plan = foretell(run)
    if not quiet:
        print_plan(plan.decisions())
    if dry_run:
        if json:
            common.print_json(plan.to_json())
        return
    with _disk(out):
        done = _run(run, batch, layout, quiet)
    if json:
        card = dict(JsonObject.read(done.folder / CARD).values)
        common.print_json({"head": str(done.folder), "verdict": done.verdict, "card": card})


def _open(model: str, threads: int | None, offline: bool, quiet: bool) -> LoadedModel:
    """The target; the harvest runs in the kernels, and torch, which trains, takes the same threads."""
    import torch

    from outrider import kernels
    from outrider.cli.progress import download_bar
    from outrider.engine.opening import open_model

    if threads is not None:
        kernels.set_threads(threads)
    torch.set_num_threads(kernels.threads())
    torch.set_flush_denormal(True)  # the far tails of a softmax, which cost much and change nothing
    with download_bar(quiet=quiet) as progress:
        return open_model(model, offline=offline, progress=progress)


def _run(run: TrainRun, batch: int, layout: str | None, quiet: bool) -> Finished:
    """All stages that are left, with their bars."""
    from outrider.train.finish import finish
    from outrider.train.plot import write_plot

    run.begin()
    harvester = run.harvester()
    with _bar("answers", len(harvester.left), quiet) as advance:
        harvester.run(batch, lambda tokens: advance(f"{tokens} tokens"))
    trainer = run.trainer()
    with _bar("steps", trainer.steps, quiet, done=trainer.step) as advance:
        trainer.run(lambda done: advance(_progress(done)))
    if write_plot(run.folder) is None and not quiet:
        _say("no plot was drawn: pip install 'outrider[plots]'")

    def told(name: str, served: Served) -> None:
        if not quiet:
            _say(
                f"{name}: acceptance length {served.acceptance_length:.2f} at K = {run.settings.k}; by position "
                + ", ".join(f"{share:.2f}" for share in served.conditional)
            )

    done = finish(run, trainer, told, layout)
    if not quiet:
        _say(f"the head lies in {done.folder}; use it with --drafter {run.settings.kind} --draft-model {done.folder}")
        for sentence in done.verdict:
            _say(f"verdict: {sentence}")
    return done


@contextmanager
def _disk(folder: Path) -> Iterator[None]:
    """A disk that fails is one line."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"{error.filename or folder}: {reason}; make room, or give another folder") from None


@contextmanager
def _bar(what: str, total: int, quiet: bool, done: int = 0) -> Iterator[Callable[[str], None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[told]}"),
    )
    shown = Console(stderr=True)
    with Progress(*columns, console=shown, disable=quiet or not shown.is_terminal) as progress:
        task = progress.add_task(what, total=total, completed=done, told="")
        yield lambda told: progress.update(task, advance=1, told=told)


def _progress(done: Progressed) -> str:
    agreement = " ".join(f"{share:.2f}" for share in done.agreement)
    return f"loss {done.loss:.3f}, agreement by position {agreement}"


def _parsed(name: str, text: str, kind: Callable[[str], N]) -> tuple[N, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--{name} {text!r} is not allowed: give numbers separated by commas") from None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
