"""What speculation did in an answer: its text with the accepted drafts marked, and what each source was worth.

Neighbours: generate.py prints this with --explain; the figures are Result.rounds and Result.stats (types.py).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from .terminal import clean, counted

if TYPE_CHECKING:
    from ..api import Result
    from ..text.tokenizer import Tokenizer

GREEN, DIM, PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"


def marked(result: Result, tokenizer: Tokenizer, *, colour: bool) -> str:
    """The answer, a bar at the end of each round. Accepted drafts are green, or in <...> without colour."""
    on, off = (GREEN, PLAIN) if colour else ("<", ">")
    bar = f"{DIM}|{PLAIN}" if colour else "|"
    texts = tokenizer.stream()
    pieces: list[str] = []
    start = 0
    for each in result.rounds:
        tokens = result.token_ids[start : start + each.tokens]  # fewer where the answer ended within the round
        start += each.tokens
        accepted = clean(texts.push(tokens[: each.accepted]))
        own = clean(texts.push(tokens[each.accepted :]))
        pieces.append((f"{on}{accepted}{off}" if accepted else "") + own)
    return bar.join(pieces) + texts.flush()


def summary(result: Result) -> str:
    """Lines: tokens a round, sources, places of a draft, and where the time went."""
    stats = result.stats
    sizes = Counter(each.tokens for each in result.rounds)
    lines = [
        f"{counted(stats.tokens, 'token')} in {counted(stats.rounds, 'round')}: {stats.tokens_per_round:.2f} a round",
        "rounds by tokens  " + "  ".join(f"{size}: {sizes[size]}" for size in sorted(sizes)),
    ]
    for source, (drafted, accepted) in sorted(stats.by_source.items()):
        lines.append(f"{source:<16}  {drafted} drafted, {accepted} accepted ({accepted / drafted:.0%})")
    if stats.drafted:
        places = zip(stats.drafted_at, stats.accepted_at, strict=True)
        lines.append("accepted by place " + "  ".join(f"{a}/{d}" for d, a in places))
    trees = [each for each in result.rounds if each.drafted > each.depth]
    if trees:
        size, depth = (sum(values) / len(trees) for values in zip(*((t.drafted, t.depth) for t in trees), strict=True))
        lines.append(
            f"trees             {counted(len(trees), 'round')}, {size:.1f} tokens and {depth:.1f} deep a round"
        )
    if stats.decode_s:
        parts = {"drafting": stats.draft_s, "target": stats.forward_s, "choosing": stats.verify_s, "rest": stats.rest_s}
        shares = ", ".join(f"{name} {seconds / stats.decode_s:.1%}" for name, seconds in parts.items())
        lines.append(f"time              {stats.decode_s:.2f} s decoding: {shares}")
    return "\n".join(lines)
