"""Answers that a server writes: read once for their states, checked against the target, asked for again if need be."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import tiny_folder
from outpace import api
from outpace.api import LanguageModel
from outpace.cli.app import build
from outpace.train import data, filters, via
from outpace.train.data import Shards, record
from outpace.train.sources import Composer, Conversations
from outpace.train.via import Server
from outpace.types import ModelError, SampleOpts, UsageError

TAPS = (0, 2)
Reply = tuple[int, Any]


class Fake(ThreadingHTTPServer):
    """An OpenAI-compatible server on this machine. answer: what it says to a path and a body."""

    daemon_threads = True

    def __init__(self, answer: Callable[[str, dict[str, Any]], Reply]) -> None:
        self.answer = answer
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        self.busy = self.most_busy = 0
        self.count = threading.Lock()
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def handle_error(self, *args: Any) -> None:
        """Nothing: requests that nobody waits for any more fail when the test is over."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Fake

    def do_GET(self) -> None:
        self._reply({})

    def do_POST(self) -> None:
        self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _reply(self, body: dict[str, Any]) -> None:
        server = self.server
        with server.count:
            server.busy += 1
            server.most_busy = max(server.most_busy, server.busy)
            server.asked.append((self.path, body))
            server.headers.append(dict(self.headers))
        try:
            status, found = server.answer(self.path, body)
            raw = found if isinstance(found, bytes) else json.dumps(found).encode()
            if status == 0:  # hangs up
                self.close_connection = True
                return
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            if status == 429:
                self.send_header("Retry-After", "0")
            self.end_headers()
            self.wfile.write(raw)
        except (BrokenPipeError, ConnectionResetError):
            pass
        finally:
            with server.count:
                server.busy -= 1

    def log_message(self, *args: Any) -> None:
        pass


MODELS = (200, {"data": [{"id": "tiny"}]})


def said(text: str, reason: str = "stop") -> Reply:
    return 200, {
        "choices": [{"message": {"role": "assistant", "content": text}, "text": text, "finish_reason": reason}]
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LanguageModel]:
    monkeypatch.setattr(data, "SHARD_ANSWERS", 8)
    monkeypatch.setattr(data, "ANSWER_TOKENS", 24)
    monkeypatch.setattr(data, "TURN_TOKENS", 12)
    monkeypatch.setattr(data, "PROMPT_TOKENS", 200)
    monkeypatch.setattr(via, "_FIRST_DELAY", 0.001)
    monkeypatch.setattr(filters, "not_text", lambda text: False)  # all that a random model says is noise
    monkeypatch.setattr(filters, "foreign", lambda answer, asked: False)
    with api.load(folder, draft="none", slots=4, cache=False, threads=1) as loaded:
        yield loaded


@pytest.fixture
def serve(folder: Path) -> Iterator[Callable[..., Fake]]:
    """Starts servers, by default one that has the target itself. change: of what it says."""
    open_: list[Fake] = []
    with api.load(folder, draft="none", slots=2, cache=False, threads=1) as served:
        lock = threading.Lock()

        def start(change: Callable[[str, dict[str, Any]], Reply | None] = lambda path, body: None) -> Fake:
            def answer(path: str, body: dict[str, Any]) -> Reply:
                if (found := change(path, body)) is not None:
                    return found
                if path == "/v1/models":
                    return MODELS
                # A random model says bytes that are no text; a server of a real one has no such trouble.
                wanted = {name: body[name] for name in ("temperature", "seed", "max_tokens")}
                opts = SampleOpts(allowed_tokens=ASCII, **wanted)
                with lock:
                    if "messages" in body:
                        result = served.chat(body["messages"], opts)
                    else:
                        result = served.generate(body["prompt"], opts)
                return said(result.text, result.finish_reason)

            open_.append(Fake(answer))
            return open_[-1]

        yield start
        for server in open_:
            server.shutdown()
            server.server_close()


ASCII = tuple(i for i, c in enumerate(tiny_folder.ALPHABET) if "!" <= c <= "~")


def questions(file: Path, count: int = 30) -> Conversations:
    rows: list[dict[str, Any]] = [{"prompt": f"What is {i}?"} for i in range(count)]
    rows[3] = {"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "x"},
                            {"role": "user", "content": "And?"}]}  # fmt: skip
    rows[4] = {"text": " ".join(f"w{i}" for i in range(30))}
    file.write_text("\n".join(map(json.dumps, rows)))
    return Conversations(file)


def make(model: LanguageModel, out: Path, server: Server, tokens: int = 10**6, **more: Any) -> int:
    return record(model, out, made_by="me", taps=TAPS, tokens=tokens, server=server, **more)


@pytest.fixture(autouse=True)
def _lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The served model may say letters only, so its arg-max is another one; a test of its own judges that."""
    monkeypatch.setattr(via, "LEAST_AGREEMENT", 0.0)


@pytest.mark.filterwarnings("ignore:all prompts are answered")
def test_answers_are_the_servers_and_states_ours(
    model: LanguageModel, serve: Callable[..., Fake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(via.KEY, "a-key")
    server = serve()
    make(model, tmp_path / "out", Server(server.url), source=questions(tmp_path / "q.jsonl"))
    shards = Shards(tmp_path / "out", "me")
    assert len(shards.sequences) > 60
    for example in shards.sequences[::9]:
        tokens = [int(token) for token in example.tokens]
        result = model.generate(tokens, max_tokens=1, temperature=0.0, taps=TAPS)
        for i, tap in enumerate(TAPS):
            np.testing.assert_array_equal(example.states[:, i], result.taps[tap].astype(np.float16))
    bodies = [body for path, body in server.asked if path == "/v1/chat/completions"]
    assert {body["temperature"] for body in bodies} == {0.0, 0.7}
    assert {body["model"] for body in bodies} == {"tiny"}
    follow = [body["messages"] for body in bodies if len(body["messages"]) == 3]
    assert follow  # the second turn comes after the target's own answer, not the file's
    assert all(messages[1]["content"] != "x" and messages[2]["content"] == "And?" for messages in follow)
    continued = [body for path, body in server.asked if path == "/v1/completions"]
    assert continued[0]["prompt"] == " ".join(f"w{i}" for i in range(15))
    assert {found.get("Authorization") for found in server.headers} == {"Bearer a-key"}
    assert server.most_busy > 4
    with pytest.raises(UsageError, match="made with a server's answers, --via"):
        record(model, tmp_path / "out", made_by="me", taps=TAPS, tokens=10, source=questions(tmp_path / "q.jsonl"))


def test_composed_prompts_and_questions_of_the_targets_own(
    model: LanguageModel, serve: Callable[..., Fake], tmp_path: Path
) -> None:
    server = serve()
    assert make(model, tmp_path, Server(server.url + "/v1/"), tokens=300, source=Composer(0)) >= 300
    assert Shards(tmp_path, "me").answers >= 300


def test_a_server_with_another_model_is_refused(
    model: LanguageModel, serve: Callable[..., Fake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy answers of the target agree with our arg-max; those of another one do not."""
    monkeypatch.setattr(via, "LEAST_AGREEMENT", 0.9)
    monkeypatch.setattr(data, "SHARD_ANSWERS", 256)
    server = serve()  # allowed to say only some tokens: another model in effect
    with pytest.raises(ModelError, match=r"says what the target would say for only \d+% of the tokens \(90% needed\)"):
        make(model, tmp_path, Server(server.url), source=questions(tmp_path / "q.jsonl"))
    assert not (tmp_path / data.INDEX).exists()


def test_agreement_counts_the_targets_own_tokens(model: LanguageModel) -> None:
    prompt = model.chat_ids([{"role": "user", "content": "What is tea?"}])
    greedy = model.generate(prompt, max_tokens=40, temperature=0.0, ignore_eos=True, taps=TAPS)
    tokens = [*prompt, *greedy.token_ids]
    for rows in (512, 16, 7):
        capacity = type(model.target.capacity)(4, 256, rows)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model.target, "capacity", capacity)
            states, agreed = via.read(model, tokens, len(prompt), TAPS, compare=True)
        assert agreed == 40
        for i, tap in enumerate(TAPS):
            np.testing.assert_array_equal(states[:-1, i], greedy.taps[tap])
    wrong = [*tokens]
    wrong[-1] = (wrong[-1] + 1) % 100
    wrong[-20] = (wrong[-20] + 1) % 100
    assert 20 <= via.read(model, wrong, len(prompt), TAPS, compare=True)[1] < 39
    assert via.read(model, tokens, len(prompt), TAPS, compare=False)[1] == 0


@pytest.mark.filterwarnings("ignore:all prompts are answered")
@pytest.mark.parametrize("trouble", [(500, b"oops"), (503, {}), (429, {"error": {"message": "slow down"}}), (0, b"")])
def test_a_bad_line_is_tried_again(
    model: LanguageModel, serve: Callable[..., Fake], tmp_path: Path, trouble: Reply
) -> None:
    tried: dict[str, int] = {}

    def sometimes(path: str, body: dict[str, Any]) -> Reply | None:
        key = json.dumps(body)
        tried[key] = tried.get(key, 0) + 1
        return trouble if tried[key] < 3 else None

    server = serve(sometimes)
    source = questions(tmp_path / "q.jsonl", 6)
    make(model, tmp_path / "out", Server(server.url), source=source)
    assert set(tried.values()) == {3}
    assert len(Shards(tmp_path / "out", "me").sequences) > 10


def test_what_is_complete_is_kept_when_the_server_dies(
    model: LanguageModel, serve: Callable[..., Fake], tmp_path: Path
) -> None:
    answered = 0

    def dies(path: str, body: dict[str, Any]) -> Reply | None:
        nonlocal answered
        answered += path.endswith("completions")
        return (500, {"error": "out of memory"}) if answered > 12 else None

    server = serve(dies)
    source = questions(tmp_path / "q.jsonl")
    with pytest.raises(UsageError, match="the server does not answer: 500 out of memory"):
        make(model, tmp_path / "out", Server(server.url), source=source)
    kept = len(Shards(tmp_path / "out", "me").sequences)
    assert 0 < kept <= 12
    with pytest.warns(UserWarning, match="all prompts are answered"):
        make(model, tmp_path / "out", Server(serve().url), source=source)
    answers = [bytes(e.tokens) for e in Shards(tmp_path / "out", "me").sequences]
    assert len(set(answers)) == len(answers) > 60


@pytest.mark.filterwarnings("ignore:all prompts are answered")
def test_single_refusals_are_left_out_and_many_are_an_error(
    model: LanguageModel, serve: Callable[..., Fake], tmp_path: Path
) -> None:
    def refuses(path: str, body: dict[str, Any]) -> Reply | None:
        asked = body["messages"][-1]["content"] if "messages" in body else ""
        if asked == "What is 9?":
            return said("half a character: \ud800")
        return (400, {"error": {"message": "too long"}}) if asked == "What is 7?" else None

    make(model, tmp_path / "some", Server(serve(refuses).url), source=questions(tmp_path / "q.jsonl"))
    assert Shards(tmp_path / "some", "me").left_out["refused by the server"] == 8  # once a pass
    never = serve(lambda path, body: (400, {"error": "no"}) if "completions" in path else None)
    with pytest.raises(UsageError, match="does not answer: 400 no"):
        make(model, tmp_path / "none", Server(never.url), source=questions(tmp_path / "q.jsonl"))


def test_the_time_ends_while_the_server_thinks(
    model: LanguageModel, serve: Callable[..., Fake], tmp_path: Path
) -> None:
    done = threading.Event()

    def thinks(path: str, body: dict[str, Any]) -> Reply | None:
        if "completions" in path:
            done.wait(20)
        return None

    begin = time.monotonic()
    more: dict[str, Any] = {"tokens": None, "seconds": 0.3, "source": questions(tmp_path / "q.jsonl")}
    make(model, tmp_path / "out", Server(serve(thinks).url), **more)
    assert time.monotonic() - begin < 10
    done.set()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("localhost:8000", "takes the URL"),
        ("ftp://localhost", "takes the URL"),
        ("http://", "takes the URL"),
        ("http://localhost:99999", "takes the URL"),
        ("http://localhost/v1?key=1", "takes the URL"),
        ("http://[::1", "takes the URL"),
        (f"http://{'a' * 70}.org", "does not answer: .*label"),
        ("http://127.0.0.1:9", "does not answer"),
    ],
)
def test_a_wrong_url(url: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(via, "_FIRST_DELAY", 0.001)
    with pytest.raises(UsageError, match=says):
        Server(url)


def test_a_key_that_cannot_be_sent(monkeypatch: pytest.MonkeyPatch, serve: Callable[..., Fake]) -> None:
    monkeypatch.setenv(via.KEY, "two\nlines")
    with pytest.raises(UsageError, match="does not answer: Invalid header value"):
        Server(serve(lambda path, body: None).url)


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        ((200, {"data": []}), "serves no model: name one with --via-model"),
        ((200, {"data": [{"id": "a"}, {"id": "b"}]}), "serves a, b: name one with --via-model"),
        ((200, b"<html>"), "not a JSON object"),
        ((200, [1]), "not a JSON object"),
        ((200, {"data": {"id": 3}}), "serves no model"),
        ((401, {"error": {"message": "no\nkey"}}), "does not answer: 401 no key"),
        ((404, b""), "does not answer: 404"),
    ],
)
def test_what_a_server_may_say_of_its_models(reply: Reply, says: str) -> None:
    server = Fake(lambda path, body: reply)
    try:
        with pytest.raises(UsageError, match=says):
            Server(server.url)
        assert Server(server.url, "mine").model == "mine"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--data", "."), "is a folder, not a file: --data takes a file of prompts; --shards says where data are kept"),
        (("--data", "none.jsonl"), "none.jsonl: no such file"),
        (("--via", "localhost"), "--via takes the URL of a server"),
    ],
)
def test_the_command_refuses_them_before_any_work(
    folder: Path, tmp_path: Path, args: tuple[str, ...], says: str
) -> None:
    result = CliRunner().invoke(build(), ["train", str(folder), "--out", str(tmp_path / "head"), *args])
    assert result.exit_code == 2
    assert says in result.stderr


def test_thinking_that_is_kept_apart_is_refused() -> None:
    message = {"content": "Tea.", "reasoning_content": "Hm."}
    server = Fake(lambda path, body: (200, {"choices": [{"message": message}]}))
    try:
        with pytest.raises(UsageError, match="without a reasoning parser"):
            Server(server.url, "m").chat([{"role": "user", "content": "What?"}], SampleOpts.greedy(max_tokens=3))
    finally:
        server.shutdown()
        server.server_close()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["message", "text", "x"]), inner),
    max_leaves=6,
)


@given(JSON | st.fixed_dictionaries({"choices": JSON | st.lists(st.fixed_dictionaries({"message": JSON}), max_size=2)}))
@settings(max_examples=60, deadline=None)
def test_any_reply_is_text_or_one_clear_line(reply: Any) -> None:
    server = Server.__new__(Server)
    server.url = "http://here"
    server.model = "m"
    server._request = lambda *args: server._parsed(json.dumps(reply).encode())  # type: ignore[method-assign]
    for ask in (lambda o: server.chat([], o), lambda o: server.complete("a", o)):
        try:
            assert isinstance(ask(SampleOpts()).text, str)
        except UsageError:
            continue


def test_many_threads_share_a_server() -> None:
    server = Fake(lambda path, body: said(body["messages"][0]["content"]))
    try:
        found = Server(server.url, "m")
        with ThreadPoolExecutor(8) as pool:
            asked = [[{"role": "user", "content": f"{i}"}] for i in range(64)]
            texts = list(pool.map(lambda messages: found.chat(messages, SampleOpts.greedy(max_tokens=1)).text, asked))
        assert texts == [f"{i}" for i in range(64)]
    finally:
        server.shutdown()
        server.server_close()
