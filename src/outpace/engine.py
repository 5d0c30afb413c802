"""Many requests on one target: checks them, gives them slots, runs rounds, keeps what can be read again.

A request that finds no free slot waits its turn. A finished request leaves its slot behind as it is: the next prompt
that begins with the same tokens (the next turn of a chat) starts from there. Neighbours: decode.py runs the rounds,
api.py turns requests into results.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from .decode import Decoder, Request, TextSink
from .drafters.draft_model import common_prefix
from .sampling import Sampler
from .types import ContextError, RewindError, SampleOpts, UsageError, token_ids


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
        self._idle: dict[int, list[int]] = {}  # slots of finished requests and the tokens they hold, oldest first

    def submit(
        self,
        prompt: Sequence[int],
        opts: SampleOpts,
        *,
        text: TextSink | None = None,
        taps: Sequence[int] = (),
        speculate: bool = True,
    ) -> Request:
        """Queues a request; `step` works on it.

        Raises UsageError for an empty prompt, a token id or tap out of range, ContextError when the prompt, or the
        prompt and opts.max_tokens, do not fit the context.
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
            raise ContextError(f"the prompt has {len(prompt)} tokens, but the context holds {context} and an answer")
        if opts.max_tokens is not None and opts.max_tokens > room:
            raise ContextError(
                f"the prompt's {len(prompt)} tokens and max_tokens {opts.max_tokens} exceed the context of {context}: "
                f"ask for at most {room}"
            )
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
            speculate=speculate,
        )
        with self.lock:
            self.waiting.append(request)
        return request

    def step(self) -> list[Request]:
        """Admits what fits and runs one round; returns the requests that took part ([] when nothing is left)."""
        with self.lock:
            while self.waiting and len(self.running) < self.decoder.target.capacity.slots:
                request = self.waiting[0]
                self._admit(request)
                self.running.append(request)
                self.waiting.popleft()
            active = list(self.running[: self.decoder.target.capacity.rows])
            if active:
                self.decoder.round(active)
            for request in active:
                if request.finish:
                    self._release(request)
            return active

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
            request.finish = request.finish or "cancelled"
            if request in self.waiting:
                self.waiting.remove(request)
            if request.slot >= 0:
                self._release(request)

    def close(self) -> None:
        """Cancels everything and frees the slots."""
        with self.lock:
            for request in [*self.waiting, *self.running]:
                self.cancel(request)
            for slot in self._idle:
                self.decoder.target.free_slot(slot)
            self._idle.clear()

    # -- slots. Ctrl-C may come between any two lines: a slot always belongs to a request or to the idle ones, and
    #    releasing a request twice does no harm.

    def _admit(self, request: Request) -> None:
        target = self.decoder.target
        # At least the prompt's last token is read again: its logits choose the first token of the answer. Taps are
        # wanted for every token, so such a request reads its whole prompt.
        shared = {
            slot: 0 if request.taps else common_prefix(tokens, request.prompt[:-1])
            for slot, tokens in self._idle.items()
        }
        best = max(shared, key=shared.__getitem__, default=None)
        if best is not None and shared[best] > 0:
            request.slot = best
            del self._idle[best]
            try:
                target.truncate(best, shared[best])
                request.begin(best, shared[best])
                return
            except RewindError:
                request.slot = -1
                target.free_slot(best)
        if len(self.running) + len(self._idle) >= target.capacity.slots:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            target.free_slot(oldest)
        request.slot = target.new_slot()
        request.begin(request.slot, 0)

    def _release(self, request: Request) -> None:
        held = self.decoder.target.length(request.slot)
        self._idle[request.slot] = request.tokens[:held]
        try:
            if self.decoder.drafter is not None:
                self.decoder.drafter.forget(request.state)
        finally:
            if request in self.running:
                self.running.remove(request)
