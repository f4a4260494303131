"""Rules `typical` and `top1`: more accepted tokens, another distribution. Only for those who ask for them by name.

Statement. `typical` (Medusa, Cai et al., 2401.10774, section 2.3.1) accepts draft token x while p(x) > min(epsilon,
delta exp(-H(p))), H the entropy of p in nats; the token after the path is drawn from p restricted to the tokens that
pass the same test. epsilon = 0.09 and delta = 0.3, its square root, are the published choice. `top1` accepts while x
is the likeliest token of p, and draws the token after the path from p.

What is lost. Neither looks at how often x is proposed. `typical` emits whatever the drafter likes among the plausible
tokens, and never an unlikely one: a drafter that repeats itself gets its way. `top1` emits the likeliest token more
often than p would, the more so the better the draft. tests/laws measures both: they are not the target's law.

Expected length. `typical`: sum of q over the tokens that pass. `top1`: the share of drafts that are the argmax, as in
greedy decoding.

Edge cases. The likeliest token always passes `typical` (max p >= exp(-H), delta <= 1), so the restricted row is never
empty. One-hot rows: both are greedy decoding. An empty draft under `top1` is a plain step; under `typical` it is not.
"""

from __future__ import annotations

import math

import torch

from outrider.core.draft import DraftLaw, SeqDraft
from outrider.core.rng import Key, Purpose, Rng
from outrider.core.row import Row
from outrider.core.verdict import Origin, Verdict
from outrider.core.warp import Rows
from outrider.errors import ConfigError


class TypicalVerifier:
    """Accepts what is plausible. Not the target's distribution."""

    name = "typical"
    lossless = False
    laws = frozenset(DraftLaw)
    trees = False
    weighs_q = False

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3) -> None:
        if not 0.0 <= epsilon < 1.0:
            raise ConfigError(f"epsilon = {epsilon} is not allowed: give a probability in [0, 1)")
        if not 0.0 <= delta < 1.0:
            raise ConfigError(f"delta = {delta} is not allowed: give a number in [0, 1)")
        self.epsilon = epsilon
        self.delta = delta

    def verify(self, draft: SeqDraft, p: Rows, rng: Rng, seed: int, position: int) -> Verdict:
        n = 0
        while n < draft.size and p[n][draft.tokens[n]] > self._threshold(p, n):
            n += 1
        row = p[n]
        typical_S = torch.where(row.weight_S > self._threshold(p, n), row.weight_S, 0.0)
        token = rng.categorical(Row(row.size, typical_S, row.token_S), Key(seed, position, Purpose.TARGET, n))
        return Verdict(list(range(n)), token, Origin.BONUS if n == draft.size else Origin.RECOVERED)

    def _threshold(self, p: Rows, m: int) -> float:
        entropy = float(torch.special.entr(p[m].weight_S).sum())
        return min(self.epsilon, self.delta * math.exp(-entropy))


class TopOneVerifier:
    """Accepts the likeliest token, samples only where the draft missed it. Not the target's distribution."""

    name = "top1"
    lossless = False
    laws = frozenset(DraftLaw)
    trees = False
    weighs_q = False

    def verify(self, draft: SeqDraft, p: Rows, rng: Rng, seed: int, position: int) -> Verdict:
        n = 0
        while n < draft.size and draft.tokens[n] == p[n].likeliest():
            n += 1
        token = rng.categorical(p[n], Key(seed, position, Purpose.TARGET, n))
        return Verdict(list(range(n)), token, Origin.BONUS if n == draft.size else Origin.RECOVERED)
