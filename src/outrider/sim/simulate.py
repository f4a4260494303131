"""The engine's own loop on virtual clocks: admission, rounds, rules and counts are those of a real run."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.control.fixed import FixedController, check_k
from outrider.core.stats import SpecStats
from outrider.core.types import SamplingParams
from outrider.engine.engine import Engine, resolve_rule
from outrider.engine.report import acceptance_histogram
from outrider.engine.request import Request
from outrider.errors import ConfigError
from outrider.sim.clock import ClockedDrafter, ClockedModel, VirtualClock
from outrider.sim.theory import Cost, Drawn
from outrider.sim.workload import Workload

MOST_TOKENS = 20_000


@dataclass(frozen=True, slots=True)
class Simulated:
    """One answer. `times` are what it took on each clock, in passes of the target over one row."""

    k: int
    stats: SpecStats
    times: tuple[float, ...]

    @property
    def drawn(self) -> Drawn:
        """Its rounds, by the tokens that they gave."""
        return Drawn(tuple(acceptance_histogram(self.stats)))


def simulate(workload: Workload, k: int, costs: Seq[Cost], *, tokens: int, seed: int = 0) -> Simulated:
    """An answer of `tokens` tokens with drafts of K (0: plain decoding), charged to one clock a cost. Raises
    ConfigError."""
    check_k(k)
    check_size(workload, k, tokens)
    cast = workload.cast(k, tokens + 2)
    clocks = [VirtualClock(cost) for cost in costs]
    target, drafter = ClockedModel(cast.target, clocks), ClockedDrafter(cast.drafter, clocks)
    params = SamplingParams(temperature=cast.temperature, max_tokens=tokens, seed=seed, ignore_eos=True)
    rule = resolve_rule(cast.rule, greedy=params.greedy)
    engine = Engine(target, {drafter.name: drafter}, FixedController(k), method=drafter.name, rule=rule)
    request = engine.add(Request([0], params))
    results = {}
    while not engine.idle:
        results.update(engine.step()[1])
    engine.check_integrity()
    stats = results[request].stats
    assert stats.emitted == tokens, (
        f"{stats.emitted} of {tokens} tokens: {results[request].completions[0].finish_reason}"
    )
    return Simulated(k, stats, tuple(clock.now for clock in clocks))


def check_size(workload: Workload, k: int, tokens: int) -> None:
    """Raises ConfigError for a K whose acceptance is not known, or an answer that is none or too long to wait for."""
    if k > workload.most_k:
        raise ConfigError(
            f"K = {k} is not allowed with acceptance {workload.label!r}, which is known for {workload.most_k} "
            f"positions: give K from 0 to {workload.most_k}, or leave --k out (of a recording, further positions were "
            "never reached: record more prompts)"
        )
    if not 1 <= tokens <= MOST_TOKENS:
        raise ConfigError(f"{tokens} tokens are not allowed: give an integer from 1 to {MOST_TOKENS}")
