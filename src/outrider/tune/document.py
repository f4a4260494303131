"""What `tune` found as a JSON document, as lines for people, and as a configuration's fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.bench.lanes import PLAIN
from outrider.bench.measure import PEER
from outrider.bench.summary import ALL, LaneSummary
from outrider.core.types import Decision
from outrider.tune.predict import Prediction
from outrider.tune.run import Tuned
from outrider.tune.verdict import Check

SCHEMA = "outrider.tune/1"
SHOWN = 8
"""Candidates in the table for people; the document has all."""


def tune_json(
    tuned: Tuned, drafters: list[Decision], facts: Mapping[str, object], warnings: list[str]
) -> dict[str, object]:
    """The document; see docs/reference/tune.md. `facts` describe machine, model and settings."""
    by_temperature = []
    for predicted, acceptance in zip(tuned.predicted, tuned.profiles, strict=True):
        everything = [*predicted.candidates, *(p for listed in predicted.by_category.values() for p in listed)]
        by_temperature.append(
            {
                "temperature": predicted.record.temperature,
                "rule": predicted.record.rule,
                "failed": dict(predicted.record.failed),
                "acceptance": [profile.to_json() for profile in acceptance],
                "plain": {category: made.to_json() for category, made in predicted.plain.items()},
                "candidates": [one.to_json() for one in everything],
            }
        )
    return {
        "schema": SCHEMA,
        **facts,
        "verdict": tuned.verdict.to_json(),
        "drafters": [{"name": one.value, "reason": one.reason} for one in drafters],
        "k": list(tuned.wanted.ks),
        "context": tuned.context,
        "pace": tuned.pace,
        "costs": tuned.costs.to_json(),
        "temperatures": by_temperature,
        "measured": [check.to_json() for check in tuned.checks],
        "on_paper": tuned.paper.to_json() if tuned.paper else None,
        "server": _server_json(server(tuned)),
        "notes": [*warnings, *tuned.notes()],
    }


def server(tuned: Tuned) -> LaneSummary | None:
    """The server that was measured beside, over all prompts."""
    return next((one for one in tuned.summaries if one.lane == PEER and one.category == ALL), None)


def _server_json(found: LaneSummary | None) -> dict[str, object] | None:
    if found is None:
        return None
    rate = found.stats.acceptance_rate if found.stats.drafted else None
    return {"tok_s": found.tok_s_total, "drafted": found.stats.drafted, "acceptance_rate": rate}


def print_tuned(tuned: Tuned, warnings: list[str], console: Console) -> None:
    """Predictions, what was measured of them, notes, and the verdict last."""
    console.print(_table(tuned))
    for line in _lines(tuned):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for note in [*warnings, *tuned.notes()]:
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    for reason in tuned.verdict.reasons:
        console.print(f"because {reason}", markup=False, highlight=False, soft_wrap=True)
    console.print(Text(tuned.verdict.sentence, style="bold"), soft_wrap=True)


def _table(tuned: Tuned) -> Table:
    table = Table(header_style="bold")
    table.add_column("candidate")
    for name in ("predicted", "tok/s", "tokens a round", "measured", "tok/s", "error"):
        table.add_column(name, justify="right")
    found = {check.lane: check for check in tuned.checks}
    plain = found.get("plain")
    table.add_row("plain", "1.00x", f"{tuned.first.plain[ALL].tok_s:.1f}", "1.00", *_measured(plain))
    for one in _shown(tuned):
        made = one.replayed
        length = f"{made.stats.acceptance_length:.2f}"
        cells = _measured(found.get(one.candidate.name))
        table.add_row(one.candidate.name, f"{one.ratio:.2f}x", f"{made.tok_s:.1f}", length, *cells)
    return table


def _shown(tuned: Tuned) -> list[Prediction]:
    """The best SHOWN candidates, and whatever else was measured."""
    measured = {check.lane for check in tuned.checks}
    return [one for i, one in enumerate(tuned.first.candidates) if i < SHOWN or one.candidate.name in measured]


def _measured(check: Check | None) -> tuple[str, str, str]:
    if check is None or check.measured_tok_s is None:
        return "-", "-", "-"
    ratio = "-" if check.measured_ratio is None else f"{check.measured_ratio:.2f}x"
    return ratio, f"{check.measured_tok_s:.1f}", "-" if check.error is None else f"{check.error:+.0%}"


def _lines(tuned: Tuned) -> Iterator[str]:
    """What the table leaves out, acceptance by drafter, other temperatures, the server."""
    shown, every = len(_shown(tuned)), len(tuned.first.candidates)
    if shown < every:
        yield f"the best {shown} of {every} candidates; all are in the report"
    for predicted, acceptance in zip(tuned.predicted, tuned.profiles, strict=True):
        at = f" at temperature {predicted.record.temperature:g}" if len(tuned.predicted) > 1 else ""
        for profile in acceptance:
            if profile.category == ALL:
                shares = " ".join(f"{share:.2f}" for share in profile.conditional)
                yield f"{profile.drafter}{at}: kept by position, given those before: {shares or 'nothing drafted'}"
        if predicted is not tuned.first and predicted.candidates:
            best = predicted.candidates[0]
            yield f"{best.candidate.name}{at} is predicted at {best.ratio:.2f} x"
    if (peer := server(tuned)) is not None and peer.tok_s_total is not None:
        kept = f", {peer.stats.acceptance_rate:.0%} of its draft tokens kept" if peer.stats.drafted else ""
        yield f"the server: {peer.tok_s_total:.1f} tokens a second{kept}"


def figures(tuned: Tuned) -> dict[str, float]:
    """What the verdict rests on, for the configuration."""
    about, paper = tuned.verdict.about, tuned.paper
    predicted = tuned.first.plain[ALL].tok_s
    plain = next((check.measured_tok_s for check in tuned.checks if check.lane == PLAIN), None)
    found = {"temperature": tuned.first.record.temperature, "ratio": tuned.verdict.ratio}
    found["plain_tok_s"] = predicted if plain is None else plain
    if plain is not None:
        found["predicted_plain_tok_s"] = predicted
    if about is not None and paper is not None:
        found |= {
            "predicted_ratio": about.ratio,
            "tokens_per_round": about.replayed.stats.acceptance_length,
            "alpha": paper.alpha,
            "c": paper.cost.c,
            "v": paper.cost.v(paper.size + 1),
        }
    return found
