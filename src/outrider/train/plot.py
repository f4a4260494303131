"""The plot of a run: the loss along its steps, and by draft position what the target would accept."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from outrider.train.trainer import LOG

PLOT = "plot.svg"


def write_plot(folder: Path) -> Path | None:
    """Draws log.jsonl of a run's folder as plot.svg; None, and nothing, without matplotlib."""
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError:
        return None
    lines = [json.loads(line) for line in (folder / LOG).read_text(encoding="utf-8").splitlines()]
    evaluated = [line for line in lines if line["held_out"]]
    figure = figures.Figure(figsize=(12, 4), layout="constrained")
    losses, along, last = figure.subplots(1, 3)
    losses.plot([line["step"] for line in lines], [line["loss"] for line in lines], linewidth=0.8)
    losses.set(title="loss of a step (grows with the tokens it learns)", xlabel="step", yscale="log")
    for position in range(len(evaluated[-1]["held_out"]["agreement"]) if evaluated else 0):
        found = [line["held_out"]["agreement"][position] for line in evaluated]
        along.plot([line["step"] for line in evaluated], found, marker=".", label=str(position + 1))
    along.set(title="held out: agreement by draft position", xlabel="step", ylim=(0, 1))
    if evaluated:
        along.legend(fontsize="small", ncols=2)
        for name, what in (("agreement", "temperature 0"), ("overlap", "temperature 1")):
            shares = evaluated[-1]["held_out"][name]
            last.plot(range(1, len(shares) + 1), shares, marker="o", label=what)
            last.set_xticks(range(1, len(shares) + 1))
        last.legend()
    last.set(title="held out, at the end", xlabel="draft position", ylim=(0, 1))
    figure.savefig(folder / PLOT)
    return folder / PLOT
