"""What was asked of a simulation and what came out, beside theory; as sentences and as a document."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.errors import ConfigError
from outrider.sim.machines import Machine
from outrider.sim.simulate import Simulated, check_size, simulate
from outrider.sim.theory import Cost, chain_break_even, speedup
from outrider.sim.workload import Workload

SCHEMA = "outrider.sim/1"
VIRTUAL = "Simulated: times are added up on a virtual clock from the costs given, and nothing was timed."
SYNTHETIC = "Acceptance is synthetic"
RECORDED = "Acceptance is not synthetic"


@dataclass(frozen=True, slots=True)
class Question:
    """One acceptance and K on several machines; `costs` belong to `machines`."""

    workload: Workload
    k: int
    machines: tuple[Machine, ...]
    costs: tuple[Cost, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """One acceptance and K on one machine. `time` and `plain_time` are in passes of the target over one row."""

    workload: Workload
    machine: Machine
    cost: Cost
    simulated: Simulated
    time: float
    plain_time: float

    @property
    def k(self) -> int:
        return self.simulated.k

    @property
    def tokens_per_round(self) -> float:
        return self.simulated.stats.acceptance_length

    @property
    def half_width(self) -> float:
        """Of the 95 % interval of `tokens_per_round`."""
        return self.simulated.drawn.half_width()

    @property
    def speedup(self) -> float:
        return self.plain_time / self.time

    @property
    def speedup_half_width(self) -> float:
        """The same of `speedup`, as far as the tokens a round decide it."""
        return self.speedup * self.half_width / self.tokens_per_round

    @property
    def theory_tokens(self) -> float | None:
        """What theory says of `tokens_per_round`; None: nothing, of this rule."""
        shape = self.workload.shape(self.k)
        return None if shape is None else 1 + self.workload.drafting * (shape.tokens - 1)

    @property
    def theory_speedup(self) -> float | None:
        """The same of `speedup`."""
        shape = self.workload.shape(self.k)
        return None if shape is None else speedup(shape, self.cost, self.workload.drafting)

    @property
    def break_even_alpha(self) -> float | None:
        """For a chain of K with one alpha; None: not even alpha = 1 pays."""
        return chain_break_even(self.k, self.cost)

    @property
    def tok_s(self) -> float | None:
        """Tokens a second; None where the machine's figures name no seconds."""
        pass_s = self.machine.pass_s
        return None if pass_s is None else self.simulated.stats.emitted / (self.time * pass_s)

    def to_json(self) -> dict[str, object]:
        stats = self.simulated.stats
        return {
            "machine": self.machine.name,
            "acceptance": self.workload.label,
            "synthetic_acceptance": self.workload.synthetic,
            "k": self.k,
            "draft_cost": self.cost.c,
            "draft_cost_once": self.cost.once,
            "simulated": {
                "tokens": stats.emitted,
                "rounds": stats.rounds,
                "drafted": stats.drafted,
                "accepted": stats.accepted,
                "draft_passes": stats.draft_passes,
                "tokens_per_round": self.tokens_per_round,
                "tokens_per_round_half_width": self.half_width,
                "acceptance_by_position": stats.acceptance_by_position(),
                "passes": self.time,
                "plain_passes": self.plain_time,
                "speedup": self.speedup,
                "speedup_half_width": self.speedup_half_width,
                "tok_s": self.tok_s,
            },
            "theory": {
                "tokens_per_round": self.theory_tokens,
                "speedup": self.theory_speedup,
                "break_even_alpha": self.break_even_alpha,
            },
        }


def ask(
    workloads: Seq[Workload],
    machines: Seq[Machine],
    ks: Seq[int],
    draft_cost: float | None,
    tokens: int,
    *,
    given: bool,
) -> list[Question]:
    """Every acceptance with every K on every machine. Lengths beyond a known acceptance are left out, unless they were
    `given`. Raises ConfigError."""
    questions = []
    for workload in workloads:
        costs = tuple(_cost(workload, machine, draft_cost) for machine in machines)
        mine = ks if given else [k for k in ks if k <= workload.most_k]
        for k in mine:
            check_size(workload, k, tokens)
            questions.append(Question(workload, k, tuple(machines), costs))
    return questions


def answer(
    questions: Seq[Question], tokens: int, seed: int, on_question: Callable[[], None] = lambda: None
) -> list[Answer]:
    """A run for each question, charged to all its machines, and one without drafts for each acceptance. `on_question`
    is called after each."""
    answers: list[Answer] = []
    plain: dict[Workload, Simulated] = {}
    for q in questions:
        if q.workload not in plain:
            plain[q.workload] = simulate(q.workload, 0, q.costs, tokens=tokens, seed=seed)
        drafted = simulate(q.workload, q.k, q.costs, tokens=tokens, seed=seed)
        rows = zip(q.machines, q.costs, drafted.times, plain[q.workload].times, strict=True)
        answers.extend(Answer(q.workload, machine, cost, drafted, time, base) for machine, cost, time, base in rows)
        on_question()
    return answers


def _cost(workload: Workload, machine: Machine, draft_cost: float | None) -> Cost:
    """A round's costs; what a pass of the draft model costs says the caller, else the acceptance, else the machine."""
    told = workload.c if draft_cost is None else draft_cost
    try:
        c = machine.draft_cost(told)
        return Cost(c, machine.v, 0.0 if draft_cost is not None else workload.once, machine.overhead)
    except ConfigError as error:
        raise ConfigError(f"acceptance {workload.label!r} on machine {machine.name!r}: {error}") from None


def statements(questions: Seq[Question]) -> Iterator[str]:
    """What the figures rest on: said wherever they are shown."""
    yield VIRTUAL
    for workload in dict.fromkeys(q.workload for q in questions):
        yield f"{SYNTHETIC if workload.synthetic else RECORDED} ({workload.label}): {workload.source}."
    for machine in dict.fromkeys(machine for q in questions for machine in q.machines):
        yield f"Costs are {machine.kind} ({machine.name}): {machine.source}."
        most = max(q.k + 1 for q in questions)
        if machine.rows is not None and most > machine.rows:
            yield f"v of {machine.name} is known up to {machine.rows} rows and continued in a straight line to {most}."


def best_lines(answers: Seq[Answer]) -> Iterator[str]:
    """For each acceptance and machine the K that was simulated fastest."""
    groups: dict[tuple[Machine, Workload], list[Answer]] = {}
    for answer in answers:
        groups.setdefault((answer.machine, answer.workload), []).append(answer)
    for (machine, workload), group in groups.items():
        best, which = max(group, key=lambda answer: answer.speedup), f"{machine.name}, {workload.label}"
        told = f"K = {best.k}, {best.speedup:.2f} x plain"
        if best.speedup - best.speedup_half_width > 1:
            yield f"{which}: fastest with {told}."
        elif best.speedup + best.speedup_half_width < 1:
            yield f"{which}: no K of these pays; the least slow is {told}."
        else:
            yield f"{which}: no K of these is surely faster than plain; the best is {told}."


def document(
    questions: Seq[Question], answers: Seq[Answer], *, tokens: int, seed: int, dry_run: bool
) -> dict[str, object]:
    """The document of `outrider sim --json`; see docs/reference/sim.md."""
    workloads = dict.fromkeys(q.workload for q in questions)
    machines = dict.fromkeys(machine for q in questions for machine in q.machines)
    return {
        "schema": SCHEMA,
        "simulated": True,
        "synthetic_acceptance": any(workload.synthetic for workload in workloads),
        "statements": list(statements(questions)),
        "settings": {"tokens": tokens, "seed": seed, "dry_run": dry_run, "ks": sorted({q.k for q in questions})},
        "acceptances": [
            {
                "label": workload.label,
                "synthetic": workload.synthetic,
                "source": workload.source,
                "drafting": workload.drafting,
            }
            for workload in workloads
        ],
        "machines": [machine.to_json() for machine in machines],
        "results": [answer.to_json() for answer in answers],
        "conclusions": list(best_lines(answers)),
    }
