"""`outpace serve`: the HTTP server."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from .terminal import note

_EVERYWHERE = ("0.0.0.0", "::", "")
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


def serve(
    model: Annotated[str, typer.Argument(help="The model: a name, a folder or a .gguf file.")] = "smollm2-135m",
    *,
    host: Annotated[str, typer.Option(help="The address to listen on; a public one needs a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    name: Annotated[
        list[str] | None, typer.Option(help="What clients may call the model.", show_default="MODEL")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OUTPACE_API_KEY", help="Let in only who has this key.", show_envvar=True)
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="A file with keys, one a line.")] = None,
    allow_host: Annotated[list[str] | None, typer.Option(help="Further names for the Host header.")] = None,
    precision: Annotated[str, typer.Option(help="int8, int4, bf16 or f32.")] = "int8",
    draft: Annotated[str, typer.Option(help="Where drafts come from; see `outpace generate`.")] = "auto",
    head: Annotated[str | None, typer.Option(help="A learned draft head.")] = None,
    draft_model: Annotated[str | None, typer.Option(help="A model that drafts.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens of a request.", show_default="the model's")] = None,
    slots: Annotated[int, typer.Option(min=1, max=256, help="Requests at once.")] = 16,
    waiting: Annotated[int, typer.Option(min=0, help="Requests that may wait for a slot.")] = 64,
    threads: Annotated[int | None, typer.Option(help="Threads.", show_default="one per core")] = None,
    drain: Annotated[float, typer.Option(min=0.0, help="Seconds that answers may take to end at the end.")] = 30.0,
) -> None:
    """Serves a model over HTTP: OpenAI's API, with the clients that you already have.

    Ctrl-C (or SIGTERM) takes no new requests and lets running answers end.
    """
    from ..api import load
    from ..types import UsageError

    try:
        import fastapi  # noqa: F401
        import uvicorn
    except ImportError:
        raise UsageError("outpace serve needs a few more packages: pip install 'outpace[serve]'") from None
    from ..server.app import Settings, create_app

    keys = [*([api_key] if api_key else []), *(_keys(api_key_file) if api_key_file else [])]
    if not keys and not _is_local(host):
        raise UsageError(f"{host} can be reached from other machines: give --api-key, or --host 127.0.0.1")
    more: dict[str, Any] = {"context": context, "slots": slots, "threads": threads}
    served = load(model, precision=precision, draft=draft, head=head, draft_model=draft_model, **more)  # type: ignore[arg-type]
    hosts = () if host in _EVERYWHERE else (*_LOCAL_NAMES, host, *(allow_host or ()))
    settings = Settings(
        names=tuple(name or (Path(model).name if os.sep in model else model,)),
        keys=keys,
        hosts=hosts,
        waiting=waiting,
        drain=drain,
    )
    app = create_app(served, settings)
    shown = f"[{host}]" if ":" in host else host
    note(f"serving {settings.names[0]} at http://{shown}:{port}/v1 (context {served.target.capacity.positions})")
    try:
        uvicorn.run(
            app,
            host=host,
            port=port,
            log_level="warning",
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=1 << 16,
            timeout_keep_alive=30,
        )
    finally:
        served.close()


def _keys(file: Path) -> list[str]:
    from ..types import UsageError

    try:
        found = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: the keys cannot be read: {error}") from None
    if not found:
        raise UsageError(f"{file}: there is no key in it")
    return found


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
