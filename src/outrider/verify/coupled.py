"""Rule `coupled`: the text is a function of prompt and seed alone (Gumbel coupling; Daliri et al., 2408.07978; lists of
drafts: 2506.05632).

Statement. Output position t owns exponential clocks E_x, one a token, fixed by (seed, t). Its token is the winner of
the race argmin E_x / p(x). From the root down: race the current row of p at its own position; if a child carries the
winner, accept it and go on there; else the winner is the token after the path.

Proof sketch. A race with independent exponential clocks has law p (Gumbel-max). Clocks of different positions are
independent, and the row raced at t depends on the tokens before t only, hence on clocks of earlier positions: each
token has law p given its prefix. The draft decides which rows are known, never which token wins, so the text does not
depend on the drafter, on K, or on the batch. A drafter that races q on the same clocks does not change that: the
winner is computed from p and the clocks whatever was proposed.

Expected length. A token drafted by the same race (law SHARED_NOISE) survives with probability sum_x 1 / sum_y
max(q(y)/q(x), p(y)/p(x)), which lies in [(1 - TV) / (1 + TV), 1 - TV]; a point draft with p(x); a token drawn from q
by other noise with the sum of q(x) p(x).

Edge cases. An empty draft is a plain step. Of duplicate siblings the first is taken. One-hot rows of p are not raced.
Positions are absolute on purpose: a clock that a rejected draft has raced is the one the target will race there too.
"""

from __future__ import annotations

from outrider.core.draft import DraftLaw, SeqDraft
from outrider.core.rng import Key, Purpose, Rng
from outrider.core.verdict import Verdict
from outrider.core.warp import Rows
from outrider.verify.walk import walk


class CoupledVerifier:
    """Compares with the winner of the position's race."""

    name = "coupled"
    lossless = True
    laws = frozenset(DraftLaw)
    trees = True
    weighs_q = False

    def verify(self, draft: SeqDraft, p: Rows, rng: Rng, seed: int, position: int) -> Verdict:
        def winner(row: int, depth: int) -> int:
            only = p[row].only
            return rng.race(p[row], Key(seed, position + depth, Purpose.RACE)) if only is None else only

        return walk(draft, winner)
