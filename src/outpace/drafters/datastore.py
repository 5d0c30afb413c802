"""Drafts from a corpus that the user names: their documents, their code, earlier answers.

The longest end of the text that the corpus holds, of at most 16 tokens, is looked up in a suffix array on the disk;
what most often follows it there is the draft. Source: REST, retrieval-based speculative decoding (He et al. 2023,
arXiv 2311.08252). Neighbours: datastore_file.py is the file, corpus.py reads what it is built from, suffix.py does the
same with the request's own text.
"""

from __future__ import annotations

import heapq
import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..text.tokenizer import Tokenizer
from ..types import Draft, UsageError
from .base import State, Want
from .corpus import Counts, documents, files
from .datastore_file import Datastore, Head, Progress, write

SAMPLE = 64  # occurrences whose continuations are counted


@dataclass(frozen=True, slots=True)
class Built:
    """A new datastore. skipped: files that are no text; unreadable: files that could not be read."""

    path: Path
    head: Head
    files: int
    skipped: int
    unreadable: int


def build(
    out: str | Path,
    corpus: Sequence[str | Path],
    tokenizer: Tokenizer,
    *,
    model: str = "",
    force: bool = False,
    progress: Progress | None = None,
) -> Built:
    """Makes a datastore of files and folders (corpus.py says which files count). `model`: its name, for messages.

    progress: called with what is done, how much and of how much: ("reading", ...) in bytes, ("sorting", ...) in tokens.
    A corpus that has changed or grown is built anew: a datastore cannot be added to. Disk: 6 bytes a token, 8 where the
    vocabulary has more than 65535; memory: see `write`. Raises UsageError for a path that is not there, a file `out`
    without `force`, or when there is no text, and ModelError when the disk refuses.
    """
    out = Path(out)
    if out.is_dir():
        raise UsageError(f"{out} is a folder; name a file to write")
    if out.exists() and not force:
        raise UsageError(f"{out} is there already; --force replaces it")
    counts = Counts()
    found = files(corpus, counts)
    sizes = [os.path.getsize(file) if os.path.isfile(file) else 0 for file in found]

    def encoded() -> Iterator[Iterator[list[int]]]:
        done = 0
        for file, size in zip(found, sizes, strict=True):
            for pieces in documents(file, counts):
                yield (tokenizer.encode(text, add_bos=False) for text in pieces)
            done += size
            if progress is not None:
                progress("reading", done, sum(sizes))

    head = write(
        out,
        encoded(),
        vocabulary=tokenizer.fingerprint(),
        known_tokens=tokenizer.known_tokens,
        model=model,
        corpus=", ".join(map(str, corpus)),
        progress=progress,
    )
    return Built(out, head, counts.files, counts.binary, counts.unreadable)


def open_for(path: str | Path, tokenizer: Tokenizer, model: str) -> Datastore:
    """Opens a datastore to draft for a model. Raises ModelError for a file that is none, is damaged or of another
    version, and UsageError for one of another vocabulary."""
    datastore = Datastore.open(path)
    if datastore.head.vocabulary != tokenizer.fingerprint():
        other = repr(datastore.head.model or "another model")  # whatever the file says, it cannot command a terminal
        raise UsageError(
            f"{path} cannot draft for {model}: it holds tokens of the vocabulary of {other}; "
            f"build one with `outpace index CORPUS --model {model} OUT`"
        )
    return datastore


@dataclass(slots=True)
class _Match:
    """The longest end of a request's first `seen` tokens that the corpus holds: its rows, none where it is too short.

    bound: no longer end occurs.
    """

    seen: int = 0
    bound: int = 0
    rows: range = range(0)


class DatastoreDrafter:
    """Drafts what most often follows, in the corpus, the longest end of the text that occurs there."""

    name = "datastore"
    free = True

    def __init__(
        self, datastore: Datastore, *, shortest: int = 2, reach: float = 1.0, least: float = 0.1, branches: int = 1
    ) -> None:
        """shortest: a match below this many tokens promises nothing. reach: a match promises at most this many tokens
        for each of its own. least: what a smaller share of its occurrences goes on with is not drafted. branches: 1
        drafts a chain; more a tree with up to so many continuations of each token, the most frequent paths first (a
        chain all the same under rule="block", which knows no trees).

        Raises UsageError unless 1 <= shortest <= the datastore's depth, reach > 0, 0 <= least <= 1 and branches >= 1.
        """
        depth = datastore.head.depth
        if not (1 <= shortest <= depth and reach > 0 and 0 <= least <= 1 and branches >= 1):
            raise UsageError(
                f"datastore drafter needs 1 <= shortest <= {depth}, reach > 0, 0 <= least <= 1 and branches >= 1, "
                f"got {shortest}, {reach}, {least} and {branches}"
            )
        self.datastore = datastore
        self.shortest, self.reach, self.least, self.branches = shortest, reach, least, branches
        self._matches: dict[State, _Match] = {}

    def propose(self, wanted: Sequence[Want]) -> list[Draft]:
        return [self._draft(want.state, want.most) for want in wanted]

    def _match(self, state: State) -> _Match:
        match = self._matches.setdefault(state, _Match())
        new = len(state.tokens) - match.seen
        if not new:
            return match
        # A new token makes a match longer by one at most, so that a round costs the same whatever the text's length.
        high = min(self.datastore.head.depth, len(state.tokens), match.bound + new)
        low, rows = self.shortest - 1, range(0)
        size = high  # the usual case in a text that is being copied
        while low < high:
            found = self.datastore.find(state.tokens[-size:])
            if found:
                low, rows = size, found
            else:  # nor does any longer end occur
                high = size - 1
            size = (low + high + 1) // 2
        match.seen, match.bound, match.rows = len(state.tokens), low, rows
        return match

    def _draft(self, state: State, n: int) -> Draft:
        match = self._match(state)
        deepest = min(n, int(match.bound * self.reach))
        if deepest <= 0 or not match.rows:
            return Draft(source=self.name)
        texts = self.datastore.following(match.rows, match.bound, deepest, SAMPLE).tolist()
        branches = 1 if state.sampler.opts.rule == "block" else self.branches
        tokens: list[int] = []
        parents: list[int] = []
        confidence: list[float] = []
        order = itertools.count()
        heap: list[tuple[int, int, int, int, int, list[list[int]]]] = []  # the most frequent next node comes first

        def grow(parent: int, depth: int, among: list[list[int]]) -> None:
            counts = Counter([text[depth] for text in among])
            del counts[-1]
            for token, count in counts.most_common(branches):
                if count >= self.least * len(texts):
                    heapq.heappush(heap, (-count, next(order), parent, depth, token, among))

        grow(-1, 0, texts)
        while heap and len(tokens) < n:
            count, _, parent, depth, token, among = heapq.heappop(heap)
            tokens.append(token)
            parents.append(parent)
            # As far as the corpus goes by the token's share of the continuations; a longer match speaks for more.
            confidence.append(-count / len(among) * match.bound / (match.bound + 1))
            if depth + 1 < deepest:
                grow(len(tokens) - 1, depth + 1, [text for text in among if text[depth] == token])
        tree = tuple(parents) if branches > 1 else None
        return Draft(tuple(tokens), parents=tree, source=self.name, confidence=tuple(confidence))

    def forget(self, state: State) -> None:
        self._matches.pop(state, None)

    def close(self) -> None:
        self._matches.clear()
