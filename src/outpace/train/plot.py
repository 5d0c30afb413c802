"""A run as a picture: loss, agreement and tokens per round by time, in training.svg beside the head.

Neighbours: history.py has the figures, loop.py draws at each checkpoint. By hand: an SVG of a few lines needs no
library.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..weights.files import replacing
from .history import Line

PLOT = "training.svg"
_WIDTH, _PANEL, _LEFT, _RIGHT, _TOP = 760, 190, 60, 20, 34
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf")

Points = Sequence[tuple[float, float]]


def draw(folder: Path, lines: Sequence[Line]) -> None:
    """Writes the picture; none for a run without figures. Raises ModelError when the disk refuses."""
    if not lines:
        return
    loss = [(line["seconds"] / 60, line["loss"]) for line in lines if "loss" in line]
    deepest = max((len(line.get("agree", ())) for line in lines), default=0)
    agree = [
        [(line["seconds"] / 60, line["agree"][j]) for line in lines if len(line.get("agree", ())) > j]
        for j in range(min(deepest, len(_COLOURS)))
    ]
    rounds = [(line["seconds"] / 60, line["tokens_per_round"]) for line in lines if "tokens_per_round" in line]
    last = max(line["seconds"] / 60 for line in lines)
    panels = [
        ("loss", [loss]),
        (f"agreement with the target, guess 1 to {len(agree)}", agree),
        ("tokens per round on held-back data (chain of 7)", [rounds]),
    ]
    parts = [_panel(i, title, curves, last) for i, (title, curves) in enumerate(panels)]
    height = _PANEL * len(panels) + 30
    body = "\n".join(parts)
    text = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n'
        f'<text x="{_WIDTH // 2}" y="{height - 8}" text-anchor="middle">minutes of training</text>\n</svg>\n'
    )
    with replacing(folder / PLOT) as file:
        file.write(text.encode())


def _panel(place: int, title: str, curves: Sequence[Points], last: float) -> str:
    """One diagram: a frame, the least and the greatest value, and its curves."""
    top, bottom = place * _PANEL + _TOP, (place + 1) * _PANEL - 6
    values = [value for curve in curves for _, value in curve]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5

    def at(minute: float, value: float) -> str:
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * minute / max(last, 1e-9)
        return f"{x:.1f},{bottom - (bottom - top) * (value - low) / (high - low):.1f}"

    found = [
        f'<text x="{_LEFT}" y="{top - 8}" font-weight="bold">{title}</text>',
        f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH - _LEFT - _RIGHT}" height="{bottom - top}" fill="none" '
        'stroke="#999"/>',
        f'<text x="{_LEFT - 6}" y="{bottom}" text-anchor="end">{low:.2f}</text>',
        f'<text x="{_LEFT - 6}" y="{top + 10}" text-anchor="end">{high:.2f}</text>',
        f'<text x="{_WIDTH - _RIGHT}" y="{bottom + 14}" text-anchor="end">{last:.0f}</text>',
    ]
    for colour, curve in zip(_COLOURS, curves, strict=False):
        points = " ".join(at(minute, value) for minute, value in curve)
        if len(curve) == 1:
            x, y = points.split(",")
            found.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>')
        elif curve:
            found.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    return "\n".join(found)
