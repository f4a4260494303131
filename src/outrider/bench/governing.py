"""What the governor is worth in real time: `python -m outrider.bench.governing TARGET -d suffix,draft_model`.

Code, prose and a verbatim quotation, each answered plain, with every drafter at several fixed K, and governed, in turn.
Of each kind of text: the seconds of the best fixed choice over the governor's, and plain's over the governor's. Costs
must have been measured (`outrider profile`). The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence as Seq

from outrider.bench.machine import busy_warning, machine_facts
from outrider.core.types import SamplingParams
from outrider.engine.llm import LLM
from outrider.engine.request import Speculation

STORY = (
    "The ferry left before the fog had lifted. Nobody on deck spoke; they listened to the bell of the buoy, first "
    "ahead, then to the left, then behind them. When the pier came out of the grey it was closer than anyone had "
    "thought, and the mate threw the line a moment too late. "
)
TEXTS = {
    "code": "Write a Python class Matrix with add, subtract, multiply, transpose and determinant methods.",
    "prose": "Describe a stormy evening in a small harbour town, in long and unusual sentences.",
    "quotation": f"Repeat the following text three times, word for word:\n\n{STORY}",
}
LENGTHS = (1, 2, 3, 5, 8)


def seconds(llm: LLM, text: str, params: SamplingParams, speculation: Speculation | None) -> float:
    """Seconds a token of one answer."""
    prompt = [{"role": "user", "content": text}]
    [result] = llm.generate([prompt], params, speculation=speculation)
    return result.timings.predicted_ms / 1000 / result.timings.predicted_n


def measure(
    fixed: LLM, governed: LLM, names: Seq[str], params: SamplingParams, repeat: int
) -> dict[str, dict[str, float]]:
    """Median seconds a token by text and way; the first of `repeat` + 1 turns warms up."""
    ways = {"plain": Speculation("none")}
    ways |= {f"{name} K={k}": Speculation(name, k) for name in names for k in LENGTHS}
    found: dict[str, dict[str, list[float]]] = {text: {} for text in TEXTS}
    for _ in range(repeat + 1):
        for kind, text in TEXTS.items():
            for way, speculation in ways.items():
                found[kind].setdefault(way, []).append(seconds(fixed, text, params, speculation))
            found[kind].setdefault("governor", []).append(seconds(governed, text, params, None))
    return {
        kind: {way: statistics.median(all_s[1:]) for way, all_s in ways_s.items()} for kind, ways_s in found.items()
    }


def main(arguments: Seq[str] | None = None) -> None:
    """Prints a table, then one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.governing", description=__doc__)
    parser.add_argument("target")
    parser.add_argument("-d", "--drafter", default="suffix", help="names, separated by commas")
    parser.add_argument("--draft-model")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args(arguments)
    names, facts = options.drafter.split(","), machine_facts()
    fixed, governed = (
        LLM(
            options.target,
            drafter=names,
            draft_model=options.draft_model,
            threads=options.threads,
            controller=controller,
            k=max(LENGTHS),
        )
        for controller in ("fixed", "governor")
    )
    params = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True)
    found = measure(fixed, governed, names, params, options.repeat)
    print(f"{'text':12}{'plain ms':>10}{'governor ms':>13}{'best ms':>10}  best fixed choice")
    for kind, ways in found.items():
        best = min((way for way in ways if way != "governor"), key=ways.__getitem__)
        shown = (f"{1e3 * ways[way]:.2f}" for way in ("plain", "governor", best))
        plain_ms, governor_ms, best_ms = shown
        print(f"{kind:12}{plain_ms:>10}{governor_ms:>13}{best_ms:>10}  {best}")
    if (busy := busy_warning(facts)) is not None:
        print(f"note: {busy}")
    settings = {"drafters": names, "max_tokens": options.max_tokens, "repeat": options.repeat}
    print(json.dumps({"machine": facts, "target": options.target, **settings, "seconds_per_token": found}))


if __name__ == "__main__":
    main()
