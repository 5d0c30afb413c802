#!/usr/bin/env python3
"""Compares outpace with llama.cpp: same file, same threads, in turns within one run (ours, theirs, theirs, ours, ...).

    scripts/build_llama_cpp.sh && scripts/requantise_smollm2.sh
    scripts/compare_llama_cpp.py FILE.gguf ... [--json OUT.json] [--perplexity] [--busy N]

Figures are medians over all turns, and beside them the best of all turns. Plain decoding is what `llama-bench -n`
times: one row a pass from an empty context, no sampling. A prompt is read in one pass. "rows 8" is the time of 8 rows
over that of one (llama-bench: a prompt of 8).
--busy N keeps N processes computing meanwhile, on the side of both.

Perplexity is llama-perplexity's: the text in pieces of 512 tokens, each read alone, the second half of each scored.
The text is the documentation of NumPy's public functions.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outpace.backends.base import Rows
from outpace.backends.cores import usable_cores
from outpace.backends.native import NativeBackend
from outpace.bench.kernels import processor, tokens
from outpace.json_file import write_json
from outpace.models.loading import load_model
from outpace.opening import load_tokenizer

TOOLS = Path(__file__).resolve().parent.parent / "build" / "peers" / "llama.cpp" / "bin"
PROMPTS = (8, 64, 512)
PIECE = 512  # tokens that perplexity reads at a time


# ------------------------------------------------------------------------------------------------------------- speed


def ours(target: NativeBackend, prompts: Sequence[int], generated: int, repeats: int) -> dict[str, list[float]]:
    """Tokens a second: "decode", and "prompt N" for each N of prompts; one value a repeat."""
    found: dict[str, list[float]] = {}
    for n in prompts:
        prompt = tokens(target, n)
        for i in range(repeats + 1):  # as llama-bench, once to warm up
            slot = target.new_slot()
            start = time.perf_counter()
            target.forward([Rows(slot, prompt, logits=[n - 1])])
            target.commit(slot, range(n))
            if i:
                found.setdefault(f"prompt {n}", []).append(n / (time.perf_counter() - start))
            target.free_slot(slot)
    for _ in range(repeats):
        slot = target.new_slot()
        start = time.perf_counter()
        for token in tokens(target, generated):
            target.forward([Rows(slot, [token])])
            target.commit(slot, [0])
        found.setdefault("decode", []).append(generated / (time.perf_counter() - start))
        target.free_slot(slot)
    return found


def theirs(file: Path, threads: int, prompts: Sequence[int], generated: int, repeats: int) -> dict[str, list[float]]:
    """The same by llama-bench."""
    read = ",".join(map(str, prompts)) or 0
    text = run("llama-bench", "-m", file, "-t", threads, "-p", read, "-n", generated, "-r", repeats, "-o", "json")
    found: dict[str, list[float]] = {}
    for test in json.loads(text):
        found["decode" if test["n_gen"] else f"prompt {test['n_prompt']}"] = test["samples_ts"]
    return found


def compare(
    file: Path, target: NativeBackend, blocks: int, prompts: Sequence[int], generated: int, repeats: int
) -> dict[str, Any]:
    """Both in turns; figure -> {"outpace", "llama_cpp", "ratio"} in tokens a second, medians; "best": the same of each
    one's fastest sample, which is nearer the truth where others use the machine too."""
    samples: dict[str, dict[str, list[float]]] = {"outpace": {}, "llama_cpp": {}}
    for turn in ["outpace", "llama_cpp", "llama_cpp", "outpace"] * blocks:
        if turn == "outpace":
            found = ours(target, prompts, generated, repeats)
        else:
            found = theirs(file, target.threads, prompts, generated, repeats)
        for name, values in found.items():
            samples[turn].setdefault(name, []).extend(values)

    def figures(of: Callable[[list[float]], float]) -> dict[str, dict[str, float]]:
        speeds = {who: {name: of(values) for name, values in samples[who].items()} for who in samples}
        for found in speeds.values() if 8 in prompts else ():  # the time of a pass of 8 rows over that of one
            found["rows 8"] = 8 * found["decode"] / found["prompt 8"]
        own, other = speeds.values()
        return {
            name: {"outpace": own[name], "llama_cpp": other[name], "ratio": own[name] / other[name]} for name in own
        }

    result: dict[str, Any] = {**figures(statistics.median), "best": figures(max)}
    result["samples"] = samples
    return result


# -------------------------------------------------------------------------------------------------------- perplexity


def documentation() -> str:
    """English text that is on every machine that has outpace."""
    parts = []
    for module in (np, np.linalg, np.fft, np.random, np.ma, np.polynomial):
        for name in sorted(vars(module)):
            text = inspect.getdoc(getattr(module, name)) if not name.startswith("_") else None
            if text and len(text) > 400 and text not in parts:
                parts.append(text)
    return "\n\n".join(parts)


def our_perplexity(target: NativeBackend, ids: list[int], begin: int | None) -> float:
    """begin: the token that takes the place of each piece's first, as llama.cpp does for models that want one."""
    total, count = 0.0, 0
    for at in range(0, len(ids) - PIECE + 1, PIECE):
        piece = ids[at : at + PIECE]
        read = piece if begin is None else [begin, *piece[1:]]
        slot = target.new_slot()
        rows = range(PIECE // 2, PIECE - 1)
        logits = target.forward([Rows(slot, read, logits=list(rows))]).logits.astype(np.float64)
        target.free_slot(slot)
        highest = logits.max(axis=1, keepdims=True)
        log_total = np.log(np.exp(logits - highest).sum(axis=1)) + highest[:, 0]
        total += float((log_total - logits[np.arange(len(rows)), piece[PIECE // 2 + 1 :]]).sum())
        count += len(rows)
    return math.exp(total / count)


def their_perplexity(file: Path, text: Path, threads: int) -> float:
    """Raises SystemExit when llama-perplexity does not say it."""
    output = run("llama-perplexity", "-m", file, "-f", text, "-c", PIECE, "-b", PIECE, "-t", threads, errors=True)
    found = re.search(r"Final estimate: PPL = ([0-9.]+)", output)
    if found is None:
        sys.exit(f"compare_llama_cpp: llama-perplexity gave no estimate for {file}")
    return float(found[1])


def perplexities(file: Path, target: NativeBackend, count: int) -> dict[str, Any]:
    """On the first `count` tokens of the documentation, as both tokenizers are given them."""
    loaded = load_model(file)
    tokenizer = load_tokenizer(loaded)
    text = documentation()
    ids = list(tokenizer.encode(text))[: count // PIECE * PIECE]
    text = tokenizer.decode(ids)
    ids = list(tokenizer.encode(text))
    wants_begin = bool((loaded.metadata or {}).get("tokenizer.ggml.add_bos_token", False))
    begin = loaded.config.bos_token_id if wants_begin else None
    exact = NativeBackend(loaded.config, loaded.weights, precision="f32", slots=1, threads=target.threads)
    found = {"tokens": len(ids), "outpace": our_perplexity(target, ids, begin)}
    found["outpace f32"] = our_perplexity(exact, ids, begin)
    del exact
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.txt"
        path.write_text(text, encoding="utf-8")
        found["llama_cpp"] = their_perplexity(file, path, target.threads)
    found["over f32"] = found["outpace"] / found["outpace f32"]
    found["over llama_cpp"] = found["outpace"] / found["llama_cpp"]
    return found


# --------------------------------------------------------------------------------------------------------------- main


def run(tool: str, *args: object, errors: bool = False) -> str:
    """A tool's output, with what it writes to stderr if `errors`. Raises SystemExit when it fails."""
    if not (TOOLS / tool).is_file():
        sys.exit(f"compare_llama_cpp: {tool} is missing: run scripts/build_llama_cpp.sh first")
    done = subprocess.run([TOOLS / tool, *map(str, args)], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"compare_llama_cpp: {tool} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return done.stdout + (done.stderr if errors else "")


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Meanwhile `count` processes do nothing but compute."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def main() -> None:
    """Compares on each file and prints one table a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--blocks", type=int, default=3, help="turns of ours, theirs, theirs, ours; 0: no speeds")
    parser.add_argument("--tokens", type=int, default=64, help="to decode each time")
    parser.add_argument("--no-prompts", action="store_true", help="decoding alone")
    parser.add_argument("--repeats", type=int, default=2, help="of each figure in a turn")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="N processes compute meanwhile")
    parser.add_argument("--perplexity", type=int, nargs="?", const=20_000, default=0, metavar="TOKENS")
    parser.add_argument("--json", type=Path, help="write all figures and samples here")
    args = parser.parse_args()
    prompts = () if args.no_prompts else PROMPTS
    found: dict[str, Any] = {"processor": processor(), "threads": args.threads, "busy": args.busy, "files": {}}
    for file in args.files:
        loaded = load_model(file)
        target = NativeBackend(loaded.config, loaded.weights, slots=1, positions=1024, threads=args.threads)
        result: dict[str, Any] = {}
        print(f"\n{file.name}, {args.threads} threads{f', {args.busy} busy processes' if args.busy else ''}")
        if args.blocks:
            with busy(args.busy):
                result = compare(file, target, args.blocks, prompts, args.tokens, args.repeats)
            print(f"{'':14}{'outpace':>10}{'llama.cpp':>11}{'ratio':>7}   at best{'llama.cpp':>11}{'ratio':>7}")
            for name, best in result["best"].items():
                columns = [
                    f"{entry['outpace']:10.2f}{entry['llama_cpp']:11.2f}{entry['ratio']:7.2f}"
                    for entry in (result[name], best)
                ]
                print(f"{name:14}{''.join(columns)}", flush=True)
        if args.perplexity:
            result["perplexity"] = entry = perplexities(file, target, args.perplexity)
            print(
                f"perplexity of {entry['tokens']} tokens: outpace {entry['outpace']:.4f} (f32 "
                f"{entry['outpace f32']:.4f}, x{entry['over f32']:.4f}), llama.cpp {entry['llama_cpp']:.4f} "
                f"(x{entry['over llama_cpp']:.4f})",
                flush=True,
            )
        found["files"][file.name] = result
        if args.json:
            write_json(args.json, found)


if __name__ == "__main__":
    main()
