#!/usr/bin/env python3
"""What speculation gives on real text: every source, and auto, over plain decoding, in turns within one run.

    scripts/measure_speculation.py [--model M] [--precision P] [--draft-model D] [--self] [--json OUT.json]

Prompts of three classes: chat (free prose: little to guess), repetition (write a text of the prompt again, changed or
not) and nothing (sampled at a high temperature: nobody can guess it). A figure is the median over prompts and turns of
a mode's tokens per second over plain decoding's in the same turn, with the interval of that median (bootstrap, 95 %).
A number behind a source is a fixed draft length; without one the controller decides. Answers must be equal in all
modes; the run stops where one is not.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
from pathlib import Path
from typing import Any

from outpace.api import LanguageModel, load
from outpace.bench.drafter import interval
from outpace.bench.kernels import processor
from outpace.costs import measure_shape
from outpace.drafters import Drafter, SuffixDrafter
from outpace.json_file import write_json
from outpace.types import SampleOpts

TEXT = (
    "The river rises in the hills north of the village and runs for eleven miles before it reaches the sea. In "
    "spring, when the snow melts, the lower meadows stand under water for a week or two, and the farmers move their "
    "sheep to the upper fields. An old stone bridge crosses the river beside the mill. The mill was built in 1743 and "
    "ground corn until 1921; today it houses a small museum that is open from May to September."
)
CODE = """def total(prices, tax):
    result = 0
    for price in prices:
        result = result + price * (1 + tax)
    return result


def average(prices, tax):
    if len(prices) == 0:
        return 0
    return total(prices, tax) / len(prices)
"""
CLASSES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "chat": (
        [
            "Why is the sky blue?",
            "Write a short letter to a friend who has moved to another city.",
            "How do I keep my bicycle in good order?",
            "Explain what a database index is.",
        ],
        {"temperature": 0.0},
    ),
    "repetition": (
        [
            f"Repeat this text word for word:\n\n{TEXT}",
            f"Correct the spelling of this text and write it again in full:\n\n{TEXT}",
            f"Write this Python code again with the name `prices` changed to `amounts`:\n\n{CODE}",
            f"Add a docstring to each function and write the whole code again:\n\n{CODE}",
        ],
        {"temperature": 0.0},
    ),
    "nothing": (["Tell me something.", "Write a story."], {"temperature": 2.0, "seed": 5}),
}


def measure(modes: dict[str, tuple[list[Drafter], int | None]], plain: LanguageModel, args: Any) -> dict[str, Any]:
    """Class -> mode -> factor over plain decoding, interval, tokens per round."""
    shape = measure_shape(plain.target)
    found: dict[str, Any] = {"shape": shape}
    for name, (prompts, options) in CLASSES.items():
        factors: dict[str, list[float]] = {mode: [] for mode in modes}
        rounds: dict[str, list[float]] = {mode: [] for mode in modes}
        for prompt in prompts:
            ids = plain.chat_ids([{"role": "user", "content": prompt}])
            opts = SampleOpts(max_tokens=args.tokens, ignore_eos=name == "nothing", **options)
            for turn in range(args.turns):
                order = list(modes)
                random.Random(turn).shuffle(order)
                speeds: dict[str, float] = {}
                answers = set()
                for mode in order:
                    drafters, fixed = modes[mode]
                    # A new model object each time: what the controller learnt is forgotten.
                    model = LanguageModel(
                        plain.target, plain.tokenizer, drafters=drafters, draft_tokens=fixed, shape=shape
                    )
                    result = model.generate(ids, opts)
                    model.engine.close()
                    for drafter in drafters:
                        drafter.close()  # a draft model reads the prompt each time
                    answers.add(tuple(result.token_ids))
                    speeds[mode] = result.stats.tokens_per_second
                    rounds[mode].append(result.stats.tokens_per_round)
                if len(answers) > 1:
                    sys.exit(f"measure_speculation: answers differ between modes for {prompt!r}")
                for mode in modes:
                    factors[mode].append(speeds[mode] / speeds["plain"])
        found[name] = {
            mode: {
                "factor": statistics.median(factors[mode]),
                "interval": interval(factors[mode]),
                "tokens_per_round": statistics.mean(rounds[mode]),
            }
            for mode in modes
        }
        print(f"\n{name}")
        for mode, entry in found[name].items():
            low, high = entry["interval"]
            print(
                f"  {mode:14}{entry['factor']:6.2f}  ({low:.2f} to {high:.2f}){entry['tokens_per_round']:7.2f} a round"
            )
        sys.stdout.flush()
    return found


def main() -> None:
    """Prints a table a class."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--draft-model")
    parser.add_argument("--self", action="store_true", dest="own", help="also the model's own weights at 4 bits")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with load(args.model, precision=args.precision, draft="none") as plain:
        modes: dict[str, tuple[list[Drafter], int | None]] = {"plain": ([], None), "suffix": ([SuffixDrafter()], None)}
        modes |= {f"suffix {k}": ([SuffixDrafter()], k) for k in (2, 4, 8)}
        for draft, more in (("draft_model", {"draft_model": args.draft_model}), ("self", {})):
            if (draft == "self" and args.own) or (draft == "draft_model" and args.draft_model):
                model = load(args.model, precision=args.precision, draft=draft, **more)
                main_drafter = model.drafters[0]
                modes[draft] = ([main_drafter], None)
                modes |= {f"{draft} {k}": ([main_drafter], k) for k in (1, 2, 3, 4)}
                modes[f"{draft}+suffix"] = ([main_drafter, SuffixDrafter()], None)
        print(f"{processor()}, {args.model}, {args.precision}, {args.tokens} tokens, {args.turns} turns")
        found = {"processor": processor(), "model": str(args.model), "precision": args.precision}
        found |= measure(modes, plain, args)
        found["load"] = os.getloadavg() if hasattr(os, "getloadavg") else None
    if args.json:
        write_json(args.json, found)


if __name__ == "__main__":
    main()
