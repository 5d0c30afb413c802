#!/usr/bin/env python3
"""Compares no drafter, the request's own text, a datastore and both, in turns within one run.

    scripts/measure_datastore.py [--model NAME] [--prompts N] [--repeats N] [--tokens N] [--json OUT.json]

The datastore holds the documentation of NumPy's public functions, and answers to questions about them. Asked for are:
  continue  what follows the beginning of a documentation that is in the datastore, as raw text
  question  a question about a function, in a chat; the datastore holds its documentation
  again     the same question in other words than the one whose answer is in the datastore
Greedy. The answers of all four must be the same. Printed are medians over the prompts: speed over plain decoding,
tokens a round and the time that drafts took.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import statistics
import tempfile
from pathlib import Path

import numpy as np

import outpace
from outpace import LanguageModel, api
from outpace.drafters import DatastoreDrafter, Drafter, SuffixDrafter
from outpace.drafters.datastore import build, open_for


def documentation() -> dict[str, str]:
    """Name -> text for NumPy's public functions with more than a few lines of it."""
    found = {}
    for name in sorted(dir(np)):
        thing = getattr(np, name)
        text = inspect.getdoc(thing) if callable(thing) and not isinstance(thing, type) else None
        if text and len(text) > 1500:
            found[name] = text
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=api.DEFAULT_MODEL)
    parser.add_argument("--prompts", type=int, default=6, help="of each kind")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    texts = documentation()
    step = max(1, len(texts) // args.prompts)
    names = list(texts)[step // 2 :: step][: args.prompts]
    with outpace.load(args.model, draft="none") as plain, tempfile.TemporaryDirectory() as scratch:
        tokenizer = plain.tokenizer
        assert tokenizer is not None
        limit = {"max_tokens": args.tokens, "temperature": 0.0}

        def asked(question: str) -> list[int]:
            return plain.chat_ids([{"role": "user", "content": question}])

        prompts = {
            "continue": [tokenizer.encode(f"numpy.{name}\n\n{texts[name]}")[:80] for name in names],
            "question": [asked(f"What does numpy.{name} do, and what are its parameters?") for name in names],
            "again": [asked(f"Please explain the function {name} of NumPy to me.") for name in names],
        }
        corpus = Path(scratch, "corpus")
        corpus.mkdir()
        for name, text in texts.items():
            (corpus / name).write_text(f"numpy.{name}\n\n{text}", encoding="utf-8")
        earlier = [plain.generate(asked(f"Explain the NumPy function {name}."), **limit).text for name in names]
        (corpus / "answers").write_text("".join(json.dumps({"text": text}) + "\n" for text in earlier))
        made = build(Path(scratch, "x"), [corpus], tokenizer)
        print(f"{made.head.suffixes} tokens in {made.head.documents} documents, {made.head.places[2]} bytes")
        store = open_for(made.path, tokenizer, args.model)
        drafters: dict[str, list[Drafter]] = {
            "none": [],
            "suffix": [SuffixDrafter()],
            "datastore": [DatastoreDrafter(store)],
            "both": [SuffixDrafter(), DatastoreDrafter(store)],
        }
        rows = []
        for kind, each in prompts.items():
            for prompt in each:
                speeds: dict[str, list[float]] = {mode: [] for mode in drafters}
                rounds: dict[str, list[float]] = {mode: [] for mode in drafters}
                drafting: dict[str, list[float]] = {mode: [] for mode in drafters}
                answers = set()
                for turn in range(args.repeats):
                    order = list(drafters)
                    for mode in order[turn % 4 :] + order[: turn % 4]:
                        # A new model object each time: what the controller learnt is forgotten.
                        model = LanguageModel(plain.target, tokenizer, drafters=drafters[mode])
                        result = model.generate(prompt, **limit)
                        model.engine.close()
                        answers.add(tuple(result.token_ids))
                        speeds[mode].append(result.stats.tokens_per_second)
                        rounds[mode].append(result.stats.tokens_per_round)
                        drafting[mode].append(1e6 * result.stats.draft_s / result.stats.rounds)
                assert len(answers) == 1, "drafters changed an answer"
                for mode in drafters:
                    ratio = statistics.median(speeds[mode]) / statistics.median(speeds["none"])
                    rows.append(
                        {
                            "kind": kind,
                            "mode": mode,
                            "speed": ratio,
                            "tokens_per_round": statistics.median(rounds[mode]),
                            "draft_us": statistics.median(drafting[mode]),
                        }
                    )
            for mode in drafters:
                mine = [row for row in rows if (row["kind"], row["mode"]) == (kind, mode)]
                middle = {key: statistics.median(float(row[key]) for row in mine) for key in list(mine[0])[2:]}
                print(
                    f"{kind:9s} {mode:9s} speed x{middle['speed']:.2f}, "
                    f"{middle['tokens_per_round']:.2f} tokens a round, drafted in {middle['draft_us']:.0f} us",
                    flush=True,
                )
        print("load", *(f"{load:.1f}" for load in os.getloadavg()))
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
