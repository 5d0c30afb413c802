"""Answers that a server writes: any that speaks the OpenAI protocol and serves the same target.

Neighbours: answers.py has the conversations; here their turns are answered over HTTP, many at a time, and our engine
then reads prompt and answer once for the hidden states: the one case with a pass over text that exists. Whether the
server really has the target is measured, not believed: where it answered greedily, our own arg-max must agree.
Protocol: POST {url}/chat/completions and /completions, GET {url}/models.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from ..api import LanguageModel
from ..backends.base import Rows
from ..types import F32, ModelError, SampleOpts, UsageError
from .answers import Example, Talk, Talks, as_f16
from .filters import loop_start

KEY = "OUTPACE_VIA_KEY"  # the environment variable with the server's key, where it wants one
AT_ONCE = 32
# Of greedy tokens with our arg-max. SmolLM2 as int8 target: 100 % in int8, 97 % in float32, 83 % rounded to 4 bits.
LEAST_AGREEMENT = 0.9
LEAST_TOKENS, LEAST_TO_WRITE = 256, 64  # before it is judged while answers come, and before any is written down
_TRIES, _FIRST_DELAY, _LONGEST_DELAY = 6, 0.5, 30.0  # seconds
_CONNECT_TIMEOUT, _TIMEOUT = 10.0, 300.0  # seconds; the second for a long answer on a busy server
_MOST_BYTES = 8 << 20  # of a reply
_REFUSALS = 20  # in a row, of single requests, before the server is given up


class RefusedError(UsageError):
    """The server will not answer this one request: too long a prompt, say."""


class ForeignAnswersError(ModelError):
    """The server's answers are not the target's."""


@dataclass(frozen=True, slots=True)
class Written:
    """A server's answer. ended: whether it ended by itself."""

    text: str
    ended: bool


class Server:
    """An OpenAI-compatible server. Its threads may share it.

    url: http or https, with or without /v1. model: its name for the target; None: the only one that it serves. Raises
    UsageError when it cannot be reached or serves several.
    """

    def __init__(self, url: str, model: str | None = None) -> None:
        try:
            parts = urlsplit(url)
            self._host, self._port, self._tls = parts.hostname or "", parts.port, parts.scheme == "https"
        except ValueError:
            parts, self._host = urlsplit(""), ""
        if parts.scheme not in ("http", "https") or not self._host or parts.query or parts.fragment:
            raise UsageError(f"--via takes the URL of a server, such as http://localhost:8000/v1, got {url!r:.100}")
        path = parts.path.rstrip("/").removesuffix("/chat/completions")
        self._path = path if path.endswith("/v1") else path + "/v1"
        self.url = f"{parts.scheme}://{self._host}:{self._port or (443 if self._tls else 80)}{self._path}"
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if key := os.environ.get(KEY):
            self._headers["Authorization"] = f"Bearer {key}"
        self._local = threading.local()
        self._live: set[http.client.HTTPConnection] = set()
        self._stop = threading.Event()
        self._refused = 0
        self.model = model or self._only_model()

    def _only_model(self) -> str:
        reply = self._request("GET", "/models", tries=3)
        found = [each.get("id") for each in _list(reply.get("data")) if isinstance(each, dict)]
        names = [name for name in found if isinstance(name, str)]
        if len(names) != 1:
            raise UsageError(f"{self.url}: serves {', '.join(names)[:300] or 'no model'}: name one with --via-model")
        return names[0]

    def chat(self, messages: Sequence[dict[str, str]], opts: SampleOpts) -> Written:
        """Its answer to a conversation. Raises RefusedError, or UsageError when nothing more can be expected of it."""
        reply = self._request("POST", "/chat/completions", self._body(opts) | {"messages": list(messages)})
        message = self._choice(reply).get("message")
        if not isinstance(message, dict):
            raise UsageError(f"{self.url}: its reply has no message")
        if message.get("reasoning_content") or message.get("reasoning"):
            raise UsageError(f"{self.url}: keeps the model's thinking apart: serve it without a reasoning parser")
        return self._written(reply, message.get("content"))

    def complete(self, text: str, opts: SampleOpts) -> Written:
        """How it goes on with a text."""
        reply = self._request("POST", "/completions", self._body(opts) | {"prompt": text})
        return self._written(reply, self._choice(reply).get("text"))

    def stop(self) -> None:
        """Ends all requests now; they raise."""
        self._stop.set()
        for connection in list(self._live):
            with suppress(OSError, AttributeError):
                connection.sock.shutdown(2)

    def _body(self, opts: SampleOpts) -> dict[str, Any]:
        body = {"model": self.model, "max_tokens": opts.max_tokens, "temperature": opts.temperature, "top_p": 1.0}
        return body | {"seed": opts.seed, "stream": False}

    def _choice(self, reply: dict[str, Any]) -> dict[str, Any]:
        choices = _list(reply.get("choices"))
        if not choices or not isinstance(choices[0], dict):
            raise UsageError(f"{self.url}: its reply has no choices")
        return choices[0]

    def _written(self, reply: dict[str, Any], text: object) -> Written:
        if not isinstance(text, str):
            raise UsageError(f"{self.url}: its reply has no text")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:  # JSON can hold half a character; one such answer is no reason to stop
            raise RefusedError(f"{self.url}: its reply has half a character") from None
        return Written(text, self._choice(reply).get("finish_reason") == "stop")

    # -- HTTP

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None, tries: int = _TRIES
    ) -> dict[str, Any]:
        why = ""
        for i in range(tries):
            delay = min(_FIRST_DELAY * 2**i, _LONGEST_DELAY)
            try:
                status, asked_delay, raw = self._once(method, self._path + path, body)
            except (OSError, http.client.HTTPException) as error:
                why = str(error) or type(error).__name__
            except ValueError as error:  # a host or a key that cannot be sent: no name of a host, a line's end
                why = str(error)
                break
            else:
                if status == 200:
                    self._refused = 0
                    return self._parsed(raw)
                why = f"{status} {_message(raw)}"
                if status in (400, 413, 422) and method == "POST":
                    self._refused += 1
                    if self._refused < _REFUSALS:
                        raise RefusedError(f"{self.url}: {why}")
                if status != 429 and status != 408 and status < 500:
                    break
                delay = max(delay, asked_delay)
            if self._stop.is_set() or (i < tries - 1 and self._stop.wait(delay)):
                why = "stopped"
                break
        raise UsageError(f"{self.url}{path}: the server does not answer: {why}")

    def _once(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, float, bytes]:
        """Status, the seconds that the server asks to wait, and the reply's body."""
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is None:
            if self._tls:
                connection = http.client.HTTPSConnection(self._host, self._port, context=ssl.create_default_context())
            else:
                connection = http.client.HTTPConnection(self._host, self._port)
            self._local.connection = connection
            self._live.add(connection)
        try:
            if connection.sock is None:
                connection.timeout = _CONNECT_TIMEOUT
                connection.connect()
                connection.sock.settimeout(_TIMEOUT)  # type: ignore[attr-defined]  # connected now
            if self._stop.is_set():
                raise http.client.HTTPException("stopped")
            connection.request(method, path, None if body is None else json.dumps(body), self._headers)
            reply = connection.getresponse()
            raw = reply.read(_MOST_BYTES + 1)
            if len(raw) > _MOST_BYTES:
                raise http.client.HTTPException(f"a reply of more than {_MOST_BYTES >> 20} MiB")
            if reply.will_close:
                connection.close()
            delay = reply.getheader("Retry-After", "")
            return reply.status, min(float(delay), 60.0) if delay.isdigit() else 0.0, raw
        except BaseException:
            connection.close()  # the next request opens it anew
            raise

    def _parsed(self, raw: bytes) -> dict[str, Any]:
        try:
            reply = json.loads(raw)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            raise UsageError(f"{self.url}: its reply is not a JSON object: {raw[:80]!r}")
        return reply


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _message(raw: bytes) -> str:
    """What the server says of an error, in one short line."""
    with suppress(ValueError, RecursionError, AttributeError):
        reply = json.loads(raw)
        error = reply.get("error", reply)
        raw = str(error.get("message", error) if isinstance(error, dict) else error).encode()
    return " ".join(raw.decode("utf-8", "replace").split())[:200]


class ByServer:
    """Answers of a server, read by our engine. agreed, compared: greedy tokens."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.agreed = self.compared = 0

    def answers(self, talks: Talks, taps: Sequence[int], deadline: float | None = None) -> Generator[Example | None]:
        """As answers.by_engine, but that what is under way at the deadline is left for later."""
        running: dict[Future[Written], Talk] = {}
        pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="via")
        more = True
        try:
            while deadline is None or time.monotonic() < deadline:
                while more and len(running) < AT_ONCE:
                    taken = talks.take()
                    if more := taken is not None:
                        talk, opts = taken
                        if talk.asks_itself:  # chat servers have no way to ask for that; it is short
                            asked = talks.model.generate(talk.ids, opts)
                            talks.asked_itself(talk, asked.token_ids, asked.finish_reason == "stop")
                            continue
                        running[pool.submit(self._ask, talk, opts)] = talk
                if not running:
                    return
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                done, _ = wait(running, timeout=left, return_when=FIRST_COMPLETED)
                for future in done:
                    talk = running.pop(future)
                    more = True
                    try:
                        written = future.result()
                    except RefusedError:
                        talks.end(talk, "refused by the server")
                        continue
                    yield self._example(talks, talk, written, taps)
        finally:
            if running:
                self.server.stop()
            pool.shutdown(wait=True, cancel_futures=True)

    def judge(self, least: int) -> None:
        """Raises ForeignAnswersError when the server's greedy answers are not the target's own. Nothing before `least`
        tokens were compared."""
        if self.compared >= least and self.agreed < LEAST_AGREEMENT * self.compared:
            raise ForeignAnswersError(
                f"{self.server.url}: {self.server.model} says what the target would say for only "
                f"{self.agreed / self.compared:.0%} of the tokens ({LEAST_AGREEMENT:.0%} needed): it is another model, "
                "chat template or way of sampling"
            )

    def _ask(self, talk: Talk, opts: SampleOpts) -> Written:
        if talk.prompt.plain:
            return self.server.complete(talk.prompt.turns[0], opts)
        return self.server.chat(talk.prompt.messages(talk.given), opts)

    def _example(self, talks: Talks, talk: Talk, written: Written, taps: Sequence[int]) -> Example | None:
        tokenizer = talks.model.tokenizer
        assert tokenizer is not None  # talks.take has made sure
        room = talks.model.target.capacity.positions - len(talk.ids)
        said = tokenizer.encode(written.text, add_bos=False)[:room]
        cut = loop_start(said)
        tokens = said if cut is None else said[:cut]
        greedy = not talk.ask.opts.temperature
        if not talks.answered(talk, said, tokens):
            return None
        states, agreed = read(talks.model, [*talk.ids, *tokens], len(talk.ids), taps, greedy)
        if greedy:
            self.agreed += agreed
            self.compared += len(tokens)
            self.judge(LEAST_TOKENS)
        return Example(np.array([*talk.ids, *tokens], np.int32), as_f16(states), answer=len(talk.ids))


def read(
    model: LanguageModel, tokens: Sequence[int], answer: int, taps: Sequence[int], compare: bool
) -> tuple[F32, int]:
    """Has the engine read a text: its hidden states, float32 [tokens, taps, hidden], and, where they are compared, how
    many of the tokens from `answer` on are the arg-max after those before them."""
    target = model.target
    agreed = 0
    known = model.tokenizer.known_tokens if model.tokenizer is not None else None
    states: F32 = np.empty((len(tokens), len(taps), model.config.hidden_size), np.float32)
    with model.engine.lock:
        slot = target.new_slot()
        try:
            for start in range(0, len(tokens), target.capacity.rows):
                part = list(tokens[start : start + target.capacity.rows])
                end = start + len(part)
                wanted = range(max(answer - 1, start), min(end, len(tokens) - 1)) if compare else range(0)
                result = target.forward([Rows(slot, part, None, [i - start for i in wanted])], taps)
                target.commit(slot, range(len(part)))
                for i, tap in enumerate(taps):
                    states[start:end, i] = result.taps[tap]
                best = result.logits[:, :known].argmax(axis=1) if len(wanted) else ()
                agreed += sum(int(b) == tokens[i + 1] for b, i in zip(best, wanted, strict=True))
        finally:
            target.free_slot(slot)
    return states, agreed
