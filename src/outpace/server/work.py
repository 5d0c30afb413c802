"""The one thread that steps the engine, and the way from it to the requests that wait for its news.

Neighbours: api.Answer is an answer in the making, asking.py submits them, the event loop of app.py reads what comes.
A client never holds the engine up: what it has not read yet waits in its own queue, which its answer's length bounds;
one that has gone is cancelled before the next pass.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from time import monotonic
from typing import Protocol

from ..api import Answer, Delta, LanguageModel, Result
from .errors import ApiError

log = logging.getLogger("outpace.server")


class Watcher(Protocol):
    """Who counts what answers take (metrics.py)."""

    def first(self, seconds: float) -> None:
        """The first token came after so long."""

    def done(self, result: Result, seconds: float) -> None:
        """The answer is whole."""


class Job:
    """One answer on its way to one client. Made and read in the event loop."""

    def __init__(self, work: Work, answer: Answer) -> None:
        self.answer = answer
        self.submitted = monotonic()
        self._work = work
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        self._watcher: Watcher | None = None

    def watch(self, watcher: Watcher) -> None:
        """Has someone told when the first token and the whole answer are there."""
        self._watcher = watcher

    def put(self, news: Delta | Exception) -> None:
        """Called by the working thread."""
        try:
            self._loop.call_soon_threadsafe(self._news.put_nowait, news)
        except RuntimeError:  # the loop has ended, and with it whoever waited
            self.cancel()

    async def deltas(self) -> AsyncIterator[Delta]:
        """What comes, until the answer is whole. Raises what it failed with. Leaving early cancels it."""
        seen = False
        try:
            while True:
                news = await self._news.get()
                if isinstance(news, Exception):
                    raise news
                if self._watcher is not None:
                    if not seen and news.token_ids:
                        seen = True
                        self._watcher.first(monotonic() - self.submitted)
                    if news.result is not None:
                        self._watcher.done(news.result, monotonic() - self.submitted)
                yield news
                if news.result is not None:
                    return
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Ends the answer before the next pass; nothing happens to one that is whole."""
        self._work.cancel(self)


class Work:
    """Steps a model's engine while there is something to do."""

    def __init__(self, model: LanguageModel, most_waiting: int = 64) -> None:
        """most_waiting: requests that may wait for a slot; further ones are turned away."""
        self.model = model
        self.most_waiting = most_waiting
        self._jobs: set[Job] = set()
        self._gone: set[Job] = set()
        self._wake = threading.Condition()
        self._draining = self._closed = False
        self._coming = 0  # requests between their arrival and the engine
        self._thread = threading.Thread(target=self._run, name="outpace-engine", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Requests without a slot yet."""
        return len(self.model.engine.waiting)

    @property
    def running(self) -> int:
        """Requests that take part in passes."""
        return len(self.model.engine.running)

    async def submit(self, makes: list[Callable[[], Answer]]) -> list[Job]:
        """Starts the answers that these calls submit to the engine: all of them, or none.

        Raises ApiError where the server is full or ends, and what a call raises.
        """
        if self._draining:
            raise ApiError(503, "the server is shutting down")
        # Those that are being submitted have no place in the engine yet.
        if self.waiting + self._coming + len(makes) > self.most_waiting + self._free_slots():
            raise ApiError(429, f"{self.waiting} requests wait already: try again in a moment", code="queue_full")

        def all_of_them() -> list[Answer]:
            answers: list[Answer] = []
            with self.model.engine.lock:  # no pass before all of them are there
                try:
                    for make in makes:
                        answers.append(make())
                except BaseException:
                    for answer in answers:
                        answer.cancel()
                    raise
            return answers

        self._coming += len(makes)
        try:
            answers = await asyncio.to_thread(all_of_them)
        finally:
            self._coming -= len(makes)
        jobs = [Job(self, answer) for answer in answers]
        with self._wake:
            closed = self._closed  # the thread may have ended while the answers were made
            if not closed:
                self._jobs.update(jobs)
                self._wake.notify()
        if closed:
            for answer in answers:
                answer.cancel()
            raise ApiError(503, "the server is shutting down")
        return jobs

    def cancel(self, job: Job) -> None:
        """See Job.cancel."""
        with self._wake:
            if job in self._jobs:
                self._gone.add(job)
                self._wake.notify()

    async def drain(self, seconds: float) -> None:
        """Takes no new requests, and ends when those there are have ended, at most after so many seconds."""
        self._draining = True
        end = monotonic() + seconds
        while self._jobs and monotonic() < end:
            await asyncio.sleep(0.02)
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Cancels what there is and ends the thread."""
        with self._wake:
            self._draining = self._closed = True
            self._wake.notify()
        self._thread.join()

    def _free_slots(self) -> int:
        return max(0, self.model.target.capacity.slots - self.running)

    # -- the working thread

    def _run(self) -> None:
        engine = self.model.engine
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._jobs or self._closed)
                jobs, gone = list(self._jobs), [*self._gone]
                if self._closed:
                    gone = jobs
                self._gone.clear()
            with engine.lock:
                for job in gone:
                    job.answer.cancel()
                error = self._step() if len(gone) < len(jobs) else None
                news = [(job, self._news_of(job, error)) for job in jobs]
            for job, each in news:
                if each is not None and job not in gone:
                    job.put(each)
            with self._wake:
                self._jobs.difference_update(
                    job for job, each in news if job.answer.finished or isinstance(each, Exception)
                )
                if self._closed and not self._jobs:
                    return

    def _step(self) -> Exception | None:
        """One pass. What goes wrong with it as a whole has ended all requests that took part."""
        try:
            self.model.engine.step()
        except Exception as error:
            log.exception("a pass failed")
            return error
        return None

    @staticmethod
    def _news_of(job: Job, error: Exception | None) -> Delta | Exception | None:
        try:
            news = job.answer.news()
        except Exception as own:
            job.answer.cancel()  # nobody follows it any more: it must not keep its slot
            return own
        if news is not None and news.result is not None and news.result.finish_reason == "cancelled":
            return error or ApiError(503, "the request was ended: the server is shutting down")
        return news
