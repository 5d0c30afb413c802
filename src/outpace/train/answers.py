"""The target's answers to prompts, many at a time, with the hidden states that its passes had anyway.

Neighbours: sources.py asks, filters.py chooses, data.py writes down; via.py has a server write the text instead. A
conversation ("talk") is asked turn by turn: each answer is an example, and the target's own words are what the next
turn follows. Now and then the target also writes the user's turn.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ..api import LanguageModel
from ..decode import Request
from ..slots import common_prefix
from ..types import F32, ModelError, SampleOpts, UsageError
from .filters import SHORTEST, Filter, foreign, loop_start, not_text
from .prompts import OWN_TURN, Prompt
from .sources import TEMPERATURE, Ask, Source

QUESTION_TOKENS, QUESTION_WORDS = 48, 40  # most of a turn that the target writes for the user


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt with its answer. tokens: int32 [n]; states: float16 [n, taps, hidden]; answer: its first token."""

    tokens: NDArray[np.int32]
    states: NDArray[np.float16]
    answer: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Most tokens of a prompt, of an answer, and of one that another turn follows."""

    prompt: int
    answer: int
    turn: int


@dataclass(frozen=True, slots=True)
class Before:
    """Where an earlier run ended. open: numbers of prompts whose talks had not. next: that of the first new prompt."""

    open: frozenset[int] = frozenset()
    next: int = 0


@dataclass(slots=True)
class Talk:
    """One conversation. given: the answers so far. ids: the prompt of the next one. before: an example that begins as
    that prompt does."""

    ask: Ask
    prompt: Prompt
    given: tuple[str, ...] = ()
    ids: list[int] = field(default_factory=list)
    before: Example | None = None

    @property
    def last(self) -> bool:
        """Whether no turn comes after this one."""
        return len(self.given) + 1 >= len(self.prompt.turns)

    @property
    def asks_itself(self) -> bool:
        """Whether the target is to write the user's turn now."""
        return bool(self.given) and self.prompt.turns[len(self.given)] == OWN_TURN

    @property
    def text(self) -> str:
        """All that was said so far."""
        said = (self.prompt.system, *self.prompt.turns[: len(self.given) + 1], *self.given)
        return "\n\n".join(filter(None, said))


class Talks:
    """The conversations that are under way. open: their numbers. next: that of the next prompt."""

    def __init__(self, model: LanguageModel, source: Source, chosen: Filter, limits: Limits, before: Before) -> None:
        self.model, self.chosen, self.limits = model, chosen, limits
        self.open, self.next = set(before.open), before.next
        asks = source.asks(min(before.open, default=before.next))
        self._asks = (ask for ask in asks if ask.number >= before.next or ask.number in before.open)
        self._waiting: deque[Talk] = deque()  # those whose next turn comes

    def take(self) -> tuple[Talk, SampleOpts] | None:
        """The next turn to be answered, with its token ids; None when there are no more prompts."""
        while True:
            if self._waiting:
                talk = self._waiting.popleft()
            elif (ask := next(self._asks, None)) is not None:
                talk = Talk(ask, ask.prompt)
                self.open.add(ask.number)
                self.next = max(self.next, ask.number + 1)
            else:
                return None
            if (opts := self._begin(talk)) is not None:
                return talk, opts

    def _begin(self, talk: Talk) -> SampleOpts | None:
        """How the talk's next turn is to be answered; None where it cannot be, and the talk has ended."""
        refused = ""
        tokenizer, limits = self.model.tokenizer, self.limits
        if tokenizer is None or (self.model.template is None and not talk.prompt.plain):
            raise UsageError(
                "the target has no chat template: train it on texts, --data FILE with rows of {'text': ...}"
            )
        try:
            if talk.prompt.plain:
                talk.ids = tokenizer.encode(talk.prompt.turns[0])
            elif talk.asks_itself:
                talk.ids = self._question(talk)
            else:
                talk.ids = self.model.chat_ids(talk.prompt.messages(talk.given))
        except UsageError:
            refused = "prompt does not fit the chat template"
        most = limits.answer if talk.last else limits.turn
        most = QUESTION_TOKENS if talk.asks_itself else most
        most = min(most, self.model.target.capacity.positions - len(talk.ids))
        if not refused and (len(talk.ids) > limits.prompt or most < SHORTEST):
            refused = "prompt is too long"
        if refused or not talk.ids:
            self.end(talk, refused or "prompt is empty")
            return None
        if talk.asks_itself:
            return replace(talk.ask.opts, temperature=TEMPERATURE, max_tokens=most)
        return replace(talk.ask.opts, max_tokens=most)

    def _question(self, talk: Talk) -> list[int]:
        """The conversation up to where the user's words would begin: what the template writes before any of them."""
        so_far = talk.prompt.messages(talk.given)[:-1]
        one, other = (
            self.model.chat_ids([*so_far, {"role": "user", "content": word}], add_generation_prompt=False)
            for word in ("Why", "How")
        )
        return one[: common_prefix(one, other)]

    def end(self, talk: Talk, reason: str) -> None:
        """Ends a talk whose next turn is left out."""
        self.open.discard(talk.ask.number)
        self.chosen.leave_out(reason)

    def asked_itself(self, talk: Talk, said: Sequence[int], ended: bool) -> None:
        """Takes the turn that the target wrote for the user, if it is one. ended: it is whole."""
        text = self._text(said)
        if not ended or not _is_question(text, talk.text):
            self.end(talk, "own question")
        else:
            talk.prompt = replace(talk.prompt, turns=(*talk.prompt.turns[: len(talk.given)], text))
            self._waiting.append(talk)

    def answered(self, talk: Talk, said: Sequence[int], tokens: Sequence[int]) -> bool:
        """Takes a turn's answer, and has the talk go on or end. Whether it is one to learn from. said: the answer's
        tokens. tokens: those to learn from: without what has no hidden states, and up to where it begins to loop."""
        text = self._text(said)
        kept = self.chosen.keeps(tokens, text, talk.text)
        looped = len(tokens) < len(said) - 1
        if looped:
            self.chosen.left_out["cut in a loop"] += 1
        if looped or talk.last or not text:
            self.open.discard(talk.ask.number)
        else:
            talk.given = (*talk.given, text)
            self._waiting.append(talk)
        return kept

    def _text(self, tokens: Sequence[int]) -> str:
        tokenizer = self.model.tokenizer
        return "" if tokenizer is None else tokenizer.decode(tokens).rstrip("\ufffd").strip()


def _is_question(text: str, asked: str) -> bool:
    words = len(text.split())
    return 2 <= words <= QUESTION_WORDS and "\n" not in text and not not_text(text) and not foreign(text, asked)


def by_engine(talks: Talks, taps: Sequence[int], deadline: float | None = None) -> Generator[Example | None]:
    """The target's answers, in the order in which they finish; at the deadline also what there is of the others. None
    for one that is left out.

    deadline: of time.monotonic. Raises what a request fails with.
    """
    running: dict[int, tuple[Request, Talk]] = {}
    model, engine = talks.model, talks.model.engine
    first: Example | None = None  # whose first tokens, the template's, most prompts begin with
    more = True
    try:
        while deadline is None or time.monotonic() < deadline:
            while more and len(running) < model.target.capacity.slots:
                taken = talks.take()
                if more := taken is not None:
                    talk, opts = taken
                    tapped = () if talk.asks_itself else taps
                    talk.before = _closest(talk.ids, talk.before, first)
                    known = _shared(talk.ids, talk.before)
                    request = engine.submit(talk.ids, opts, taps=tapped, speculate=False, known=known)
                    running[id(request)] = (request, talk)
            if not running:
                return
            for request in engine.step():
                emitted = len(request.tokens) - len(request.prompt)
                looped = emitted % 16 == 0 and loop_start(request.tokens[len(request.prompt) :]) is not None
                if not request.finish and not looped:
                    continue
                if request.error is not None:
                    raise request.error
                engine.cancel(request)
                _, talk = running.pop(id(request))
                if talk.asks_itself:
                    talks.asked_itself(talk, request.output, request.finish == "stop")
                else:
                    example = _example(talks, talk, request, taps)
                    first = first or example
                    yield example
                more = True  # the talk may go on
        for request, talk in running.values():  # the time is over
            if talk.last and request.taps and len(request.tokens) > len(request.prompt) + SHORTEST:
                yield _example(talks, talk, request, taps)
    finally:
        for request, _ in running.values():
            engine.cancel(request)


def _example(talks: Talks, talk: Talk, request: Request, taps: Sequence[int]) -> Example | None:
    """What a finished request teaches: up to a loop's second turn, and without the last token, which nobody read."""
    start = len(request.prompt)
    cut = loop_start(request.tokens[start:])
    n = min(len(request.tokens) - 1, request.read)
    if cut is not None:
        n = min(n, start + cut)
    if not talks.answered(talk, request.output, request.tokens[start:n]):
        return None
    held = request.stats.cached_prompt_tokens
    read: F32 = np.stack([np.concatenate(request.tapped[tap])[: n - held] for tap in taps], axis=1)
    states = as_f16(read)
    if held and talk.before is not None:
        states = np.concatenate([talk.before.states[:held], states])
    talk.before = Example(np.array(request.tokens[:n], np.int32), states, answer=start)
    return talk.before


def _shared(ids: Sequence[int], example: Example | None) -> int:
    """How many of these tokens the example begins with: their hidden states are known, and need not be computed again
    where a slot still holds them."""
    if example is None:
        return 0
    return common_prefix(ids, example.tokens.tolist())


def _closest(ids: Sequence[int], *examples: Example | None) -> Example | None:
    return max(examples, key=lambda example: _shared(ids, example))


def as_f16(states: F32) -> NDArray[np.float16]:
    """Hidden states as they are kept; the few that are too large become the largest. Raises ModelError for NaN."""
    if not np.isfinite(states).all():
        raise ModelError("the target's hidden states are not finite")
    most = np.finfo(np.float16).max
    return np.clip(states, -most, most).astype(np.float16)
