"""POST /v1/completions, as OpenAI's (legacy) API reference describes it: also echo with the prompt's log-probabilities,
which lm-eval's `local-completions` asks for.

Neighbours: as chat.py's; scoring.py reads prompts whose log-probabilities are wanted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from ..api import Result
from ..text.tokenizer import Tokenizer
from ..types import TokenLogprobs
from .asking import Asked, Asking
from .errors import refused
from .fields import CompletionRequest
from .streaming import merged
from .telling import timings, usage
from .work import Job


def prompts(asking: Asking, body: CompletionRequest) -> list[list[int]]:
    """The prompts as token ids."""
    given = body.prompt
    if isinstance(given, str):
        given = [given]
    if not given:
        raise refused("the prompt is empty: give a text or at least one token id", param="prompt")
    many = [given] if isinstance(given[0], int) else given
    found = [asking.tokenizer.encode(each) if isinstance(each, str) else [int(t) for t in each] for each in many]
    size = asking.model.config.vocab_size
    for ids in found:
        if not ids:
            raise refused("a prompt is empty: give a text or at least one token id", param="prompt")
        if any(token >= size for token in ids):
            raise refused(f"a token id is outside the vocabulary of {size}", param="prompt")
    if len(found) * body.n > 64:
        raise refused("too many answers at once: at most 64", param="prompt")
    return found


def asked(asking: Asking, body: CompletionRequest) -> list[Asked]:
    """The choices of each prompt; none where nothing is to be written."""
    asking.check_model(body.model)
    if body.echo and body.stream:
        raise refused("echo cannot be streamed", param="echo")
    if body.max_tokens == 0 and not body.echo:
        raise refused("max_tokens 0 needs echo", param="max_tokens")
    opts = asking.opts(
        body, max_tokens=body.max_tokens or (None if body.max_tokens is None else 1), logprobs=body.logprobs
    )
    return [asking.choices(ids, body, opts) for ids in prompts(asking, body)]


class Logprobs:
    """A choice's log-probabilities in the API's four lists."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._at = 0
        self.tokens: list[str] = []
        self.token_logprobs: list[float | None] = []
        self.top_logprobs: list[dict[str, float] | None] = []
        self.text_offset: list[int] = []

    def add(self, found: Sequence[TokenLogprobs | int]) -> Logprobs:
        """Of more tokens; a plain id: a token of which nothing is known, as the prompt's first."""
        for each in found:
            token = each if isinstance(each, int) else each.token
            text = self._tokenizer.token_bytes(token).decode("utf-8", errors="replace")
            self.tokens.append(text)
            self.text_offset.append(self._at)
            self._at += len(text)
            if isinstance(each, int):
                self.token_logprobs.append(None)
                self.top_logprobs.append(None)
            else:
                self.token_logprobs.append(max(each.logprob, -9999.0))
                self.top_logprobs.append({self._text(token): max(value, -9999.0) for token, value in each.top})
        return self

    def _text(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode("utf-8", errors="replace")

    def told(self) -> dict[str, Any]:
        """As the API has them."""
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: getattr(self, name) for name in names}


async def answer(
    asking: Asking,
    body: CompletionRequest,
    each: Sequence[Asked],
    jobs: list[Job],
    scores: Sequence[Sequence[TokenLogprobs | int]],
) -> dict[str, Any]:
    """The whole answer. scores: of each prompt, where echo wants them."""
    results: list[Result | None] = [None] * (len(each) * body.n)
    if body.max_tokens != 0:
        async for i, delta in merged(jobs):
            results[i] = delta.result or results[i]
    choices = []
    for i, result in enumerate(results):
        prompt = each[i // body.n].prompt_ids
        text = asking.tokenizer.decode(prompt) if body.echo else ""
        logprobs: dict[str, Any] | None = None
        if body.logprobs is not None:
            told = Logprobs(asking.tokenizer)
            told.add(scores[i // body.n] if body.echo else [])
            logprobs = told.add(result.logprobs if result is not None else []).told()
        choices.append(
            {
                "index": i,
                "text": text + (result.text if result is not None else ""),
                "logprobs": logprobs,
                "finish_reason": result.finish_reason if result is not None else "length",
            }
        )
    done = [result for result in results if result is not None]
    prompt_tokens = sum(len(one.prompt_ids) for one in each)
    found: dict[str, Any] = {
        **asking.stamp("cmpl", "text_completion", body.model),
        "choices": choices,
        "usage": usage(done)
        if len(each) == 1 and done
        else {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": sum(len(result.token_ids) for result in done),
            "total_tokens": prompt_tokens + sum(len(result.token_ids) for result in done),
        },
    }
    return found | ({"timings": timings(done[0].stats)} if done else {})


async def stream(asking: Asking, body: CompletionRequest, jobs: list[Job]) -> AsyncIterator[dict[str, Any]]:
    """The answer in chunks."""
    base = asking.stamp("cmpl", "text_completion", body.model)
    results: list[Result] = []
    logprobs = [Logprobs(asking.tokenizer) for _ in jobs]
    counted = body.stream_options is not None and body.stream_options.include_usage
    async for i, delta in merged(jobs):
        finish = delta.result.finish_reason if delta.result is not None else None
        told: dict[str, Any] | None = None
        if body.logprobs is not None and delta.logprobs:
            before = len(logprobs[i].tokens)
            told = {name: values[before:] for name, values in logprobs[i].add(delta.logprobs).told().items()}
        if delta.text or told or finish:
            choice = {"index": i, "text": delta.text, "logprobs": told, "finish_reason": finish}
            chunk = base | {"choices": [choice]} | ({"usage": None} if counted else {})
            yield chunk | ({"timings": timings(delta.result.stats)} if delta.result is not None else {})
        if delta.result is not None:
            results.append(delta.result)
    if counted:
        yield base | {"choices": [], "usage": usage(results)}
