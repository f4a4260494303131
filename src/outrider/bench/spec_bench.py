"""Answers in the form that Spec-Bench's evaluation scripts read: a file a lane, a line a question.

A line has `question_id`, `category`, `answer_id`, `model_id`, `choices` and `tstamp`. A choice is one repetition:
`index`, and a list over the turns each of `turns` (the answers' texts), `decoding_steps`, `new_tokens` and `wall_time`
(seconds, the prompt's included); `accept_lengths` has the tokens emitted by every round of all turns, the target's own
included.
Their speed script takes tokens over wall time of each question's first choice, counts plain's tokens anew with its own
tokenizer, and compares with the file of plain; their equality script compares `turns`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from pathlib import Path

from outrider.bench.measure import PEER, Measured, Run


def write_answers(measured: Measured, target: str, folder: Path, *, now: float) -> list[Path]:
    """One file for each lane of ours: a peer does not tell its rounds. `now` is the time stamp, in seconds."""
    written = []
    for lane in measured.lane_names:
        if lane == PEER:
            continue
        model_id = _slug(f"{Path(target).name}-{lane}-temperature-{measured.params.temperature:g}")
        runs = [run for run in measured.runs if run.lane == lane]
        path = folder / f"{model_id}.jsonl"
        lines = (json.dumps(line, ensure_ascii=False) + "\n" for line in _lines(runs, model_id, now))
        path.write_text("".join(lines), "utf-8")
        written.append(path)
    return written


def _lines(runs: Seq[Run], model_id: str, now: float) -> Iterator[dict[str, object]]:
    for question in dict.fromkeys(run.question for run in runs):
        mine = [run for run in runs if run.question == question]
        repetitions = sorted({run.repetition for run in mine})
        yield {
            "question_id": int(question) if question.isdecimal() else question,
            "category": mine[0].category,
            "answer_id": hashlib.sha256(f"{model_id} {question} {now}".encode()).hexdigest()[:22],
            "model_id": model_id,
            "choices": [_choice(i, [run for run in mine if run.repetition == i]) for i in repetitions],
            "tstamp": now,
        }


def _choice(index: int, runs: Seq[Run]) -> dict[str, object]:
    turns = sorted(runs, key=lambda run: run.turn)
    return {
        "index": index,
        "turns": [run.text for run in turns],
        "decoding_steps": [run.stats.rounds for run in turns],
        "new_tokens": [run.tokens for run in turns],
        "wall_time": [run.total_s for run in turns],
        "accept_lengths": [tokens for run in turns for tokens in run.round_tokens],
    }


def _slug(text: str) -> str:
    """A name that is a file's name everywhere."""
    return re.sub(r"[^A-Za-z0-9._=-]+", "-", text).strip("-.").replace("=", "")
