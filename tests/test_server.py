"""The server, over real sockets, with a tiny model: what it answers, whom it lets in, and what it does when things go
wrong. Answers must be those that the Python API gives to the same question."""

from __future__ import annotations

import asyncio
import concurrent.futures
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("fastapi")

import openai
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny_folder
from outpace.api import LanguageModel, load
from outpace.server.app import Settings, create_app
from outpace.server.parts import CALL, CALLED, THINK, THOUGHT, Splitter
from outpace.types import SampleOpts

NAME = "tiny"
HELLO = [{"role": "user", "content": "Hello there"}]


class Running:
    """A server in a thread of its own."""

    def __init__(self, model: LanguageModel, **more: Any) -> None:
        self.model = model
        self.app = create_app(model, Settings(names=(NAME,), **{"drain": 5.0, **more}))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._server = uvicorn.Server(uvicorn.Config(self.app, port=self.port, log_level="critical"))
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    @property
    def work(self) -> Any:
        return self.app.state.server.work

    def client(self, key: str = "any") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=key, max_retries=0)

    def call(
        self, path: str, body: Any = None, *, method: str = "", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers, body. body: JSON, or bytes as they are."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method or ("POST" if data is not None else "GET"), path, data, sent)
        reply = connection.getresponse()
        found = reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read()
        connection.close()
        return found

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        status, _, data = self.call(path, body, **headers)
        return status, json.loads(data)

    def idle(self) -> bool:
        """Waits until no request has a slot; False when that does not come about."""
        for _ in range(500):
            if not self.model.engine.running and not self.model.engine.waiting:
                return True
            time.sleep(0.01)
        return False

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LanguageModel]:
    with load(tiny_folder.write(tmp_path_factory.mktemp("tiny")), cache=False, slots=4, threads=1) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LanguageModel]:
    """The same model once more, without a server."""
    with load(tiny_folder.write(tmp_path_factory.mktemp("alone")), cache=False, slots=4, threads=1) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def server(model: LanguageModel) -> Iterator[Running]:
    running = Running(model)
    yield running
    running.stop()


def chat(**more: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": HELLO, "max_tokens": 12, "seed": 3, "ignore_eos": True, **more}


# --------------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_those_of_the_python_api(server: Running, alone: LanguageModel, temperature: float) -> None:
    opts = SampleOpts(temperature=temperature, seed=3, max_tokens=12, ignore_eos=True)
    wanted = [alone.chat(HELLO, replace(opts, choice=i)).text for i in range(3)]
    status, found = server.post("/v1/chat/completions", chat(temperature=temperature, n=3))
    assert status == 200
    assert [choice["message"]["content"] for choice in found["choices"]] == wanted
    assert found["usage"]["completion_tokens"] == 36
    assert {choice["finish_reason"] for choice in found["choices"]} == {"length"}
    for enabled in (True, False):
        body = chat(temperature=temperature, speculative={"enabled": enabled})
        assert server.post("/v1/chat/completions", body)[1]["choices"][0]["message"]["content"] == wanted[0]
    stream = server.client().chat.completions.create(
        model=NAME,
        messages=HELLO,  # type: ignore[arg-type]
        max_tokens=12,
        seed=3,
        temperature=temperature,
        n=3,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    texts, counts = ["", "", ""], None
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
        counts = chunk.usage or counts
    assert texts == wanted
    assert counts is not None
    assert counts.completion_tokens == 36


def test_answers_do_not_depend_on_company(server: Running) -> None:
    bodies = [
        chat(messages=[{"role": "user", "content": "x" * (i * 7 % 50 + 1)}], seed=i, max_tokens=5 + i, temperature=0.8)
        for i in range(16)
    ]

    def ask(body: dict[str, Any]) -> Any:
        return server.post("/v1/chat/completions", body)[1]["choices"]

    alone = [ask(body) for body in bodies]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, bodies))
    assert together == alone


def test_completions_echo_and_tell_how_likely_the_prompt_is(server: Running, alone: LanguageModel) -> None:
    found = server.client().completions.create(
        model=NAME, prompt="abcab", max_tokens=3, temperature=0, echo=True, logprobs=2, seed=1
    )
    choice = found.choices[0]
    assert choice.text.startswith("abcab")
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs)
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:] if value)
    # What is told of a prompt is what is told of the same tokens when they are the answer.
    status, first = server.post(
        "/v1/completions",
        {"model": NAME, "prompt": "abcab", "max_tokens": 2, "temperature": 0, "logprobs": 1, "ignore_eos": True},
    )
    assert status == 200
    text = first["choices"][0]["logprobs"]["token_logprobs"]
    ids = alone.generate("abcab", temperature=0.0, max_tokens=2, ignore_eos=True).token_ids
    prompt = [*alone.tokenizer.encode("abcab"), *ids]  # type: ignore[union-attr]
    scored = server.post(
        "/v1/completions", {"model": NAME, "prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1}
    )[1]["choices"][0]["logprobs"]["token_logprobs"]
    assert scored[-2:] == pytest.approx(text, abs=1e-5)


def test_answers_keep_to_a_schema(server: Running) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    for seed in range(4):
        body = chat(
            temperature=1.0,
            seed=seed,
            max_tokens=150,
            ignore_eos=False,
            response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
            logit_bias={str(ord(" ") + 188): -100, "198": -100},
        )
        status, found = server.post("/v1/chat/completions", body)
        assert status == 200, found
        choice = found["choices"][0]
        if choice["finish_reason"] == "stop":
            value = json.loads(choice["message"]["content"])
            assert set(value) == {"a", "b"}
            assert 0 <= value["a"] <= 99
            assert value["b"] in "xy"


def test_a_tool_that_must_be_called_is_called(server: Running) -> None:
    parameters = {
        "type": "object",
        "properties": {"k": {"enum": ["on", "off"]}},
        "required": ["k"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("lamp", "fan")]
    choice = {"type": "function", "function": {"name": "fan"}}
    done = 0
    for seed in range(6):
        body = chat(tools=tools, tool_choice=choice, temperature=1.0, seed=seed, max_tokens=180, ignore_eos=False)
        status, found = server.post("/v1/chat/completions", body)
        assert status == 200, found
        answer = found["choices"][0]
        if answer["finish_reason"] == "length":  # white space without end, from random weights
            continue
        done += 1
        assert answer["finish_reason"] == "tool_calls"
        (call,) = answer["message"]["tool_calls"]
        assert call["function"]["name"] == "fan"
        assert json.loads(call["function"]["arguments"])["k"] in ("on", "off")
        _, data, text = server.call("/v1/chat/completions", {**body, "stream": True})
        chunks = [json.loads(line[6:]) for line in text.decode().split("\n\n") if line.startswith("data: {")]
        streamed = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls", [])]
        assert [c["function"] for c in streamed] == [call["function"]]
        assert data["content-type"].startswith("text/event-stream")
    assert done


def test_other_apis_say_the_same(server: Running) -> None:
    wanted = server.post("/v1/chat/completions", chat(temperature=0.0, ignore_eos=False))[1]["choices"][0]["message"][
        "content"
    ]
    body = {"model": f"{NAME}:latest", "messages": HELLO, "options": {"temperature": 0, "num_predict": 12}}
    _, _, data = server.call("/api/chat", body)
    lines = [json.loads(line) for line in data.decode().splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == wanted
    assert lines[-1]["done"]
    assert lines[-1]["eval_count"] == 12
    assert server.post("/api/chat", {**body, "stream": False})[1]["message"]["content"] == wanted
    message = {"model": NAME, "messages": HELLO, "max_tokens": 12, "temperature": 0}
    status, found = server.post("/v1/messages", message)
    assert status == 200
    assert found["content"] == [{"type": "text", "text": wanted}]
    assert found["stop_reason"] == "max_tokens"
    assert found["usage"]["output_tokens"] == 12
    _, _, data = server.call("/v1/messages", {**message, "stream": True})
    sent = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: ")]
    assert [each["type"] for each in sent][:2] == ["message_start", "content_block_start"]
    assert sent[-1]["type"] == "message_stop"
    assert "".join(each["delta"].get("text", "") for each in sent if each["type"] == "content_block_delta") == wanted
    assert NAME in [each["name"] for each in json.loads(server.call("/api/tags")[2])["models"]]
    assert server.post("/api/show", {"model": NAME})[0] == 200


def test_responses_stream_and_come_whole(server: Running) -> None:
    wanted = server.post("/v1/chat/completions", chat(temperature=0.0, ignore_eos=False))[1]
    text = wanted["choices"][0]["message"]["content"]
    client = server.client()
    whole = client.responses.create(model=NAME, input="Hello there", max_output_tokens=12, temperature=0)
    assert whole.output_text == text
    assert whole.status == "incomplete"
    seen, said = [], ""
    for event in client.responses.create(
        model=NAME, input="Hello there", max_output_tokens=12, temperature=0, stream=True
    ):
        seen.append(event.type)
        said += event.delta if event.type == "response.output_text.delta" else ""
    assert said == text
    assert seen[0] == "response.created"
    assert seen[-1] == "response.incomplete"
    assert server.post("/v1/responses", {"model": NAME, "input": "x", "previous_response_id": "y"})[0] == 400
    assert server.post("/v1/responses", {"model": NAME, "input": [{"type": "input_image"}]})[0] == 400


def test_text_becomes_tokens_and_back(server: Running) -> None:
    found = server.post("/tokenize", {"prompt": "aé<|im_end|>"})[1]
    assert found["count"] == len(found["tokens"])
    assert server.post("/detokenize", {"tokens": found["tokens"]})[1] == {"prompt": "aé<|im_end|>"}
    assert server.post("/detokenize", {"tokens": [10**6]})[0] == 400


def test_metrics_have_the_names_that_dashboards_know(server: Running) -> None:
    server.post("/v1/chat/completions", chat())
    text = server.call("/metrics")[2].decode()
    for name in (
        "vllm:num_requests_running",
        "vllm:generation_tokens_total",
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:request_success_total",
    ):
        assert f"{name}{{" in text


# ---------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"foo": 1}, 400, "foo"),
        ({"speculative": {"foo": 1}}, 400, "speculative.foo"),
        ({"speculative": {"drafter": "nobody"}}, 400, None),
        ({"temperature": -0.1}, 400, "temperature"),
        ({"temperature": "1"}, 400, "temperature"),
        ({"temperature": True}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"n": 0}, 400, "n"),
        ({"n": 17}, 400, "n"),
        ({"max_tokens": 10**7}, 400, "messages"),
        ({"max_tokens": 10**30}, 400, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 3}, 400, "max_tokens"),
        ({"top_logprobs": 2}, 400, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, 400, "logit_bias"),
        ({"stop": ["a"] * 17}, 400, "stop"),
        ({"stop": ""}, 400, "stop"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user"}]}, 400, "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, 400, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            400,
            "messages",
        ),
        ({"messages": [{"role": "user", "content": "x" * 400}]}, 400, "messages"),
        ({"model": "other"}, 404, "model"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, 400, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}},
            400,
            "response_format",
        ),
        ({"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    server: Running, change: dict[str, Any], status: int, param: str | None
) -> None:
    found, error = server.post("/v1/chat/completions", chat(**change))
    assert found == status, error
    assert error["error"]["message"]
    assert "\n" not in error["error"]["message"]
    assert error["error"]["param"] == param or (param == "max_tokens" and error["error"]["param"] == "max_tokens")
    assert "/" not in error["error"]["message"]  # no path of this machine


@pytest.mark.parametrize(
    "text", [b"{", b"[]", b"1", b"null", b'{"model": NaN}', b'{"model": 1e999}', b"\xff\xfe", b"[" * 100000]
)
def test_what_is_no_request_is_refused(server: Running, text: bytes) -> None:
    status, _, body = server.call("/v1/chat/completions", text)
    assert status == 400
    assert json.loads(body)["error"]["message"]


def test_numbers_that_are_none_are_refused(server: Running) -> None:
    for number in ("NaN", "Infinity", "-Infinity", "1e400"):
        body = json.dumps(chat()).replace('"seed": 3', f'"temperature": {number}').encode()
        assert server.call("/v1/chat/completions", body)[0] == 400


def test_a_context_that_is_too_small_is_told(server: Running) -> None:
    _, error = server.post("/v1/chat/completions", chat(messages=[{"role": "user", "content": "x" * 300}]))
    assert error["error"]["code"] == "context_length_exceeded"


def test_only_who_has_a_key_comes_in(model: LanguageModel) -> None:
    running = Running(model, keys=("secret", "other"), hosts=("127.0.0.1", "localhost"))
    try:
        assert running.call("/health")[0] == 200
        for key in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}, {"x_api_key": ""}):
            status, headers, _ = running.call("/v1/models", **key)
            assert status == 401
            assert headers["www-authenticate"] == "Bearer"
        assert running.call("/v1/models", Authorization="Bearer other")[0] == 200
        assert running.call("/v1/models", x_api_key="secret")[0] == 200
        # A page that the user visits cannot reach it: neither under a name of its own, nor with a simple request.
        assert running.call("/v1/models", Authorization="Bearer secret", Host="evil.example")[0] == 403
        plain = {"Authorization": "Bearer secret", "Content_Type": "text/plain"}
        assert running.call("/v1/chat/completions", json.dumps(chat()).encode(), **plain)[0] == 415
        status, headers, _ = running.call("/v1/models", method="OPTIONS", Origin="http://evil.example")
        assert not any(name.startswith("access-control") for name in headers)
    finally:
        running.stop()


def test_bodies_are_bounded(server: Running) -> None:
    status, _, body = server.call("/v1/chat/completions", b" " * (9 << 20))
    assert status == 413
    assert json.loads(body)["error"]["message"]


# ------------------------------------------------------------------------------------------------------ under load


def test_a_client_that_leaves_frees_its_slot(server: Running) -> None:
    for stream in (True, False):
        body = json.dumps(chat(max_tokens=200, stream=stream)).encode()
        connection = socket.create_connection(("127.0.0.1", server.port))
        lines = ("POST /v1/chat/completions HTTP/1.1", "Host: x", "Content-Type: application/json")
        head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""])
        connection.sendall(head.encode() + body)
        if stream:
            connection.recv(64)
        connection.close()
        assert server.idle()


def test_a_server_that_is_full_says_so(model: LanguageModel) -> None:
    running = Running(model, waiting=0)
    try:
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            replies = list(
                pool.map(lambda i: running.call("/v1/chat/completions", chat(max_tokens=120, seed=i)), range(12))
            )
        assert {status for status, _, _ in replies} <= {200, 429}
        assert all(headers.get("retry-after") for status, headers, _ in replies if status == 429)
        assert running.idle()
        assert running.call("/v1/chat/completions", chat())[0] == 200
    finally:
        running.stop()


def test_running_answers_end_before_the_server_does(model: LanguageModel) -> None:
    running = Running(model)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        reply = pool.submit(running.post, "/v1/chat/completions", chat(max_tokens=60))
        while not model.engine.running:
            time.sleep(0.005)
        running.stop()
        status, found = reply.result()
    assert status == 200
    assert found["usage"]["completion_tokens"] == 60
    assert not model.engine.running


def test_a_pass_that_fails_fails_its_requests_alone(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("secret words")

    with monkeypatch.context() as patch:
        patch.setattr(server.model.engine.decoder, "round", broken)
        status, found = server.post("/v1/chat/completions", chat())
    assert status == 500
    assert "secret" not in json.dumps(found)
    assert server.idle()
    assert server.post("/v1/chat/completions", chat())[0] == 200


# ------------------------------------------------------------------------------------------------- texts taken apart


def apart(pieces: list[str], **more: Any) -> list[tuple[str, str]]:
    splitter = Splitter(**more)
    parts = [part for piece in pieces for part in splitter.push(piece)] + splitter.finish()
    found: list[tuple[str, str]] = []
    for part in parts:
        text = part.text if part.call is None else f"{part.call.name} {part.call.arguments}"
        if found and found[-1][0] == part.kind != "call":
            found[-1] = (part.kind, found[-1][1] + text)
        else:
            found.append((part.kind, text))
    return found


CASES = [
    ("plain text", {}, [("content", "plain text")]),
    (f"{THINK}\nhm\n{THOUGHT}\n\nyes", {}, [("reasoning", "hm"), ("content", "yes")]),
    (f"hm\n{THOUGHT}\n\nyes", {"thinking": True}, [("reasoning", "hm"), ("content", "yes")]),
    (f"a {THINK} b", {}, [("content", f"a {THINK} b")]),
    (f'{CALL}\n{{"name": "f", "arguments": {{"x": 1}}}}\n{CALLED}', {"tools": True}, [("call", 'f {"x": 1}')]),
    (
        f'So:\n{CALL}{{"name": "f"}}{CALLED}\n{CALL}{{"name": "g", "arguments": "1"}}{CALLED}\n',
        {"tools": True},
        [("content", "So:"), ("call", "f {}"), ("call", "g 1")],
    ),
    (f"{CALL}no json{CALLED}x", {"tools": True}, [("content", f"{CALL}no json{CALLED}x")]),
    (f"{CALL} cut", {"tools": True}, [("content", f"{CALL} cut")]),
    (f"{CALL}x{CALLED}", {}, [("content", f"{CALL}x{CALLED}")]),
    ("  <thi", {}, [("content", "  <thi")]),
    ("<tool", {"tools": True}, [("content", "<tool")]),
]


@pytest.mark.parametrize(("text", "options", "wanted"), CASES)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_parts_do_not_depend_on_how_the_text_came(
    text: str, options: dict[str, Any], wanted: list[tuple[str, str]], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert apart(pieces, **options) == wanted


def test_jobs_of_a_loop_that_ended_are_cancelled(model: LanguageModel) -> None:
    from outpace.server.work import Work

    work = Work(model)

    async def start() -> None:
        await work.submit([lambda: model.submit("abc", max_tokens=200, ignore_eos=True)])

    asyncio.run(start())
    for _ in range(500):
        if not model.engine.running:
            break
        time.sleep(0.01)
    assert not model.engine.running
    work.close()


@pytest.mark.parametrize("prompt", [[1 << 30], [[1], [1 << 30]], [[]], [[1], []], []])
@pytest.mark.parametrize("more", [{}, {"echo": True, "max_tokens": 0}, {"echo": True, "logprobs": 1}])
def test_prompts_of_ids_that_cannot_be_are_refused(server: Running, prompt: Any, more: dict[str, Any]) -> None:
    status, found = server.post("/v1/completions", {"model": NAME, "prompt": prompt, "max_tokens": 1, **more})
    assert status == 400
    assert "error" in found
    assert server.idle()


def test_an_answer_whose_news_fail_frees_its_slot(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any) -> None:
        raise ValueError("/a/path")

    with monkeypatch.context() as patch:
        patch.setattr("outpace.api.Answer.news", broken)
        status, found = server.post("/v1/chat/completions", chat())
    assert status == 500
    assert "/a/path" not in json.dumps(found)
    assert server.idle()
    assert server.post("/v1/chat/completions", chat())[0] == 200
