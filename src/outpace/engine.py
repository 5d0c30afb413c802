"""Many requests on one target: checks them, gives them slots, runs rounds, keeps what can be read again.

A request that finds no free slot waits its turn. A finished request leaves its slot behind (slots.py): the next prompt
that begins with the same tokens, such as the next turn of a chat, starts from there. Neighbours: decode.py runs the
rounds, api.py turns requests into results.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice

from .controller import MAX_DRAFT
from .decode import Decoder, Request, TextSink
from .sampling import Sampler
from .slots import SlotPool
from .types import ContextError, SampleOpts, UsageError, token_ids

_WORTH_WAITING = 16  # tokens that another request is about to read
_LOOKED_AT = 8  # waiting requests: behind those the turn must be waited for in any case


class Engine:
    """The requests of one target.

    Threads may share it: whoever steps works for all requests. lock: held while anything changes.
    """

    def __init__(self, decoder: Decoder, *, end_tokens: frozenset[int] = frozenset(), known_tokens: int | None = None):
        """end_tokens: ids that end an answer. known_tokens: ids from here on are padding of the vocabulary."""
        self.lock = threading.RLock()
        self.decoder = decoder
        self.end_tokens = end_tokens
        self.known_tokens = known_tokens
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self._slots = SlotPool(decoder.target)

    def submit(
        self,
        prompt: Sequence[int],
        opts: SampleOpts,
        *,
        text: TextSink | None = None,
        taps: Sequence[int] = (),
        speculate: bool = True,
        known: int = 0,
        drafter: str | None = None,
        most_drafted: int = MAX_DRAFT,
    ) -> Request:
        """Queues a request; `step` works on it. drafter: the only one that may draft for it; most_drafted: tokens of a
        draft, at most.

        known: of so many of the prompt's first tokens the caller has the hidden states: those that a slot still holds
        (stats.cached_prompt_tokens) are missing from what `taps` collect.

        Raises UsageError for an empty prompt, a token id or tap out of range, an unknown drafter, ContextError when the
        prompt, or the prompt and opts.max_tokens, do not fit the context.
        """
        target = self.decoder.target
        vocab, layers = target.config.vocab_size, target.config.num_hidden_layers
        prompt, taps = token_ids("the prompt", prompt), tuple(dict.fromkeys(token_ids("taps", taps)))
        if not prompt:
            raise UsageError("the prompt is empty: give at least one token")
        outside = next((t for t in prompt if not 0 <= t < vocab), None)
        if outside is not None:
            raise UsageError(f"prompt token id {outside} is outside the vocabulary of {vocab}")
        if any(not -1 <= tap <= layers for tap in taps):
            raise UsageError(f"taps must be in -1 .. {layers} for a model of {layers} layers, got {list(taps)}")
        context = target.capacity.positions
        room = context - len(prompt)
        if room < 1:
            raise ContextError(f"the prompt's {len(prompt)} tokens leave no room to answer in a context of {context}")
        if opts.max_tokens is not None and opts.max_tokens > room:
            raise ContextError(
                f"the prompt's {len(prompt)} tokens and max_tokens {opts.max_tokens} exceed the context of {context}: "
                f"ask for at most {room}"
            )
        drafters = {each.name for each in self.decoder.drafters}
        if drafter is not None and drafter not in drafters:
            there = ", ".join(sorted(drafters)) or "none"
            raise UsageError(f"there is no drafter {drafter!r:.40} here, only: {there}")
        if opts.stop and text is None:
            raise UsageError("stop strings need a tokenizer; use stop_tokens with token ids")
        if opts.constraint is not None:
            # Its state belongs to one answer: the caller's own object serves any number of them.
            opts = replace(opts, constraint=opts.constraint.fork())
        sampler = Sampler(opts, vocab, prompt, end_tokens=self.end_tokens, known_tokens=self.known_tokens)
        request = Request(
            prompt=prompt,
            opts=opts,
            sampler=sampler,
            limit=min(opts.max_tokens or room, room),
            end_tokens=self.end_tokens,
            text=text,
            taps=taps,
            known=known,
            speculate=speculate,
            most_drafted=min(most_drafted, MAX_DRAFT),
            without=set() if drafter is None else drafters - {drafter},
            evidence=self.decoder.controller.track(),
        )
        with self.lock:
            self.waiting.append(request)
        return request

    def step(self) -> list[Request]:
        """Admits what fits and runs one round; returns the requests that took part ([] when nothing is left)."""
        with self.lock:
            while (request := self._next()) is not None:
                self.waiting.remove(request)
                self.running.append(request)
                try:
                    self._admit(request)
                except BaseException:
                    self.cancel(request)
                    raise
            active = list(self.running[: self.decoder.most])
            if active:
                self._round(active)
            for request in active:
                if request.finish:
                    self._release(request)
            return active

    def _next(self) -> Request | None:
        """The request that is admitted now. One that begins as a text that is just being read waits until that is done:
        then it need not read it again."""
        if not self.waiting or len(self.running) >= self.decoder.target.capacity.slots:
            return None
        reading = [r for r in self.running if not r.taps and len(r.prompt) - r.read > _WORTH_WAITING]
        for request in islice(self.waiting, _LOOKED_AT if reading else 1):
            if request.taps or not any(self._soon_read(request, other) for other in reading):
                return request
        return None

    @staticmethod
    def _soon_read(request: Request, other: Request) -> bool:
        n = min(len(request.prompt), len(other.prompt))
        ahead = min(n, other.read + _WORTH_WAITING)
        return n > other.read and ahead > other.read and request.prompt[:ahead] == other.prompt[:ahead]

    def _round(self, active: list[Request]) -> None:
        try:
            self._slots.with_room(lambda: self.decoder.round(active))
        except BaseException:
            # Interrupted anywhere in the round (Ctrl-C): nobody knows how far it went, so none of its requests goes on.
            for request in active:
                self.cancel(request)
            raise

    def run(self, requests: Sequence[Request]) -> None:
        """Steps until these requests have finished; cancels them when interrupted. Raises the error of a failed one."""
        try:
            while not all(request.finish for request in requests):
                self.step()
                failed = next((request.error for request in requests if request.error is not None), None)
                if failed is not None:
                    raise failed
        finally:
            for request in requests:
                self.cancel(request)

    def cancel(self, request: Request) -> None:
        """Ends a request that is waiting or running; does nothing to a finished one."""
        with self.lock:
            if request.finish and request not in self.running:
                return
            if not request.finish:
                request.finish = "cancelled"
                if request.text is not None:
                    request.text.finish()
            if request in self.waiting:
                self.waiting.remove(request)
            elif request in self.running:
                self._release(request)

    def close(self) -> None:
        """Cancels everything and frees the slots."""
        with self.lock:
            for request in [*self.waiting, *self.running]:
                self.cancel(request)
            self._slots.clear()

    @contextmanager
    def empty_slot(self) -> Iterator[int]:
        """A slot of the target for passes of the caller's own, each under the lock. Raises CapacityError when running
        requests have all of them."""
        owner = object()
        with self.lock:
            slot, _ = self._slots.open(owner, (), reuse=False)
        try:
            yield slot
        finally:
            with self.lock:
                self._slots.drop(owner)

    # -- slots

    def _admit(self, request: Request) -> None:
        # At least the prompt's last token is read again: its logits choose the first token of the answer. Taps are
        # wanted for every token, so such a request reads its whole prompt but for what is known of it.
        usable = request.prompt[:-1][: request.known if request.taps else None]
        slot, held = self._slots.open(request, usable, reuse=bool(usable), text=request.tokens)
        self.decoder.begin(request, slot, held)
        self.decoder.total.prompt_tokens += len(request.prompt)
        self.decoder.total.cached_prompt_tokens += request.read

    def _release(self, request: Request) -> None:
        # Ctrl-C may come between any two lines: what is still among the running is released once more.
        if request.error is None and request.slot >= 0:
            self._slots.close(request, request.tokens)
        else:  # failed, or interrupted while it was admitted: nobody knows what the slot holds
            self._slots.drop(request)
        for drafter in self.decoder.drafters:
            try:
                drafter.forget(request.state)
            except Exception as error:  # whatever a drafter does, it must not cost the answer
                warnings.warn(f"drafter {drafter.name} failed to forget a request: {error!r}", stacklevel=2)
        self.running.remove(request)
