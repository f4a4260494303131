"""A bench as a table for the docs: every lane in every category."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.bench.lanes import PLAIN
from outrider.bench.summary import ALL, LaneSummary

HEADER = ("category", "lane", "prompts", "length", "draft share", "draft / step", "tok/s", "x plain", "95 %", "answers")
LEFT = 2
"""Columns of words; the others are figures."""


def markdown_table(summaries: Seq[LaneSummary]) -> str:
    """All prompts first, then category by category; lanes in their order.

    length: emitted tokens a target pass; draft share: of the decoding time; draft / step: the drafting of a round over
    a plain step; tok/s: median over prompts, after the prefill; x plain: median of the prompts' ratios; 95 %: its
    interval.
    """
    categories = [ALL, *dict.fromkeys(s.category for s in summaries if s.category != ALL)]
    rows = [_cells(s) for category in categories for s in summaries if s.category == category]
    rule = ["---"] * LEFT + ["---:"] * (len(HEADER) - LEFT)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [HEADER, rule, *rows])


def _cells(s: LaneSummary) -> list[str]:
    plain, speedup = s.lane == PLAIN, s.speedup
    interval = speedup.median_interval if speedup else None
    equal = None if plain or s.differing is None else f"{s.prompts - s.differing} equal"
    return [
        s.category,
        s.lane,
        str(s.prompts),
        f"{s.stats.acceptance_length:.2f}" if s.counts_known else "",
        "" if plain or s.draft_share is None else f"{s.draft_share:.0%}",
        "" if plain or s.draft_steps is None else f"{s.draft_steps:.2f}",
        "" if s.tok_s is None else f"{s.tok_s.median:.1f}",
        "1" if plain else "" if speedup is None else f"{speedup.by_prompt.median:.2f}",
        "" if interval is None else str(interval),
        equal or "",
    ]
