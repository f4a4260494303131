"""What `bench` and `verify` would do, said without doing it: nothing is fetched, loaded or run."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.bench.lanes import PLAIN
from outrider.engine.prompt_file import Conversation

DRY_RUN_SCHEMA = "outrider.dry_run/1"


@dataclass(frozen=True, slots=True)
class Work:
    """The answers of a command: every turn of every prompt, `repeat` times in each lane, plain and a peer among them.

    `warm_up` is how many short answers of at most `warm_up_tokens` come first in each lane.
    """

    command: str
    models: tuple[str, ...]
    lanes: tuple[str, ...]
    prompts: Seq[Conversation]
    max_tokens: int
    repeat: int = 1
    warm_up: int = 0
    warm_up_tokens: int = 0

    @property
    def turns(self) -> int:
        return sum(len(prompt.turns) for prompt in self.prompts)

    @property
    def answers(self) -> int:
        """Without warming up."""
        return self.turns * self.repeat * len(self.lanes)

    @property
    def most_tokens(self) -> int:
        """Of all answers, those that warm up too."""
        warming = self.warm_up * min(self.warm_up_tokens, self.max_tokens)
        return self.answers * self.max_tokens + len(self.lanes) * warming

    def sentences(self) -> list[str]:
        """For people."""
        categories = ", ".join(dict.fromkeys(prompt.category for prompt in self.prompts))
        others = ", ".join(lane for lane in self.lanes if lane != PLAIN)
        return [
            f"would load {' and '.join(self.models)}",
            f"would answer {len(self.prompts)} prompts ({self.turns} turns; {categories}), {self.repeat} time(s) each, "
            f"in {len(self.lanes)} lanes: {PLAIN}, and against it {others}",
            f"that is {self.answers} answers of at most {self.max_tokens} tokens, and {self.warm_up} to warm up in "
            f"each lane: at most {self.most_tokens} tokens",
            "nothing was loaded and nothing was run",
        ]

    def to_json(self) -> dict[str, object]:
        return {
            "schema": DRY_RUN_SCHEMA,
            "command": self.command,
            "models": list(self.models),
            "lanes": list(self.lanes),
            "prompts": len(self.prompts),
            "turns": self.turns,
            "categories": sorted({prompt.category for prompt in self.prompts}),
            "repeat": self.repeat,
            "warm_up": self.warm_up,
            "answers": self.answers,
            "max_tokens": self.max_tokens,
            "tokens_at_most": self.most_tokens,
        }
