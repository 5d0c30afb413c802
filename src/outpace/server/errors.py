"""What a client is told when something is wrong: a status, a type, one line.

Neighbours: every part raises ApiError, or an error of outpace's own, which `of` translates; app.py writes it in the
form of the API that was spoken. Nothing of this machine (paths, tracebacks) gets into a message.
"""

from __future__ import annotations

from typing import Any

from ..types import CapacityError, ContextError, NumericalError, UsageError


class ApiError(Exception):
    """An answer that is an error. kind, code, param: as OpenAI's error object has them."""

    def __init__(
        self, status: int, message: str, *, kind: str = "", code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.kind = kind or _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.headers = {"Retry-After": "1"} if status in (429, 503) else {}

    def openai(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        """Anthropic's."""
        kind = {"server_error": "api_error"}.get(self.kind, self.kind)
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def ollama(self) -> dict[str, Any]:
        """Ollama's."""
        return {"error": self.message}


_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def refused(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that can never be answered as it is."""
    return ApiError(400, message, param=param, code=code)


def of(error: BaseException) -> ApiError:
    """What a client is told of an error that came up while its request was worked on."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextError):
        return refused(str(error), param="messages", code="context_length_exceeded")
    if isinstance(error, UsageError):
        return refused(str(error))
    if isinstance(error, CapacityError):
        return ApiError(503, "there is no memory for this request now: try again, or ask for less")
    if isinstance(error, NumericalError):
        return ApiError(500, "the model's numbers went wrong for this request")
    return ApiError(500, "an error inside the server; its log says more")
