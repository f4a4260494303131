"""The controller `governor`: drafts with what pays, as much as pays, and not at all where nothing does.

Before every round it weighs, for every sequence, each drafter and K by what is expected of them: tokens, from what
past rounds gave (`acceptance`), over seconds, from measured costs (`cost`). A drafter that is off is tried now and
then; what that may cost is a small share of the whole. Decisions depend on committed tokens and past outcomes alone,
never on the draft that they allow, and on no clock: the same costs and outcomes give the same decisions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from outrider.control.acceptance import UNKNOWN, Acceptance, SharedAcceptance
from outrider.control.cost import CostModel
from outrider.control.fixed import check_k
from outrider.core.types import Sequence, Switch

DEFAULT_MOST = 8
"""The most draft tokens a round where nothing else was asked for."""
PLAIN = "none"
MARGIN = 0.02
"""Another drafter, or none, takes over when it is this much faster; another K of the same drafter for less."""
MARGIN_K = 0.005
PROBE_SHARE = 0.01
"""Of the time of a sequence, what trying drafters that are off may cost."""
PROBE_START, PROBE_MOST = 0.5, 2.0
"""In plain rounds: what may be spent on that at the start of a sequence, and what may be saved up for it."""
LOOK_AGAIN = 16
"""Rounds after which a sequence in plain steps is weighed anew without news: its context has grown."""
CONTEXT_STEP = 128
"""Costs are looked up for contexts in steps of so many tokens."""
LOG_LENGTH = 64
"""Decisions that are kept of a sequence, the latest."""


@dataclass(slots=True)
class Option:
    """A way to run a sequence's next round; what is expected of it: tokens, rows of the pass, seconds of drafting."""

    drafter: str
    k: int
    tokens: float = 1.0
    rows: float = 1.0
    draft_s: float = 0.0

    def same(self, other: Option) -> bool:
        return (self.drafter, self.k) == (other.drafter, other.k)

    def __str__(self) -> str:
        return f"{self.drafter}, K = {self.k}" if self.k else "plain steps"


@dataclass(frozen=True, slots=True)
class _Others:
    """What the rest of the batch is expected to do in the coming round, however this sequence is run."""

    tokens: float
    rows: float
    draft_s: float
    size: int


@dataclass(slots=True)
class _State:
    """One sequence. `chosen` is its standing option, `now` that of the coming round: a probe, or the standing one.

    `others` are the rest of the batch in that round, and `usual_s` the seconds a token of all of them under the
    standing option. `purse_s` is what may be spent on probes; `idle` counts the tokens since each drafter drafted,
    `waited` the rounds since then, `quiet` those since the options were weighed.
    """

    acceptance: dict[str, Acceptance]
    purse_s: float
    chosen: Option = field(default_factory=lambda: Option(PLAIN, 0))
    now: Option = field(default_factory=lambda: Option(PLAIN, 0))
    others: _Others = _Others(0.0, 0.0, 0.0, 1)
    usual_s: float = 0.0
    news: bool = True
    quiet: int = 0
    length: int = 0
    idle: dict[str, int] = field(default_factory=dict)
    waited: dict[str, int] = field(default_factory=dict)
    why: str = ""
    log: deque[Switch] = field(default_factory=lambda: deque(maxlen=LOG_LENGTH))


class GovernorController:
    """Weighs `drafters`, whose costs are known, with at most `most` draft tokens a round.

    `alphas` are first guesses of the chance that a drafted token is kept, by drafter, as from the card of a head.
    """

    def __init__(
        self,
        costs: CostModel,
        drafters: Seq[str],
        *,
        most: int = DEFAULT_MOST,
        alphas: Mapping[str, float] | None = None,
    ) -> None:
        check_k(most)
        self.costs, self.most = costs, most
        self.drafters = [name for name in drafters if name != PLAIN]
        for name in self.drafters:
            costs.draft_s(name, 1)  # raises where its cost is not known
        guesses = alphas or {}
        self.shared = {name: SharedAcceptance(most, guesses.get(name, UNKNOWN)) for name in self.drafters}
        self._states: dict[int, _State] = {}
        self._rounds_s: dict[tuple[int, bool], list[float]] = {}
        self._draft_s: dict[tuple[str, int], list[float]] = {}

    def open(self, seq: Sequence, drafters: Seq[str]) -> None:
        usable = [name for name in drafters if name in self.shared]
        plain_s = self._round_s(1, seq.prompt_len, seq.params.greedy)
        state = _State({name: Acceptance(self.shared[name]) for name in usable}, PROBE_START * plain_s)
        state.length = len(seq.tokens)
        self._states[seq.id] = state

    def close(self, seq: Sequence) -> list[Switch]:
        state = self._states.pop(seq.id, None)
        return list(state.log) if state is not None else []

    def drafter(self, seq: Sequence) -> str:
        return self._states[seq.id].now.drafter

    def budgets(self, seqs: Seq[Sequence]) -> list[int]:
        states = [self._state(seq) for seq in seqs]
        for seq, state in zip(seqs, states, strict=True):
            state.quiet += 1
            if len(seqs) > 1 or state.news or state.quiet >= LOOK_AGAIN:
                self._weigh(seq, state, self._others(state, states))
        probe: Option | None = None  # one a round is enough for a batch
        for seq, state in zip(seqs, states, strict=True):
            state.others = self._others(state, states)
            state.usual_s = 1 / self._rate(seq, state.chosen, state.others)
            own = self._probe(seq, state) if probe is None else None
            probe, state.now = probe or own, own or state.chosen
        return [state.now.k for state in states]

    def observe(self, seq: Sequence, drafted: int, accepted: int) -> None:
        state = self._states[seq.id]
        if seq.finished:  # a stop may have cut what was accepted
            return
        option, emitted = state.now, len(seq.tokens) - state.length
        state.length = len(seq.tokens)
        plain_s = self._round_s(1, state.length, seq.params.greedy)
        state.purse_s += PROBE_SHARE * state.usual_s * emitted
        for name in state.acceptance:
            state.idle[name] = state.idle.get(name, 0) + emitted
            state.waited[name] = state.waited.get(name, 0) + 1
        if option.k:
            probing = not option.same(state.chosen)
            if probing:
                state.purse_s -= self._lost_s(seq, state, drafted, emitted)
            changed = state.acceptance[option.drafter].add(option.k, drafted, accepted)
            state.why = "the text has changed" if changed else "a probe was kept" if probing and accepted else ""
            state.idle[option.drafter] = state.waited[option.drafter] = 0
            state.news = True
        state.purse_s = min(state.purse_s, PROBE_MOST * plain_s)

    def check_integrity(self) -> None:
        """Asserts that no closed sequence has left anything here."""
        assert not self._states, f"sequences {sorted(self._states)} were never closed"

    def _state(self, seq: Sequence) -> _State:
        if seq.id not in self._states:
            self.open(seq, self.drafters)
        return self._states[seq.id]

    def _round_s(self, rows: float, context: int, greedy: bool) -> float:
        """The cost model's round, from a table by rows for contexts of about this length."""
        step = context // CONTEXT_STEP
        table = self._rounds_s.setdefault((step, greedy), [])
        low = int(rows)
        while len(table) < low + 2:
            middle = CONTEXT_STEP * (step + 0.5)
            table.append(self.costs.round_s(len(table), middle, greedy=greedy))
        return table[low] + (rows - low) * (table[low + 1] - table[low])

    def _others(self, state: _State, states: Seq[_State]) -> _Others:
        rest = [other.chosen for other in states if other is not state]
        return _Others(
            sum(option.tokens for option in rest),
            sum(option.rows for option in rest),
            sum(option.draft_s for option in rest),
            len(states),
        )

    def _option(self, state: _State, drafter: str, k: int, batch: int) -> Option:
        if k == 0:
            return Option(PLAIN, 0)
        kept, drafted = state.acceptance[drafter].gains()
        return Option(drafter, k, 1 + kept[k], 1 + drafted[k], self._drafts_s(drafter, batch)[k])

    def _drafts_s(self, drafter: str, batch: int) -> list[float]:
        """Entry K: the cost model's draft."""
        if (drafter, batch) not in self._draft_s:
            costs = [self.costs.draft_s(drafter, k, batch) for k in range(self.most + 1)]
            self._draft_s[drafter, batch] = costs
        return self._draft_s[drafter, batch]

    def _rate(self, seq: Sequence, option: Option, others: _Others) -> float:
        """Tokens a second of the whole batch when this sequence is run so."""
        round_s = self._round_s(option.rows + others.rows, len(seq.tokens), seq.params.greedy)
        return (option.tokens + others.tokens) / (round_s + option.draft_s + others.draft_s)

    def _best(self, seq: Sequence, state: _State, drafter: str, room: int, others: _Others) -> Option:
        """The best K of a drafter, from 1."""
        kept, drafted = state.acceptance[drafter].gains()
        drafts_s = self._drafts_s(drafter, others.size)
        context, greedy = len(seq.tokens), seq.params.greedy
        tokens, rows, spent_s = 1 + others.tokens, 1 + others.rows, others.draft_s
        rates = [
            (tokens + kept[k]) / (spent_s + drafts_s[k] + self._round_s(rows + drafted[k], context, greedy))
            for k in range(1, room + 1)
        ]
        return self._option(state, drafter, 1 + rates.index(max(rates)), others.size)

    def _room(self, seq: Sequence) -> int:
        """Draft tokens that the request and the length of its answer allow."""
        most = self.most if seq.k is None else min(self.most, seq.k)
        if seq.params.max_tokens is not None:
            most = min(most, seq.params.max_tokens - seq.output_len - 1)
        return max(most, 0)

    def _weigh(self, seq: Sequence, state: _State, others: _Others) -> None:
        """Makes the best option the standing one, where it is better by the margin."""
        room, batch = self._room(seq), others.size
        plain = self._option(state, PLAIN, 0, batch)
        stay = self._option(state, state.chosen.drafter, min(state.chosen.k, room), batch)
        best, best_rate = stay, self._rate(seq, stay, others)
        stay_rate = best_rate
        drafts = [self._best(seq, state, drafter, room, others) for drafter in state.acceptance] if room else []
        for option in [plain, *drafts]:
            rate = self._rate(seq, option, others)
            margin = (MARGIN_K if option.drafter == stay.drafter else MARGIN) / batch  # the rate is the whole batch's
            if rate > max(best_rate, stay_rate * (1 + margin)):
                best, best_rate = option, rate
        if not best.same(state.chosen) or not state.log:
            plain_rate = self._rate(seq, plain, others)
            reason = self._reason(state, best, best_rate / plain_rate, stay, stay_rate / plain_rate)
            if min(state.chosen.k, room) == state.chosen.k:  # the end of the answer is no decision
                state.log.append(Switch(seq.output_len, best.drafter, best.k, reason))
        state.chosen, state.news, state.quiet, state.why = best, False, 0, ""

    def _reason(self, state: _State, best: Option, gain: float, stay: Option, stay_gain: float) -> str:
        parts = [state.why] if state.why else []
        for name in dict.fromkeys(option.drafter for option in (best, stay) if option.k):
            parts.append(f"{name}: {state.acceptance[name].first():.0%} of first tokens kept")
        if best.same(stay):
            parts.append(
                f"{best} at {gain:.2f} x plain is the best of what is known" if best.k else "nothing else pays"
            )
        else:
            parts.append(f"{best} at {gain:.2f} x plain, {stay} at {stay_gain:.2f}")
        return "; ".join(parts)

    def _probe(self, seq: Sequence, state: _State) -> Option | None:
        """One token of a drafter that is off, when the purse allows what that is expected to lose."""
        if state.purse_s <= 0.0 or not self._room(seq):
            return None
        off = [name for name in state.acceptance if name != state.chosen.drafter]
        if not off:
            return None
        longest = max(off, key=lambda name: state.waited.get(name, 0))
        option = self._option(state, longest, 1, state.others.size)
        tokens = option.tokens + state.others.tokens
        lost_s = tokens / self._rate(seq, option, state.others) - tokens * state.usual_s
        return option if lost_s <= state.purse_s else None

    def _lost_s(self, seq: Sequence, state: _State, drafted: int, emitted: int) -> float:
        """What a probe took longer than the standing option would have for the same tokens."""
        option, others = state.now, state.others
        took_s = self._round_s(1 + drafted + others.rows, state.length, seq.params.greedy)
        took_s += option.draft_s + others.draft_s
        took_s += self.costs.catch_up_s(option.drafter, state.idle.get(option.drafter, 0))
        return took_s - (emitted + others.tokens) * state.usual_s
