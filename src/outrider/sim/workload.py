"""What is simulated: how often drafts are right, and a target and a drafter that act it out in the engine.

`Scripted` is told the acceptance: the target repeats a known text, and the drafter draws at each position whether to be
right. `Tables` is not: two random tables resemble each other, and a real drafter and a real rule work on them.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

import torch

from outrider.core.draft import SeqDraft
from outrider.core.protocols import Drafter, LanguageModel
from outrider.core.registry import verifier_class
from outrider.core.rng import CounterRng, Key, Purpose
from outrider.core.types import MAX_K, Sequence
from outrider.drafters.draft_model import DraftModelDrafter
from outrider.drafters.fixed import FixedDrafter
from outrider.errors import ConfigError
from outrider.models.table import TableModel
from outrider.sim.theory import Shape, alpha, best_tree, check_chance, pick

DRAWN = "every draft token is kept or not by a draw; no model and no prompt was measured"


@dataclass(frozen=True, slots=True)
class Cast:
    """Who acts: a target, a drafter for it, the temperature and the acceptance rule."""

    target: LanguageModel
    drafter: Drafter
    temperature: float
    rule: str


@dataclass(frozen=True)
class Scripted:
    """Acceptance by position (a chain), or by the rank of a choice where `tree` (the best tree of K nodes).

    A share `drafting` of the rounds has a draft. `c` and `once` are what drafts cost, where that is known.
    """

    label: str
    source: str
    chances: tuple[float, ...]
    synthetic: bool = True
    tree: bool = False
    drafting: float = 1.0
    c: float | None = None
    once: float = 0.0

    def __post_init__(self) -> None:
        for chance in (*self.chances, self.drafting):
            check_chance(chance)
        if self.tree:
            Shape((-1,) * len(self.chances), self.chances)

    @property
    def most_k(self) -> int:
        """The longest draft of which the acceptance is known."""
        return MAX_K if self.tree else len(self.chances)

    def shape(self, k: int) -> Shape:
        """The draft of K tokens as theory sees it."""
        return best_tree(self.chances, k, k) if self.tree else Shape.chain(self.chances[:k])

    def cast(self, k: int, context_length: int) -> Cast:
        """Who acts it out."""
        script = _Script(self.shape(k), self.drafting)
        drafter = FixedDrafter(script=script, trees=self.tree)
        return Cast(known_text(script.vocab_size, context_length), drafter, 0.0, "greedy")


def known_text(vocab_size: int, context_length: int) -> TableModel:
    """A target that says n mod V behind n tokens, whatever they are."""
    rows = torch.eye(vocab_size, dtype=torch.float64)
    return TableModel(lambda context: rows[len(context) % vocab_size], vocab_size, context_length=context_length)


class _Script:
    """Draws, at each level of the draft, which of the siblings is right; knows the text of `known_text`."""

    def __init__(self, shape: Shape, drafting: float) -> None:
        self.shape = shape
        self.drafting = drafting
        self.children: dict[int, list[int]] = {}
        self.rank: list[int] = []
        self.level: list[int] = []
        for node, parent in enumerate(shape.parents):
            siblings = self.children.setdefault(parent, [])
            self.rank.append(len(siblings))
            self.level.append(self.level[parent] + 1 if parent >= 0 else 0)
            siblings.append(node)
        self.vocab_size = max(self.rank, default=0) + 3
        self._rng = CounterRng()

    def __call__(self, seq: Sequence, budget: int) -> SeqDraft:
        key = Key(seq.seed, seq.output_len, Purpose.DRAFT)
        if self._rng.uniform(key) >= self.drafting:
            return SeqDraft.empty()
        size = min(budget, self.shape.size)
        right = self._right(key, size)
        tokens = [self._token(len(seq.tokens), node, node in right) for node in range(size)]
        depth = max(self.level[:size], default=-1) + 1
        return SeqDraft(tokens, list(self.shape.parents[:size]), source=FixedDrafter.name, passes=depth)

    def _right(self, key: Key, size: int) -> set[int]:
        """The nodes on the path that is accepted."""
        right: set[int] = set()
        node = self._child(-1, size, key, level=1)
        while node is not None:
            right.add(node)
            node = self._child(node, size, key, level=len(right) + 1)
        return right

    def _child(self, node: int, size: int, key: Key, level: int) -> int | None:
        """Which child of a node is accepted, among the first `size` nodes."""
        siblings = [child for child in self.children.get(node, ()) if child < size]
        return pick(siblings, self.shape.chances, self._rng.uniform(key._replace(offset=level)))

    def _token(self, length: int, node: int, right: bool) -> int:
        """The text's token behind `length` tokens and the node's ancestors, or one that no sibling has."""
        return (length + self.level[node] + (0 if right else 1 + self.rank[node])) % self.vocab_size


@dataclass(frozen=True)
class Tables:
    """Two random Markov tables: the draft's logits are the target's and `noise` times as much noise."""

    noise: float
    rule: str
    synthetic: bool = True
    drafting: float = 1.0
    most_k: int = MAX_K
    c: float | None = None
    once: float = 0.0
    vocab_size: int = 32
    sharpness: float = 2.5

    def __post_init__(self) -> None:
        if not 0 <= self.noise <= 100:
            raise ConfigError(f"noise {self.noise} is not allowed: give a number from 0 (equal tables) to 100")

    @property
    def lossless(self) -> bool:
        return verifier_class(self.rule)().lossless

    @property
    def label(self) -> str:
        return "tables" if self.lossless else f"tables, rule {self.rule} (lossy)"

    @property
    def source(self) -> str:
        return (
            f"random tables of {self.vocab_size} tokens at temperature 1, the draft's with noise {self.noise:g}, no "
            f"language model; {self._theory}"
        )

    @property
    def _theory(self) -> str:
        if self.alpha is not None:
            return f"under rule {self.rule} alpha is {self.alpha:.3f}, and theory takes it for every position"
        if self.lossless:
            return f"no theory is stated, since rule {self.rule} judges a draft as a whole"
        return f"rule {self.rule} is lossy: its text does not follow the target's distribution, and no theory is stated"

    @cached_property
    def alpha(self) -> float | None:
        """The mean of `theory.alpha` over the target's own text; None where the rule has none."""
        p_VV, q_VV = (logits.softmax(-1) for logits in self._logits)
        share_V = torch.full((self.vocab_size,), 1 / self.vocab_size, dtype=torch.float64)
        for _ in range(200):
            share_V = share_V @ p_VV
        of_context = [alpha(p_V[None], q_V[None], self.rule) for p_V, q_V in zip(p_VV, q_VV, strict=True)]
        kept = [float(share) * own for share, own in zip(share_V, of_context, strict=True) if own is not None]
        return sum(kept) if kept else None

    @cached_property
    def _logits(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Target and draft, [V, V] each."""
        generator = torch.Generator().manual_seed(1)
        shape = (2, self.vocab_size, self.vocab_size)
        own_VV, noise_VV = self.sharpness * torch.randn(shape, generator=generator, dtype=torch.float64)
        return own_VV, own_VV + self.noise * noise_VV

    def shape(self, k: int) -> Shape | None:
        """The draft of K tokens as theory sees it; None where there is no theory."""
        return None if self.alpha is None else Shape.chain([self.alpha] * k)

    def cast(self, k: int, context_length: int) -> Cast:
        own, draft = (TableModel.from_table(logits, context_length=context_length) for logits in self._logits)
        return Cast(own, DraftModelDrafter(model=draft), 1.0, self.rule)


Workload = Scripted | Tables


def iid(chance: float) -> Scripted:
    """One alpha at every position."""
    label = f"alpha {chance}"
    return Scripted(label, f"{label} at every position, as given; {DRAWN}", (chance,) * MAX_K)


def by_position(chances: Seq[float]) -> Scripted:
    """Conditional acceptance at each position."""
    told = ", ".join(str(chance) for chance in chances)
    return Scripted("by position", f"{told} by position, as given; {DRAWN}", tuple(chances))


def by_rank(chances: Seq[float]) -> Scripted:
    """The chance that the token is the draft's first choice, its second, ...: the best tree of K nodes."""
    told = ", ".join(str(chance) for chance in chances)
    return Scripted("tree by rank", f"{told} by rank at every node, as given; {DRAWN}", tuple(chances), tree=True)
