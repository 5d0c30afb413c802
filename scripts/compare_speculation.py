#!/usr/bin/env python3
"""Compares decoding with speculation: outpace's choice against every way of llama.cpp that needs no second model.

    scripts/build_llama_cpp.sh && scripts/requantise_smollm2.sh
    scripts/compare_speculation.py FILE.gguf ... [--head HEAD] [--json OUT.json]

The same file, prompts (as token ids), greedy decoding, threads and number of tokens, in turns within one run. Figures
are tokens a second of decoding, the prompt left out, as both programs report them; medians over prompts and turns, and
the ratio to llama.cpp's best mode of the class, taken turn by turn, with the interval of its median (bootstrap, 95 %).
Prompts are those of scripts/measure_speculation.py: chat and repetition.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compare_llama_cpp import TOOLS
from measure_speculation import CLASSES, interval

from outpace.api import LanguageModel, load
from outpace.backends.cores import usable_cores
from outpace.bench.kernels import processor
from outpace.json_file import write_json
from outpace.types import SampleOpts

MODES = {  # of llama-server
    "plain": [],
    "ngram-simple 4, 7": [
        "--spec-type",
        "ngram-simple",
        "--spec-ngram-simple-size-n",
        "4",
        "--spec-ngram-simple-size-m",
        "7",
    ],
    "ngram-simple": ["--spec-type", "ngram-simple"],
    "ngram-mod": ["--spec-type", "ngram-mod"],
    "ngram-cache": ["--spec-type", "ngram-cache"],
}


@contextlib.contextmanager
def server(file: Path, threads: int, options: list[str]) -> Iterator[str]:
    """A llama-server that is ready; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(TOOLS / "llama-server"),
        "-m",
        str(file),
        "-t",
        str(threads),
        "-c",
        "2048",
        "-np",
        "1",
        "--port",
        str(port),
    ]
    process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            if process.poll() is not None:
                sys.exit(f"compare_speculation: llama-server ended with {process.returncode}: {' '.join(options)}")
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/health", timeout=1).read()
                break
            time.sleep(0.1)
        yield address
    finally:
        process.kill()
        process.wait()


def theirs(address: str, ids: list[int], tokens: int) -> tuple[float, float]:
    """Tokens a second, and tokens a round where drafts were verified (1.0 without)."""
    body = {"prompt": ids, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
    request = urllib.request.Request(
        f"{address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as reply:
        timings = json.loads(reply.read())["timings"]
    accepted = timings.get("draft_n_accepted", 0)
    return timings["predicted_per_second"], timings["predicted_n"] / max(1, timings["predicted_n"] - accepted)


def ours(model: LanguageModel, ids: list[int], tokens: int, *, speculate: bool) -> tuple[float, float]:
    """The same."""
    stats = model.generate(ids, SampleOpts.greedy(max_tokens=tokens, ignore_eos=True), speculate=speculate).stats
    return stats.tokens_per_second, stats.tokens_per_round


def compare(file: Path, args: Any) -> dict[str, Any]:
    """Class -> mode -> figures; and "over": outpace's speculation over its own plain decoding and over the best of
    llama.cpp's modes."""
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(load(file, head=args.head, threads=args.threads))
        # A draft head or model is brought up to date with each prompt; what the controller learnt stays, as in use.
        servers = {mode: stack.enter_context(server(file, args.threads, options)) for mode, options in MODES.items()}
        for name in ("chat", "repetition"):
            speeds: dict[str, list[float]] = {}
            rounds: dict[str, list[float]] = {}
            for prompt in CLASSES[name][0]:
                ids = model.chat_ids([{"role": "user", "content": prompt}])
                for turn in range(args.turns + 1):  # once to warm up
                    order = ["outpace", "outpace plain", *servers]
                    random.Random(turn).shuffle(order)
                    for mode in order:
                        if mode in servers:
                            speed, per_round = theirs(servers[mode], ids, args.tokens)
                        else:
                            speed, per_round = ours(model, ids, args.tokens, speculate=mode == "outpace")
                        if turn:
                            speeds.setdefault(mode, []).append(speed)
                            rounds.setdefault(mode, []).append(per_round)
            best = max(servers, key=lambda mode: statistics.median(speeds[mode]))
            over = {
                against: [a / b for a, b in zip(speeds["outpace"], speeds[mode], strict=True)]
                for against, mode in (
                    ("plain", "outpace plain"),
                    ("llama.cpp's plain", "plain"),
                    ("llama.cpp's best", best),
                )
            }
            found[name] = {
                "modes": {
                    mode: {
                        "tokens_per_second": statistics.median(of),
                        "tokens_per_round": statistics.mean(rounds[mode]),
                    }
                    for mode, of in speeds.items()
                },
                "best of llama.cpp": best,
                "over": {
                    against: {"factor": statistics.median(of), "interval": interval(of)} for against, of in over.items()
                },
            }
            print(f"\n{file.name}, {name}")
            for mode, entry in found[name]["modes"].items():
                print(f"  {mode:20}{entry['tokens_per_second']:8.1f} tokens/s{entry['tokens_per_round']:7.2f} a round")
            for against, entry in found[name]["over"].items():
                low, high = entry["interval"]
                print(f"  over {against:20}{entry['factor']:6.2f}  ({low:.2f} to {high:.2f})", flush=True)
    return found


def main() -> None:
    """Prints a table a file and class."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--head", type=Path, help="a draft head for outpace")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {
        "processor": processor(),
        "threads": args.threads,
        "head": args.head.name if args.head else "",
        "files": {},
    }
    for file in args.files:
        found["files"][file.name] = compare(file, args)
        if args.json:
            write_json(args.json, found)


if __name__ == "__main__":
    main()
