"""Acceptance that `outrider bench` recorded, to be replayed."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.core.documents import read_document
from outrider.core.json_file import JsonObject
from outrider.errors import ConfigError, ModelFileError

if TYPE_CHECKING:
    from outrider.sim.workload import Scripted

BENCH_SCHEMA = "outrider.bench/1"
PLAIN = "plain"


def recorded(path: Path, drafters: Seq[str] = (), category: str = "all") -> list[Scripted]:
    """Of each drafter in a document of `outrider bench` its longest lane. Raises ConfigError."""
    document = read_document(path, "--bench", BENCH_SCHEMA)
    try:
        lanes = _lanes(document)
        found = {name: lane for name, lane in lanes.items() if name != PLAIN and _positions(_figures(lane, "all"))}
        wanted = list(dict.fromkeys(drafters)) or list(found)
        missing = next((name for name in wanted if name not in found), None)
        if missing is not None or not wanted:
            raise ConfigError(
                f"--bench {path} has no acceptance of drafter {missing or 'any'}: it has that of "
                f"{', '.join(found) or 'none'}"
            )
        return [_replayed(path, name, found[name], lanes.get(PLAIN), category) for name in wanted]
    except ModelFileError as error:
        raise ConfigError(f"--bench {error}; measure it again with outrider bench") from None


def _lanes(document: JsonObject) -> dict[str, JsonObject]:
    """By drafter the lane with the largest K, and plain."""
    lanes: dict[str, JsonObject] = {}
    for lane in document.objects("lanes"):
        name = PLAIN if lane.text("lane") == PLAIN else lane.text("drafter", "")
        if name and (name not in lanes or lane.whole("k") > lanes[name].whole("k")):
            lanes[name] = lane
    return lanes


def _figures(lane: JsonObject, category: str) -> JsonObject:
    if category == "all":
        return lane.child("all")
    categories: Mapping[str, object] = lane.child("categories").values
    if category not in categories:
        raise ConfigError(
            f"category {category!r} is not in lane {lane.text('lane')!r} of {lane.path}: it has "
            f"{', '.join(('all', *categories))}"
        )
    return lane.child("categories").child(category)


def _positions(figures: JsonObject) -> list[float]:
    """Acceptance at each position, of all rounds; empty where nothing was drafted or rounds are not known."""
    found = figures.values.get("acceptance_by_position") or []
    if not isinstance(found, list) or not all(isinstance(share, (int, float)) for share in found):
        raise ModelFileError(f"{figures.path}: 'acceptance_by_position' is no list of numbers")
    if any(not 0 <= share <= 1 for share in found) or sorted(found, reverse=True) != found:
        raise ModelFileError(f"{figures.path}: 'acceptance_by_position' rises, or has what is no share")
    return [float(share) for share in found]


def _replayed(path: Path, name: str, lane: JsonObject, plain: JsonObject | None, category: str) -> Scripted:
    """Tokens a round as recorded; where drafts were short or missing, rounds of whole drafts and of none."""
    from outrider.sim.workload import Scripted  # brings torch, which a file that is refused does not wait for

    figures = _figures(lane, category)
    kept = _positions(figures)
    passes = figures.number("target_passes", 0.0)
    drafting = min(1.0, max(figures.number("drafted") / (passes * len(kept)), kept[0])) if kept and passes > 0 else 0.0
    if not drafting:
        raise ConfigError(f"--bench {path}: drafter {name!r} drafted nothing in category {category!r}: take another")
    reached = [drafting, *kept[:-1]]
    chances = tuple(min(1.0, share / before) if before else 0.0 for share, before in zip(kept, reached, strict=True))
    c, once = _draft_cost(figures, plain, drafting, len(kept))
    told = f"recorded by outrider bench: {path}, lane {lane.text('lane')!r}, {category} prompts"
    replay = "replayed by draws that know nothing of the text; no model runs"
    share = f"; {drafting:.0%} of the rounds have a draft" if drafting < 1 else ""
    return Scripted(f"{name} (recorded)", f"{told}{share}; {replay}", chances, False, False, drafting, c, once)


def _draft_cost(figures: JsonObject, plain: JsonObject | None, drafting: float, k: int) -> tuple[float | None, float]:
    """What a draft took, in plain passes: by token, or as a whole where the draft model ran once or not at all."""
    time = figures.child("time")
    base = plain.child("all").child("time") if plain is not None else JsonObject(figures.path, {})
    known = {**time.values, "plain": base.values.get("round_ms"), "pass": base.values.get("target_share")}
    if any(known.get(name) is None for name in ("round_ms", "draft_share", "plain", "pass")):
        return None, 0.0
    pass_ms = base.number("round_ms") * base.number("target_share")
    if pass_ms <= 0:
        return None, 0.0
    cost = time.number("round_ms") * time.number("draft_share") / drafting / pass_ms
    each = figures.number("draft_passes", 0.0) / figures.number("target_passes") / drafting
    return (cost / k, 0.0) if each > 1.5 or (k == 1 and each > 0) else (0.0, cost)
