"""Rule `greedy`: decoding at temperature 0, for chains and trees.

Statement. Walk down from the root: while the current node has a child that carries the row's likeliest token, accept
that child. The token after the path is the likeliest one of the last row. Ties go to the lowest index.

Proof sketch. p is one-hot at each row. By induction along the path every accepted token is the argmax given its prefix,
and so is the last token; that is the definition of greedy decoding.

Expected length. 1 + the number of leading draft tokens that equal the target's own greedy text; on a tree, along the
best branch.

Edge cases. An empty draft gives the row's argmax (a plain step). Of duplicate siblings the first is taken. The draft's
law does not matter: a token is compared, never weighed.
"""

from __future__ import annotations

from outrider.core.draft import DraftLaw, SeqDraft
from outrider.core.rng import Rng
from outrider.core.verdict import Verdict
from outrider.core.warp import Rows
from outrider.verify.walk import walk


class GreedyVerifier:
    """Compares with the argmax. Rows of p must be one-hot."""

    name = "greedy"
    lossless = True
    laws = frozenset(DraftLaw)
    trees = True
    weighs_q = False

    def verify(self, draft: SeqDraft, p: Rows, rng: Rng, seed: int, position: int) -> Verdict:
        def likeliest(row: int, depth: int) -> int:
            token = p[row].only
            assert token is not None, "rule 'greedy' judges one-hot rows only"
            return token

        return walk(draft, likeliest)
