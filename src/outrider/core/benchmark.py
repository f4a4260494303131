"""What sampling adds to a round: `python -m outrider.core.benchmark`.

Milliseconds to warp the rows of one pass, to make the distribution of every row (a rule that stops early makes fewer),
to look up a draft token in each, and to draw one token from the last; `greedy` is the same pass at temperature 0. CPU
time of one thread: that is what is left for it while a model runs, and other programs disturb it less than wall time.

Logits are made up after measured ones: those of trained models fall with the rank r of a token like -s ln(r). Rows of
Qwen2.5-Coder-0.5B and SmolLM2-135M on code and prose have s from 1.5 (an open question: 100 tokens hold 95 %) to 4 and
more (inside an identifier: one token does). Peaked rows are cheaper; the default 1.6 is an open question in every row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from outrider.core.rng import CounterRng, Key, Purpose
from outrider.core.types import SamplingParams, Sequence
from outrider.core.warp import RowContext, warp

SETTINGS = {
    "greedy": SamplingParams(),
    "T=1": SamplingParams(1.0),
    "T=1, race": SamplingParams(1.0),
    "T=1 top-p 0.95": SamplingParams(1.0, top_p=0.95),
    "T=1.5 top-p 0.95": SamplingParams(1.5, top_p=0.95),
    "T=1 top-k 50": SamplingParams(1.0, top_k=50),
    "T=1 min-p 0.05": SamplingParams(1.0, min_p=0.05),
    "T=1 top-p 0.95, penalties": SamplingParams(1.0, top_p=0.95, frequency_penalty=0.3, repetition_penalty=1.1),
}
OUTPUT_TOKENS = 4096
"""Output so far, which penalties count; a fifth of it distinct."""


def made_up_logits(rows: int, vocab_size: int, slope: float) -> Tensor:
    """float32 [rows, V]: -slope ln(rank) in an order of its own in each row."""
    generator = torch.Generator().manual_seed(0)
    rank_MV = torch.stack([torch.randperm(vocab_size, generator=generator) for _ in range(rows)]) + 1.0
    return rank_MV.log().mul_(-slope)


def sample(logits_MV: Tensor, contexts: Seq[RowContext], key: Key) -> int:
    """Every row made and read, one token drawn."""
    p, rng = warp(logits_MV, contexts), CounterRng()
    for m in range(len(contexts)):
        p[m][m]
    return (
        rng.race(p[len(contexts) - 1], key)
        if key.purpose is Purpose.RACE
        else rng.categorical(p[len(contexts) - 1], key)
    )


def times_ms(logits_MV: Tensor, setting: str, rounds: int) -> list[float]:
    """Milliseconds of each round, sorted."""
    seq = Sequence(0, [0], SETTINGS[setting], seed=0)
    seq.tokens += [17 * i % (OUTPUT_TOKENS // 5) for i in range(OUTPUT_TOKENS)]
    contexts = [RowContext(seq, tuple(range(m))) for m in range(len(logits_MV))]
    purpose = Purpose.RACE if "race" in setting else Purpose.TARGET
    times = []
    for i in range(rounds + 2):
        start_s = time.thread_time()
        sample(logits_MV, contexts, Key(0, i, purpose))
        times.append(1e3 * (time.thread_time() - start_s))
    return sorted(times[2:])


def main(arguments: Seq[str] | None = None) -> None:
    """Prints a table, then one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m outrider.core.benchmark", description=__doc__)
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=[1, 5])
    parser.add_argument("--vocab", type=lambda text: [int(part) for part in text.split(",")], default=[49152, 151936])
    parser.add_argument("--slope", type=float, default=1.6)
    parser.add_argument("--rounds", type=int, default=51)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    records = []
    print(f"{'vocabulary':>10}{'rows':>6}  {'setting':28}{'median ms':>10}{'best ms':>9}")
    with torch.inference_mode():
        for vocab_size in options.vocab:
            for rows in options.rows:
                logits_MV = made_up_logits(rows, vocab_size, options.slope)
                for setting in SETTINGS:
                    times = times_ms(logits_MV, setting, options.rounds)
                    median, best = statistics.median(times), times[0]
                    print(f"{vocab_size:10}{rows:6}  {setting:28}{median:10.3f}{best:9.3f}")
                    record = {"vocab_size": vocab_size, "rows": rows, "setting": setting}
                    records.append(record | {"median_ms": round(median, 4), "best_ms": round(best, 4)})
    print(json.dumps({"slope": options.slope, "rounds": options.rounds, "records": records}))


if __name__ == "__main__":
    main()
