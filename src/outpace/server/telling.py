"""What is told of a finished answer beside its text: usage, timings, log-probabilities, ids.

Sources: OpenAI's API reference for usage and logprobs; llama.cpp's server for `timings`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from ..api import Result
from ..text.tokenizer import Tokenizer
from ..types import Stats, TokenLogprobs


def new_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return f"{prefix}-{secrets.token_hex(16)}"


def usage(results: Sequence[Result]) -> dict[str, Any]:
    """Of the choices of one request."""
    prompt = len(results[0].prompt_ids)
    tokens = sum(len(result.token_ids) for result in results)
    accepted = sum(result.stats.accepted for result in results)
    drafted = sum(result.stats.drafted for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        "prompt_tokens_details": {"cached_tokens": results[0].stats.cached_prompt_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def timings(stats: Stats) -> dict[str, Any]:
    """As llama.cpp's server gives them, and tokens a round."""
    prompt, prompt_s = stats.prompt_tokens - stats.cached_prompt_tokens, stats.prefill_s
    decoded, decode_s = stats.decode_tokens, stats.decode_s
    return {
        "cache_n": stats.cached_prompt_tokens,
        "prompt_n": prompt,
        "prompt_ms": 1e3 * prompt_s,
        "prompt_per_token_ms": 1e3 * prompt_s / max(prompt, 1),
        "prompt_per_second": prompt / prompt_s if prompt_s else 0.0,
        "predicted_n": decoded,
        "predicted_ms": 1e3 * decode_s,
        "predicted_per_token_ms": 1e3 * decode_s / max(decoded, 1),
        "predicted_per_second": decoded / decode_s if decode_s else 0.0,
        "draft_n": stats.drafted,
        "draft_n_accepted": stats.accepted,
        "tokens_per_round": stats.tokens_per_round,
    }


def chat_logprobs(tokenizer: Tokenizer, found: Iterable[TokenLogprobs]) -> list[dict[str, Any]]:
    """As a chat's choice has them."""
    return [
        _entry(tokenizer, each.token, each.logprob)
        | {"top_logprobs": [_entry(tokenizer, token, logprob) for token, logprob in each.top]}
        for each in found
    ]


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token)
    return {"token": raw.decode("utf-8", errors="replace"), "logprob": max(logprob, -9999.0), "bytes": list(raw)}
