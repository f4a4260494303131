"""What the commands share: the spelling of their options, and reading what they name. Imports no torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from outrider.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from outrider.core.trace import StepTrace
    from outrider.core.types import SamplingParams

MODEL_NAMES = "a path, a name of `outrider models list`, hf:org/name[:file], or pypi:package"


def one_drafter(text: str) -> str:
    """What is drafted with where nothing chooses between drafters. Raises ConfigError for several names."""
    if "," in text:
        raise ConfigError(
            f"--drafter {text!r} names several drafters and one is used here: give one name (outrider bench and "
            "outrider verify compare several; --controller governor chooses between several; the drafter cascade joins "
            "suffix with another)"
        )
    return text


def one_length(text: str | int) -> int:
    """The value of an option that takes one K."""
    try:
        return int(text)
    except ValueError:
        from outrider.core.types import MAX_K

        several = " (outrider bench and outrider verify take several)" if "," in str(text) else ""
        raise typer.BadParameter(
            f"K = {text!r} is not allowed: give one integer from 0 to {MAX_K}, as in --k 5{several}"
        ) from None


def answer_length(text: str | int) -> int:
    """The value of --max-tokens."""
    try:
        length = int(text)
    except ValueError:
        length = 0
    if length < 1:
        raise typer.BadParameter(f"max_tokens = {text} is not allowed: give an integer >= 1, as in --max-tokens 256")
    return length


Model = Annotated[str | None, typer.Option("--model", "-m", help=f"The target: {MODEL_NAMES}. [default: SmolLM2-135M]")]
Target = Annotated[str, typer.Argument(metavar="TARGET", help=f"The target: {MODEL_NAMES}.")]
DrafterName = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        "-d",
        metavar="NAME",
        help="What drafts: none, ngram, suffix, prediction, draft_model, layer_skip, eagle3, mtp, medusa, dflash, "
        "dspark, cascade. "
        "[default: draft_model with --draft-model, prediction with --prediction, cascade with a head that comes with "
        "the package for this target (eagle3, dspark), else suffix]",
    ),
]
DrafterNames = Annotated[
    list[str] | None,
    typer.Option(
        "--drafter", "-d", metavar="NAME[,NAME...]", help="The drafters, separated by commas or each with its own -d."
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        metavar="MODEL",
        help="A smaller model of the target's vocabulary; for a head (eagle3, mtp, medusa, dflash, dspark) its folder, "
        "if it does not come with the package.",
    ),
]
DraftLength = Annotated[
    int | None,
    typer.Option(
        "--k",
        "-k",
        metavar="K",
        parser=one_length,
        help="Draft tokens a round, up to 64; 0 is plain decoding. [default: what the head's card says, else 5]",
    ),
]
MinConfidence = Annotated[
    float | None,
    typer.Option(
        "--min-confidence",
        metavar="P",
        help="End a draft where its drafter thinks all of it less probable to be kept than this, 0 to 1; for heads and "
        "draft models. [default: what the head's card says, else 0]",
    ),
]


def draft_lengths(default: str) -> typer.models.OptionInfo:
    """The option --k of a command that compares several."""
    made: typer.models.OptionInfo = typer.Option(
        "--k",
        "-k",
        metavar="K[,K...]",
        help=f"Draft tokens a round, up to 64, separated by commas or each with its own -k. [default: {default}]",
    )
    return made


ControllerName = Annotated[
    str,
    typer.Option(
        "--controller",
        metavar="NAME",
        help="Who decides how much is drafted: fixed (K tokens every round) or governor (each round what pays, up to K "
        "tokens or none, by costs that outrider profile has kept; several drafters may be named).",
    ),
]
Rule = Annotated[
    str,
    typer.Option(
        help="Acceptance rule: auto (greedy at temperature 0, block above), greedy, chain, block, match, coupled; "
        "lossy: typical, top1."
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="The target's weights in memory: auto, quantised (the file's own blocks), int4 (4.5 bits a weight), "
        "bfloat16, float32."
    ),
]
DraftDtype = Annotated[
    str, typer.Option(help="The same for the draft model; auto is int4 where the CPU kernels run.", metavar="TEXT")
]
Threads = Annotated[
    int | None, typer.Option(metavar="N", help="CPU threads, up to the logical processors. [default: physical cores]")
]
Offline = Annotated[bool, typer.Option("--offline", help="Never fetch: fail when the model is not on this machine.")]

Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 takes the likeliest token every time.")]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option(help="Keep the smallest likeliest set with at least this mass, in (0, 1].")]
MinP = Annotated[float, typer.Option(help="Keep tokens with at least this share of the likeliest one's, in [0, 1).")]
PresencePenalty = Annotated[float, typer.Option(help="Against tokens already in the answer, in [-2, 2].")]
FrequencyPenalty = Annotated[float, typer.Option(help="Against each time a token is in the answer, in [-2, 2].")]
RepetitionPenalty = Annotated[float, typer.Option(help="Against tokens in prompt or answer, > 0; 1 is off.")]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Same seed, same answer. [default: drawn, and reported]")]
MaxTokens = Annotated[
    int, typer.Option("--max-tokens", "-n", metavar="N", parser=answer_length, help="Longest answer, in tokens.")
]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End the answer before this text; repeatable.")]
JsonSchema = Annotated[
    str | None, typer.Option(metavar="FILE|TEXT", help="A JSON schema that the answer must satisfy.")
]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--raw",
        help="Through the chat template, or the text as it is. [default: --chat when the model has a template]",
    ),
]


def _configure(context: typer.Context, path: Path | None) -> Path | None:
    """The values of a configuration become the defaults of the command's options, and its target."""
    if path is None:
        return None
    from outrider.tune.configuration import read_configuration

    told: dict[str, object] = dict(read_configuration(path))
    if "model" in told:
        told["target"] = told["model"]
    many = {param.name for param in context.command.params if getattr(param, "multiple", False)}
    context.default_map = {name: [str(value)] if name in many else value for name, value in told.items()}
    return path


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        is_eager=True,
        callback=_configure,
        help="Model, drafter, K and more as outrider tune wrote them; what is said here goes before it.",
    ),
]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="The system message of the chat template.")]
TraceFile = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE", help="Write every round (StepTrace) as a line of JSON.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document as the last line of stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Nothing on stderr but errors and warnings.")]


def split_names(texts: Seq[str], option: str = "--drafter") -> list[str]:
    """The names of the option's comma-separated lists, in order, each once; none where the option was not given. Raises
    ConfigError where it was given and names nothing."""
    names = list(dict.fromkeys(name.strip() for text in texts for name in text.split(",") if name.strip()))
    if texts and not names:
        raise ConfigError(
            f"{option} {','.join(texts)!r} names nothing: give names separated by commas, or leave the option out"
        )
    return names


def check_drafters(names: list[str]) -> None:
    """Raises ConfigError, with the closest name, for a drafter that cannot be asked for."""
    from outrider.core.registry import drafter_names, unknown

    allowed = drafter_names()
    for name in names:
        if name not in allowed:
            raise unknown("drafter", name, allowed)


def read_text(path: Path, option: str) -> str:
    """A UTF-8 text file that an option names. Raises ConfigError."""
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option} {path} is not UTF-8 text (byte {error.start}): convert it first") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"{option} {path} cannot be read: {reason}; give the path of a text file") from None


def read_prompt(argument: str | None, file: Path | None) -> str:
    """The prompt: the argument, the file, or what is piped in (without its last newline). Raises UserError."""
    if argument is not None and file is not None:
        raise ConfigError("two prompts were given, PROMPT and --file: give one of them")
    if argument is not None:
        text = argument
    elif file is not None:
        text = read_text(file, "--file").removesuffix("\n")
    elif not sys.stdin.isatty():
        text = read_stdin().removesuffix("\n")
    else:
        raise RequestError("no prompt was given: write it after `generate`, name a file with --file, or pipe it in")
    if not text:
        raise RequestError("the prompt is empty: give at least one character")
    return text


def read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError(f"the piped prompt is not UTF-8 text (byte {error.start}): convert it first") from None


def read_schema(text: str) -> str:
    """A JSON schema given as text, or as the path of a file. Raises ConfigError."""
    if not text.lstrip().startswith(("{", "true", "false")):
        text = read_text(Path(text), "--json-schema")
    try:
        json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--json-schema is not valid JSON: {error}; give a JSON schema object or its file") from None
    return text


def sampling_params(
    seed: int | None, stop: list[str] | None, json_schema: str | None, **fields: object
) -> SamplingParams:
    """The sampling parameters of the options. A seed is drawn here when none is given, so that it can be reported."""
    import secrets

    from outrider.core.types import SamplingParams

    return SamplingParams(
        seed=secrets.randbits(48) if seed is None else seed,
        stop=tuple(stop or ()),
        json_schema=read_schema(json_schema) if json_schema is not None else None,
        **fields,  # type: ignore[arg-type]  # checked by SamplingParams itself
    )


class TraceWriter:
    """The trace file: every round a line, until `active` is cleared."""

    def __init__(self, file: TextIO | None) -> None:
        self.active = True
        self._file = file

    @classmethod
    @contextmanager
    def to(cls, path: Path | None) -> Iterator[TraceWriter]:
        if path is None:
            yield cls(None)
            return
        try:
            file = path.open("w", encoding="utf-8")
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ConfigError(
                f"--trace {path} cannot be written: {reason}; give a file in a folder that exists"
            ) from None
        with file:
            yield cls(file)

    def write(self, step: StepTrace) -> None:
        if self.active and self._file is not None:
            self._file.write(step.to_json() + "\n")


def print_json(document: dict[str, object]) -> None:
    """The one document on the last line of stdout."""
    print(json.dumps(document, ensure_ascii=False, allow_nan=False), flush=True)
