#!/usr/bin/env python3
"""Writes the tables of docs/speed.md between its markers, from docs/figures/*.json, which scripts/measure.sh makes.

    scripts/speed_table.py [--check]

--check changes nothing and fails when the page does not say what the figures say. A figure that was not measured is
shown as such. Ratios of two programs come with a 95 % interval: both programs' samples are drawn again 2,000 times
(bootstrap, fixed seed) and the ratio of medians taken each time.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "speed.md"
FIGURES = ROOT / "docs" / "figures"
SHAPES = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b")
KINDS = ("Q8_0", "Q4_0", "Q4_1")
MISSING = "not measured"


def figures(name: str) -> dict[str, Any]:
    """A JSON file of docs/figures; {} where there is none."""
    path = FIGURES / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def interval(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Of the ratio of medians."""
    rng = random.Random(0)
    ratios = sorted(
        statistics.median(rng.choices(ours, k=len(ours))) / statistics.median(rng.choices(theirs, k=len(theirs)))
        for _ in range(2000)
    )
    return ratios[50], ratios[-51]


def compared(name: str, figure: str) -> list[str]:
    """Ours over llama.cpp's for each kind of file."""
    found = {kind: entry for file, entry in figures(name).get("files", {}).items() for kind in KINDS if kind in file}
    cells = []
    for kind in KINDS:
        if kind not in found or figure not in found[kind]:
            cells.append(f"{kind} {MISSING}")
            continue
        entry = found[kind]
        samples = [entry["samples"][who][figure] for who in ("outpace", "llama_cpp")]
        if min(map(len, samples)) < 4:  # too few for an interval
            low, high = entry[figure]["ratio"], entry["best"][figure]["ratio"]
            cells.append(f"{kind} **{low:.2f}** by the medians of {len(samples[0])}, {high:.2f} by the best")
            continue
        low, high = interval(*samples)
        both = f"{entry[figure]['outpace']:.0f} / {entry[figure]['llama_cpp']:.0f}"
        cells.append(f"{kind} **{entry[figure]['ratio']:.2f}** ({low:.2f} to {high:.2f}; {both} tokens/s)")
    return cells


def rows_ratio(name: str, rows: int) -> str:
    """T(rows) / T(1): of medians, and of the fastest passes."""
    found = figures(name)
    if not found:
        return MISSING
    median, least = found["pass_ms"], found["pass_min_ms"]
    return f"**{median[str(rows)] / median['1']:.2f}** ({least[str(rows)] / least['1']:.2f})"


def share(name: str) -> str:
    """Of the streaming bandwidth that one row uses: of medians, and of the fastest."""
    found = figures(name)
    if not found:
        return MISSING
    speed = found["bandwidth"]["big"]["bytes_per_s"] / 1e9
    return f"**{found['share']['of_big']:.0%}** ({found['share']['of_big_best']:.0%}) of {speed:.0f} GB/s"


def by_bits(models: Sequence[str], figure: Callable[[str], str]) -> list[str]:
    return [f"{model}: {figure(f'{model}-8bit')} / {figure(f'{model}-4bit')}" for model in models]


def torch_ratio(name: str) -> list[str]:
    found = figures("torch").get("median_ms")
    if not found:
        return [MISSING]
    return [f"**{found[name] / found[f'outpace, {bits} bits']:.1f}** at {bits} bits" for bits in (8, 4)]


def perplexity() -> list[str]:
    cells = []
    for file, entry in figures("perplexity").get("files", {}).items():
        kind = next(kind for kind in KINDS if kind in file)
        found = entry["perplexity"]
        cells.append(
            f"{kind} {found['outpace']:.3f}: over f32 **{found['over f32']:.4f}**, over llama.cpp "
            f"**{found['over llama_cpp']:.4f}**"
        )
    return cells or [MISSING]


def start(mode: str) -> list[str]:
    """Seconds of a start: median and least to the first token, and of processor time."""
    found = figures("start").get("modes", {}).get(mode)
    if not found:
        return [MISSING]
    wall, processor = found["first_token_s"], found["processor_s"]
    return [
        f"**{wall['median']:.2f} s** (least {wall['least']:.2f}; processor time {processor['median']:.2f}, least "
        f"{processor['least']:.2f}; load {' to '.join(map(str, figures('start')['load']))})"
    ]


def self_drafts() -> list[str]:
    """What a 16-bit target gains by drafting for itself at 4 bits."""
    found = figures("self_f16")
    cells = []
    for name in ("chat", "repetition"):
        if name not in found:
            return [MISSING]
        own, fixed = found[name]["modes"]["self"], found[name]["modes"]["self 3"]
        cells.append(
            f"{name} {ratio(own['factor'])}, {own['tokens_per_round']:.1f} tokens a round; "
            f"always 3 tokens {fixed['factor']['median']:.2f}"
        )
    return cells


def reach() -> str:
    """The table of aims."""
    smollm2 = ("smollm2",)
    lines: list[tuple[str, str, list[str]]] = [
        ("plain decoding over llama.cpp", "1.7 / 2.2 / 2.2", compared("llama_cpp", "decode")),
        ("prompt of 64 over llama.cpp", "1.0", compared("llama_cpp", "prompt 64")),
        ("prompt of 512 over llama.cpp", "1.0", compared("llama_cpp", "prompt 512")),
        ("decoding beside as many computing processes as cores", "1.0", compared("llama_cpp_busy", "decode")),
        ("T(8)/T(1), 8 / 4 bits", "1.45 / 1.6", by_bits(smollm2, lambda name: rows_ratio(name, 8))),
        ("T(8)/T(1), 8 / 4 bits", "1.12 / 1.3", by_bits(SHAPES, lambda name: rows_ratio(name, 8))),
        ("T(16)/T(1), 8 / 4 bits", "1.6 / 2.0", by_bits(SHAPES, lambda name: rows_ratio(name, 16))),
        ("one row, share of streaming bandwidth, 8 / 4 bits", "88 %", by_bits(SHAPES, share)),
        ("one row over PyTorch eager f32", "6", torch_ratio("PyTorch, eager f32")),
        ("one row over PyTorch fbgemm int8", "3", torch_ratio("PyTorch, fbgemm int8")),
        ("SmolLM2 F16, `self` at 4 bits, over its own plain decoding", "1.3", self_drafts()),
        ("second start of SmolLM2 to the first token", "0.3 s", start("second start")),
        ("the same without the cache of weights", "", start("without the cache")),
        ("of it importing NumPy, tokenizers, jinja2 and typer", "", start("libraries")),
        ("perplexity, 20k tokens of documentation", "1.005 over f32; within 0.5 % of llama.cpp", perplexity()),
    ]
    rows = [f"| {what} | {aim} | {'<br>'.join(cells)} |" for what, aim, cells in lines]
    return markdown(["figure", "aim", "measured"], rows)


def markdown(columns: Sequence[str], rows: Sequence[str]) -> str:
    """A table of rows that are written already; MISSING without any."""
    if not rows:
        return MISSING
    return "\n".join([f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *rows])


def contexts() -> str:
    """Tokens a second by context and kind of cache."""
    found = {kind: figures(f"contexts-smollm2-{kind}").get("decode", {}) for kind in ("f32", "f16", "q8")}
    columns = sorted({int(context) for decode in found.values() for context in decode})
    rows = [
        f"| {kind} | " + " | ".join(f"{decode[str(n)]:.0f}" if str(n) in decode else "" for n in columns) + " |"
        for kind, decode in found.items()
        if decode
    ]
    return markdown(["cache", *map(str, columns)], rows)


def passes() -> str:
    """Milliseconds of a pass by rows."""
    names = [f"{model}-{bits}bit" for model in ("smollm2", *SHAPES) for bits in (8, 4)]
    found = {name: figures(name) for name in names}
    rows = []
    for name, entry in found.items():
        if entry:
            times = " | ".join(f"{entry['pass_ms'][str(n)]:.2f}" for n in (1, 2, 4, 6, 8, 12, 16))
            rows.append(f"| {name} | {times} | {entry['prefill'].get('512', 0):.0f} |")
    return markdown(["model", "1", "2", "4", "6", "8", "12", "16 rows, ms", "prompt of 512, tokens/s"], rows)


def heads() -> str:
    """What a draft step costs, what rounds must bring, and the simulation."""
    rows = []
    for model in ("smollm2", *SHAPES):
        for bits in (8, 4):
            found = figures(f"head-{model}-{bits}bit")
            if not found:
                continue
            need = " / ".join(f"{found['needed'][str(k)]:.2f}" for k in (1, 3, 7))
            simulated = "<br>".join(
                f"{s['tau']:g}: **{s['controller']['factor']:.2f}**, always {s['chain']} {s['fixed']['factor']:.2f}"
                for s in found["simulated"]
            )
            rows.append(
                f"| {model}-{bits}bit | {found['step_ms']['1']:.2f} of {found['pass_ms']['1']:.2f} | "
                f"**{found['step_share']:.1%}** (at most {found['most_share']:.1%}) | {need} | {simulated} |"
            )
    pay = "tokens a round that pay 1 / 3 / 7 drafts"
    return markdown(["model", "step, ms", "share of a pass (aim)", pay, "simulated: factor"], rows)


def speculation() -> str:
    """Decoding with speculation, end to end."""
    rows = []
    for file, classes in figures("speculation").get("files", {}).items():
        kind = next(kind for kind in KINDS if kind in file)
        for name, found in classes.items():
            modes, best = found["modes"], found["best of llama.cpp"]
            cells = [f"{modes[mode]['tokens_per_second']:.0f}" for mode in ("outpace", "outpace plain", "plain", best)]
            over = [
                "**{:.2f}** ({:.2f} to {:.2f})".format(entry["factor"], *entry["interval"])
                for entry in found["over"].values()
            ]
            rows.append(
                f"| {kind}, {name} | {cells[0]} ({modes['outpace']['tokens_per_round']:.2f} a round) | {cells[1]} | "
                f"{cells[2]} | {cells[3]} ({best}) | {over[0]} | {over[2]} |"
            )
    over = ("over own plain", "over llama.cpp's best")
    return markdown(["file, prompts", "outpace", "plain", "llama.cpp plain", "its best", *over], rows)


def sweep() -> str:
    """What the controller makes of a head and the text, beside every fixed setting."""
    rows = []
    for name, found in figures("sweep").items():
        if not isinstance(found, dict) or "modes" not in found:
            continue
        own, best = found["modes"]["head+suffix"], found["modes"][found["best fixed"]]
        rows.append(
            f"| {name} | {ratio(own['factor'])} | {own['tokens_per_round']:.2f} | {found['best fixed']} "
            f"{best['factor']['median']:.2f} | {ratio(own['over_best_fixed'])} |"
        )
    return markdown(["prompts", "over plain decoding", "tokens a round", "best fixed", "over the best fixed"], rows)


def ratio(entry: dict[str, float]) -> str:
    """A median with its interval."""
    return f"**{entry['median']:.2f}** ({entry['low']:.2f} to {entry['high']:.2f})"


TABLES: dict[str, Callable[[], str]] = {
    "reach": reach,
    "passes": passes,
    "contexts": contexts,
    "heads": heads,
    "speculation": speculation,
    "sweep": sweep,
}


def filled(page: str) -> str:
    """The page with the text between each table's markers replaced."""
    for name, table in TABLES.items():
        begin, end = f"<!-- table {name} -->\n", "<!-- end -->"
        before, found, rest = page.partition(begin)
        if not found or end not in rest:
            sys.exit(f"speed_table: {PAGE.name} has no table {name}")
        page = f"{before}{begin}{table()}\n{end}{rest.partition(end)[2]}"
    return page


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    wanted = filled(page)
    if sys.argv[1:] == ["--check"]:
        if page != wanted:
            sys.exit("speed_table: docs/speed.md differs from docs/figures: run scripts/speed_table.py")
    elif sys.argv[1:]:
        sys.exit("usage: scripts/speed_table.py [--check]")
    else:
        part = PAGE.with_name(PAGE.name + ".part")
        part.write_text(wanted, encoding="utf-8")
        part.replace(PAGE)


if __name__ == "__main__":
    main()
