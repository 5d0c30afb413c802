"""Logits + history + SampleOpts -> one probability row, and the random numbers that choose from it.

Order and scope (vLLM's, https://docs.vllm.ai, class Sampler), the same for every verified row:

1. logit_bias is added.
2. repetition_penalty r: logits of tokens seen in prompt or output are divided by r when positive, else multiplied.
   frequency_penalty * count and presence_penalty are subtracted for tokens seen in the output.
3. Masks set logits to -inf: allowed_tokens, banned_tokens, bad_words (the last token of a sequence whose beginning
   ends the output), end and stop tokens before min_tokens, ids that the tokenizer does not know (padding of the
   vocabulary), the constraint's mask.
4. temperature: 0 keeps the arg-max only, the lowest id on a tie. Otherwise softmax(logits / temperature).
5. min_p, top_k, top_p, typical_p, each on what the one before left, renormalised. Ties go to the lowest id.

Random numbers are counter-based: hashes (SplitMix64, Steele, Lea and Flood 2014) of (seed, choice, stream, position,
...), so that a token's noise depends on where it stands and never on how many numbers were drawn before. The token is
arg-max(log p + Gumbel noise), computed as arg-min(E / p) with E = -log(u) exponential: the same choice, one logarithm.

This module knows no model, no cache and no draft; decode.py hands it rows.
"""

from __future__ import annotations

import enum
import math
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._native import candidates, choose
from .types import F32, F64, I64, Distribution, ModelError, NumericalError, SampleOpts, TokenLogprobs, UsageError

# ------------------------------------------------------------------------------------------------------- randomness

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_M1 = 0xBF58476D1CE4E5B9
_M2 = 0x94D049BB133111EB
_NO_CHANCE = 7.0  # what lies so far below the best logit, at temperature 1, is no candidate beside the chosen token
_START = 0x243F6A8885A308D3  # the first 64 bits of pi's fraction


class Stream(enum.IntEnum):
    """What a random number is for. Streams are independent of each other."""

    TOKEN = 1  # the target's own token (match rule)
    DRAFT = 2  # a draft token that is not coupled to the target's
    ACCEPT = 3  # accept or reject
    RESIDUAL = 4  # the correction or bonus token of the rejection and block rules


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _M1) & _MASK
    z = ((z ^ (z >> 27)) * _M2) & _MASK
    return z ^ (z >> 31)


def fresh_seed() -> int:
    """A seed for a request that brought none: reported, so that the answer can be repeated."""
    return secrets.randbits(63)


@dataclass(frozen=True, slots=True)
class Noise:
    """All random numbers of one request: functions of (seed, choice) and of the place where they are used."""

    seed: int
    choice: int = 0

    def key(self, stream: Stream, *place: int) -> int:
        """The 64-bit key of a place, e.g. (position) or (round's first position, position)."""
        h = _START
        for value in (self.seed & _MASK, self.seed >> 64, self.choice, int(stream), *place):
            # The rotation keeps equal neighbours (seed = choice, say) from cancelling each other.
            rotated = (h << 23 | h >> 41) & _MASK
            h = _mix((rotated ^ _mix((value + _GOLDEN) & _MASK)) + _GOLDEN & _MASK)
        return h

    def uniform(self, stream: Stream, *place: int) -> float:
        """One number in (0, 1)."""
        return ((_mix(self.key(stream, *place)) >> 11) + 0.5) * 2.0**-53

    def draw(self, row: Distribution, stream: Stream, *place: int) -> int:
        """One token from the row. Equal rows at equal places give equal tokens."""
        if row.one_hot:
            return int(row.tokens[0])
        with np.errstate(over="ignore"):  # the time of a token that is all but impossible is infinite
            race = exponentials(self.key(stream, *place), row.tokens) / row.probs
        return int(row.tokens[np.argmin(race)])


def exponentials(key: int, tokens: I64) -> F64:
    """Exponential(1) noise of each token id under a key: -log(u), u = hash of (key, id) in (0, 1)."""
    z = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_M1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_M2)
    z ^= z >> np.uint64(31)
    u = ((z >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    noise: F64 = -np.log(u)
    return noise


# ------------------------------------------------------------------------------------------------- the probability row


def distribution(logits: F32, opts: SampleOpts) -> Distribution:
    """Steps 4 and 5: temperature and the filters. logits: [vocab_size], already biased, penalised and masked.

    Raises NumericalError for NaN or when every token is masked.
    """
    best = int(np.argmax(logits))
    top = float(logits[best])
    if math.isnan(top) or top == math.inf:
        raise NumericalError(f"the model's logits hold {top}: the weights are damaged or the computation overflowed")
    if top == -math.inf:
        raise NumericalError("no token is left to choose from: the masks exclude the whole vocabulary")
    if not opts.temperature:
        return Distribution(np.array([best], dtype=np.int64), np.ones(1), sound=True)
    with np.errstate(over="ignore"):  # at a tiny temperature what is not the best goes to -inf
        weights = np.exp((logits.astype(np.float64) - top) / opts.temperature)
    tokens = np.flatnonzero(weights)
    probs = weights[tokens]
    probs /= probs.sum()
    for keep in _filters(opts):
        chosen = keep(probs)
        if chosen is not None:
            tokens, probs = tokens[chosen], probs[chosen]
            probs = probs / probs.sum()
    return Distribution(tokens, probs, sound=True)


def _filters(opts: SampleOpts) -> Iterable[Any]:
    """The active filters in order; each maps probs [m] to the indices that stay (ascending), None for all."""
    if opts.min_p:
        yield lambda probs: np.flatnonzero(probs >= opts.min_p * probs.max())
    if opts.top_k and opts.top_k > 0:
        yield lambda probs: _top_k(probs, opts.top_k or 0)
    if opts.top_p is not None and opts.top_p < 1.0:
        yield lambda probs: _smallest_mass(probs, -probs, opts.top_p or 1.0)
    if opts.typical_p is not None and opts.typical_p < 1.0:
        # Locally typical sampling (Meister et al. 2022, arXiv 2202.00666): nearest to the entropy first.
        yield lambda probs: _smallest_mass(probs, np.abs(np.log(probs) - np.sum(probs * np.log(probs))), opts.typical_p)


def _top_k(probs: F64, k: int) -> I64 | None:
    if k >= len(probs):
        return None
    kth = np.partition(probs, -k)[-k]
    above = np.flatnonzero(probs > kth)
    level = np.flatnonzero(probs == kth)[: k - len(above)]
    return np.sort(np.concatenate([above, level]))


def _largest(values: F64, n: int) -> I64:
    """Indices of the n largest, the largest first."""
    pool = np.argpartition(values, -n)[-n:] if n < len(values) else np.arange(len(values))
    return pool[np.argsort(-values[pool], kind="stable")]


def _smallest_mass(probs: F64, rank: F64, mass: float) -> I64:
    """The fewest entries, lowest rank first, that together hold at least `mass`; never none."""
    count = 128
    while True:
        # Sorting a whole vocabulary costs milliseconds: look at the best few first, and at more when they fall short.
        if count < len(probs):
            pool = np.flatnonzero(rank <= np.partition(rank, count - 1)[count - 1])
        else:
            pool = np.arange(len(probs))
        order = pool[np.argsort(rank[pool], kind="stable")]
        total = np.cumsum(probs[order])
        if total[-1] >= mass or len(pool) == len(probs):
            return np.sort(order[: int(np.searchsorted(total, mass)) + 1])
        count *= 8


# ---------------------------------------------------------------------------------------------------------- one request


def _native_rule(opts: SampleOpts) -> tuple[float, int, float, float] | None:
    """Arguments of the native fast path, None for options that it does not cover."""
    temperature = opts.temperature or 0.0
    if (temperature and not 1e-6 <= temperature <= 1e6) or (opts.typical_p or 1.0) < 1.0:
        return None
    return temperature, min(opts.top_k or 0, 2**31), opts.top_p or 1.0, opts.min_p or 0.0


class Sampler:
    """One request's way from logits to tokens. Holds the history that penalties need; `extend` moves it on.

    `ahead` in the methods below is the path of draft tokens between the emitted text and the row: every parameter is
    applied to every verified row with the history that the row would have.
    """

    def __init__(
        self,
        opts: SampleOpts,
        vocab_size: int,
        prompt: Sequence[int] = (),
        *,
        end_tokens: Iterable[int] = (),
        known_tokens: int | None = None,
        native: bool = True,
    ) -> None:
        """vocab_size: length of the logits. end_tokens: ids that end a text (kept back before min_tokens).
        known_tokens: ids from here on are padding of the vocabulary and never chosen. native: choose tokens by the
        native fast path where it covers the options; it gives the tokens of the reference here.

        Raises UsageError for a token id in the options that is out of range.
        """
        self.opts = opts
        self.vocab_size = vocab_size
        self.noise = Noise(fresh_seed() if opts.seed is None else opts.seed, opts.choice)
        self.start = len(prompt)
        self.output: list[int] = []
        self._counts: Counter[int] = Counter()
        self._prompt_tokens = frozenset(prompt)
        self._ids("stop_tokens", opts.stop_tokens)
        self._ends = self._ids("end_tokens", (*end_tokens, *opts.stop_tokens), strict=False)
        bias = opts.logit_bias or {}
        self._bias_ids = self._ids("logit_bias", bias)
        self._bias = np.array(list(bias.values()), dtype=np.float32)
        self._banned = self._ids("banned_tokens", opts.banned_tokens or ())
        if known_tokens is not None and known_tokens < vocab_size:
            self._banned = np.concatenate([self._banned, np.arange(known_tokens, vocab_size)])
        self._excluded: NDArray[np.bool_] | None = None
        if opts.allowed_tokens is not None:
            self._excluded = np.ones(vocab_size, dtype=bool)
            self._excluded[self._ids("allowed_tokens", opts.allowed_tokens)] = False
        for word in opts.bad_words or ():
            self._ids("bad_words", word)
        self._native = _native_rule(opts) if native else None
        self._touched: tuple[I64, bool] | None = None  # tokens, and whether a ban is on one of them
        self._penalties = bool(
            opts.presence_penalty or opts.frequency_penalty or (opts.repetition_penalty or 1.0) != 1.0
        )
        self._seen = self._ids("prompt", self._prompt_tokens, strict=False)  # each token of prompt and output once

    def _ids(self, name: str, ids: Iterable[int], *, strict: bool = True) -> I64:
        given = list(ids)
        inside = [token for token in given if 0 <= token < self.vocab_size]
        if strict and len(inside) < len(given):
            outside = next(token for token in given if not 0 <= token < self.vocab_size)
            raise UsageError(f"{name}: token id {outside} is outside the vocabulary of {self.vocab_size}")
        return np.array(inside, dtype=np.int64)

    # -- history

    def extend(self, tokens: Sequence[int]) -> None:
        """Emitted tokens become history."""
        if self._penalties:
            self._seen = self._with(tokens)
        self.output.extend(tokens)
        self._counts.update(tokens)
        if self.opts.constraint is not None:
            self.opts.constraint.advance(tokens)

    @property
    def position(self) -> int:
        """Absolute position of the next token to be emitted."""
        return self.start + len(self.output)

    # -- rows

    def processed(self, logits: F32, ahead: Sequence[int] = ()) -> F32:
        """Steps 1 to 3: float32 [vocab_size]; the input itself when nothing applies."""
        opts = self.opts
        allowed = self._allowed(ahead) if opts.constraint is not None else None
        early = len(self.output) + len(ahead) < (opts.min_tokens or 0)
        words = self._bad_word_ends(ahead)
        if not (
            len(self._bias) or self._penalties or len(self._banned) or early or words
            or allowed is not None or self._excluded is not None
        ):  # fmt: skip
            return logits
        row = logits.astype(np.float32)  # a copy
        row[self._bias_ids] += self._bias
        if self._penalties:
            self._penalise(row, ahead)
        row[self._banned] = -np.inf
        row[words] = -np.inf
        if self._excluded is not None:
            row[self._excluded] = -np.inf
        if early:
            row[self._ends] = -np.inf
        if allowed is not None:
            row[~allowed] = -np.inf
        return row

    def as_they_are(self, ids: I64, ahead: Sequence[int] = ()) -> bool:
        """Whether `processed` leaves the logits of these tokens alone, so that nobody needs those of the others."""
        if self._touched is None or self._touched[0] is not ids:
            self._touched = ids, bool(len(self._banned)) and bool(np.isin(ids, self._banned).any())
        return not (
            self._touched[1]
            or len(self._bias)
            or self._penalties
            or self.opts.bad_words
            or self._excluded is not None
            or self.opts.constraint is not None
            or len(self.output) + len(ahead) < (self.opts.min_tokens or 0)
        )

    def _allowed(self, ahead: Sequence[int]) -> NDArray[np.bool_] | None:
        """The constraint's mask. Raises UsageError for one that is no bool array over the vocabulary."""
        assert self.opts.constraint is not None
        mask: object = self.opts.constraint.mask(ahead)
        if mask is None:
            return None
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (self.vocab_size,):
            found = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, np.ndarray) else type(mask).__name__
            raise UsageError(f"constraint.mask must return None or a bool array [{self.vocab_size}], got {found}")
        return mask

    def _penalise(self, row: F32, ahead: Sequence[int]) -> None:
        opts = self.opts
        counts = self._counts + Counter(ahead) if ahead else self._counts
        r = opts.repetition_penalty or 1.0
        if r != 1.0:
            seen = self._with(ahead)
            values = row[seen]
            row[seen] = np.where(values > 0, values / np.float32(r), values * np.float32(r))
        if counts and (opts.presence_penalty or opts.frequency_penalty):
            ids = np.fromiter(counts.keys(), dtype=np.int64, count=len(counts))
            n = np.fromiter(counts.values(), dtype=np.float32, count=len(counts))
            row[ids] -= np.float32(opts.frequency_penalty or 0.0) * n + np.float32(opts.presence_penalty or 0.0)

    def _with(self, tokens: Sequence[int]) -> I64:
        """The tokens seen so far and these, each once."""
        known = (self._prompt_tokens, self._counts.keys())
        new = {token for token in tokens if not any(token in ids for ids in known) and token < self.vocab_size}
        return np.append(self._seen, np.array(list(new), dtype=np.int64)) if new else self._seen

    def _bad_word_ends(self, ahead: Sequence[int]) -> list[int]:
        if not self.opts.bad_words:
            return []
        longest = max(map(len, self.opts.bad_words)) - 1
        tail = tuple([*self.output, *ahead][-longest:]) if longest else ()
        return [
            word[-1]
            for word in self.opts.bad_words
            if len(word) == 1 or (len(tail) >= len(word) - 1 and tail[len(tail) - len(word) + 1 :] == word[:-1])
        ]

    def row(self, logits: F32, ahead: Sequence[int] = ()) -> Distribution:
        """The target's distribution after the emitted text and `ahead`. Raises NumericalError (see distribution)."""
        return distribution(self.processed(logits, ahead), self.opts)

    def token(self, logits: F32, ahead: Sequence[int] = ()) -> int:
        """The target's own token after the emitted text and `ahead`: a function of logits, history and seed alone."""
        return self._choose(self.processed(logits, ahead), self.position + len(ahead))

    def _choose(self, row: F32, place: int) -> int:
        """The token at a position; row: processed logits."""
        if self._native is not None:
            found = choose(row, *self._native, self.noise.key(Stream.TOKEN, place))
            if found >= 0:
                return found
            # Only logits that are an error are left to the reference, which says what is wrong with them.
        return self.noise.draw(distribution(row, self.opts), Stream.TOKEN, place)

    def draft(self, logits: F32, ahead: Sequence[int] = ()) -> tuple[int, Distribution | None]:
        """A drafter's token from its own logits, and the q it was drawn from (None: one-hot).

        Under the match rule it is drawn with the target's noise, so that close distributions give equal tokens.
        """
        if self.opts.rule == "match":
            return self.token(logits, ahead), None
        row = self.row(logits, ahead)
        if row.one_hot:
            return int(row.tokens[0]), None
        return self.noise.draw(row, Stream.DRAFT, self.position, self.position + len(ahead)), row

    def siblings(self, logits: F32, n: int, ahead: Sequence[int] = ()) -> list[tuple[int, Distribution | None]]:
        """At most n tokens for one place, for a draft of fixed length, each with its q as `draft`. One, but under the
        rejection rule: there they are drawn without replacement, each from what the ones before it left."""
        row = self.row(logits, ahead) if n > 1 and self.opts.rule == "rejection" else None
        if row is None or row.one_hot:
            return [self.draft(logits, ahead)]
        found: list[tuple[int, Distribution | None]] = []
        for _ in range(min(n, len(row.tokens))):
            # The same race without its winner: the order of a race's runners is a draw without replacement.
            token = self.noise.draw(row, Stream.DRAFT, self.position, self.position + len(ahead))
            found.append((token, row))
            left = row.tokens != token
            row = Distribution(row.tokens[left], row.probs[left] / row.probs[left].sum(), sound=True)
        return found

    def candidates(
        self, logits: F32, n: int, ahead: Sequence[int] = (), ids: I64 | None = None
    ) -> list[tuple[int, float]]:
        """For a drafter: at most n tokens that the target may choose, `token` of these logits first, and how likely
        each is (0 .. 1) to be the one. ids: ascending, the only tokens that the logits [len(ids)] are of; `as_they_are`
        must be true of them. Raises as `token`.

        Greedy: the most probable ones. Else those that come first in the race which decides about the token, each with
        its share of the pace: the target runs it with the same noise and nearly the same probabilities, so what came
        in a close second here may win there.
        """
        row, place = logits if ids is not None else self.processed(logits, ahead), self.position + len(ahead)
        if self._native is not None:
            found = candidates(row, *self._native, self.noise.key(Stream.TOKEN, place), n, ids)
            if found:
                return found
        if ids is not None:
            row = np.full(self.vocab_size, -np.inf, dtype=np.float32)
            row[ids] = logits
        return self._candidates(row, n, place)

    def _candidates(self, row: F32, n: int, place: int) -> list[tuple[int, float]]:
        """The reference's way; row: processed logits."""
        first = self._choose(row, place)
        weights = row - row.max()
        if self.opts.temperature:
            weights /= np.float32(min(max(self.opts.temperature, 1e-6), 1e6))
        tokens = np.flatnonzero(weights >= -_NO_CHANCE)
        np.exp(weights, out=weights)
        pace = weights[tokens].astype(np.float64)
        rest = float(weights.sum()) - float(pace.sum())
        if self.opts.temperature:
            for keep in _filters(self.opts):
                chosen = keep(pace / pace.sum())
                if chosen is not None:
                    tokens, pace, rest = tokens[chosen], pace[chosen], 0.0
            pace = pace / exponentials(self.noise.key(Stream.TOKEN, place), tokens)
        share = pace / (pace.sum() + max(0.0, rest))
        best = _largest(share, n)
        found = dict(zip(tokens[best].tolist(), share[best].tolist(), strict=True))
        others = [(token, sure) for token, sure in found.items() if token != first]
        return [(first, found.get(first, float(share.max()))), *others[: n - 1]]

    def confidence(self, logits: F32, token: int) -> float:
        """The probability of a token by raw logits float32 [vocab_size]; 0.0 where they hold no number."""
        with np.errstate(all="ignore"):
            top = logits.max()
            share = float(np.exp(logits[token] - top) / np.exp(logits - top).sum())
        return share if share == share else 0.0

    # -- the randomness of the rejection and block rules; a round is named by its first position, so that no number
    #    that one round has looked at is used by the next

    def accept(self, depth: int) -> float:
        """The uniform number in (0, 1) that decides about the draft token at this depth of the round."""
        return self.noise.uniform(Stream.ACCEPT, self.position, depth)

    def residual(self, row: Distribution, depth: int) -> int:
        """The correction or bonus token that follows `depth` accepted tokens."""
        return self.noise.draw(row, Stream.RESIDUAL, self.position, depth)

    # -- logprobs

    def logprobs(self, logits: F32, token: int, ahead: Sequence[int] = ()) -> TokenLogprobs:
        """Log-probabilities of the chosen and of the opts.logprobs most probable tokens, of the target's raw logits
        (or, with processed_logprobs, of the row that the token was chosen from)."""
        if self.opts.processed_logprobs:
            with np.errstate(divide="ignore"):
                logs = np.log(self.row(logits, ahead).dense(len(logits)))
        else:
            shifted = logits.astype(np.float64) - float(logits.max())
            logs = shifted - math.log(float(np.exp(shifted).sum()))
        count = min(self.opts.logprobs or 0, len(logs))
        best = _top_k(logs, count) if 0 < count < len(logs) else np.arange(count)
        assert best is not None
        order = best[np.argsort(-logs[best], kind="stable")]
        top = tuple((int(i), float(logs[i])) for i in order if logs[i] > -math.inf)
        return TokenLogprobs(token, float(logs[token]), top)


# ----------------------------------------------------------------------------------------------------------- defaults

_GENERATION_CONFIG_FIELDS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")


def generation_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling defaults from a generation_config.json: what the model's authors recommend.

    do_sample false or absent means greedy, as in transformers. Raises ModelError for a value out of range.
    """
    found = {k: generation_config[k] for k in _GENERATION_CONFIG_FIELDS if generation_config.get(k) is not None}
    if not generation_config.get("do_sample", False):
        # The other parameters choose among tokens, which greedy decoding does not do; a penalty still applies.
        found = {k: v for k, v in found.items() if k == "repetition_penalty"} | {"temperature": 0.0}
    found = {"temperature": 1.0, **found}
    try:
        SampleOpts(**found)
    except UsageError as error:
        raise ModelError(f"generation_config.json: {error}") from None
    return found
