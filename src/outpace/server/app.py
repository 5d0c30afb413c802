"""The server's routes. `create_app` puts model, guard and APIs together; cli/serve.py runs it with uvicorn."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse

from .. import __version__
from ..api import LanguageModel
from ..types import OutpaceError
from . import chat, completions, messages, ollama, responses
from .asking import Asking
from .errors import ApiError, of, refused
from .fields import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from .guard import Guard, form_of
from .metrics import Metrics
from .scoring import score
from .streaming import events, while_there
from .work import Job, Work

log = logging.getLogger("outpace.server")
SSE = "text/event-stream"
_PAGE_MAY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True, slots=True)
class Settings:
    """names: what the model is called; the first one is shown. keys, hosts: see guard.py. waiting: requests that may
    wait for a slot. drain: seconds for running answers when the server is told to end."""

    names: Sequence[str]
    keys: Sequence[str] = ()
    hosts: Sequence[str] = ()
    waiting: int = 64
    drain: float = 30.0


class Server:
    """What the routes share."""

    def __init__(self, model: LanguageModel, settings: Settings) -> None:
        self.settings, self.model = settings, model
        self.asking = Asking(model, settings.names)
        self.work = Work(model, settings.waiting)
        self.metrics = Metrics(self.work, settings.names[0])
        self.began = int(time.time())

    async def start(self, asked: Sequence[Any]) -> list[Job]:
        """The jobs of all choices."""
        jobs = await self.work.submit([make for each in asked for make in each.makes])
        for job in jobs:
            job.watch(self.metrics)
        return jobs


def create_app(model: LanguageModel, settings: Settings) -> FastAPI:
    """The application. The model belongs to it until it has shut down."""
    server = Server(model, settings)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        yield
        await server.work.drain(settings.drain)

    app = FastAPI(
        title="outpace",
        version=__version__,
        description="A language model on this machine: OpenAI's API, Anthropic's messages and Ollama's.",
        lifespan=life,
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
    )
    app.state.server = server
    app.add_middleware(Guard, keys=settings.keys, hosts=settings.hosts)
    _errors(app)
    _openai(app, server)
    _anthropic(app, server)
    _ollama(app, server)
    _tools(app, server)
    return app


def _errors(app: FastAPI) -> None:
    def told(request: Request, error: ApiError) -> Response:
        return JSONResponse(form_of(error, request.url.path), error.status, error.headers)

    @app.exception_handler(RequestValidationError)
    async def wrong_fields(request: Request, error: RequestValidationError) -> Response:
        return told(request, explained(error))

    @app.exception_handler(HTTPException)
    async def wrong_route(request: Request, error: HTTPException) -> Response:
        return told(request, ApiError(error.status_code, str(error.detail)))

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        if request.url.path.startswith("/v1/messages") and error.status == 503:
            error.kind = "overloaded_error"
        return told(request, error)

    @app.exception_handler(OutpaceError)
    async def own_error(request: Request, error: OutpaceError) -> Response:
        return told(request, of(error))

    @app.exception_handler(Exception)
    async def any_error(request: Request, error: Exception) -> Response:
        return told(request, of(error))  # uvicorn logs it


def explained(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a request's fields, in one line that names the field."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if part != "body"]
    # Of a field that may be several things the path goes on with the name of each: the field is what the user wrote.
    name = path[0] if path else None
    where = ".".join(path)
    if first["type"] == "json_invalid":
        return refused("the request is not JSON")
    if first["type"] == "extra_forbidden":
        return refused(f"unknown parameter: {where}", param=where, code="unknown_parameter")
    if first["type"] == "missing":
        return refused(f"missing parameter: {where}", param=where, code="missing_required_parameter")
    return refused(f"{where or 'the request'}: {first['msg']}", param=name)


def _openai(app: FastAPI, server: Server) -> None:
    asking = server.asking

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(server, name) for name in server.settings.names]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        asking.check_model(name)
        return _model(server, name)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        if body.stream_options is not None and not body.stream:
            raise refused("stream_options needs stream: true", param="stream_options")
        asked = await asyncio.to_thread(asking.chat, body)  # templates and grammars may take long
        jobs = await server.start([asked])
        if body.stream:
            return StreamingResponse(events(chat.stream(asking, body, asked, jobs)), media_type=SSE)
        return JSONResponse(await while_there(request, chat.answer(asking, body, asked, jobs)))

    @app.post("/v1/responses")
    async def create_response(body: responses.Body, request: Request) -> Response:
        asked = await asyncio.to_thread(responses.asked, asking, body)
        jobs = await server.start([asked])
        if body.stream:
            return StreamingResponse(responses.events(body, asked, jobs), media_type=SSE)
        return JSONResponse(await while_there(request, responses.answer(body, asked, jobs)))

    @app.post("/v1/completions")
    async def text_completions(body: CompletionRequest, request: Request) -> Response:
        asked = await asyncio.to_thread(completions.asked, asking, body)
        scores: list[Any] = []
        if body.echo and body.logprobs is not None:
            top = body.logprobs
            for each in asked:
                scores.append(await asyncio.to_thread(score, server.model, each.prompt_ids, top))
        jobs = await server.start(asked) if body.max_tokens != 0 else []
        if body.stream:
            return StreamingResponse(events(completions.stream(asking, body, jobs)), media_type=SSE)
        return JSONResponse(await while_there(request, completions.answer(asking, body, asked, jobs, scores)))


def _anthropic(app: FastAPI, server: Server) -> None:
    @app.post("/v1/messages")
    async def create_message(body: messages.Body, request: Request) -> Response:
        asked = await asyncio.to_thread(messages.asked, server.asking, body)
        jobs = await server.start([asked])
        if body.stream:
            return StreamingResponse(messages.events(body, asked, jobs), media_type=SSE)
        return JSONResponse(await while_there(request, messages.answer(body, asked, jobs)))


def _ollama(app: FastAPI, server: Server) -> None:
    asking = server.asking

    async def told(body: ollama.ChatBody | ollama.GenerateBody, request: Request) -> Response:
        asked = await asyncio.to_thread(ollama.asked, asking, body)
        jobs = await server.start([asked])
        if body.stream:
            return StreamingResponse(ollama.lines(body, asked, jobs), media_type="application/x-ndjson")
        return JSONResponse(await while_there(request, ollama.whole(body, asked, jobs)))

    @app.post("/api/chat")
    async def ollama_chat(body: ollama.ChatBody, request: Request) -> Response:
        return await told(body, request)

    @app.post("/api/generate")
    async def ollama_generate(body: ollama.GenerateBody, request: Request) -> Response:
        return await told(body, request)

    @app.get("/api/tags")
    async def ollama_tags() -> dict[str, Any]:
        return ollama.tags(asking, server.began)

    @app.post("/api/show")
    async def ollama_show(body: ollama.ShowBody) -> dict[str, Any]:
        asking.check_model(ollama.name_of(asking, body.model or body.name or ""))
        return ollama.show(asking)

    @app.get("/api/version")
    async def ollama_version() -> dict[str, str]:
        return {"version": __version__}


def _tools(app: FastAPI, server: Server) -> None:
    asking = server.asking

    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")

    @app.get("/", include_in_schema=False)
    async def chat_page() -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": _PAGE_MAY, "X-Content-Type-Options": "nosniff"})

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(server.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        if (body.prompt is None) == (body.messages is None):
            raise refused("give either prompt or messages")
        if body.messages is not None:
            ids = await asyncio.to_thread(asking.chat_ids, body.messages)
        else:
            bos = None if body.add_special_tokens else False
            ids = await asyncio.to_thread(asking.tokenizer.encode, body.prompt or "", add_bos=bos)
        return {"tokens": ids, "count": len(ids), "max_model_len": server.model.target.capacity.positions}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        size = asking.tokenizer.vocab_size
        if any(token >= size for token in body.tokens):
            raise refused(f"a token id is outside the vocabulary of {size}", param="tokens")
        return {"prompt": asking.tokenizer.decode(body.tokens, skip_special=False)}


def _model(server: Server, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": server.began,
        "owned_by": "outpace",
        "max_model_len": server.model.target.capacity.positions,
    }
