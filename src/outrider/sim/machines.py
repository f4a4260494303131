"""What passes cost, by machine: measured by `outrider profile`, or from figures that others published.

Nothing built in here was measured by this project, and each says where its figures are from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType

from outrider.core.documents import read_document
from outrider.core.json_file import JsonObject
from outrider.errors import ConfigError, ModelFileError
from outrider.sim.theory import RowCost, flat, measured_v

PROFILE_SCHEMA = "outrider.profile/1"
LEAST_PASS_S = 1e-7
ROWS_SHOWN = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)


@dataclass(frozen=True, slots=True)
class Machine:
    """A target on a machine, as a simulation sees it.

    `kind` is "measured" (by `outrider profile`), "published" (measured by others), "data sheet" (a bound that follows
    from peak rates) or "assumed". Up to `rows` rows v rests on figures; beyond it is continued (None: it is a formula).
    `c` is a pass of the draft model that the figures name, `overhead` a round's part outside passes, both in passes
    over one row, which takes `pass_s` seconds where that is known.
    """

    name: str
    kind: str
    source: str
    v: RowCost
    rows: int | None = None
    c: float | None = None
    overhead: float = 0.0
    pass_s: float | None = None

    def draft_cost(self, told: float | None) -> float:
        """`told`, else what the machine's figures say. Raises ConfigError where nobody says it."""
        found = self.c if told is None else told
        if found is None:
            raise ConfigError(
                f"what drafting costs is not known, for machine {self.name!r} does not say it: give --draft-cost C, in "
                "passes of the target over one row (0 for a look-up that costs nothing)"
            )
        return found

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "kind": self.kind,
            "source": self.source,
            "v": {str(rows): self.v(rows) for rows in ROWS_SHOWN},
            "rows": self.rows,
            "draft_cost": self.c,
            "overhead": self.overhead,
            "pass_seconds": self.pass_s,
        }


def _roofline(name: str, source: str, gbps: float, tflops: float, weight_bytes: float) -> Machine:
    """v from peak rates: reading the weights once, or two operations a weight and row, whichever takes longer."""
    crossing = 1e12 * tflops / 2 / (1e9 * gbps / weight_bytes)
    told = f"{source}; v = max(1, rows / {crossing:.0f}) is a bound: no program reaches both peaks"
    return Machine(name, "data sheet", told, lambda rows: max(1.0, rows / crossing))


_T5 = (
    "Leviathan et al., arXiv 2211.17192, table 4: T5-XXL (11B) on a TPU-v4, drafts by {}, c from profiler traces; "
    "v = 1 is the paper's assumption"
)
_CHEN = (
    "Chen et al., arXiv 2302.01318: Chinchilla (70B) on 16 TPU-v4, 14.1 ms a token, drafts by a 4B model, 1.8 ms a "
    "token; v from figure 1, where a round with K = 7 takes about 28.6 ms (read off the plot)"
)
_ADA = "NVIDIA Ada GPU architecture white paper, appendix A: RTX 4090, 1008 GB/s, 165.2 TFLOPS (bfloat16, float32 sums)"
_HOPPER = "NVIDIA H100 data sheet: H100 SXM, 3350 GB/s, 989.4 TFLOPS (bfloat16, dense)"

MACHINES: Mapping[str, Machine] = MappingProxyType(
    {
        machine.name: machine
        for machine in (
            Machine("ideal", "assumed", "a pass over any number of rows costs one pass", flat),
            Machine("tpu-v4-t5-small", "published", _T5.format("T5-small (77M)"), flat, c=0.02),
            Machine("tpu-v4-t5-base", "published", _T5.format("T5-base (250M)"), flat, c=0.04),
            Machine("tpu-v4-t5-large", "published", _T5.format("T5-large (800M)"), flat, c=0.11),
            Machine(
                "tpu-v4-chinchilla",
                "published",
                _CHEN,
                measured_v({1: 14.1, 8: 28.6 - 7 * 1.8}),
                rows=8,
                c=1.8 / 14.1,
                pass_s=0.0141,
            ),
            _roofline("h100-sxm-bf16", _HOPPER, 3350, 989.4, 2),
            _roofline("rtx-4090-bf16", _ADA, 1008, 165.2, 2),
            _roofline("rtx-4090-4bit", f"{_ADA}; weights of 4.5 bits, multiplied in bfloat16", 1008, 165.2, 4.5 / 8),
        )
    }
)


def find_machine(name: str) -> Machine:
    """A built-in machine, or that of a file that `outrider profile --json` wrote. Raises ConfigError."""
    if name in MACHINES:
        return MACHINES[name]
    path = Path(name)
    if not path.is_file():
        close = get_close_matches(name, MACHINES, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ConfigError(
            f"--machine {name!r} is no file and no built-in machine{hint}: give the document of outrider profile "
            f"--json, or one of {', '.join(MACHINES)}"
        )
    document = read_document(path, "--machine", PROFILE_SCHEMA)
    try:
        return _measured(name, document)
    except ModelFileError as error:
        raise ConfigError(f"--machine {error}; measure it again with outrider profile --json") from None


def _measured(path: str, document: JsonObject) -> Machine:
    """The machine of a profile. Raises ModelFileError for a figure that is missing or none."""
    table = document.child("target_seconds")
    seconds = {rows: table.number(str(rows)) for rows in table.whole_keys()}
    try:
        v = measured_v(seconds)
    except ConfigError as error:
        raise ModelFileError(f"{path}: {error}") from None
    if seconds[1] < LEAST_PASS_S:
        raise ModelFileError(f"{path}: a pass over 1 row takes {seconds[1]} s, expected {LEAST_PASS_S} or more")
    context = document.child("settings").whole("context")
    target, cpu = document.child("model").text("target"), document.child("machine").text("cpu", "an unknown processor")
    overhead_s = document.number("overhead_seconds", 0.0)
    if overhead_s < 0:
        raise ModelFileError(f"{path}: 'overhead_seconds' is {overhead_s}, expected a number >= 0")
    source = f"{path}: {target} behind {context} tokens on {cpu}"
    return Machine(path, "measured", source, v, max(seconds), overhead=overhead_s / seconds[1], pass_s=seconds[1])
