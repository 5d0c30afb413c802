"""The training data: the target's own answers with the hidden states that its passes had anyway, on disk.

Neighbours: prompts.py composes what is asked; batches.py reads what is written here. A folder holds shards.json and
for each shard N three arrays: N.tokens.npy int32 [tokens], N.states.npy float16 [tokens, taps, hidden] (memory-mapped
when read) and N.rows.npy int64 [sequences, 3] (first token, first answer token, end). A sequence is prompt and answer
without the answer's last token, whose state nobody computed. shards.json is written last: a shard that it does not
name was interrupted and is made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..api import LanguageModel
from ..decode import Request
from ..json_file import read_json
from ..types import F32, I64, ModelError, SampleOpts, UsageError, size
from ..weights.files import replacing
from .prompts import Prompt, compose

FORMAT = 1
INDEX = "shards.json"
SHARD_PROMPTS = 256
PROMPT_TOKENS, ANSWER_TOKENS, TURN_TOKENS = 384, 256, 96  # most; a turn that is followed by another one is short
SHORTEST = 6  # an answer of fewer tokens teaches nothing
TEMPERATURE = 0.7  # of the half of the answers that is sampled
_TYPICAL_TOKENS = 400 * SHARD_PROMPTS  # of a shard, for the disk's sake; rather too many

Progress = Callable[[int, int, float], None]  # answer tokens, prompts, seconds so far


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt with its answer. tokens: int32 [n]; states: float16 [n, taps, hidden]; answer: its first token."""

    tokens: NDArray[np.int32]
    states: NDArray[np.float16]
    answer: int


def fingerprint(path: Path, precision: str) -> str:
    """Tells targets apart: sizes, beginnings and ends of the model's files, and the precision it ran with."""
    digest = hashlib.sha256(precision.encode())
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.suffix in (".safetensors", ".json"))
    for file in files:
        with open(file, "rb") as raw:
            length = os.fstat(raw.fileno()).st_size
            digest.update(f"{length}".encode() + raw.read(1 << 22))
            raw.seek(max(0, length - (1 << 20)))
            digest.update(raw.read())
    return digest.hexdigest()


def record(
    model: LanguageModel,
    folder: Path,
    *,
    made_by: str,
    taps: Sequence[int],
    seed: int = 0,
    seconds: float | None = None,
    tokens: int | None = None,
    progress: Progress | None = None,
) -> int:
    """Lets the target answer composed prompts until the folder holds `tokens` answer tokens, or what `seconds` of work
    gave; goes on where an earlier call ended. Returns the answer tokens that the folder holds.

    made_by: the target's fingerprint. Ctrl-C keeps the answers that are complete, and goes on as KeyboardInterrupt.
    Raises UsageError when the folder holds another target's data, ModelError when the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    taps = tuple(taps)
    index = _index(folder)
    facts = {"format": FORMAT, "target": made_by, "taps": list(taps), "hidden": model.config.hidden_size, "seed": seed}
    if index is None:
        index = {**facts, "shards": []}
    check(folder, index, facts)
    shards: list[dict[str, int]] = index["shards"]
    done = sum(shard["answers"] for shard in shards)
    spent = sum(shard["milliseconds"] for shard in shards) / 1000
    first = shards[-1]["next"] if shards else 0
    composed = islice(compose(seed), first, None)
    while (tokens is None or done < tokens) and (seconds is None or spent < seconds):
        _check_space(folder, len(taps) * model.config.hidden_size)
        asked = [
            (prompt, SampleOpts(temperature=TEMPERATURE if i % 2 else 0.0, seed=i))
            for i, prompt in enumerate(islice(composed, SHARD_PROMPTS), first)
        ]
        answers: list[Example] = []
        part_begin = time.monotonic()
        deadline = None if seconds is None else part_begin + seconds - spent
        interrupted: BaseException | None = None
        try:
            for answer in answered(model, asked, taps, deadline):
                answers.append(answer)
                done += len(answer.tokens) - answer.answer
                if progress is not None:
                    progress(done, first + len(answers), spent + time.monotonic() - part_begin)
                if tokens is not None and done >= tokens:
                    break
        except KeyboardInterrupt as error:
            interrupted = error
        taken = time.monotonic() - part_begin
        spent += taken
        if answers:
            facts_of_it = {"next": first + SHARD_PROMPTS, "milliseconds": round(1000 * taken)}
            shards.append(_write(folder, len(shards), answers) | facts_of_it)
            with replacing(folder / INDEX) as file:
                file.write(json.dumps(index, indent=1).encode())
        first += SHARD_PROMPTS
        if interrupted is not None:
            raise interrupted
    return done


def check(folder: Path, index: dict[str, Any], facts: dict[str, Any]) -> None:
    """Raises UsageError unless the folder's data are of the target, taps and seed that `facts` name."""
    for name, value in facts.items():
        if index.get(name) != value:
            what = "another target (or the target has changed)" if name == "target" else f"another {name}"
            raise UsageError(f"{folder}: the data there were made with {what}: use a new folder, or delete this one")


def answered(
    model: LanguageModel,
    asked: Sequence[tuple[Prompt, SampleOpts]],
    taps: Sequence[int],
    deadline: float | None = None,
) -> Iterator[Example]:
    """The target's answers, in the order in which they finish; at the deadline also what there is of the others.

    deadline: of time.monotonic. Raises what a request fails with.
    """
    waiting: deque[tuple[Prompt, tuple[str, ...], SampleOpts]] = deque((prompt, (), opts) for prompt, opts in asked)
    running: dict[int, tuple[Request, Prompt, tuple[str, ...], SampleOpts]] = {}
    engine = model.engine
    try:
        while (waiting or running) and (deadline is None or time.monotonic() < deadline):
            while waiting and len(running) < model.target.capacity.slots:
                prompt, given, opts = waiting.popleft()
                ids = model.chat_ids(prompt.messages(given))
                limit = ANSWER_TOKENS if len(given) + 1 == len(prompt.turns) else TURN_TOKENS
                limit = min(limit, model.target.capacity.positions - len(ids))
                if len(ids) > PROMPT_TOKENS or limit < SHORTEST:
                    continue
                request = engine.submit(ids, replace(opts, max_tokens=limit), taps=taps, speculate=False)
                running[id(request)] = (request, prompt, given, opts)
            for request in engine.step():
                emitted = len(request.tokens) - len(request.prompt)
                looped = emitted % 16 == 0 and loop_start(request.tokens[len(request.prompt) :]) is not None
                if not request.finish and not looped:
                    continue
                if request.error is not None:
                    raise request.error
                engine.cancel(request)
                _, prompt, given, opts = running.pop(id(request))
                if (sequence := _sequence(request, taps)) is not None:
                    yield sequence
                if not looped and len(given) + 1 < len(prompt.turns) and model.tokenizer is not None:
                    text = model.tokenizer.decode(request.tokens[len(request.prompt) :]).strip()
                    waiting.append((prompt, (*given, text), opts))
        for request, *_ in running.values():  # the time is over: what there is of the last answers
            if request.tapped and (sequence := _sequence(request, taps)) is not None:
                yield sequence
    finally:
        for request, *_ in running.values():
            engine.cancel(request)


def _sequence(request: Request, taps: Sequence[int]) -> Example | None:
    """What a finished request teaches: up to a loop's second turn. None where that is too little."""
    start = len(request.prompt)
    n = min(len(request.tokens) - 1, request.read)
    if (cut := loop_start(request.tokens[start:])) is not None:
        n = min(n, start + cut)
    if n - start < SHORTEST:
        return None
    states: F32 = np.stack([np.concatenate(request.tapped[tap])[:n] for tap in taps], axis=1)
    if not np.isfinite(states).all():
        raise ModelError("the target's hidden states are not finite")
    most = np.finfo(np.float16).max
    return Example(
        np.array(request.tokens[:n], np.int32), np.clip(states, -most, most).astype(np.float16), answer=start
    )


def loop_start(tokens: Sequence[int], most: int = 48, times: int = 3, least: int = 24) -> int | None:
    """Where the loop into which the text has fallen comes round for the second time; None where it is in none.

    A loop is an end that repeats with a period of at most `most` tokens, `times` times and over `least` tokens.
    """
    n = len(tokens)
    for period in range(1, most + 1):
        span = max(times * period, least)
        if n < span or tokens[n - 1] != tokens[n - 1 - period]:
            continue
        begin = n - 1 - period
        while begin >= 0 and tokens[begin] == tokens[begin + period]:
            begin -= 1
        begin += 1  # the first token of the periodic end
        if n - begin >= span:
            return begin + period
    return None


def _write(folder: Path, number: int, answers: Sequence[Example]) -> dict[str, int]:
    """Writes a shard and returns its numbers for the index."""
    ends = np.cumsum([len(answer.tokens) for answer in answers])
    starts = ends - [len(answer.tokens) for answer in answers]
    rows: I64 = np.stack([starts, starts + [answer.answer for answer in answers], ends], axis=1).astype(np.int64)
    arrays = {
        "tokens": np.concatenate([answer.tokens for answer in answers]),
        "states": np.concatenate([answer.states for answer in answers]),
        "rows": rows,
    }
    for name, array in arrays.items():
        with replacing(folder / f"{number:05d}.{name}.npy") as file:
            np.save(file, array)
    return {
        "sequences": len(answers),
        "tokens": int(ends[-1]),
        "answers": int((rows[:, 2] - rows[:, 1]).sum()),
    }


def _index(folder: Path) -> dict[str, Any] | None:
    index = read_json(folder / INDEX, missing={})
    if not index:
        return None
    try:
        for shard in index["shards"]:
            for name in ("sequences", "tokens", "answers", "next", "milliseconds"):
                if not isinstance(shard[name], int):
                    raise TypeError
        if index["format"] != FORMAT:
            raise UsageError(f"{folder / INDEX}: data of format {index['format']!r:.20}, this version reads {FORMAT}")
    except (KeyError, TypeError):
        raise ModelError(f"{folder / INDEX}: is damaged: delete the folder {folder} and make the data again") from None
    return index


def _in_order(rows: I64, tokens: int) -> bool:
    """Whether every sequence has its answer inside itself, and lies inside the shard."""
    edges = np.concatenate([np.zeros((len(rows), 1), np.int64), rows, np.full((len(rows), 1), tokens)], axis=1)
    steps = np.diff(edges, axis=1)
    return bool((steps >= 0).all() and (steps[:, 2] > 0).all())


def _check_space(folder: Path, numbers: int) -> None:
    needed = 2 * numbers * _TYPICAL_TOKENS
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelError(f"{folder}: {size(free)} free on the disk, but the next part of the data takes {size(needed)}")


class Shards:
    """The data of a folder. Sequences are views of the files, read when they are used.

    made_by: the fingerprint that the data must have. Raises UsageError for data of another target or none at all,
    ModelError, naming the file, for damaged ones.
    """

    def __init__(self, folder: Path, made_by: str) -> None:
        index = _index(folder)
        if index is None or not index["shards"]:
            raise UsageError(f"{folder}: no training data there")
        check(folder, index, {"target": made_by})
        self.taps = tuple(index["taps"])
        self.hidden = int(index["hidden"])
        self.sequences: list[Example] = []
        for number, shard in enumerate(index["shards"]):
            tokens, states, rows = (self._array(folder, number, name) for name in ("tokens", "states", "rows"))
            shapes = ((shard["tokens"],), (shard["tokens"], len(self.taps), self.hidden), (shard["sequences"], 3))
            if (tokens.shape, states.shape, rows.shape) != shapes or not _in_order(rows, len(tokens)):
                raise ModelError(f"{folder}: shard {number} is damaged: delete the folder and make the data again")
            self.sequences += [
                Example(tokens[start:end], states[start:end], int(answer - start)) for start, answer, end in rows
            ]

    def _array(self, folder: Path, number: int, name: str) -> NDArray[Any]:
        file = folder / f"{number:05d}.{name}.npy"
        try:
            array: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise ModelError(f"{file}: cannot be read: {error}; delete the folder and make the data again") from None
        return array

    @property
    def answers(self) -> int:
        """Answer tokens."""
        return sum(len(sequence.tokens) - sequence.answer for sequence in self.sequences)

    def counts(self, vocabulary: int) -> I64:
        """How often each token occurs in the answers, int64 [vocabulary]."""
        total: I64 = np.zeros(vocabulary, np.int64)
        for sequence in self.sequences:
            total += np.bincount(sequence.tokens[sequence.answer :], minlength=vocabulary)
        return total
