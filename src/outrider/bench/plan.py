"""`plan`: what two models, their caches and the work on them take in memory, before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.bench.head_size import Head
from outrider.bench.memory import available, rss
from outrider.control.fixed import check_k
from outrider.core.step import PREFILL_CHUNK
from outrider.core.types import TargetIdentity
from outrider.engine.opening import identify, missing_draft, needs_of
from outrider.engine.shipped import ShippedHead, default_drafter, last_of_cascade, shipped_for
from outrider.errors import ConfigError, ModelFileError
from outrider.models.decoder import Decoder
from outrider.models.footprint import sized_decoder
from outrider.models.loader.checkpoint import Checkpoint, UnknownArchitectureError, open_checkpoint
from outrider.models.tokenizer import Tokenizer

PLAN_SCHEMA = "outrider.plan/1"
TIGHT = 0.9
"""More than this share of what is available is called tight."""
COMMON_CONTEXT = 4096
DTYPES = ("quantised", "bfloat16", "int4")
"""Forms of the target's weights that may be smaller, the ones that lose least first."""
FLOAT_NBYTES = 4
MOST_BATCH = 10**9
"""More sequences than any machine holds."""


@dataclass(frozen=True, slots=True)
class Item:
    """Bytes that something takes. Exact ones follow from the file's header and the code; others are estimates."""

    name: str
    nbytes: int
    exact: bool
    how: str

    def to_json(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Model:
    """A model by its header, to be loaded as `dtype` says.

    A draft's "auto" may lose precision, unless it `keeps_precision`: as its own draft a model does.
    """

    name: str
    checkpoint: Checkpoint
    dtype: str
    draft: bool = False
    keeps_precision: bool = False

    @classmethod
    def open(cls, name: str, path: Path, dtype: str, *, draft: bool = False, keeps_precision: bool = False) -> Model:
        """Raises UserError for a file that is none, or a model that the native decoder does not run."""
        try:
            return cls(name, open_checkpoint(path), dtype, draft, keeps_precision)
        except UnknownArchitectureError as error:
            hint = "; a draft head is named with --drafter" if draft else ""
            raise ModelFileError(f"plan knows the models of the native decoder alone{hint}: {error}") from None

    @property
    def role(self) -> str:
        return "draft" if self.draft else "target"

    @property
    def context_length(self) -> int:
        return self.checkpoint.config.context_length

    @property
    def identity(self) -> TargetIdentity:
        """That of the model when it is loaded."""
        path = self.checkpoint.path
        return identify(Tokenizer.of(self.checkpoint), (self.name, path.name, path.stem))


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be run: `batch` sequences of `context` tokens, prompt and answer, with drafts of `k`.

    `head` is a draft head on the target, where there is one.
    """

    target: Model
    draft: Model | None
    head: Head | None
    context: int
    batch: int
    k: int

    def __post_init__(self) -> None:
        check_k(self.k)
        if not 1 <= self.context <= self.target.context_length:
            raise ConfigError(
                f"--context {self.context} is not allowed: give 1 to {self.target.context_length}, which "
                f"{self.target.name} holds"
            )
        if not 1 <= self.batch <= MOST_BATCH:
            raise ConfigError(f"--batch {self.batch} is not allowed: give an integer from 1 to {MOST_BATCH}")

    def items(self) -> list[Item]:
        found = list(_model_items(self.target, self))
        if self.draft is not None:
            found += _model_items(self.draft, self)
        if self.head is not None:
            how = f"{self.head.form}; its keys and values are of a few layers and are not counted"
            found.append(Item("head weights", self.head.nbytes, False, how))
        return found


def shipped_head(target: Model, drafter: str | None, k: int) -> ShippedHead | None:
    """The head of the package that would draft for this target where no file was named: that of `drafter`, or, where
    that is None, of what drafts by default. Raises ConfigError for a drafter that needs a head and has none."""
    heads = shipped_for(target.identity)
    if drafter is None:
        drafter = default_drafter(heads, k).value
    needs = needs_of(drafter)
    if "head" in needs and drafter not in heads:
        raise ConfigError(missing_draft(drafter))
    name = last_of_cascade(heads) if "drafters" in needs else drafter
    return heads.get(name) if name is not None else None


def usual_context(target: Model) -> int:
    """What is planned for when nothing is said."""
    return min(COMMON_CONTEXT, target.context_length)


@dataclass(frozen=True, slots=True)
class Plan:
    """What it takes, and whether this machine has it. `available` None: the system does not tell.

    `process` is what Python and its libraries hold already, which `available` does not count.
    """

    work: Work
    items: list[Item]
    available: int | None
    process: int | None

    @property
    def needed(self) -> int:
        return sum(item.nbytes for item in self.items)

    @property
    def fits(self) -> bool | None:
        """None: not known."""
        return None if self.available is None else self.needed <= self.available

    @property
    def tight(self) -> bool:
        return bool(self.fits) and self.available is not None and self.needed > TIGHT * self.available

    def remedies(self) -> list[str]:
        """Single changes with which it would fit."""
        return [] if self.fits is not False else [said for said, work in _smaller(self.work) if plan(work).fits]

    def to_json(self) -> dict[str, object]:
        work = self.work
        return {
            "schema": PLAN_SCHEMA,
            "target": work.target.name,
            "draft": work.draft.name if work.draft else None,
            "head": str(work.head.path) if work.head else None,
            "context": work.context,
            "batch": work.batch,
            "k": work.k,
            "items": [item.to_json() for item in self.items],
            "needed_bytes": self.needed,
            "available_bytes": self.available,
            "process_bytes": self.process,
            "fits": self.fits,
            "tight": self.tight,
            "remedies": self.remedies(),
        }


def plan(work: Work) -> Plan:
    """Reads headers and what the system says of its memory. Raises ConfigError for a dtype that is not possible."""
    return Plan(work, work.items(), available(), rss())


def cache_nbytes(decoder: Decoder, context: int, k: int) -> tuple[int, int]:
    """(held, on the way): bytes of one sequence's keys and values when it has `context` positions, and the most that
    the block before takes beside a larger one while it is copied.

    The sequence is a prompt and an answer of k + 1 tokens: the engine runs the prompt but its last token in chunks,
    then a round of 1 + k rows. Blocks double, so another length of the prompt may take up to twice the context's bytes,
    and never more than the model's own context.
    """
    cache, beside = decoder.new_cache(), 0
    ahead = max(context - k - 2, 0)
    chunks = [min(PREFILL_CHUNK, ahead - start) for start in range(0, ahead, PREFILL_CHUNK)]
    for count in [*chunks, min(k + 1, context)]:
        before = cache.nbytes
        cache.reserve(count)
        beside = max(beside, before if cache.nbytes > before else 0)
        cache.keep(range(count))
    return cache.nbytes, beside


def _model_items(model: Model, work: Work) -> Iterator[Item]:
    small = model.draft and not model.keeps_precision
    decoder, precision = sized_decoder(model.checkpoint, model.name, dtype=model.dtype, draft=small)
    yield Item(f"{model.role} weights", decoder.nbytes, True, f"{precision.value}: {precision.reason}")
    context = min(work.context, model.context_length)
    held, beside = cache_nbytes(decoder, context, work.k)
    kind = str(decoder.kv_dtype).removeprefix("torch.")
    how = f"{work.batch} x {context} positions in {kind}, spare room included"
    yield Item(f"{model.role} cache", held * work.batch, True, how)
    how = "rows of a pass and their logits; a cache beside its larger copy"
    yield Item(f"{model.role} scratch", _scratch_nbytes(decoder, work, model.draft) + beside, False, how)


def _scratch_nbytes(decoder: Decoder, work: Work, draft: bool) -> int:
    """An estimate: the widest arrays of a pass over a prompt, and the logits of a round with a copy for sampling. A
    draft model takes the prompts of all sequences in one pass."""
    config, rows = decoder.config, work.batch * (work.k + 1)
    attended = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
    width = 3 * config.hidden_size + attended + 3 * config.ffn_size
    prefill = PREFILL_CHUNK * (work.batch if draft else 1)
    return FLOAT_NBYTES * (max(prefill, rows) * width + 2 * rows * decoder.vocab_size)


def _smaller(work: Work) -> Iterator[tuple[str, Work]]:
    """Changes that may make it fit, each as little as it takes, and the work with it."""
    for dtype in DTYPES:
        try:
            smaller = replace(work, target=replace(work.target, dtype=dtype))
            smaller.items()
        except ConfigError:
            continue
        yield f"--dtype {dtype}", smaller
    powers = (work.context - 1).bit_length()  # of two, below the context
    if (shorter := _largest(powers, lambda number: replace(work, context=1 << number - 1))) is not None:
        yield f"--context {shorter.context}", shorter
    if (fewer := _largest(work.batch - 1, lambda batch: replace(work, batch=batch))) is not None:
        yield f"--batch {fewer.batch}", fewer
    if work.draft is not None:
        yield "no --draft-model", replace(work, draft=None)


def _largest(most: int, work_of: Callable[[int], Work]) -> Work | None:
    """The work of the largest number from 1 to `most` with which it fits, found by halving; None: not even with 1."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if plan(work_of(middle)).fits else (low, middle - 1)
    return work_of(low) if low else None
