"""The training data: the target's own answers with the hidden states that its passes had anyway, on disk.

Neighbours: sources.py asks, answers.py and via.py answer; batches.py reads what is written here. A folder holds
shards.json and for each shard N three arrays: N.tokens.npy int32 [tokens], N.states.npy float16 [tokens, taps, hidden]
(memory-mapped when read) and N.rows.npy int64 [sequences, 3] (first token, first answer token, end). A sequence is
prompt and answer without the answer's last token, whose state nobody computed. shards.json is written last: a shard
that it does not name was interrupted and is made again. It also names the prompts whose answers were still being
written then, so that nothing but those is lost, whatever ends the process.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..api import LanguageModel
from ..hub import flock
from ..json_file import read_json
from ..types import I64, ModelError, UsageError, size
from ..weights.files import replacing
from .answers import Before, Limits, Talks, by_engine
from .answers import Example as Example
from .filters import Filter, digest
from .sources import Source
from .via import LEAST_TO_WRITE, ByServer, Server

FORMAT = 1
INDEX = "shards.json"
SHARD_ANSWERS, SHARD_BYTES = 256, 256 << 20  # a shard is written when it has as many, or as much of hidden states
PROMPT_TOKENS, ANSWER_TOKENS, TURN_TOKENS = 384, 256, 96  # most; a turn that is followed by another one is short
_TYPICAL_TOKENS = 400  # of a sequence, for the disk's sake; rather too many

Progress = Callable[[int, int, float], None]  # answer tokens, prompts, seconds so far


def fingerprint(path: Path, precision: str) -> str:
    """Tells targets apart: sizes, beginnings and ends of the model's files, and the precision it ran with."""
    digest = hashlib.sha256(precision.encode())
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.suffix in (".safetensors", ".json"))
    if not any(file.suffix == ".safetensors" for file in files) and path.is_dir():
        files += sorted(path.glob("*.gguf"))
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
    source: Source,
    server: Server | None = None,
    seconds: float | None = None,
    tokens: int | None = None,
    progress: Progress | None = None,
) -> int:
    """Lets the target answer the source's prompts until the folder holds `tokens` answer tokens, or what `seconds` of
    work gave, or there are no more prompts; goes on where an earlier call ended. Returns the answer tokens that the
    folder holds. Rows of a file that were skipped, and its end, are told as warnings.

    made_by: the target's fingerprint. server: has it write the answers. Whatever ends the call, Ctrl-C, too, the
    answers that are complete are kept. Raises UsageError when the folder holds another target's or source's data, is
    in use, or the server cannot be used, ModelError when the disk is full or the server's answers are not the target's.
    """
    taps = tuple(taps)
    facts: dict[str, Any] = {"format": FORMAT, "target": made_by, "taps": list(taps)}
    facts |= {"hidden": model.config.hidden_size, "source": source.facts, "by": "server" if server else "engine"}
    with _alone(folder):
        index = _index(folder) or {**facts, "shards": []}
        check(folder, index, facts)
        writer = _Writer(folder, index, tokens, seconds)
        chosen = Filter(writer.digests())
        limits = Limits(PROMPT_TOKENS, ANSWER_TOKENS, TURN_TOKENS)
        talks = Talks(model, source, chosen, limits, writer.before)
        deadline = None if seconds is None else writer.begin + seconds - writer.spent
        reader = ByServer(server) if server is not None else None
        answers = by_engine(talks, taps, deadline) if reader is None else reader.answers(talks, taps, deadline)

        def write() -> None:
            if reader is not None:
                reader.judge(LEAST_TO_WRITE)
            writer.write(talks)

        try:
            writer.check_space()
            for answer in () if writer.enough else answers:
                if answer is not None:
                    writer.add(answer)
                if progress is not None:
                    progress(writer.answers, talks.next - len(talks.open), writer.seconds)
                if writer.full:
                    write()
                    writer.check_space()
                if writer.enough:
                    break
            exhausted = not writer.enough and (deadline is None or time.monotonic() < deadline)
        finally:
            answers.close()
            write()
            if note := source.note():
                warnings.warn(note, stacklevel=2)
        if exhausted:
            warnings.warn(f"all prompts are answered: {writer.answers:,} answer tokens is all there is", stacklevel=2)
        return writer.answers


class _Writer:
    """Collects answers and writes shards of them.

    answers: answer tokens so far. before: where the folder's data end. spent: the seconds that they took.
    """

    def __init__(self, folder: Path, index: dict[str, Any], tokens: int | None, seconds: float | None) -> None:
        self._folder, self._index = folder, index
        self._shards: list[dict[str, Any]] = index["shards"]
        self._tokens, self._seconds = tokens, seconds
        self._waiting: list[Example] = []
        self._failed = False
        self.answers: int = sum(shard["answers"] for shard in self._shards)
        self.spent: float = sum(shard["milliseconds"] for shard in self._shards) / 1000
        last = self._shards[-1] if self._shards else {}
        self.before = Before(frozenset(last.get("open", ())), last.get("next", 0))
        self.begin = self._mark = time.monotonic()

    def digests(self) -> Iterator[bytes]:
        """Those of the answers that the folder holds."""
        for number in range(len(self._shards)):
            tokens, rows = (_array(self._folder, number, name) for name in ("tokens", "rows"))
            if tokens.ndim != 1 or rows.shape[1:] != (3,) or not _in_order(rows, len(tokens)):
                raise ModelError(
                    f"{self._folder}: shard {number} is damaged: delete the folder and make the data again"
                )
            yield from (digest(tokens[answer:end]) for _, answer, end in rows)

    @property
    def seconds(self) -> float:
        """Of work, earlier calls included."""
        return self.spent + time.monotonic() - self.begin

    @property
    def enough(self) -> bool:
        """Whether there are as many answer tokens as were wanted."""
        return self._tokens is not None and self.answers >= self._tokens

    @property
    def full(self) -> bool:
        """Whether it is time to write."""
        held = sum(answer.states.nbytes for answer in self._waiting)
        return len(self._waiting) >= SHARD_ANSWERS or held >= SHARD_BYTES

    def add(self, answer: Example) -> None:
        """Takes an answer."""
        self._waiting.append(answer)
        self.answers += len(answer.tokens) - answer.answer

    def write(self, talks: Talks) -> None:
        """Writes a shard of the answers that wait. Where none do, what was left out is noted with the last shard."""
        waiting, self._waiting = self._waiting, []
        if self._failed or not (waiting or self._shards):
            return
        self._failed = True  # until it is done: answers that could not be written are asked for again
        now = time.monotonic()
        if waiting:
            shard = _write(self._folder, len(self._shards), waiting) | {"milliseconds": 0, "left_out": {}}
            self._shards.append(shard)
        shard = self._shards[-1]
        shard |= {"next": talks.next, "open": sorted(talks.open)}
        shard["milliseconds"] += round(1000 * (now - self._mark))
        shard["left_out"] = dict(Counter(shard.get("left_out", {})) + talks.chosen.left_out)
        talks.chosen.left_out.clear()
        self._mark = now
        with replacing(self._folder / INDEX) as file:
            file.write(json.dumps(self._index, indent=1).encode())
        self._failed = False

    def check_space(self) -> None:
        """Raises ModelError unless the disk holds what is still to be made, as far as that can be foretold."""
        if self.enough or (self._seconds is not None and self.seconds >= self._seconds):
            return
        row = 2 * len(self._index["taps"]) * self._index["hidden"] + 4  # bytes of a token
        read, answered, spent = (
            sum(shard[name] for shard in self._shards) for name in ("tokens", "answers", "milliseconds")
        )
        rest = 0.0
        if self._tokens is not None:
            rest = (self._tokens - self.answers) * (read / answered if answered else 1.5)
        elif self._seconds is not None and spent:
            rest = (self._seconds - self.seconds) * 1000 * read / spent
        needed = row * max(round(rest), _TYPICAL_TOKENS * SHARD_ANSWERS)
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            raise ModelError(
                f"{self._folder}: the data still to be made take about {size(needed)}, but {size(free)} are free on "
                "the disk: make room, or make less"
            )


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps other processes from writing there, and deletes what killed ones left half-written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            try:
                flock(lock.fileno(), wait=False)
            except OSError:
                raise UsageError(f"{folder}: another process makes data there: wait, or use a new folder") from None
            for part in folder.glob(".*.part"):
                part.unlink(missing_ok=True)
            yield
    except OSError as error:
        raise ModelError(f"{folder}: cannot be written: {error.strerror or error}") from None


def check(folder: Path, index: dict[str, Any], facts: dict[str, Any]) -> None:
    """Raises UsageError unless the folder's data are what `facts` say: of that target, taps, prompts."""
    for name, value in facts.items():
        found = index.get(name)
        if found == value:
            continue
        what = f"another {name}"
        if name == "target":
            what = "another target (or the target has changed)"
        elif name == "by":
            what = (
                "answers that our own engine wrote, without --via" if found == "engine" else "a server's answers, --via"
            )
        elif name == "source" and found is not None:
            what = (
                f"composed prompts of seed {found['composer']}, without --data"
                if "composer" in found
                else "--data FILE"
            )
            what += ", another one, or it has changed" if "file" in found and "file" in value else ""
        raise UsageError(f"{folder}: the data there were made with {what}: use a new folder, or delete this one")


def _write(folder: Path, number: int, answers: Sequence[Example]) -> dict[str, Any]:
    """Writes a shard's arrays, all or none, and returns its numbers for the index."""
    ends = np.cumsum([len(answer.tokens) for answer in answers])
    starts = ends - [len(answer.tokens) for answer in answers]
    rows: I64 = np.stack([starts, starts + [answer.answer for answer in answers], ends], axis=1).astype(np.int64)
    arrays: dict[str, list[NDArray[Any]]] = {
        "tokens": [answer.tokens for answer in answers],
        "states": [answer.states for answer in answers],
        "rows": [rows],
    }
    try:
        for name, parts in arrays.items():
            with replacing(_file(folder, number, name)) as file:
                _put(file, parts)
    except BaseException:
        for name in arrays:
            with suppress(OSError):
                _file(folder, number, name).unlink()
        raise
    return {
        "sequences": len(answers),
        "tokens": int(ends[-1]),
        "answers": int((rows[:, 2] - rows[:, 1]).sum()),
    }


def _put(file: BinaryIO, parts: Sequence[NDArray[Any]]) -> None:
    """Writes arrays as one .npy file, one after the other, without a copy of them all."""
    shape = (sum(map(len, parts)), *parts[0].shape[1:])
    descr = np.lib.format.dtype_to_descr(parts[0].dtype)
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    for part in parts:
        file.write(np.ascontiguousarray(part).data)


def _file(folder: Path, number: int, name: str) -> Path:
    return folder / f"{number:05d}.{name}.npy"


def _array(folder: Path, number: int, name: str) -> NDArray[Any]:
    file = _file(folder, number, name)
    try:
        array: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: cannot be read: {error}; delete the folder and make the data again") from None
    return array


def _index(folder: Path) -> dict[str, Any] | None:
    """The folder's index; None where there is none. What older ones do not say is filled in."""
    index = read_json(folder / INDEX, missing={})
    if not index:
        return None
    if "shards" in index and index.get("format") != FORMAT:
        raise UsageError(f"{folder / INDEX}: data of format {index.get('format')!r:.20}, this version reads {FORMAT}")
    index.setdefault("by", "engine")
    index.setdefault("source", {"composer": index.get("seed", 0)})
    if not _is_index(index):
        raise ModelError(f"{folder / INDEX}: is damaged: delete the folder {folder} and make the data again")
    return index


def _is_index(index: dict[str, Any]) -> bool:
    shards, taps, source = index.get("shards"), index.get("taps"), index["source"]
    if not (isinstance(shards, list) and _are_numbers(taps, least=-1) and _are_numbers([index.get("hidden")], least=1)):
        return False
    if not isinstance(source, dict) or not ({"composer", "file"} & source.keys()):
        return False
    for shard in shards:
        if not isinstance(shard, dict):
            return False
        numbers = [shard.get(name) for name in ("sequences", "tokens", "answers", "next", "milliseconds")]
        left_out = shard.get("left_out", {})
        if not (_are_numbers(numbers) and _are_numbers(shard.get("open", [])) and isinstance(left_out, dict)):
            return False
        if not _are_numbers(list(left_out.values())):
            return False
    return True


def _are_numbers(values: object, least: int = 0) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= least for value in values)


def _in_order(rows: I64, tokens: int) -> bool:
    """Whether every sequence has its answer inside itself, and lies inside the shard."""
    edges = np.concatenate([np.zeros((len(rows), 1), np.int64), rows, np.full((len(rows), 1), tokens)], axis=1)
    steps = np.diff(edges, axis=1)
    return bool((steps >= 0).all() and (steps[:, 2] > 0).all())


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
        self.made_by = made_by
        self.taps = tuple(index["taps"])
        self.hidden = int(index["hidden"])
        self.left_out: Counter[str] = Counter()  # answers and prompts that were of no use, by reason
        self.sequences: list[Example] = []
        self.mapped: list[NDArray[np.float16]] = []  # the states of each shard: nearly all that there is to read
        for number, shard in enumerate(index["shards"]):
            self.left_out.update(shard.get("left_out", {}))
            tokens, states, rows = (_array(folder, number, name) for name in ("tokens", "states", "rows"))
            shapes = ((shard["tokens"],), (shard["tokens"], len(self.taps), self.hidden), (shard["sequences"], 3))
            if (tokens.shape, states.shape, rows.shape) != shapes or not _in_order(rows, len(tokens)):
                raise ModelError(f"{folder}: shard {number} is damaged: delete the folder and make the data again")
            self.mapped.append(states)
            self.sequences += [
                Example(tokens[start:end], states[start:end], int(answer - start)) for start, answer, end in rows
            ]

    @property
    def answers(self) -> int:
        """Answer tokens."""
        return sum(len(sequence.tokens) - sequence.answer for sequence in self.sequences)

    def counts(self, vocabulary: int) -> I64:
        """How often each token occurs in the answers, int64 [vocabulary]."""
        answers = [sequence.tokens[sequence.answer :] for sequence in self.sequences]
        return np.bincount(np.concatenate(answers), minlength=vocabulary).astype(np.int64)
