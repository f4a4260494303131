"""The walk of the comparing rules: from the root down, as long as a child carries the token that the rule names."""

from __future__ import annotations

from collections.abc import Callable

from outrider.core.draft import SeqDraft
from outrider.core.verdict import Origin, Verdict


def walk(draft: SeqDraft, token_after: Callable[[int, int], int]) -> Verdict:
    """`token_after(row, depth)` is the rule's own token after row `row` of p, `depth` tokens into the draft.

    A child that carries it is accepted (of duplicate siblings the first); the first token that no child carries ends
    the walk. Chains and trees.
    """
    path: list[int] = []
    node = -1
    while True:
        token = token_after(node + 1, len(path))
        children = [i for i, parent in enumerate(draft.parents) if parent == node]
        match = next((child for child in children if draft.tokens[child] == token), None)
        if match is None:
            return Verdict(path, token, Origin.RECOVERED if children else Origin.BONUS)
        path.append(match)
        node = match
