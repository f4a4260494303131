"""What a profile says of drafting here: how many rows are nearly free, and from what on drafts pay."""

from __future__ import annotations

from outrider.bench.profile import Profile

NEARLY_FREE = 1.1
"""A pass that costs at most this many one-row passes."""
HEADLINE_ROWS = 5


def nearly_free(found: Profile) -> int:
    """The most rows such that these, and all fewer that were measured, cost at most NEARLY_FREE passes over one."""
    most = 1
    for rows in found.passes:
        if found.v(rows) > NEARLY_FREE:
            break
        most = rows
    return most


def headline_rows(found: Profile) -> int:
    """The rows that the sentences are about: HEADLINE_ROWS where measured, else the most."""
    return HEADLINE_ROWS if HEADLINE_ROWS in found.passes else max(found.passes)


def break_even(found: Profile) -> float:
    """Tokens a pass over the headline rows above which drafts that cost nothing are faster than plain."""
    return max(found.v(headline_rows(found)), 1.0)


def sentences(found: Profile) -> list[str]:
    """The conclusions, for people."""
    rows = headline_rows(found)
    if rows == 1:
        return [f"a pass over one row takes {1e3 * found.passes[1].median_s:.2f} ms"]
    free = nearly_free(found)
    if free > 1:
        drafted = f"{free - 1} drafted token{'s' if free > 2 else ''}"
        first = f"up to {free} rows cost at most {NEARLY_FREE} x one: checking {drafted} is nearly free here"
    else:
        least = next(count for count in found.passes if count > 1)
        first = f"{least} rows already cost {found.v(least):.2f} x one: checking a drafted token is not free here"
    return [
        f"checking {rows} tokens costs {found.v(rows):.2f} x one",
        first,
        f"with {rows} rows, drafts that cost nothing (ngram, suffix) pay above {break_even(found):.2f} tokens a pass",
    ]


def conclusion_json(found: Profile) -> dict[str, object]:
    """The conclusions, for machines."""
    several = len(found.passes) > 1
    return {
        "nearly_free_rows": nearly_free(found),
        "break_even_rows": headline_rows(found) if several else None,
        "break_even_tokens_per_pass": break_even(found) if several else None,
        "sentences": sentences(found),
    }
