#!/usr/bin/env python3
"""What speculation gives on real text: every source, and auto, over plain decoding, in turns within one run.

    scripts/measure_speculation.py [--model M] [--precision P] [--head H] [--draft-model D] [--self] [--held-out N]
                                   [--json OUT.json]

Prompts of three classes: chat (free prose: little to guess), repetition (write a text of the prompt again, changed or
not) and nothing (sampled at a high temperature: nobody can guess it); or, of the forty held-out prompts, the first N of
each of their classes and repetition. A figure is the median over prompts and turns of a mode's tokens per second over
plain decoding's in the same turn, with the interval of that median (bootstrap, 95 %). A number behind a source is a
fixed draft length; without one the controller decides, and what it learns stays from prompt to prompt, as in use.
"Over the best fixed" compares it in the same way with the fixed length that is best for the class, plain decoding
included. Answers must be equal in all modes; the run stops where one is not.
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
from outpace.bench import prompts as bench_prompts
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


Modes = dict[str, tuple[list[Drafter], int | None]]


def measure(modes: Modes, plain: LanguageModel, args: Any) -> dict[str, Any]:
    """Class -> mode -> factor over plain decoding, interval, tokens per round; of modes that decide also over the best
    fixed one."""
    shape = measure_shape(plain.target)
    found: dict[str, Any] = {"shape": shape}
    models = {
        mode: LanguageModel(plain.target, plain.tokenizer, drafters=drafters, draft_tokens=fixed, shape=shape)
        for mode, (drafters, fixed) in modes.items()
    }
    for name, (prompts, options) in classes(args.held_out).items():
        speeds: dict[str, list[float]] = {mode: [] for mode in modes}
        rounds: dict[str, list[float]] = {mode: [] for mode in modes}
        for turn in range(args.turns):
            for prompt in prompts:
                ids = plain.chat_ids([{"role": "user", "content": prompt}])
                opts = SampleOpts(max_tokens=args.tokens, ignore_eos=name == "nothing", **options)
                order = list(modes)
                random.Random(f"{turn} {prompt}").shuffle(order)
                answers = set()
                for mode in order:
                    result = models[mode].generate(ids, opts)
                    # Drafters are shared by modes, and slots by all: each begins without what another one left.
                    models[mode].engine.close()
                    for drafter in modes[mode][0]:
                        drafter.close()
                    answers.add(tuple(result.token_ids))
                    speeds[mode].append(result.stats.tokens_per_second)
                    rounds[mode].append(result.stats.tokens_per_round)
                if len(answers) > 1:
                    sys.exit(f"measure_speculation: answers differ between modes for {prompt!r}")
        fixed = [mode for mode, (drafters, length) in modes.items() if length is not None or not drafters]
        best = max(fixed, key=lambda mode: statistics.median(ratios(speeds, mode, "plain")))
        found[name] = {"best fixed": best, "modes": {}}
        print(f"\n{name}")
        for mode in modes:
            entry: dict[str, Any] = {"tokens_per_round": statistics.mean(rounds[mode])}
            text = f"  {mode:14}"
            for against, other in (("factor", "plain"), ("over_best_fixed", best)):
                if against == "factor" or mode not in fixed:
                    each = ratios(speeds, mode, other)
                    low, high = interval(each)
                    entry[against] = {"median": statistics.median(each), "low": low, "high": high}
                    text += f"{entry[against]['median']:6.2f} ({low:.2f} to {high:.2f})"
                    text += f" over {best}" if against != "factor" else f"{entry['tokens_per_round']:6.2f} a round"
            found[name]["modes"][mode] = entry
            print(text, flush=True)
    return found


def classes(held: int) -> dict[str, tuple[list[str], dict[str, Any]]]:
    """Class -> prompts, and how they are answered."""
    if not held:
        return CLASSES
    found: dict[str, tuple[list[str], dict[str, Any]]] = {}
    for kind in bench_prompts.CLASSES:
        of_kind = [prompt for prompt in bench_prompts.held_out() if prompt.kind == kind and len(prompt.messages) == 1]
        found[kind] = [prompt.messages[0]["content"] for prompt in of_kind[:held]], {"temperature": 0.0}
    return found | {"repetition": CLASSES["repetition"]}


def ratios(speeds: dict[str, list[float]], mode: str, other: str) -> list[float]:
    """Turn by turn."""
    return [a / b for a, b in zip(speeds[mode], speeds[other], strict=True)]


def main() -> None:
    """Prints a table a class."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--head", help="a draft head")
    parser.add_argument("--draft-model")
    parser.add_argument("--self", action="store_true", dest="own", help="also the model's own weights at 4 bits")
    parser.add_argument("--held-out", type=int, default=0, help="so many of each class of the held-out prompts instead")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    more: dict[str, Any] = {"precision": args.precision, "context": 2048}
    with load(args.model, draft="none", **more) as plain:
        suffix = SuffixDrafter()
        modes: Modes = {"plain": ([], None), "suffix": ([suffix], None)}
        modes |= {f"suffix {k}": ([suffix], k) for k in (2, 4, 8)}
        lengths = {"draft_model": (1, 2, 3, 4), "self": (1, 2, 3, 4), "head": (1, 2, 3, 5, 7)}
        asked = {"draft_model": args.draft_model, "self": args.own, "head": args.head}
        for draft in (draft for draft, wanted in asked.items() if wanted):
            options = {"head": {"head": args.head}, "draft_model": {"draft_model": args.draft_model}}
            kind = {} if draft == "head" else {"draft": draft}
            model = load(args.model, **kind, **options.get(draft, {}), **more)
            main_drafter = model.drafters[0]
            modes[draft] = ([main_drafter], None)
            modes |= {f"{draft} {k}": ([main_drafter], k) for k in lengths[draft]}
            modes[f"{draft}+suffix"] = ([main_drafter, suffix], None)
        print(f"{processor()}, {args.model}, {args.precision}, {args.tokens} tokens, {args.turns} turns")
        found = {"processor": processor(), "model": str(args.model), "precision": args.precision}
        found |= measure(modes, plain, args)
        found["load"] = os.getloadavg() if hasattr(os, "getloadavg") else None
    if args.json:
        write_json(args.json, found)


if __name__ == "__main__":
    main()
