"""The values that travel between the parts of outpace, and the errors they raise.

Plain data, no logic beyond validation: every other module may import this one, and it imports none of them.
The letters follow the papers: q is a draft's distribution, p the target's (Leviathan et al. 2022, arXiv 2211.17192;
Chen et al. 2023, arXiv 2302.01318; Sun et al. 2024, arXiv 2403.10444).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

Rule = Literal["match", "rejection", "block"]
RULES: tuple[str, ...] = ("match", "rejection", "block")
MAX_BIAS = 1e30  # size of what may be added to a logit, so that sums and quotients stay in float32
MAX_PENALTY = 1e6  # repetition penalties lie between this and its inverse


# --------------------------------------------------------------------------------------------------------- errors


class OutpaceError(Exception):
    """Base of every error that outpace raises on purpose. Its text is one line: what is wrong, where, what to do."""

    exit_code = 1


class UsageError(OutpaceError, ValueError):
    """The caller asked for something impossible: an empty prompt, a parameter out of range, an unknown name."""

    exit_code = 2


class ContextError(UsageError):
    """Prompt and requested tokens do not fit the model's context. Nothing is ever truncated silently."""


class ModelError(OutpaceError):
    """A model's files are damaged, inconsistent or of a kind that is not supported."""


class NumericalError(OutpaceError):
    """A forward pass produced NaN or no token was left to choose from."""


class CapacityError(OutpaceError):
    """A backend has no free slot, row or memory for the request."""


class RewindError(OutpaceError):
    """A slot's state cannot go back to the length that was asked for."""


class HubError(OutpaceError):
    """A model could not be fetched, found or removed."""


class Device(enum.Enum):
    """Where a model runs."""

    CPU = "cpu"


# ----------------------------------------------------------------------------------------------------- proposals


@dataclass(frozen=True, slots=True)
class Distribution:
    """A probability row that keeps only what can be drawn.

    tokens: int64 [m], strictly ascending ids. probs: float64 [m], positive, summing to 1.
    One-hot rows have m = 1. A row over the whole vocabulary has m = vocab_size. sound: whoever made the row vouches for
    all this (sampling.distribution does), so that nobody looks through it again.
    """

    tokens: I64
    probs: F64
    sound: bool = False

    def dense(self, vocab_size: int) -> F64:
        """The same row as float64 [vocab_size] with zeros where nothing can be drawn."""
        row = np.zeros(vocab_size, dtype=np.float64)
        row[self.tokens] = self.probs
        return row

    def prob(self, token: int) -> float:
        """Probability of one token id, 0.0 where it cannot be drawn."""
        at = int(np.searchsorted(self.tokens, token))
        return float(self.probs[at]) if at < len(self.tokens) and self.tokens[at] == token else 0.0

    def is_sound(self) -> bool:
        """Whether the row is what the fields promise; a row from a foreign drafter need not be."""
        if self.sound:
            return True
        ascending = len(self.tokens) == len(self.probs) > 0 and bool((np.diff(self.tokens) > 0).all())
        return ascending and bool((self.probs > 0.0).all()) and abs(float(self.probs.sum()) - 1.0) < 1e-6

    @property
    def one_hot(self) -> bool:
        return len(self.tokens) == 1


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that a drafter guesses will follow the context.

    tokens: n ids. q: for each token the distribution that it was drawn from; None (the whole, or one entry) means
    one-hot: the token was chosen, not drawn. parents: for each token the index of the draft token before it, -1 for
    the context's last token; None means a chain. source: the drafter's name, for statistics. confidence: how sure the
    drafter is of each token, given that its parent is right (0 .. 1); None where it cannot tell.
    """

    tokens: tuple[int, ...] = ()
    q: tuple[Distribution | None, ...] | None = None
    parents: tuple[int, ...] | None = None
    source: str = ""
    confidence: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.q is not None and len(self.q) != len(self.tokens):
            raise UsageError(f"draft has {len(self.tokens)} tokens but {len(self.q)} distributions")
        if self.confidence is not None and len(self.confidence) != len(self.tokens):
            raise UsageError(f"draft has {len(self.tokens)} tokens but {len(self.confidence)} confidences")
        if self.parents is not None:
            if len(self.parents) != len(self.tokens):
                raise UsageError(f"draft has {len(self.tokens)} tokens but {len(self.parents)} parents")
            if any(not -1 <= parent < i for i, parent in enumerate(self.parents)):
                raise UsageError("a draft token's parent must be an earlier draft token or -1")

    def __len__(self) -> int:
        return len(self.tokens)

    def checked(self, vocab_size: int) -> Draft:
        """The draft with plain integers as tokens. Raises UsageError for a token outside the vocabulary, and for a q
        that is no distribution or that the token cannot have been drawn from."""
        tokens = token_ids("draft", self.tokens)
        parents = None if self.parents is None else token_ids("a draft's parents", self.parents)
        sure = self.confidence
        if sure is not None:
            numbers = [_number(value) for value in sure]
            if not all(value is not None and 0.0 <= value <= 1.0 for value in numbers):
                raise UsageError(f"a draft's confidences must be numbers in 0 .. 1, got {_short(sure)}")
            sure = tuple(float(value) for value in numbers if value is not None)
        for i, token in enumerate(tokens):
            if not 0 <= token < vocab_size:
                raise UsageError(f"draft token id {token} is outside the vocabulary of {vocab_size}")
            q = self.q[i] if self.q is not None else None
            if q is not None and not (q.is_sound() and q.prob(token) > 0.0):
                raise UsageError(f"draft token {i} has a q that it cannot have been drawn from")
        return replace(self, tokens=tokens, parents=parents, confidence=sure)

    def path(self, node: int) -> tuple[int, ...]:
        """The draft's tokens from the context up to and with draft token `node`; () for -1."""
        if self.parents is None:
            return self.tokens[: node + 1]
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tuple(reversed(tokens))

    def depths(self) -> list[int]:
        """For each token how many of the draft's tokens lead to it, itself included."""
        if self.parents is None:
            return list(range(1, len(self.tokens) + 1))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def children(self, node: int) -> list[int]:
        """Draft tokens that follow `node` (-1: the context), in the order they were drawn."""
        if self.parents is None:
            return [node + 1] if node + 1 < len(self.tokens) else []
        return [i for i, parent in enumerate(self.parents) if parent == node]

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """The draft tokens that these tokens go through, one after the other, as far as the draft has them."""
        path: list[int] = []
        for token in tokens:
            child = next((i for i in self.children(path[-1] if path else -1) if self.tokens[i] == token), None)
            if child is None:
                break
            path.append(child)
        return path

    def cut(self, n: int) -> Draft:
        """The draft's first n tokens."""
        return self if n >= len(self.tokens) else self.keep(range(n))

    def keep(self, nodes: Sequence[int]) -> Draft:
        """These draft tokens alone, ascending, with every one's parent among them."""
        place = {-1: -1} | {node: i for i, node in enumerate(nodes)}
        return Draft(
            tuple(self.tokens[node] for node in nodes),
            None if self.q is None else tuple(self.q[node] for node in nodes),
            None if self.parents is None else tuple(place[self.parents[node]] for node in nodes),
            self.source,
            None if self.confidence is None else tuple(self.confidence[node] for node in nodes),
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verification decided: the draft tokens that stay and the token that follows them.

    kept: indices into the draft, a path from the root in order. next_token: the correction after a rejection, or the
    bonus token when the whole path was accepted.
    """

    kept: tuple[int, ...]
    next_token: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one emitted token. top: (token id, logprob), most probable first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Round(NamedTuple):
    """One target pass of a request: how many draft tokens it verified, how many stayed, and whose they were.

    depth: the most of them that follow one another, fewer than were drafted where they are a tree.
    """

    drafted: int
    accepted: int
    source: str = ""
    depth: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that the round emits when nothing ends the answer within it."""
        return self.accepted + 1


@dataclass(slots=True)
class Stats:
    """Counts and seconds of one request. tokens counts emitted tokens, the bonus token included; decode_tokens those
    of the rounds whose time is decode_s: rounds that read more than one token of the prompt count as prefill_s.

    accepted_at[i] counts the rounds in which a token at depth i of a draft was accepted; drafted_at[i] those in which
    one was proposed there. by_source: drafter's name -> [drafted, accepted].
    draft_s: choosing what to draft and drafting; forward_s: the target's pass, which verifies; verify_s: sampling from
    its logits and what follows. Seconds are those of whole rounds: requests that share passes, as in generate_many,
    each report the shared time, so their seconds do not add up and tokens_per_second is one request's share of the
    throughput. LanguageModel.stats has all requests together, each second once.
    """

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    tokens: int = 0
    rounds: int = 0
    decode_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    by_source: dict[str, list[int]] = field(default_factory=dict)
    prefill_s: float = 0.0
    draft_s: float = 0.0
    forward_s: float = 0.0
    verify_s: float = 0.0
    decode_s: float = 0.0

    def count(self, each: Round) -> None:
        """Adds a round."""
        self.rounds += 1
        self.drafted += each.drafted
        self.accepted += each.accepted
        if each.drafted:
            counts = self.by_source.setdefault(each.source, [0, 0])
            counts[0] += each.drafted
            counts[1] += each.accepted
        for at, n in ((self.drafted_at, each.depth), (self.accepted_at, each.accepted)):
            at.extend([0] * (each.depth - len(at)))
            for i in range(n):
                at[i] += 1

    @property
    def rounds_by_accepted(self) -> list[int]:
        """[k]: rounds in which exactly k draft tokens were accepted."""
        at_least = [self.rounds, *self.accepted_at]
        while len(at_least) > 1 and not at_least[-1]:
            at_least.pop()
        return [n - more for n, more in zip(at_least, [*at_least[1:], 0], strict=True)]

    @property
    def rest_s(self) -> float:
        """Seconds of decode_s that belong to none of the parts."""
        return max(0.0, self.decode_s - self.draft_s - self.forward_s - self.verify_s)

    @property
    def tokens_per_round(self) -> float:
        """Mean tokens emitted per target pass (tau), the bonus token included; 0.0 before the first round."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance(self) -> float:
        """Share of drafted tokens that were accepted; 0.0 when none were drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second while decoding, prefill (and the tokens that come with it) left out; 0.0 before that."""
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0


# -------------------------------------------------------------------------------------------------- sampling options


class Constraint(Protocol):
    """A grammar that follows a request and limits what may be emitted next (an interface; any grammar engine fits).

    The object is stateful: `advance` moves it past emitted tokens. `mask` and `cut` look ahead without moving it.
    """

    def mask(self, ahead: Sequence[int]) -> NDArray[np.bool_] | None:
        """Allowed tokens [vocab_size] after the emitted tokens and `ahead`; None when everything is allowed."""

    def cut(self, draft: Sequence[int]) -> int:
        """How many of the draft's first tokens the grammar allows: the rest never costs a row."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Emitted tokens became part of the text."""

    def fork(self) -> Constraint:
        """An independent copy in the same state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOpts:
    """How to choose tokens. None means "not said": the model's generation_config.json decides, then the neutral value.

    The meaning, scope and order of the parameters are written down in sampling.py.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_tokens: tuple[int, ...] | None = None
    banned_tokens: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] | None = None
    seed: int | None = None
    choice: int = 0
    rule: Rule = "match"
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    processed_logprobs: bool = False
    constraint: Constraint | None = None

    @classmethod
    def greedy(cls, **changes: Any) -> SampleOpts:
        """Always the most probable token, the lowest id on a tie."""
        return cls(temperature=0.0, **changes)

    def with_defaults(self, defaults: Mapping[str, Any]) -> SampleOpts:
        """The same options with every unset field taken from `defaults` (field name -> value)."""
        known = {f.name for f in fields(self)}
        fill = {k: v for k, v in defaults.items() if k in known and getattr(self, k) is None}
        return replace(self, **fill) if fill else self

    def __post_init__(self) -> None:
        def bad(name: str, rule: str) -> UsageError:
            return UsageError(f"{name} must be {rule}, got {_short(getattr(self, name))}")

        def put(name: str, value: Any) -> None:
            # Plain Python values from here on: numbers of NumPy, lists and iterators are as good as floats and tuples.
            object.__setattr__(self, name, value)

        def number(name: str, low: float, high: float, rule: str, *, open_low: bool = False) -> None:
            value = getattr(self, name)
            if value is None:
                return
            found = _number(value)
            if found is None or not low <= found <= high or (open_low and found == low):
                raise bad(name, rule)
            put(name, found)

        def whole(name: str, low: int, rule: str) -> None:
            value = getattr(self, name)
            if value is None:
                return
            found = _whole(value)
            if found is None or found < low:
                raise bad(name, rule)
            put(name, found)

        def flag(name: str) -> None:
            if not isinstance(getattr(self, name), (bool, np.bool_)):
                raise bad(name, "True or False")
            put(name, bool(getattr(self, name)))

        number("temperature", 0.0, math.inf, "a finite number >= 0")
        number("top_p", 0.0, 1.0, "in (0, 1]", open_low=True)
        number("min_p", 0.0, 1.0, "in [0, 1]")
        number("typical_p", 0.0, 1.0, "in (0, 1]", open_low=True)
        number("repetition_penalty", 1 / MAX_PENALTY, MAX_PENALTY, f"in {1 / MAX_PENALTY:g} .. {MAX_PENALTY:g}")
        number("presence_penalty", -MAX_BIAS, MAX_BIAS, f"a number of size <= {MAX_BIAS:g}")
        number("frequency_penalty", -MAX_BIAS, MAX_BIAS, f"a number of size <= {MAX_BIAS:g}")
        whole("top_k", -1, "a whole number >= 1, or 0 or -1 for no limit")
        whole("seed", 0, "a whole number >= 0")
        whole("choice", 0, "a whole number >= 0")
        whole("max_tokens", 1, "a whole number >= 1")
        whole("min_tokens", 0, "a whole number >= 0")
        whole("logprobs", 0, "a whole number >= 0")
        flag("ignore_eos")
        flag("processed_logprobs")
        if self.min_tokens is not None and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UsageError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        if not isinstance(self.rule, str) or self.rule not in RULES:
            raise bad("rule", "one of " + ", ".join(RULES))
        if isinstance(self.stop, (str, bytes)) or not isinstance(self.stop, Iterable):
            raise bad("stop", "a tuple of non-empty strings")
        put("stop", tuple(self.stop))
        if not all(isinstance(s, str) and s for s in self.stop):
            raise bad("stop", "a tuple of non-empty strings")
        for name in ("allowed_tokens", "banned_tokens", "stop_tokens"):
            if getattr(self, name) is not None or name == "stop_tokens":
                put(name, token_ids(name, getattr(self, name)))
        if self.bad_words is not None:
            if isinstance(self.bad_words, (str, bytes)) or not isinstance(self.bad_words, Iterable):
                raise bad("bad_words", "a tuple of non-empty token sequences")
            put("bad_words", tuple(token_ids("bad_words", word) for word in self.bad_words))
            if not all(self.bad_words):
                raise bad("bad_words", "a tuple of non-empty token sequences")
        if self.logit_bias is not None:
            put("logit_bias", self._biases())
        if self.constraint is not None:
            missing = [f for f in ("mask", "cut", "advance", "fork") if not callable(getattr(self.constraint, f, None))]
            if missing:
                raise UsageError(f"constraint {_short(self.constraint)} has no method {missing[0]}")

    def _biases(self) -> dict[int, float]:
        if not isinstance(self.logit_bias, Mapping):
            raise UsageError(f"logit_bias must be a map from token id to number, got {_short(self.logit_bias)}")
        biases = {}
        for token, bias in self.logit_bias.items():
            i, value = _whole(token), -math.inf if bias == -math.inf else _number(bias)
            if i is None or value is None:
                raise UsageError(
                    f"logit_bias must be a map from token id to finite number or -inf, got {_short({token: bias})}"
                )
            if abs(value) > MAX_BIAS and value != -math.inf:
                raise UsageError(f"logit_bias must be numbers of size <= {MAX_BIAS:g} or -inf, got {value!r}")
            biases[i] = value
        return biases


def token_ids(name: str, values: Any) -> tuple[int, ...]:
    """Token ids as plain integers, from any iterable of whole numbers (also NumPy's). UsageError naming `name`."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise UsageError(f"{name} must be a sequence of token ids, got {_short(values)}")
    ids = []
    for value in values:
        number = _whole(value)
        if number is None:
            raise UsageError(f"{name} must hold token ids, which are whole numbers, got {_short(value)}")
        ids.append(number)
    return tuple(ids)


def _whole(value: object) -> int | None:
    """A whole number as an int, None for anything else. True and False are none."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        return None
    return int(value)


def _number(value: object) -> float | None:
    """A finite number as an int or float, None for anything else."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def size(count: int) -> str:
    """Bytes for people: 98362432 -> 98 MB."""
    for unit, step in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= step:
            return f"{count / step:.1f} {unit}" if count < 10 * step else f"{count / step:.0f} {unit}"
    return f"{count} B"
