"""The datastore: sort, search and drafts against brute force; its file under attack; the corpus; the product."""

from __future__ import annotations

import json
import os
import random
import struct
import threading
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import outpace
import tiny
import tiny_folder
from outpace import LanguageModel, ModelError, SampleOpts, UsageError, WeightMap
from outpace.backends.native import NativeBackend
from outpace.cli.app import build as command_line
from outpace.controller import Controller
from outpace.decode import Decoder
from outpace.drafters import DatastoreDrafter, Drafter, State, SuffixDrafter, Want
from outpace.drafters import corpus as corpus_module
from outpace.drafters.corpus import Counts, documents, files
from outpace.drafters.datastore import build
from outpace.drafters.datastore_file import HEAD, Datastore, write
from outpace.drafters.suffix_array import sorted_suffixes
from outpace.sampling import Sampler
from outpace.text.tokenizer import Tokenizer

KNOWN = 5
TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=30), min_size=1, max_size=6).filter(any)


def store(path: Path, texts: Sequence[Sequence[int]], known: int = KNOWN) -> Datastore:
    write(path, ([text] for text in texts), vocabulary="v", known_tokens=known, model="m", corpus="c")
    return Datastore.open(path)


def state(tokens: list[int], **opts: Any) -> State:
    return State(tokens, Sampler(SampleOpts(**{"temperature": 0.0, "seed": 3, **opts}), KNOWN, tokens))


def occurrences(texts: Sequence[Sequence[int]], pattern: Sequence[int]) -> list[tuple[int, ...]]:
    """What follows the pattern wherever it occurs, up to the end of the document."""
    size = len(pattern)
    return [
        tuple(text[at + size :])
        for text in texts
        for at in range(len(text) - size + 1)
        if list(text[at : at + size]) == list(pattern)
    ]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("datastore") / "x.idx"


# ------------------------------------------------------------------------------------------------ sort and search


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 3), max_size=60),
    st.integers(1, 12),
    st.integers(1, 6),
    st.sampled_from(["<u2", ">u4", "u4"]),
)
def test_suffixes_are_sorted_by_depth_tokens_then_by_place(
    tokens: list[int], group: int, depth: int, kind: str
) -> None:
    pieces = list(sorted_suffixes(np.array(tokens, kind), 3, depth=depth, group=group))
    longer = tokens + [3] * depth
    places = [i for i, token in enumerate(tokens) if token != 3]
    assert [int(i) for piece in pieces for i in piece] == sorted(places, key=lambda i: (longer[i : i + depth], i))


@pytest.mark.parametrize("vocabulary", [300, 151_936])
def test_large_vocabularies_and_endless_repetition_are_sorted(vocabulary: int) -> None:
    rng = np.random.default_rng(0)
    tokens = np.concatenate([np.zeros(3000), rng.integers(0, vocabulary, 3000), np.tile([7, 8], 1500)]).astype(
        np.uint32
    )
    longer = [*tokens.tolist(), *[vocabulary] * 16]
    found = np.concatenate(list(sorted_suffixes(tokens, vocabulary, group=100))).tolist()
    assert found == sorted(range(len(tokens)), key=lambda i: (longer[i : i + 16], i))


@settings(max_examples=80, deadline=None)
@given(texts=TEXTS, pattern=st.lists(st.integers(0, 3), min_size=1, max_size=6), n=st.integers(1, 8))
def test_search_finds_every_occurrence_and_stays_in_its_document(
    scratch: Path, texts: list[list[int]], pattern: list[int], n: int
) -> None:
    datastore = store(scratch, texts)
    rows = datastore.find(pattern)
    want = sorted((*text[:n], *[-1] * (n - len(text))) for text in occurrences(texts, pattern))
    assert sorted(map(tuple, datastore.following(rows, len(pattern), n, 1000).tolist())) == want


def test_wide_vocabularies_unknown_tokens_and_one_token(tmp_path: Path) -> None:
    texts = [[70_000, 256, 1, 65_535], [256, 1, 255]]
    datastore = store(tmp_path / "wide", texts, known=100_000)
    assert (datastore.head.width, datastore.head.documents, datastore.head.suffixes) == (4, 2, 7)
    assert sorted(datastore.following(datastore.find([256, 1]), 2, 2, 9).tolist()) == [[255, -1], [65_535, -1]]
    for pattern in ([100_000], [-1], [2**32 - 1], [2**40], [], [1] * 17):
        assert not datastore.find(pattern)
    datastore = store(tmp_path / "narrow", [[65_534]], known=65_535)
    assert datastore.head.width == 2
    assert len(datastore.find([65_534])) == 1
    assert not datastore.find([65_535])  # the end of a document is no token


def test_following_takes_an_even_sample(tmp_path: Path) -> None:
    datastore = store(tmp_path / "x", [[0, 1]] * 300 + [[0, 2]] * 100)
    sample = datastore.following(datastore.find([0]), 1, 1, 8)
    assert sample.ravel().tolist() == [1] * 6 + [2] * 2


# --------------------------------------------------------------------------------------------------------- drafts


def brute_force(
    texts: list[list[int]], tokens: list[int], n: int, shortest: int, depth: int = 16
) -> set[tuple[int, ...]]:
    """Every draft that follows the most frequent continuation token by token; ties leave several."""
    for size in range(min(depth, len(tokens)), shortest - 1, -1):
        found = occurrences(texts, tokens[-size:])
        if found:
            drafts, done = {()}, set()
            for at in range(min(n, size)):
                grown = set()
                for draft in drafts:
                    follow = Counter(text[at] for text in found if text[:at] == draft and len(text) > at)
                    best = [t for t, c in follow.items() if c == max(follow.values()) and c >= 0.1 * len(found)]
                    grown |= {(*draft, token) for token in best}
                    if not best:
                        done.add(draft)
                drafts = grown
            return drafts | done
    return {()}


@settings(max_examples=80, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 2), max_size=40), st.integers(0, 6), st.integers(1, 3), st.randoms())
def test_draft_is_the_most_frequent_continuation_of_the_longest_match(
    scratch: Path, texts: list[list[int]], tokens: list[int], n: int, shortest: int, rng: random.Random
) -> None:
    drafter, grown = DatastoreDrafter(store(scratch, texts), shortest=shortest), state([])
    while len(grown.tokens) < len(tokens):  # grows as a text does, by one token or some
        grown.tokens += tokens[len(grown.tokens) :][: rng.randint(1, 4)]
        (draft,) = drafter.propose([Want(grown, n)])
        assert draft.tokens in brute_force(texts, grown.tokens, n, shortest)
        assert (draft.parents, draft.q, draft.source) == (None, None, "datastore")


def test_tree_holds_the_most_frequent_paths(tmp_path: Path) -> None:
    texts = [[0, 1, 2, 3]] * 5 + [[0, 1, 2, 4]] * 3 + [[0, 1, 3, 3]] * 2
    drafter = DatastoreDrafter(store(tmp_path / "x", texts), branches=2)
    (draft,) = drafter.propose([Want(state([0, 1]), 4)])
    assert (draft.tokens, draft.parents) == ((2, 3, 4, 3), (-1, 0, 0, -1))
    assert drafter.propose([Want(state([0, 1]), 2)])[0].tokens == (2, 3)
    (chain,) = drafter.propose([Want(state([0, 1], temperature=1.0, rule="block"), 4)])
    assert (chain.tokens, chain.parents) == ((2, 3), None)
    rare = [[0, 1, 2]] * 30 + [[0, 1, 3]]
    (draft,) = DatastoreDrafter(store(tmp_path / "y", rare), branches=2).propose([Want(state([0, 1]), 4)])
    assert draft.tokens == (2,)


def test_a_round_costs_the_same_whatever_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datastore = store(tmp_path / "x", [[0, 1, 2, 3, 4] * 30])
    sizes: list[int] = []
    find = Datastore.find
    monkeypatch.setattr(Datastore, "find", lambda self, p: sizes.append(len(p)) or find(self, p))
    drafter, s = DatastoreDrafter(datastore), state([0, 0] * 500)
    drafter.propose([Want(s, 3)])
    assert len(sizes) <= 6
    for token, want in zip([3, 0, 1, 2, 3], [[2], [2], [2], [3], [4]], strict=True):
        sizes.clear()
        s.tokens.append(token)
        drafter.propose([Want(s, 3)])
        assert sizes == want


def test_confidence_is_the_share_of_the_continuations_and_grows_with_the_match(tmp_path: Path) -> None:
    drafter = DatastoreDrafter(store(tmp_path / "x", [[3, 0, 1, 2, 2]] * 3 + [[4, 0, 1, 3, 3]]))
    (short,) = drafter.propose([Want(state([2, 0, 1]), 2)])
    (long,) = drafter.propose([Want(state([3, 0, 1]), 2)])
    assert (short.tokens, long.tokens) == ((2, 2), (2, 2))
    assert short.confidence == pytest.approx((0.75 * 2 / 3, 2 / 3))
    assert long.confidence == pytest.approx((3 / 4, 3 / 4))


def test_settings_out_of_range_are_refused(tmp_path: Path) -> None:
    datastore = store(tmp_path / "x", [[0, 1]])
    for wrong in ({"shortest": 0}, {"shortest": 17}, {"reach": 0}, {"least": 2}, {"branches": 0}):
        with pytest.raises(UsageError):
            DatastoreDrafter(datastore, **wrong)  # type: ignore[arg-type]


def test_many_threads_read_at_once(tmp_path: Path) -> None:
    rng = random.Random(0)
    texts = [[rng.randrange(4) for _ in range(200)] for _ in range(5)]
    datastore = store(tmp_path / "x", texts)
    patterns = [[rng.randrange(4) for _ in range(3)] for _ in range(200)]
    want = [len(occurrences(texts, pattern)) for pattern in patterns]
    found: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda: found.append([len(datastore.find(pattern)) for pattern in patterns]))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    store(tmp_path / "x", [[0, 1, 2]])  # takes the file's place meanwhile
    for thread in threads:
        thread.join()
    assert found == [want] * 4
    assert Datastore.open(tmp_path / "x").head.suffixes == 3


# ----------------------------------------------------------------------------------------------------------- file


def test_nothing_is_left_behind_when_writing_fails(tmp_path: Path) -> None:
    def broken() -> Any:
        yield [[0, 1]]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "x", broken(), vocabulary="v", known_tokens=KNOWN)
    with pytest.raises(UsageError, match="no text"):
        store(tmp_path / "x", [[], []])
    with pytest.raises(UsageError, match="outside the vocabulary of 5"):
        store(tmp_path / "x", [[1, KNOWN]])
    with pytest.raises(ModelError, match="cannot be written"):
        store(tmp_path / "no" / "x", [[1]])
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_datastore_is_refused(tmp_path: Path) -> None:
    good = tmp_path / "good"
    store(good, [[0, 1, 2]])
    data = good.read_bytes()
    length = int.from_bytes(data[8:12], "little")
    fields = json.loads(data[16 : 16 + length])
    assert len(data) == 2 * HEAD + 4 * 3

    def headed(**changes: Any) -> bytes:
        return begins(json.dumps(fields | changes).encode())

    def begins(text: bytes) -> bytes:
        return (struct.pack("<8sII", b"OUTPDATA", len(text), zlib.crc32(text)) + text).ljust(HEAD, b"\0") + data[HEAD:]

    (tmp_path / "same").write_bytes(headed())
    Datastore.open(tmp_path / "same")
    names = "\x01\udc80\N{GRINNING FACE}" * 999  # of folders can be anything; the head has room for what is kept
    write(tmp_path / "odd", [[[1]]], vocabulary="v" * 64, known_tokens=KNOWN, model=names, corpus=names)
    Datastore.open(tmp_path / "odd")
    cases = {
        "empty": b"",
        "short": data[:100],
        "other": b"GGUF" + data[4:],
        "truncated": data[:-4],
        "longer": data + b"\0",
        "tokens": data[:HEAD] + bytes([data[HEAD] ^ 1]) + data[HEAD + 1 :],
        "suffixes": data[:-1] + b"\1",
        "version": headed(version=2),
        "missing": headed(extra=1),
        "counts": headed(documents=2),
        "large": headed(tokens=2**40, suffixes=2**40 - 1),
        "negative": headed(tokens=-1, suffixes=-2),
        "text": headed(tokens="4"),
        "flag": headed(documents=True),
        "none": headed(checksums=None),
        "vocabulary": headed(known_tokens=0),
        "wider": headed(known_tokens=2**20),
        "deep": begins(b"[" * 4000),
        "list": begins(b"[]"),
        "words": begins(b"no JSON"),
        "bytes": begins(b"\xff"),
    }
    for name, content in cases.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ModelError, match=f"^{path}: not a usable datastore: .*outpace index") as caught:
            Datastore.open(path)
        assert "\n" not in str(caught.value)
    os.mkfifo(tmp_path / "pipe")
    for name in ("nothing", "pipe", "."):
        with pytest.raises(ModelError, match=r"no such file|not a regular file"):
            Datastore.open(tmp_path / name)


def test_damage_never_does_more_than_spoil_drafts(tmp_path: Path) -> None:
    rng = random.Random(0)
    path, bad = tmp_path / "x", tmp_path / "bad"
    store(path, [[rng.randrange(4) for _ in range(3000)] for _ in range(4)])
    data = path.read_bytes()
    opened = 0
    for _ in range(150):
        mutant = bytearray(data)
        for _ in range(rng.choice([1, 5, 2000])):
            mutant[rng.randrange(rng.choice([64, HEAD, len(data)]))] = rng.choice([0, 255, rng.randrange(256)])
        if rng.random() < 0.1:
            del mutant[rng.randrange(len(mutant)) :]
        bad.write_bytes(mutant)
        try:
            datastore = Datastore.open(bad)
        except ModelError:
            continue
        opened += 1
        drafter = DatastoreDrafter(datastore, branches=rng.choice([1, 3]), least=0.0)
        for _ in range(10):
            tokens = [rng.randrange(4) for _ in range(rng.randrange(8))]
            (draft,) = drafter.propose([Want(state(tokens), 15)])
            draft.checked(KNOWN)
    assert opened > 10  # damage in the middle is not looked for


# --------------------------------------------------------------------------------------------------------- corpus


def read(path: Path) -> tuple[list[str], Counts]:
    counts = Counts()
    return ["".join(pieces) for pieces in documents(path, counts)], counts


def test_text_is_told_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "_HEAD", 8)
    path = tmp_path / "x.bin"
    for data, want in {
        "äöü€𝄞 ∑ привет 你好\n".encode(): "äöü€𝄞 ∑ привет 你好\n",  # characters cut by the head's end
        b"\xef\xbb\xbfwith a mark": "with a mark",
        b"much later \xff bytes \xe2\x82": "much later \ufffd bytes \ufffd",
        b"a\r\nb": "a\r\nb",
        b'{"name": "package", "text": 3}': '{"name": "package", "text": 3}',
        b'[1, 2]\n{"text": "a"}': '[1, 2]\n{"text": "a"}',
        b"[" * 50_000: "[" * 50_000,
    }.items():
        path.write_bytes(data)
        assert read(path) == ([want], Counts(files=1)), data[:30]
    for data in (b"a\0b", b"\xff\xfea\0", b"caf\xe9", b"\x89PNG\r\n"):
        path.write_bytes(data)
        assert read(path) == ([], Counts(binary=1))
    path.write_bytes(b"")
    assert read(path)[1] == Counts(files=1)
    assert read(tmp_path / "gone")[1] == Counts(unreadable=1)


def test_a_long_text_comes_in_pieces_that_end_with_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "PIECE", 10)
    monkeypatch.setattr(corpus_module, "_HEAD", 7)
    path = tmp_path / "x"
    for text in ("one\ntwo\nthree\nfour\nfive\n", "ä" * 50, "a\n" + "b" * 45 + "\nc"):
        path.write_text(text, encoding="utf-8")
        (pieces,) = [list(pieces) for pieces in documents(path, Counts())]
        assert "".join(pieces) == text
        assert len(pieces) > 1
    assert all(piece.endswith("\n") for piece in pieces[:1])


def test_answers_and_conversations_become_their_texts(tmp_path: Path) -> None:
    path = tmp_path / "x"
    talk = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "tool", "content": None},
    ]
    for content, want in (
        (json.dumps(talk), ["hi", "hello"]),
        (json.dumps({"messages": talk}, indent=1), ["hi", "hello"]),
        (json.dumps({"text": "answer", "seed": 1}), ["answer"]),
        ('{"text": "one"}\n\n' + json.dumps({"messages": talk}) + "\n", ["one", "hi", "hello"]),
        ('{"text": "half \\ud800"}', ["half ?"]),
    ):
        path.write_text(content, encoding="utf-8")
        assert read(path) == (want, Counts(files=1))


def test_folders_are_walked_without_junk_links_and_twice_named_files(tmp_path: Path) -> None:
    for name in ("a/x.txt", "a/b/y", "a/.git/z", "a/node_modules/z", "a/c/__pycache__/z", "a/.hidden", "d/w"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "a/loop").symlink_to(tmp_path / "a")
    (tmp_path / "a/again").symlink_to(tmp_path / "a/x.txt")
    os.mkfifo(tmp_path / "a/pipe")
    found = files([tmp_path / "a/x.txt", tmp_path / "a", str(tmp_path / "d/w"), tmp_path / "a/.git"], Counts())
    assert [str(file.relative_to(tmp_path)) for file in found] == [
        "a/x.txt",
        "a/pipe",
        "a/b/y",
        "d/w",
        "a/.git/z",
    ]
    assert read(tmp_path / "a/pipe")[1] == Counts(unreadable=1)
    with pytest.raises(UsageError, match="no such file or folder"):
        files([tmp_path / "nothing"], Counts())


# -------------------------------------------------------------------------------------------------------- product


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder.write(tmp_path_factory.mktemp("tiny"))


def test_any_datastore_leaves_the_tokens_as_they_are(tmp_path: Path) -> None:
    config, arrays = tiny.random_model("qwen3", 0)
    rng = random.Random(5)
    prompts = [[rng.randrange(67) for _ in range(rng.randint(1, 20))] for _ in range(6)]
    opts = [SampleOpts(temperature=t, seed=7, max_tokens=60) for t in (0.0, 0.0, 0.0, 0.05, 0.3, 1.0)]
    with LanguageModel(NativeBackend(config, WeightMap.from_tensors(arrays)), None) as plain:
        want = [plain.generate(p, o).token_ids for p, o in zip(prompts, opts, strict=True)]
    # The corpus: half of the answers, one with an error in it, and tokens at random.
    texts = [[*p, *w] for p, w in zip(prompts[::2], want[::2], strict=True)]
    texts.append([*prompts[1], *want[1][:20], 0, *want[1][20:]])
    texts += [[rng.randrange(67) for _ in range(300)] for _ in range(3)]
    datastore = store(tmp_path / "x", texts, known=67)
    drafters: list[Drafter] = [
        DatastoreDrafter(datastore),
        DatastoreDrafter(datastore, branches=3, shortest=1, least=0.0, reach=9.0),
    ]
    for used in ([drafters[0]], [drafters[1]], [drafters[0], SuffixDrafter()]):
        for fixed in (None, 1, 5, 15):
            with LanguageModel(NativeBackend(config, WeightMap.from_tensors(arrays)), None) as model:
                model.engine.decoder = Decoder(model.target, used, Controller(fixed))
                found = model.generate_many(prompts, opts)
            assert [result.token_ids for result in found] == want
            if fixed == 5:
                assert found[0].stats.tokens_per_round > 3  # its answer is in the corpus
                assert sum(result.stats.accepted for result in found) > 100


def test_other_rules_run_with_chains_and_trees(tmp_path: Path) -> None:
    config, arrays = tiny.random_model("qwen3", 0)
    datastore = store(tmp_path / "x", [[i % 7 for i in range(100)], [i % 5 for i in range(100)]], known=67)
    for branches in (1, 3):
        drafter = DatastoreDrafter(datastore, branches=branches, shortest=1)
        with LanguageModel(NativeBackend(config, WeightMap.from_tensors(arrays)), None, drafters=[drafter]) as model:
            for rule in ("rejection", "block"):
                one = model.generate([0, 1, 2, 3], temperature=2.0, seed=1, rule=rule, max_tokens=40)
                two = model.generate([0, 1, 2, 3], temperature=2.0, seed=1, rule=rule, max_tokens=40)
                assert one.token_ids == two.token_ids
                assert one.stats.drafted > 0


def test_load_uses_it_and_refuses_another_vocabulary(folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    text = "Ünïcode and 你好: what was said once may be said again. "
    (tmp_path / "a.txt").write_text(text * 3, encoding="utf-8")
    seen: list[tuple[str, int, int]] = []
    made = build(tmp_path / "x", [tmp_path], tokenizer, model="tiny", progress=lambda *step: seen.append(step))
    assert {what for what, done, total in seen if done == total} == {"reading", "sorting"}
    assert made.head.suffixes == 3 * len(tokenizer.encode(text))
    ids = tokenizer.encode(text[:30])
    for draft, names in (("datastore", ["datastore"]), ("auto", ["suffix", "datastore"])):
        with outpace.load(folder, draft=draft, datastore=tmp_path / "x") as model:
            assert [drafter.name for drafter in model.drafters] == names
            (found,) = model.drafters[-1].propose([Want(State(ids, Sampler(SampleOpts(seed=0), 300, ids)), 12)])
            assert tokenizer.decode(found.tokens) == tokenizer.decode(tokenizer.encode(text)[len(ids) : len(ids) + 12])
            answer = model.generate(text, temperature=0.0, max_tokens=30)
            assert answer.token_ids == model.generate(text, temperature=0.0, max_tokens=30, speculate=False).token_ids
    with pytest.raises(UsageError, match="there already"):
        build(tmp_path / "x", [tmp_path], tokenizer)
    with pytest.raises(UsageError, match="is a folder"):
        build(tmp_path, [tmp_path], tokenizer)
    write(tmp_path / "foreign", [[[1, 2]]], vocabulary="other", known_tokens=KNOWN, model="qwen\n")
    with pytest.raises(
        UsageError, match=r"foreign cannot draft for .*: it holds tokens of the vocabulary of 'qwen\\n'"
    ):
        outpace.load(folder, datastore=tmp_path / "foreign")
    with pytest.raises(ModelError, match=r"a\.txt: not a usable datastore"):
        outpace.load(folder, datastore=tmp_path / "a.txt")
    for wrong in (
        {"draft": "datastore"},
        {"draft": "none", "datastore": "x"},
        {"draft": "suffix", "datastore": "x"},
    ):
        with pytest.raises(UsageError, match="datastore"):
            outpace.load(folder, **wrong)  # type: ignore[arg-type]


def test_command_line(folder: Path, tmp_path: Path) -> None:
    def run(*args: object) -> Any:
        return CliRunner().invoke(command_line(), [str(a) for a in args])

    texts, out = tmp_path / "texts", tmp_path / "x.idx"
    texts.mkdir()
    (texts / "a").write_text("one two three one two four")
    (texts / "b").write_bytes(b"\0\1")
    made = run("index", texts, out, "--model", folder)
    assert (made.exit_code, made.stdout) == (0, "")
    assert made.stderr.startswith(f"wrote {out} (")
    assert "1 file skipped as no text" in made.stderr
    assert "%" not in made.stderr  # no terminal, no bar
    assert run("index", texts, out, "--model", folder).exit_code == 2
    made = run("index", texts, texts / "a", tmp_path / "y.idx", "--model", folder, "--json")
    found = json.loads(made.stdout)
    assert (found["files"], found["skipped"], found["documents"], found["tokens"]) == (1, 1, 1, 26)
    assert found["bytes"] == (tmp_path / "y.idx").stat().st_size
    assert made.stderr == ""
    empty = run("index", texts / "b", tmp_path / "z.idx", "--model", folder)
    assert (empty.exit_code, empty.stderr) == (2, "outpace: there is no text to make a datastore of\n")
    answers = [
        run("generate", "one two", "--model", folder, "--json", "--temperature", "0", "--max-tokens", "40", *more)
        for more in ((), ("--datastore", out), ("--draft", "datastore", "--datastore", out))
    ]
    assert len({tuple(json.loads(answer.stdout)["token_ids"]) for answer in answers}) == 1
    for wrong in (("--draft", "datastore"), ("--draft", "none", "--datastore", out), ("--datastore", texts)):
        refused = run("generate", "x", "--model", folder, *wrong)
        assert refused.exit_code in (1, 2)
        assert refused.stderr.startswith("outpace: ")
        assert refused.stderr.count("\n") == 1
