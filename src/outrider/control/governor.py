"""The controller `governor`: drafts with what pays, as much as pays, and not at all where nothing does.

Before every round it weighs, for every sequence, each drafter and K by what is expected of them: tokens, from what
past rounds gave (`acceptance`), over seconds, from measured costs (`cost_model`). A drafter that is off is tried now
and then; what that may cost is a small share of the whole. Decisions depend on committed tokens and past outcomes
alone, never on the draft that they allow, and on no clock: the same costs and outcomes give the same decisions.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from types import MappingProxyType

from outrider.control.acceptance import Acceptance, SharedAcceptance
from outrider.control.cost_model import CostModel, draft_steps
from outrider.control.fixed import check_k
from outrider.core.types import NO_DRAFTER, Sequence, Switch

DEFAULT_MOST = 8
"""The most draft tokens a round where nothing else was asked for."""
MARGIN = 0.02
"""Another drafter, or none, takes over when it is this much faster; another K of the same drafter for less."""
MARGIN_K = 0.005
PROBE_SHARE, HOPEFUL_SHARE = 0.01, 0.02
"""Of the time of a sequence, what trying drafters that are off may cost; and where one of them pays by what all
requests have shown."""
PROBE_START, PROBE_MOST = 1.0, 2.0
"""In plain rounds: what may be spent on that at the start of a sequence, and what may be saved up for it."""
LOOK_AGAIN = 16
"""Rounds after which a sequence in plain steps is weighed anew without news: its context has grown."""
SETTLED, LOOK_OFTEN = 8, 4
"""A sequence is weighed every round in its first rounds, then once in so many: weighing takes time of its own."""
ANSWER = 256
"""Tokens that an answer is taken to have where nothing bounds it: over them a drafter earns what its start costs."""
CONTEXT_STEP = 128
"""Costs are looked up for contexts in steps of so many tokens."""
NO_MEMBERS: Mapping[str, Seq[str]] = MappingProxyType({})
LOG_LENGTH = 64
"""Decisions that are kept of a sequence, the latest."""


@dataclass(slots=True)
class Option:
    """A way to run a sequence's next round; what is expected of it: tokens, rows of the pass, and draft steps, of which
    the last may find that it is not sure enough."""

    drafter: str
    k: int
    tokens: float = 1.0
    rows: float = 1.0
    steps: float = 0.0

    def same(self, other: Option) -> bool:
        return (self.drafter, self.k) == (other.drafter, other.k)

    def __str__(self) -> str:
        return f"{self.drafter}, K = {self.k}" if self.k else "plain steps"


@dataclass(frozen=True, slots=True)
class _Drafting:
    """How a drafter drafts: the share of each of its makers, and whether at temperature 0 (`greedy`)."""

    drafter: str
    makers: Mapping[str, float]
    greedy: bool


@dataclass(frozen=True, slots=True)
class _Others:
    """What the rest of the batch is expected to do in the coming round, however this sequence is run; `drafts` with
    their steps."""

    tokens: float = 0.0
    rows: float = 0.0
    drafts: tuple[tuple[_Drafting, float], ...] = ()


@dataclass(slots=True)
class _State:
    """One sequence, at temperature 0 (`greedy`) or above. `chosen` is its standing option, `now` that of the coming
    round: a probe, or the standing one.

    `room` are the draft tokens that the round may have, `weighed` those that it had when the options were weighed;
    `others` are the rest of the batch in that round, and `usual_s` the seconds a token of all of them under the
    standing option. `best` is the best option of each drafter. `purse_s` is what may be spent on probes, into which
    `share` of its time goes; `probes` are those of the drafters that are off, with what each is expected to lose when
    its drafter has caught up; `idle` counts the tokens that each drafter has not read, all of the prompt at first,
    `members` are those whose drafts a drafter hands on; `waited` the rounds since it drafted, `quiet` those since the
    options were weighed. `why` is what came up since then.
    """

    acceptance: dict[str, Acceptance]
    greedy: bool
    purse_s: float
    room: int = 0
    weighed: int = 0
    chosen: Option = field(default_factory=lambda: Option(NO_DRAFTER, 0))
    now: Option = field(default_factory=lambda: Option(NO_DRAFTER, 0))
    others: _Others = _Others()
    usual_s: float = 0.0
    best: dict[str, Option] = field(default_factory=dict)
    share: float = PROBE_SHARE
    probes: list[tuple[Option, float]] = field(default_factory=list)
    news: bool = True
    members: dict[str, list[str]] = field(default_factory=dict)
    rounds: int = 0
    quiet: int = 0
    length: int = 0
    idle: dict[str, int] = field(default_factory=dict)
    waited: dict[str, int] = field(default_factory=dict)
    why: str = ""
    log: deque[Switch] = field(default_factory=lambda: deque(maxlen=LOG_LENGTH))

    @property
    def due(self) -> bool:
        """Whether the options are to be weighed for the coming round, where nothing changed around the sequence."""
        if self.why or self.room != self.weighed:
            return True
        often = LOOK_OFTEN if self.rounds > SETTLED else 1
        return self.quiet >= (often if self.news else LOOK_AGAIN)


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
        self.drafters = [name for name in drafters if name != NO_DRAFTER]
        for name in self.drafters:
            costs.draft_s(name, 1, greedy=True)  # raises where its cost is not known
        guesses = alphas or {}
        self.shared = {name: SharedAcceptance(most, guesses.get(name)) for name in self.drafters}
        self._states: dict[int, _State] = {}
        self._rounds_s: dict[tuple[int, bool], list[float]] = {}
        self._draft_s: dict[tuple[str, int, bool], list[float]] = {}

    def open(self, seq: Sequence, drafters: Seq[str], members: Mapping[str, Seq[str]] = NO_MEMBERS) -> None:
        usable = [name for name in drafters if name in self.shared]
        greedy = seq.params.greedy
        purse_s = PROBE_START * self._round_s(1, seq.prompt_len, greedy)
        state = _State({name: Acceptance(self.shared[name]) for name in usable}, greedy, purse_s)
        state.length = len(seq.tokens)
        state.members = {name: [own for own in members.get(name, ()) if own in usable] for name in usable}
        state.idle, state.waited = dict.fromkeys(usable, state.length), dict.fromkeys(usable, 0)
        self._states[seq.id] = state

    def close(self, seq: Sequence) -> list[Switch]:
        state = self._states.pop(seq.id, None)
        return list(state.log) if state is not None else []

    def drafter(self, seq: Sequence) -> str:
        return self._states[seq.id].now.drafter

    def budgets(self, seqs: Seq[Sequence], rooms: Seq[int]) -> list[int]:
        states = [self._state(seq) for seq in seqs]
        for seq, state, room in zip(seqs, states, rooms, strict=True):
            state.room = min(room, self.most if seq.k is None else min(self.most, seq.k))
        weighed = []
        for seq, state in zip(seqs, states, strict=True):
            state.rounds, state.quiet = state.rounds + 1, state.quiet + 1
            if len(seqs) > 1 or state.others.rows or state.due:
                self._weigh(seq, state, self._others(state, states), len(seqs))
                weighed.append((seq, state))
        for seq, state in weighed:
            self._price(seq, state, self._others(state, states))
        probe: Option | None = None  # one a round is enough for a batch
        for state in states:
            own = self._probe(state) if probe is None else None
            probe, state.now = probe or own, own or state.chosen
        return [min(state.now.k, state.room) for state in states]

    def observe(self, seq: Sequence, asked: int, drafted: int, accepted: int, source: str) -> None:
        state = self._states[seq.id]
        if seq.finished:  # a stop may have cut what was accepted
            return
        option, emitted = state.now, len(seq.tokens) - state.length
        state.length = len(seq.tokens)
        plain_s = self._round_s(1, state.length, state.greedy)
        state.purse_s += state.share * state.usual_s * emitted
        probing = bool(asked) and not option.same(state.chosen)
        if probing:
            state.purse_s -= self._lost_s(state, option, 1 + drafted, draft_steps(option.k, drafted), emitted)
            state.purse_s -= self._catch_up_s(state, option)
        for name in state.acceptance:
            state.idle[name] += emitted
            state.waited[name] += 1
        if asked:
            state.acceptance[option.drafter].makers.add(source if source in self.costs.drafters else option.drafter)
            changed = state.acceptance[option.drafter].add(asked, drafted, accepted)
            if changed:
                state.why, state.purse_s = "the text has changed", PROBE_MOST * plain_s
            elif probing and accepted:
                state.why = "a probe was kept"
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
        rest = [other for other in states if other is not state]
        return _Others(
            sum(other.chosen.tokens for other in rest),
            sum(other.chosen.rows for other in rest),
            tuple(
                (self._drafting(other, other.chosen.drafter), other.chosen.steps) for other in rest if other.chosen.k
            ),
        )

    def _option(self, state: _State, drafter: str, k: int) -> Option:
        if k == 0:
            return Option(NO_DRAFTER, 0)
        kept, drafted = state.acceptance[drafter].gains()
        return Option(drafter, k, 1 + kept[k], 1 + drafted[k], 1 + drafted[k - 1])

    def _drafts_s(self, drafter: str, batch: int, greedy: bool) -> list[float]:
        """Entry K: the cost model's draft of K steps."""
        key = drafter, batch, greedy
        if key not in self._draft_s:
            self._draft_s[key] = [self.costs.draft_s(drafter, k, batch, greedy=greedy) for k in range(self.most + 1)]
        return self._draft_s[key]

    def _drafting(self, state: _State, drafter: str, seen: Acceptance | SharedAcceptance | None = None) -> _Drafting:
        """By the makers of this sequence's drafts, or of those that were `seen`."""
        makers = (seen or state.acceptance[drafter]).makers
        return _Drafting(drafter, makers.shares() or {drafter: 1.0}, state.greedy)

    def _draft_of(self, how: _Drafting, steps: float, batch: int) -> float:
        """One of `batch` drafts that are made together."""
        low, whole_s = min(int(steps), self.most - 1), 0.0
        for maker, share in how.makers.items():
            drafts_s = self._drafts_s(maker, batch, how.greedy)
            whole_s += share * (drafts_s[low] + (steps - low) * (drafts_s[low + 1] - drafts_s[low]))
        return whole_s

    def _drafting_s(self, state: _State, drafter: str, steps: float, others: _Others) -> float:
        """What all drafts of a round cost when this sequence drafts so: those of one drafter are made together."""
        drafts = [*others.drafts, (self._drafting(state, drafter), steps)] if steps else others.drafts
        together = Counter(how.drafter for how, _ in drafts)
        return sum(self._draft_of(how, length, together[how.drafter]) for how, length in drafts)

    def _rate(self, seq: Sequence, state: _State, option: Option, others: _Others) -> float:
        """Tokens a second of the whole batch when this sequence is run so until its end."""
        round_s = self._round_s(option.rows + others.rows, len(seq.tokens), state.greedy)
        round_s += self._drafting_s(state, option.drafter, option.steps, others)
        if option.k:
            left = (ANSWER if seq.params.max_tokens is None else seq.params.max_tokens) - seq.output_len
            round_s += self._catch_up_s(state, option) * min(1.0, option.tokens / max(left, 1))
        return (option.tokens + others.tokens) / round_s

    def _best(self, seq: Sequence, state: _State, drafter: str, others: _Others) -> Option:
        """The best K of a drafter, from 1."""
        kept, drafted = state.acceptance[drafter].gains()
        together = 1 + sum(other.drafter == drafter for other, _ in others.drafts)
        how = self._drafting(state, drafter)
        drafts_s = [self._draft_of(how, 1 + steps, together) for steps in drafted[: state.room]]
        spent_s = self._drafting_s(state, drafter, 1, others) - drafts_s[0]
        context, tokens, rows = len(seq.tokens), 1 + others.tokens, 1 + others.rows
        rates = [
            (tokens + kept[k]) / (spent_s + drafts_s[k - 1] + self._round_s(rows + drafted[k], context, state.greedy))
            for k in range(1, state.room + 1)
        ]
        return self._option(state, drafter, 1 + rates.index(max(rates)))

    def _bests(self, seq: Sequence, state: _State, plain_rate: float, others: _Others) -> dict[str, Option]:
        """The best option of each drafter. One that hands on what others draft stands for these as long as it pays: it
        chooses between them by their drafts, and to tell them apart here costs more than it gains."""
        best: dict[str, Option] = {}
        passed_over: set[str] = set()
        for name in sorted(state.acceptance, key=lambda name: not state.members[name]):
            if name in passed_over:
                continue
            best[name] = self._best(seq, state, name, others)
            if state.members[name] and self._rate(seq, state, best[name], others) > plain_rate:
                passed_over.update(state.members[name])
        return best

    def _weigh(self, seq: Sequence, state: _State, others: _Others, batch: int) -> None:
        """Makes the best option the standing one, where it is better by the margin."""
        room = state.room
        plain = self._option(state, NO_DRAFTER, 0)
        stay = self._option(state, state.chosen.drafter, min(state.chosen.k, room))
        best, best_rate = stay, self._rate(seq, state, stay, others)
        stay_rate = best_rate
        state.best = self._bests(seq, state, self._rate(seq, state, plain, others), others) if room else {}
        for option in [plain, *state.best.values()]:
            rate = self._rate(seq, state, option, others)
            margin = (MARGIN_K if option.drafter == stay.drafter else MARGIN) / batch  # the rate is the whole batch's
            if rate > max(best_rate, stay_rate * (1 + margin)):
                best, best_rate = option, rate
        if not best.same(state.chosen) or not state.log:
            plain_rate = self._rate(seq, state, plain, others)
            reason = self._reason(state, best, best_rate / plain_rate, stay, stay_rate / plain_rate)
            if min(state.chosen.k, room) == state.chosen.k:  # the end of the answer is no decision
                state.log.append(Switch(seq.output_len, best.drafter, best.k, reason))
        state.chosen, state.weighed, state.news, state.quiet, state.why = best, room, False, 0, ""

    def _reason(self, state: _State, best: Option, gain: float, stay: Option, stay_gain: float) -> str:
        parts = [state.why] if state.why else []
        for name in dict.fromkeys(option.drafter for option in (best, stay) if option.k):
            parts.append(f"{name}: {self._first(state.acceptance[name], name)}")
        if best.same(stay):
            parts.append(
                f"{best} at {gain:.2f} x plain is the best of what is known" if best.k else "nothing else pays"
            )
        else:
            parts.append(f"{best} at {gain:.2f} x plain, {stay} at {stay_gain:.2f}")
        return "; ".join(parts)

    def _first(self, acceptance: Acceptance, name: str) -> str:
        """How many first tokens are kept, and how that is known."""
        share = f"{acceptance.first():.0%} of first tokens"
        if acceptance.seen:
            return f"{share} kept"
        return f"{share} kept, as its card says" if acceptance.shared.carded else f"{share} assumed to be kept"

    def _probe(self, state: _State) -> Option | None:
        """A draft of a drafter that is off, when the purse allows what that is expected to lose: of those that it
        allows, the one that waited longest."""
        if state.purse_s <= 0.0 or not state.room:
            return None
        for option, lost_s in sorted(state.probes, key=lambda probe: -state.waited[probe[0].drafter]):
            if lost_s + self._catch_up_s(state, option) <= state.purse_s:
                return option
        return None

    def _price(self, seq: Sequence, state: _State, others: _Others) -> None:
        """What a token costs under the standing option, and what probes lose against that."""
        state.others = others
        state.usual_s = 1 / self._rate(seq, state, state.chosen, others)
        off = [option for name, option in state.best.items() if name != state.chosen.drafter]
        state.probes = [
            (option, self._lost_s(state, option, option.rows, option.steps, option.tokens)) for option in off
        ]
        hopeful = any(self._has_paid(seq, state, option.drafter) for option in off)
        state.share = HOPEFUL_SHARE if hopeful else PROBE_SHARE

    def _has_paid(self, seq: Sequence, state: _State, drafter: str) -> bool:
        """Whether a drafter pays by what all requests have shown."""
        kept, drafted = self.shared[drafter].gains()
        context, how = len(seq.tokens), self._drafting(state, drafter, self.shared[drafter])
        plain_s = self._round_s(1, context, state.greedy)
        return any(
            (1 + kept[k]) * plain_s
            > self._round_s(1 + drafted[k], context, state.greedy) + self._draft_of(how, 1 + drafted[k - 1], 1)
            for k in range(1, state.room + 1)
        )

    def _lost_s(self, state: _State, option: Option, rows: float, steps: float, tokens: float) -> float:
        """What a probe takes longer than the standing option does for the same tokens, but for catching up."""
        others = state.others
        took_s = self._round_s(rows + others.rows, state.length, state.greedy)
        took_s += self._drafting_s(state, option.drafter, steps, others)
        return took_s - (tokens + others.tokens) * state.usual_s

    def _catch_up_s(self, state: _State, option: Option) -> float:
        """What its drafter has to read first; nothing for one that drafted in the round before."""
        return self.costs.catch_up_s(option.drafter, state.idle[option.drafter])
