"""What is measured against what: plain, and combinations of drafter, K and acceptance rule."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.control.fixed import check_k
from outrider.core.registry import verifier_class
from outrider.core.types import MAX_K, SamplingParams
from outrider.engine.engine import resolve_rule
from outrider.engine.llm import LLM
from outrider.engine.request import Speculation
from outrider.errors import ConfigError

PLAIN, GOVERNOR = "plain", "governor"


@dataclass(frozen=True, slots=True)
class Lane:
    """One way to generate. `rule` is the rule that really runs ("greedy" at temperature 0).

    `method` and `k` None: a governor decides who drafts, and how much.
    """

    method: str | None
    k: int | None
    rule: str

    @property
    def name(self) -> str:
        if self.governed:
            return GOVERNOR
        return PLAIN if self.method == "none" else f"{self.method} K={self.k}"

    @property
    def governed(self) -> bool:
        return self.method is None

    @property
    def speculation(self) -> Speculation:
        return Speculation(self.method, self.k, self.rule)

    @property
    def lossless(self) -> bool:
        return bool(verifier_class(self.rule)().lossless)


def plain_lane(rule: str) -> Lane:
    """The lane that never drafts. It draws its tokens as `rule` does."""
    return Lane("none", 0, rule)


def governor_lane(rule: str) -> Lane:
    """The lane of a governor over all drafters of the other lanes."""
    return Lane(None, None, rule)


def ungoverned(llm: LLM) -> LLM:
    """The same target and drafters, with K fixed where `llm` has a governor."""
    engine = llm.engine
    return LLM.from_parts(
        engine.target,
        engine.router.drafters,
        tokenizer=llm.tokenizer,
        template=llm.template,
        k=llm.k,
        rule=engine.rule,
        max_batch=engine.scheduler.max_batch,
    )


def lanes(llm: LLM, ks: Mapping[str, Seq[int]], rules: Seq[str]) -> list[Lane]:
    """`combinations` of what `llm` has loaded. Raises ConfigError for a drafter that is not.

    The engine's own K caps each lane's: build it with the largest.
    """
    drafters = llm.engine.router.drafters
    for method in ks:
        if method not in drafters:
            raise ConfigError(f"drafter {method!r} is not loaded in this engine: choose one of {', '.join(drafters)}")
    return combinations(ks, rules)


def combinations(ks: Mapping[str, Seq[int]], rules: Seq[str]) -> list[Lane]:
    """Every drafter with each of its K, by name, and each rule, drafters outermost, each once. Raises ConfigError for a
    K that is not allowed, or no lane."""
    drafting = {method: dict.fromkeys(own) for method, own in ks.items() if method != "none"}
    for k in {k for own in drafting.values() for k in own}:
        check_k(k)
    found = [Lane(method, k, rule) for method, own in drafting.items() for k in own for rule in dict.fromkeys(rules)]
    if not found:
        raise ConfigError("nothing to compare with plain: name at least one drafter other than 'none', and one K")
    return found


def parse_ks(text: str) -> list[int]:
    """Draft lengths from "1,2,5". Raises ConfigError for anything else."""
    try:
        ks = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--k {text!r} is not allowed: give integers from 0 to {MAX_K} separated by commas, as in 1,2,5"
        ) from None
    for k in ks:
        check_k(k)
    return ks


def comparable(rule: str, params: SamplingParams) -> bool:
    """Whether answers under this rule can be compared with plain token by token: the text depends on nothing else."""
    return params.greedy or rule == "coupled"


def comparable_rules(names: Seq[str], params: SamplingParams) -> list[str]:
    """The rules that run for these names, "auto" being greedy at temperature 0 and coupled above.

    Raises ConfigError for a rule whose answers cannot be compared token by token.
    """
    resolved = []
    for name in names:
        rule = "coupled" if name == "auto" and not params.greedy else resolve_rule(name, greedy=params.greedy)
        if not comparable(rule, params):
            raise ConfigError(
                f"rule {rule!r} at temperature {params.temperature} draws other random numbers than plain does: its "
                "answers follow the same distribution but differ token by token, so there is nothing to compare; use "
                "--rule coupled, or --temperature 0"
            )
        resolved.append(rule)
    return list(dict.fromkeys(resolved))
