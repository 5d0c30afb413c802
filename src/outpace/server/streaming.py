"""Answers as they come: the news of several jobs in one stream, server-sent events, clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, TypeVar

from starlette.requests import Request

from ..api import Delta
from .errors import of
from .work import Job

T = TypeVar("T")


async def merged(jobs: Sequence[Job]) -> AsyncIterator[tuple[int, Delta]]:
    """The deltas of all jobs with the job's number, as they come. Whatever ends it early cancels all of them."""
    news: asyncio.Queue[tuple[int, Delta | Exception | None]] = asyncio.Queue()

    async def follow(i: int, job: Job) -> None:
        try:
            async for delta in job.deltas():
                news.put_nowait((i, delta))
            news.put_nowait((i, None))
        except Exception as error:
            news.put_nowait((i, error))

    tasks = [asyncio.create_task(follow(i, job)) for i, job in enumerate(jobs)]
    left = len(jobs)
    try:
        while left:
            i, each = await news.get()
            if isinstance(each, Exception):
                raise each
            if each is None:
                left -= 1
            else:
                yield i, each
    finally:
        for task in tasks:
            task.cancel()
        for job in jobs:
            job.cancel()


async def events(chunks: AsyncIterator[dict[str, Any]], *, done: bool = True) -> AsyncIterator[str]:
    """Server-sent events; an error within becomes the last one."""
    try:
        async for chunk in chunks:
            yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
    except Exception as error:
        yield f"data: {json.dumps(of(error).openai())}\n\n"
    if done:
        yield "data: [DONE]\n\n"


async def while_there(request: Request, work: Awaitable[T]) -> T:
    """What `work` gives; it is cancelled when the client leaves before."""
    task = asyncio.ensure_future(work)

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watch = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise asyncio.CancelledError
        return task.result()
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
