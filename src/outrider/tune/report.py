"""The report that a person opens: one HTML file, nothing loaded from anywhere, light and dark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path

from jinja2 import Environment
from markupsafe import Markup

from outrider.bench.summary import ALL
from outrider.sim.theory import Cost, Shape, speedup
from outrider.tune.predict import Prediction, on_paper
from outrider.tune.replay import Replayed
from outrider.tune.run import Tuned
from outrider.tune.svg import Axes, heat, lines, picture, stacked, ticks

PAGE = Path(__file__).with_name("report.html")
CELLS = 24
MOST_ROWS = 16


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture, what it shows, its legend (text and colour), and its figures."""

    id: str
    title: str
    sentence: str
    svg: Markup
    legend: Seq[tuple[str, str]]
    header: Seq[str]
    rows: Seq[Seq[str]]


def report_html(tuned: Tuned, document: Mapping[str, object]) -> str:
    """The whole page. `document` is that of `tune_json`."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(PAGE.read_text("utf-8"))
    return page.render(
        verdict=tuned.verdict,
        document=document,
        checks=tuned.checks,
        candidates=tuned.first.candidates,
        plots=list(_plots(tuned)),
        temperature=f"{tuned.wanted.temperatures[0]:g}",
    )


def best_of_each(tuned: Tuned) -> list[Prediction]:
    """The fastest predicted candidate of each drafter, fastest first; the verdict's own for its drafter."""
    found: dict[str, Prediction] = {}
    about = tuned.verdict.about
    for one in [*([about] if about else []), *tuned.first.candidates]:
        found.setdefault(one.candidate.drafter, one)
    return sorted(found.values(), key=lambda one: -one.ratio)


def _plots(tuned: Tuned) -> Iterator[Plot]:
    yield _acceptance(tuned)
    if tuned.paper is not None and tuned.verdict.about is not None:
        yield _map(tuned, tuned.verdict.about, tuned.paper.cost)
    yield _breakdown(tuned)
    yield _roofline(tuned)
    yield _by_category(tuned)


def _legend(names: Seq[str]) -> list[tuple[str, str]]:
    return [(name, f"--c{index % 6}") for index, name in enumerate(names)]


def _acceptance(tuned: Tuned) -> Plot:
    found = {p.drafter: p for p in tuned.profiles[0] if p.category == ALL and p.conditional}
    series = {name: list(enumerate(profile.conditional, 1)) for name, profile in found.items()}
    k = tuned.first.record.k
    axes = Axes(1, max(k, 2), 0, 1, "position in the draft", "kept, given those before")
    sentence = (
        "How often a draft token is kept where all before it were, by its position in the draft. Higher is better."
    )
    drawn = lines(axes, series, range(1, k + 1), [0, 0.25, 0.5, 0.75, 1])
    shares = [[f"{share:.2f}" for share in profile.conditional] for profile in found.values()]
    rows = [[str(at + 1), *(own[at] if at < len(own) else "-" for own in shares)] for at in range(k)]
    title = "Acceptance by position"
    svg = Markup(picture("acceptance", title, sentence, drawn))
    return Plot("acceptance", title, sentence, svg, _legend(list(series)), ["position", *found], rows)


def _map(tuned: Tuned, about: Prediction, cost: Cost) -> Plot:
    """Speed-up over alpha and c at the K of the verdict's candidate, with this machine's v."""
    k = about.replayed.size
    placed, rows = list[tuple[float, float]](), []
    for number, one in enumerate(best_of_each(tuned), 1):
        own = on_paper(one, tuned.costs, tuned.context, greedy=tuned.first.record.greedy).cost
        share, made = one.replayed.alpha, one.replayed
        drafting = made.drafting / max(made.stats.rounds, 1)
        placed.append((own.c, share))
        rows.append(
            [f"{number}: {one.candidate.name}", f"{share:.2f}", f"{own.c:.3f}", f"{drafting:.0%}", f"{one.ratio:.2f} x"]
        )
    most = min(max([0.5, *(1.25 * c for c, _ in placed)]), 2.0)

    def value(c: float, alpha: float) -> float:
        return speedup(Shape.chain([alpha] * k), replace(cost, c=c))

    axes = Axes(0, most, 0, 1, "c: cost of a draft token, in passes over one row", "alpha: chance that it is kept")
    drawn = heat(axes, CELLS, value, placed, ticks(most), [0, 0.25, 0.5, 0.75, 1])
    title = "Where speculation pays"
    sentence = (
        f"Speed over plain by how often a draft token is kept (alpha) and what it costs (c), for drafts of {k} "
        f"token{'s' if k > 1 else ''} and this machine's pass times, in rounds that have a draft; the numbered dots "
        "are the drafters here, each at its best length (the verdict's as chosen). Drafting: the share of its rounds "
        "that have a draft."
    )
    edges = ("below 0.5 x", "0.5", "0.7", "0.85", "1 x and more", "1.2", "1.5", "2 x and more")
    legend = [(text, f"--m{number}") for number, text in enumerate(edges)]
    svg = Markup(picture("map", title, sentence, drawn))
    return Plot("map", title, sentence, svg, legend, ["candidate", "alpha", "c", "drafting", "predicted"], rows)


def _breakdown(tuned: Tuned) -> Plot:
    made: dict[str, Replayed] = {"plain": tuned.first.plain[ALL]}
    made |= {one.candidate.name: one.replayed for one in best_of_each(tuned)}
    parts = {name: _round_ms(one) for name, one in made.items()}
    drawn, height = stacked(parts, " ms")
    title = "Where a round's time goes"
    sentence = (
        "Milliseconds of one round by the cost model: the target's pass, drafting, and the rest (sampling, Python)."
    )
    rows = [
        [name, *(f"{ms:.2f}" for ms in parts[name]), f"{one.stats.acceptance_length:.2f}", f"{one.tok_s:.1f}"]
        for name, one in made.items()
    ]
    header = ["lane", "target pass ms", "drafting ms", "the rest ms", "tokens a round", "tok/s"]
    svg = Markup(picture("round", title, sentence, drawn, height))
    return Plot("round", title, sentence, svg, _legend(["target pass", "drafting", "the rest"]), header, rows)


def _round_ms(one: Replayed) -> tuple[float, float, float]:
    rounds = max(one.stats.rounds, 1)
    return 1e3 * one.pass_s / rounds, 1e3 * one.draft_s / rounds, 1e3 * one.other_s / rounds


def _roofline(tuned: Tuned) -> Plot:
    """v against its bounds: one row's time, and the least seconds a row that were seen."""
    costs, context = tuned.costs, tuned.context
    counts = list(range(1, MOST_ROWS + 1))
    v = {rows: costs.v(rows, context) for rows in counts}
    slope = min(v[rows] / rows for rows in counts)
    roof = {rows: max(1.0, slope * rows) for rows in counts}
    high = max(*v.values(), 1.5)
    axes = Axes(1, MOST_ROWS, 0, high, "rows of the pass (draft tokens + 1)", "v: cost over one row")
    series = {"v, measured": [(rows, v[rows]) for rows in counts]}
    bound = {"roofline": [(rows, roof[rows]) for rows in counts]}
    drawn = lines(axes, series, [1, 4, 8, 12, 16], ticks(high), bound)
    title = "What checking several tokens costs"
    sentence = (
        f"A pass over several rows behind {context:.0f} tokens, relative to one row; 1 would be free. The dashed "
        "roofline is the larger of one row's time (memory) and the least time a row that was seen (arithmetic)."
    )
    rows_of = [[str(rows), f"{v[rows]:.2f}", f"{roof[rows]:.2f}"] for rows in (1, 2, 3, 4, 5, 6, 8, 12, 16)]
    legend = [("v, measured", "--c0"), ("roofline", "--bound")]
    svg = Markup(picture("roofline", title, sentence, drawn))
    return Plot("roofline", title, sentence, svg, legend, ["rows", "v", "roofline"], rows_of)


def _by_category(tuned: Tuned) -> Plot:
    """The verdict's candidate by category: as the verdict has it, measured or predicted."""
    about, how = tuned.verdict.about, "measured" if tuned.verdict.measured else "predicted"
    rows, bars = [], dict[str, tuple[float]]()
    for category in [ALL, *tuned.first.by_category] if about else []:
        assert about is not None
        one = tuned.first.of(about.candidate, category)
        found = [s for s in tuned.summaries if s.lane == about.candidate.name and s.category == category]
        measured = found[0].speedup.of_totals if found and found[0].speedup else None
        shown = measured if tuned.verdict.measured else one.ratio
        if shown is not None:
            bars[category] = (shown,)
        length = f"{one.replayed.stats.acceptance_length:.2f}"
        rows.append([category, f"{one.ratio:.2f} x", "-" if measured is None else f"{measured:.2f} x", length])
    drawn, height = stacked(bars, " x", 1.0)
    name = about.candidate.name if about else "no candidate"
    title = f"By kind of prompt: {name}"
    sentence = f"Speed over plain by category of prompt, {how}; below 1, the dashed line, it is slower than plain."
    header = ["category", "predicted", "measured", "tokens a round"]
    svg = Markup(picture("kinds", title, sentence, drawn, height))
    return Plot("kinds", title, sentence, svg, _legend([f"x plain, {how}"]), header, rows)
