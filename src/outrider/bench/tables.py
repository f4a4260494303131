"""Reports as tables for people, and as JSON documents for machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.bench.compare import Outcome
from outrider.bench.conclusion import Conclusion, conclude
from outrider.bench.interval import Interval
from outrider.bench.lanes import GOVERNOR, PLAIN
from outrider.bench.measure import PEER, Measured
from outrider.bench.price import Price
from outrider.bench.summary import ALL, LaneSummary, Spread
from outrider.bench.verification import VerifyReport

BENCH_SCHEMA = "outrider.bench/1"
VERIFY_SCHEMA = "outrider.verify/1"

STYLE = {
    Outcome.IDENTICAL: "green",
    Outcome.TIE: "yellow",
    Outcome.NOT_COMPARABLE: "yellow",
    Outcome.UNVERIFIED: "bold red",
    Outcome.DIVERGED: "bold red",
}
SHOWN_DIFFERENCES = 20


def print_verify(report: VerifyReport, console: Console, decode: Callable[[int], str]) -> None:
    """The table of lanes, every difference found (`decode` shows a token), notes, and the verdict."""
    table = Table(title_justify="left", header_style="bold")
    table.add_column("drafter")
    for name in ("K", "prompts", "identical", "ties", "largest gap", "diverged", "accept length", "accept rate"):
        table.add_column(name, justify="right")
    for lane in report.lanes:
        gap, diverged = lane.largest_gap, lane.count(Outcome.DIVERGED)
        table.add_row(
            lane.lane.method,
            str(lane.lane.k),
            str(len(lane.findings)),
            str(lane.count(Outcome.IDENTICAL)),
            str(lane.count(Outcome.TIE)),
            "-" if gap is None else f"{gap:.2g}",
            Text(str(diverged), style=STYLE[Outcome.DIVERGED] if diverged else ""),
            f"{lane.stats.acceptance_length:.2f}",
            f"{lane.stats.acceptance_rate:.0%}" if lane.stats.drafted else "-",
        )
    console.print(table)
    for line in _difference_lines(report, decode):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for lane in report.lanes:
        for note in lane.notes:
            console.print(f"note: {lane.lane.name}: {note}", markup=False, highlight=False, soft_wrap=True)
    console.print(Text(report.outcome.value, style=STYLE[report.outcome]), Text(_meaning(report)), soft_wrap=True)


def _difference_lines(report: VerifyReport, decode: Callable[[int], str]) -> list[str]:
    lines = []
    for lane in report.lanes:
        found = [(Outcome.DIVERGED, *pair) for pair in lane.divergences()]
        found += [(Outcome.TIE, *pair) for pair in lane.ties()]
        for outcome, prompt, at in found:
            plain, speculative = (
                "the end" if token is None else f"{token} {decode(token)!r}"
                for token in (at.plain_token, at.speculative_token)
            )
            gap = at.reason if at.gap is None else f"gap {at.gap:.3g}, tolerance {at.tolerance:.3g}"
            where = f"{lane.lane.name}, prompt {prompt}, output token {at.position}"
            lines.append(f"{outcome}: {where}: plain {plain}, speculative {speculative}; {gap}")
    hidden = len(lines) - SHOWN_DIFFERENCES
    return lines[:SHOWN_DIFFERENCES] + ([f"... and {hidden} more (all of them with --json)"] if hidden > 0 else [])


def _meaning(report: VerifyReport) -> str:
    answers = sum(len(lane.findings) for lane in report.lanes)
    if report.outcome is Outcome.UNVERIFIED:
        return "no lane drafted a single token, so nothing was verified: give K >= 1, other drafters or longer answers"
    if report.outcome is Outcome.DIVERGED:
        return _divergence_meaning(report, answers)
    if report.outcome is Outcome.TIE:
        tied = sum(lane.count(Outcome.TIE) for lane in report.lanes)
        return (
            f"{answers} speculative answers equal plain; in {tied} of them, tokens within "
            f"{report.relative_tolerance:.2g} of the largest logit were equally good"
        )
    return f"{answers} speculative answers equal plain, token by token"


def _divergence_meaning(report: VerifyReport, answers: int) -> str:
    """What went wrong, and whose fault it is: speculation's, or the target's, which fails by itself too."""
    found = [f.comparison for lane in report.lanes for f in lane.findings if f.comparison.outcome is Outcome.DIVERGED]
    by_itself = sorted({comparison.error for comparison in found if comparison.plain_failed})
    bad = [comparison for comparison in found if not comparison.plain_failed]
    parts = []
    if bad:
        errors = sorted({comparison.error for comparison in bad if comparison.error})
        why = f" ({'; '.join(errors)})" if errors else ""
        parts.append(
            f"{len(bad)} of {answers} speculative answers differ from plain by more than rounding explains{why}: this "
            "is a bug"
        )
    if by_itself:
        parts.append(
            f"{len(found) - len(bad)} of {answers} answers cannot be compared, as plain decoding fails by itself "
            f"({'; '.join(by_itself)}): the model or its file is at fault, not speculation; try --dtype float32, or "
            "fetch or convert the model again"
        )
    return "; ".join(parts)


def verify_json(report: VerifyReport, facts: Mapping[str, object]) -> dict[str, object]:
    """The document of `verify --json`. `facts` describe machine, model and settings."""
    return {
        "schema": VERIFY_SCHEMA,
        "outcome": report.outcome.value,
        "relative_tolerance": report.relative_tolerance,
        **facts,
        "lanes": [lane.to_json() for lane in report.lanes],
    }


def print_bench(
    measured: Measured,
    summaries: Seq[LaneSummary],
    warnings: Seq[str],
    console: Console,
    *,
    verdict: Conclusion | None = None,
    price: Price | None = None,
) -> None:
    """A table over all prompts, one of categories where there are several, costs, notes, the verdict (None: that of an
    idle machine)."""
    console.print(_speed_table([summary for summary in summaries if summary.category == ALL]))
    if any(summary.category != ALL for summary in summaries):
        console.print(_category_table(summaries, measured.lane_names))
    for line in _cost_lines(summaries, price or Price()):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for note in [*warnings, *measured.notes, *summary_notes(summaries)]:
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    console.print(Text(f"verdict: {(verdict or conclude(summaries)).sentence}", style="bold"), soft_wrap=True)


def _cost_lines(summaries: Seq[LaneSummary], price: Price) -> list[str]:
    """What a million tokens cost in each lane but the peer's, whose machine may be another one."""
    lines = []
    for s in summaries:
        tok_s = s.tok_s_with_prefill_total
        if s.category != ALL or s.lane == PEER or not tok_s:
            continue
        money, kwh = price.money(tok_s), price.kwh(tok_s)
        parts = [*([f"{money:.4g}"] if money is not None else []), *([f"{kwh:.4g} kWh"] if kwh is not None else [])]
        lines += [f"a million tokens of {s.lane} cost {' and '.join(parts)}"] if parts else []
    return lines


def _category_table(summaries: Seq[LaneSummary], lanes: Seq[str]) -> Table:
    """Median speed-up and acceptance length of each lane by category; for plain, its tokens a second."""
    table = Table(header_style="bold")
    table.add_column("category")
    table.add_column("prompts", justify="right")
    for lane in lanes:
        table.add_column(f"{lane} tok/s" if lane == PLAIN else f"{lane} (length)", justify="right")
    for category in dict.fromkeys(s.category for s in summaries if s.category != ALL):
        row = {s.lane: s for s in summaries if s.category == category}
        cells = [_category_cell(row[lane]) for lane in lanes]
        table.add_row(category, str(row[PLAIN].prompts), *cells)
    return table


def _category_cell(s: LaneSummary) -> str:
    if s.lane == PLAIN:
        return _middle(s.tok_s, ".1f")
    factor = _factor(s.speedup.by_prompt.median if s.speedup else None)
    return f"{factor} ({s.stats.acceptance_length:.2f})" if s.counts_known else factor


def _speed_table(summaries: Seq[LaneSummary]) -> Table:
    table = Table(header_style="bold")
    table.add_column("lane")
    columns = [
        "tok/s",
        "IQR",
        "speed-up",
        "IQR",
        "95 %",
        "of totals",
        "+prefill",
        "accept",
        "length",
        "passes",
        "TTFT ms",
    ]
    for name in [*columns, "TPOT ms", "draft", "target", "answers"]:
        table.add_column(name, justify="right")
    for s in summaries:
        speedup, prefill = s.speedup, s.speedup_with_prefill
        rounds = s.counts_known
        table.add_row(
            s.lane,
            _middle(s.tok_s, ".1f"),
            _quartiles(s.tok_s, ".1f"),
            _factor(speedup.by_prompt.median if speedup else None),
            _quartiles(speedup.by_prompt if speedup else None, ".2f"),
            _bounds(speedup.median_interval if speedup else None),
            _factor(speedup.of_totals if speedup else None),
            _factor(prefill.by_prompt.median if prefill else None),
            f"{s.stats.acceptance_rate:.0%}" if s.stats.drafted else "-",
            f"{s.stats.acceptance_length:.2f}" if rounds else "-",
            f"{s.stats.rounds}+{s.stats.draft_passes}" if rounds else "-",
            _middle(s.ttft_s, ".0f", 1000),
            _middle(s.tpot_s, ".1f", 1000),
            _share(s.draft_share),
            _share(s.target_share),
            _answers(s),
        )
    return table


def _answers(summary: LaneSummary) -> str:
    if summary.differing is None:
        return "-"
    return f"{summary.prompts - summary.differing}/{summary.prompts} equal"


def summary_notes(summaries: Seq[LaneSummary]) -> list[str]:
    """Where answers differ, and where a speed-up is more than the acceptance length can give."""
    notes = []
    for s in (s for s in summaries if s.category == ALL):
        if s.differing:
            notes.append(
                f"{s.lane}: {s.differing} of {s.prompts} answers differ from plain ({s.ties} by ties that rounding "
                f"explains, {s.diverged} DIVERGED); they are left out of the speed-ups"
            )
        if s.speedup and s.implausible:
            notes.append(
                f"{s.lane}: a speed-up of {s.speedup.of_totals:.2f} is more than its {s.stats.acceptance_length:.2f} "
                "tokens a pass can give: passes over one row are slower here than over several, or the machine was "
                "disturbed; do not quote it"
            )
        elif s.beyond:
            notes.append(
                f"{s.lane}: on {len(s.beyond)} of {s.prompts} prompts the speed-up is more than the tokens a pass can "
                f"give ({', '.join(s.beyond)}): passes over one row are slower here than over several, or the machine "
                "was disturbed; do not quote it"
            )
    return notes


def bench_json(
    measured: Measured,
    summaries: Seq[LaneSummary],
    facts: Mapping[str, object],
    warnings: Seq[str],
    *,
    verdict: Conclusion | None = None,
    price: Price | None = None,
) -> dict[str, object]:
    """The document on the last line of `bench`. `facts` describe machine, model and settings."""
    lanes = []
    known = {lane.name: lane for lane in measured.lanes}
    for name in measured.lane_names:
        lane = known.get(name)
        own = price if name != PEER else None
        mine = {summary.category: _summary_json(summary, own) for summary in summaries if summary.lane == name}
        lanes.append(
            {
                "lane": name,
                "drafter": lane.method if lane else None,
                "k": lane.k if lane else None,
                "controller": None if lane is None else GOVERNOR if lane.governed else "fixed",
                "rule": None if name == PEER else measured.lanes[0].rule,
                "lossless": None if name == PEER else measured.lanes[0].lossless,
                "all": mine.pop(ALL),
                "categories": mine,
            }
        )
    peer = measured.peer
    return {
        "schema": BENCH_SCHEMA,
        **facts,
        "price": price.to_json() if price else None,
        "verdict": (verdict or conclude(summaries)).to_json(),
        "lanes": lanes,
        "peer": {"url": peer.url, "model": peer.model, "figures_from": sorted(peer.sources)} if peer else None,
        "notes": [*warnings, *measured.notes, *summary_notes(summaries)],
    }


def _summary_json(summary: LaneSummary, price: Price | None) -> dict[str, object]:
    cost = price.of(summary.tok_s_with_prefill_total) if price else None
    return {**summary.to_json(), "cost": cost}


def _middle(spread: Spread | None, form: str, scale: float = 1.0) -> str:
    return "-" if spread is None else format(scale * spread.median, form)


def _quartiles(spread: Spread | None, form: str) -> str:
    return "-" if spread is None else f"{spread.q1:{form}}..{spread.q3:{form}}"


def _bounds(interval: Interval | None) -> str:
    return "-" if interval is None else str(interval)


def _factor(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
