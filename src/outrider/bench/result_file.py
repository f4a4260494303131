"""The file of `bench --out`: the document of its last line, and under `runs` every answer's counts and times."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from outrider.bench.lanes import PLAIN
from outrider.bench.measure import Measured, Run
from outrider.bench.summary import ALL
from outrider.bench.tables import BENCH_SCHEMA
from outrider.core.documents import read_document
from outrider.core.json_file import JsonObject
from outrider.engine.prompt_file import Conversation
from outrider.errors import ConfigError, ModelFileError

COMPARED = ("prompts_digest", "form", "turns", "temperature", "max_tokens", "ignore_eos", "seed", "rule")
"""Settings on which the answers hang: with others, figures are of other texts. "rule" is that of the lanes."""

MODEL_FACTS = {"target": "target", "dtype": "dtype", "draft dtype": "draft_dtype"}
"""What of a file's `model` may explain a change, by the name that people read."""


def prompts_digest(prompts: Seq[Conversation]) -> str:
    """SHA-256 over the questions as they are asked, in order."""
    asked = json.dumps([[prompt.id, prompt.category, list(prompt.turns)] for prompt in prompts])
    return hashlib.sha256(asked.encode()).hexdigest()


def write_result(path: Path, document: Mapping[str, object], measured: Measured) -> None:
    """`document` is that of `bench_json`."""
    runs = [_run_json(run, measured) for run in measured.runs]
    path.write_text(json.dumps({**document, "runs": runs}, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")


def _run_json(run: Run, measured: Measured) -> dict[str, object]:
    found = measured.differences.get((run.lane, run.prompt))
    return {
        "lane": run.lane,
        "prompt": run.prompt,
        "question": run.question,
        "turn": run.turn,
        "category": run.category,
        "repetition": run.repetition,
        "prompt_tokens": run.prompt_tokens,
        "tokens": run.tokens,
        "decode_s": run.decode_s,
        "total_s": run.total_s,
        "target_s": run.target_s,
        "draft_s": run.draft_s,
        "rounds": run.stats.rounds,
        "drafted": run.stats.drafted,
        "accepted": run.stats.accepted,
        "draft_passes": run.stats.draft_passes,
        "finish_reason": run.finish_reason,
        "answer": hashlib.sha256(json.dumps(run.token_ids).encode()).hexdigest()[:16] if run.token_ids else None,
        "differs": measured.comparable(run.lane) and found is not None,
    }


@dataclass(frozen=True, slots=True)
class LaneResult:
    """A lane's figures over one category, or over all. `speedup` is the median of the prompts' ratios to plain."""

    prompts: int
    acceptance_length: float | None
    speedup: float | None
    diverged: int


@dataclass(frozen=True, slots=True)
class Timed:
    """One prompt in one lane: medians over the repetitions. `differs`: its answer is not plain's and should be."""

    question: str
    category: str
    tokens: float
    decode_s: float
    answer: str
    differs: bool


class ResultFile:
    """A file of `bench --out`, read. Raises UserError, one line, for what is none."""

    def __init__(self, path: Path, option: str) -> None:
        self.path = path
        self._object = read_document(path, option, BENCH_SCHEMA)
        self.lanes = {lane.text("lane"): lane for lane in self._listed("lanes")}
        self.settings = {**self._object.child("settings").values, "rule": self._rule(), "draft": self.draft}

    @property
    def target(self) -> str:
        return self._object.child("model").text("target")

    @property
    def draft(self) -> object:
        """The draft model or head that was named; None: none was."""
        return self.about("model", "draft")

    def _rule(self) -> object:
        """That of all lanes but a peer's."""
        return next((lane.values["rule"] for lane in self.lanes.values() if lane.values.get("rule") is not None), None)

    def about(self, *names: str) -> object:
        """What the file says under these nested names; None where it says nothing."""
        value: object = self._object.values
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def drafting(self) -> list[str]:
        """The lanes that are compared with plain and have rounds."""
        return [name for name, lane in self.lanes.items() if name != PLAIN and lane.values.get("rule") is not None]

    def categories(self, lane: str) -> list[str]:
        return [ALL, *self.lanes[lane].child("categories").values]

    def figures(self, lane: str, category: str = ALL) -> LaneResult:
        of_lane = self.lanes[lane]
        figures = of_lane.child("all") if category == ALL else of_lane.child("categories").child(category)
        speedup = figures.child("speedup")
        return LaneResult(
            figures.whole("prompts"),
            figures.number("acceptance_length") if "acceptance_length" in figures.values else None,
            speedup.child("by_prompt").number("median") if speedup.values else None,
            figures.child("answers").whole("diverged"),
        )

    def timed(self, lane: str) -> dict[str, Timed]:
        """By prompt."""
        runs: dict[str, list[JsonObject]] = {}
        for run in self._listed("runs"):
            if run.text("lane") == lane:
                runs.setdefault(run.text("prompt"), []).append(run)
        return {prompt: _timed(group) for prompt, group in runs.items()}

    def _listed(self, key: str) -> list[JsonObject]:
        try:
            return self._object.objects(key)
        except ModelFileError as error:
            raise ConfigError(
                f"{error}: give a file that outrider bench --out wrote (the line that bench prints lacks the runs)"
            ) from None


def _timed(runs: Seq[JsonObject]) -> Timed:
    first = runs[0]
    return Timed(
        first.text("question"),
        first.text("category"),
        median(run.number("tokens") for run in runs),
        median(run.number("decode_s") for run in runs),
        first.text("answer", ""),
        any(run.boolean("differs", False) for run in runs),
    )
