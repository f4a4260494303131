"""One pass of plain decoding in which every drafter is asked at every token what it would have drafted.

Nothing that is drafted is checked, so the answers are plain's own. What of a draft would have been kept is read off
the answer that followed: with a rule under which the text does not depend on drafts (greedy, coupled), that is what the
rule would have kept. `replay` makes the rounds of any shorter draft from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from outrider.bench.lanes import comparable
from outrider.control.fixed import FixedController
from outrider.core.draft import Draft, DraftLaw, SeqDraft, sanitise
from outrider.core.protocols import Committed, Drafter, LanguageModel
from outrider.core.rng import Rng
from outrider.core.types import SamplingParams, Sequence
from outrider.engine.engine import Engine
from outrider.engine.llm import LLM
from outrider.engine.prompt_file import Conversation
from outrider.engine.request import Request, Speculation

NAME = "recorder"


@dataclass(frozen=True, slots=True)
class Asked:
    """A draft at one place of an answer: `kept[j]` of its first j nodes would have been kept, for j up to its size.
    `source` is the drafter that made it: of a cascade, a member."""

    kept: tuple[int, ...]
    source: str = ""

    @property
    def size(self) -> int:
        return len(self.kept) - 1

    @classmethod
    def of(cls, draft: SeqDraft, following: Seq[int]) -> Asked:
        """Of a draft, and the tokens of the answer that followed."""
        kept, depth = [0], list[int]()
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            level = 0 if parent < 0 else depth[parent]
            right = 0 <= level < len(following) and following[level] == token
            depth.append(level + 1 if right else -1)
            kept.append(max(kept[-1], depth[-1]))
        return cls(tuple(kept), draft.source)


@dataclass(frozen=True, slots=True)
class Answer:
    """A plain answer of `tokens` tokens behind `prompt_tokens`; `most` is what it was allowed.

    `asked` has, by drafter, a draft for every token.
    """

    prompt: str
    category: str
    prompt_tokens: int
    tokens: int
    most: int
    asked: Mapping[str, tuple[Asked, ...]]


@dataclass(frozen=True, slots=True)
class Record:
    """The answers at one temperature under one rule, drafts of up to `k` tokens; why a drafter `failed`, by name."""

    temperature: float
    rule: str
    k: int
    answers: tuple[Answer, ...]
    failed: Mapping[str, str]

    @property
    def greedy(self) -> bool:
        return self.rule == "greedy"


class Recorder:
    """A drafter that asks others and offers nothing."""

    name = NAME
    trees = False

    def __init__(self, drafters: Mapping[str, Drafter], target: LanguageModel) -> None:
        self.drafters = dict(drafters)
        self.target = target
        self.laws: frozenset[DraftLaw] = frozenset().union(*(d.laws for d in drafters.values()))
        self.wants = tuple(sorted({layer for d in drafters.values() for layer in d.wants}))
        self.failed: dict[str, str] = {}
        self.drafts: dict[str, list[SeqDraft]] = {name: [] for name in drafters}

    def begin(self) -> None:
        """Forgets the drafts of the answer before."""
        self.drafts = {name: [] for name in self.drafters}

    def open(self, seq: Sequence) -> None:
        self._each(lambda name, drafter: drafter.open(seq))

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int], rng: Rng) -> Draft:
        def ask(name: str, drafter: Drafter) -> None:
            drafts = zip(seqs, budgets, drafter.propose(seqs, budgets, rng).seqs, strict=True)
            self.drafts[name] += [self._checked(seq, budget, draft) for seq, budget, draft in drafts]

        self._each(ask)
        return Draft([SeqDraft.empty(self.name) for _ in seqs])

    def _checked(self, seq: Sequence, budget: int, draft: SeqDraft) -> SeqDraft:
        """What of a draft a round would have checked."""
        clean, _ = sanitise(draft, budget, self.target.vocab_size)
        fits = clean.law in seq.rule.laws and (clean.is_chain or (seq.rule.trees and self.target.trees))
        return clean if fits else clean.head(0)

    def commit(self, seq: Sequence, committed: Committed) -> None:
        self._each(lambda name, drafter: drafter.commit(seq, committed.for_layers(drafter.wants, self.wants)))

    def close(self, seq: Sequence) -> None:
        self._each(lambda name, drafter: drafter.close(seq))

    def _each(self, act: Callable[[str, Drafter], object]) -> None:
        """Does it for every drafter that has not failed; one that raises is asked no more."""
        for name, drafter in self.drafters.items():
            if name in self.failed:
                continue
            try:
                act(name, drafter)
            except Exception as error:
                self.failed[name] = f"{type(error).__name__}: {error}"


def record(
    llm: LLM,
    prompts: Seq[tuple[Conversation, list[int]]],
    params: SamplingParams,
    names: Seq[str],
    k: int,
    rule: str,
    on_answer: Callable[[], None] = lambda: None,
) -> Record:
    """Answers the prompts (with their token ids) one after the other; the engine of `llm` must be idle."""
    assert comparable(rule, params), f"under rule {rule!r} a text depends on what is drafted"
    outer = llm.engine
    recorder = Recorder({name: outer.router.drafters[name] for name in names}, outer.target)
    engine = Engine(
        outer.target,
        {NAME: recorder},
        FixedController(k),
        method=NAME,
        rule=rule,
        tokenizer=llm.tokenizer,
        stop_ids=outer.stop_ids,
        max_batch=1,
    )
    params = params if params.seed is not None else replace(params, seed=0)
    answers = []
    for prompt, ids in prompts:
        recorder.begin()
        answers.append(_answer(engine, recorder, prompt, ids, params, rule))
        on_answer()
    kept = tuple(replace(a, asked={n: d for n, d in a.asked.items() if n not in recorder.failed}) for a in answers)
    return Record(params.temperature, rule, k, kept, recorder.failed)


def _answer(
    engine: Engine, recorder: Recorder, prompt: Conversation, ids: list[int], params: SamplingParams, rule: str
) -> Answer:
    target = engine.target
    request_id = engine.add(Request(ids, params, Speculation(NAME, None, rule)))
    result = None
    while result is None:
        result = engine.step()[1].get(request_id)
    tokens = result.completions[0].token_ids
    room = target.context_length - len(ids)
    most = room if params.max_tokens is None else min(room, params.max_tokens)
    asked = {
        name: tuple(Asked.of(draft, tokens[at:]) for at, draft in enumerate(drafts))
        for name, drafts in recorder.drafts.items()
    }
    return Answer(prompt.id, prompt.category, len(ids), len(tokens), most, asked)
