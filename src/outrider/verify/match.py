"""Rule `match`: draw from the target and keep going while the draft guessed right. Chains and trees, no q needed.

Statement. From the root down: draw y from the row of p at the current node. If a child carries y, accept it and go on
there; else y is the token after the path.

Proof sketch. Every emitted token is a fresh draw from the target's row for its prefix, so the text has the target's
law as long as the draft does not depend on those draws. The draft only decides how many of them one pass can use.

Expected length. On a chain a token survives with probability p(x): the same as `chain` for point drafts. For drawn
ones the sum of q(x) p(x), at most the sum of min(p, q) that `chain` gets. On a tree, the mass of p on the children.

Edge cases. An empty draft is a plain step. Of duplicate siblings the first is taken. One-hot rows of p are not drawn
from: their token is compared, which is rule `greedy`.
"""

from __future__ import annotations

from outrider.core.draft import DraftLaw, SeqDraft
from outrider.core.rng import Key, Purpose, Rng
from outrider.core.verdict import Verdict
from outrider.core.warp import Rows
from outrider.verify.walk import walk


class MatchVerifier:
    """Compares with the target's own draw."""

    name = "match"
    lossless = True
    laws = frozenset({DraftLaw.POINT, DraftLaw.IID, DraftLaw.NO_REPLACEMENT})
    trees = True
    weighs_q = False

    def verify(self, draft: SeqDraft, p: Rows, rng: Rng, seed: int, position: int) -> Verdict:
        def drawn(row: int, depth: int) -> int:
            only = p[row].only
            return rng.categorical(p[row], Key(seed, position, Purpose.TARGET, depth)) if only is None else only

        return walk(draft, drawn)
