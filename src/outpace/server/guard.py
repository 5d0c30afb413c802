"""Who may come in: the key, the Host header, the body's size and kind. Runs before anything of a request is read.

Neighbours: app.py puts it around all routes. A web page that the user visits must not reach the server on their own
machine: its requests carry a foreign Host (DNS rebinding) or a content type that needs no permission, and neither is
taken; there are no CORS headers unless origins are named.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError

OPEN = ("/health", "/")  # what needs no key; the page asks for it
MOST_BODY = 8 << 20


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[str] = (), hosts: Sequence[str] = ()) -> None:
        """keys: any of them lets in; none: nobody needs one. hosts: names that the Host header may have, without port;
        none: any."""
        self._app, self._keys = app, [key.encode() for key in keys]
        self._hosts = {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value for name, value in scope["headers"]}
        error = self._refusal(scope, headers)
        if error is not None:
            await _send_error(send, error, scope["path"])
            return
        taken = 0

        async def bounded() -> Message:
            nonlocal taken
            message = await receive()
            if message["type"] == "http.request":
                taken += len(message.get("body", b""))
                if taken > MOST_BODY:
                    raise ApiError(413, f"the request is larger than {MOST_BODY >> 20} MiB")
            return message

        await self._app(scope, bounded, send)

    def _refusal(self, scope: Scope, headers: dict[str, bytes]) -> ApiError | None:
        if self._hosts and _host_of(headers.get("host", b"")) not in self._hosts:
            return ApiError(403, "this server does not answer to that Host: see --allow-host")
        if self._keys and scope["path"] not in OPEN and not self._has_key(headers):
            return ApiError(401, "an API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        if scope["method"] in ("POST", "PUT", "PATCH"):
            length = headers.get("content-length", b"0")
            if not length.isdigit() or int(length) > MOST_BODY:
                return ApiError(413, f"the request is larger than {MOST_BODY >> 20} MiB")
            kind = headers.get("content-type", b"").split(b";")[0].strip().lower()
            if kind != b"application/json":
                return ApiError(415, "the content type must be application/json")
        return None

    def _has_key(self, headers: dict[str, bytes]) -> bool:
        given = headers.get("authorization", b"")
        key = given[7:] if given[:7].lower() == b"bearer " else headers.get("x-api-key", b"")
        # Every key is compared, in a time that does not depend on where they differ.
        return bool(sum(hmac.compare_digest(key.strip(), known) for known in self._keys))


def _host_of(header: bytes) -> str:
    host = header.decode("latin-1").strip().lower()
    if host.startswith("["):
        return host.partition("]")[0][1:]
    return host.partition(":")[0]


async def _send_error(send: Send, error: ApiError, path: str) -> None:
    body = json.dumps(form_of(error, path)).encode()
    headers: list[tuple[bytes, bytes]] = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *((name.lower().encode(), value.encode()) for name, value in error.headers.items()),
    ]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def form_of(error: ApiError, path: str) -> dict[str, Any]:
    """The error as the API that the path belongs to has it."""
    if path.startswith("/api/"):
        return error.ollama()
    return error.anthropic() if path.startswith("/v1/messages") else error.openai()
