"""The small public pieces: a generator over one sequence, speculators that propose and verify, and their decoder.

A thin layer over backends, sampling and verify for people who put speculative decoding together by hand; the product's
own loop is decode.py. Contexts are plain token lists: a speculator finds out by the longest common prefix what its KV
cache already holds, so that a round of n drafts costs at most n + 1 rows of the draft and one pass of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np

from . import verify
from .backends.base import Backend, Rows
from .backends.head import HeadPass, HeadRows
from .backends.native import NativeBackend
from .backends.reference import ReferenceBackend
from .backends.running_head import run_head
from .cache import CacheOption
from .config import ModelConfig
from .heads.mtp import MtpHead
from .models.quantise import Precision
from .sampling import Noise, Sampler, Stream, distribution, fresh_seed
from .slots import common_prefix
from .types import F32, F64, CapacityError, Device, Distribution, Draft, SampleOpts, UsageError
from .weights.weight_map import WeightMap

StepRule = Literal["rejection", "argmax-softmax"]


@dataclass(frozen=True, slots=True)
class DraftProposal:
    """Proposed tokens (n) and probs float [n, vocab_size]: the distribution that each token was drawn from.

    drawn False: the tokens are the rows' arg-max instead, so that q is one-hot whatever the rows say.
    """

    tokens: list[int]
    probs: F64
    drawn: bool = True


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """probs float [n, vocab_size]: the target's distribution at each proposed position.

    bonus float [vocab_size]: the distribution after the last one, where the target computed it.
    """

    probs: F64
    bonus: F64 | None = None


class Speculator(Protocol):
    """Anything that can stand on either side of a SpecDecoder."""

    def propose(self, context: Sequence[int], n: int) -> DraftProposal:
        """n tokens that may follow the context, with the distribution each was drawn from."""

    def verify(self, context: Sequence[int], proposed: Sequence[int]) -> VerifyResult:
        """The distribution at each proposed position, given the context and the proposed tokens before it."""


class Qwen3Generator:
    """One sequence on one model: prefill, cached steps, plain generation.

    Not thread-safe. rows_computed and passes count what the model was made to do.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.rows_computed = 0
        self.passes = 0
        self._slot = backend.new_slot()
        self._tokens: list[int] = []  # committed
        self._pending: list[int] = []  # appended by the last pass, not settled yet
        self._hidden: dict[int, list[F32]] = {}  # tap that a head reads -> that state of each token held
        self._logits: F32 | None = None  # after the last token of the sequence

    @classmethod
    def from_loader(
        cls,
        config: ModelConfig,
        weights: WeightMap,
        device: Device = Device.CPU,
        *,
        precision: Precision = "f32",
        backend: Literal["native", "reference"] = "native",
        kv_cache: CacheOption = "auto",
    ) -> Qwen3Generator:
        """Takes the model's tensors out of the map. kv_cache: as `load`. Raises ModelError for missing or
        mis-shaped ones, UsageError for a device that is not supported."""
        if device is not Device.CPU:
            raise UsageError(f"device {device!r} is not supported: use Device.CPU")
        kind = {"native": NativeBackend, "reference": ReferenceBackend}[backend]
        return cls(kind(config, weights, precision=precision, slots=2, kv_cache=kv_cache))

    def config(self) -> ModelConfig:
        return self.backend.config

    def prefill(self, ids: Sequence[int]) -> None:
        """Starts over with this sequence: the KV cache is reset, then filled."""
        self.prefill_get_last_logits(ids)

    def prefill_get_last_logits(self, ids: Sequence[int]) -> F32:
        """Resets, fills the KV cache and returns the last row's logits, float32 [vocab_size]."""
        self.backend.truncate(self._slot, 0)
        self._tokens, self._pending = [], []
        self._logits = self.read(ids, [], 1)[0]
        return self._logits

    def decode_get_logits(self, token: int) -> F32:
        """One cached step: appends a token, returns the logits after it. Raises UsageError before a prefill."""
        sequence = self._sequence()
        self._logits = self.read([*sequence, token], [], 1, agreed=len(sequence))[0]
        return self._logits

    def generate_cached(self, max_tokens: int, opts: SampleOpts | None = None) -> list[int]:
        """At most max_tokens tokens that follow the sequence (greedy by default), which they then belong to.

        The sequence is what the last call read, drafts that a speculator proposed or verified included. Ends early at
        an end token of the config or at the end of the context. Raises UsageError before a prefill.
        """
        if max_tokens < 0:
            raise UsageError(f"max_tokens must be >= 0, got {max_tokens}")
        opts = opts or SampleOpts.greedy()
        sequence = self._sequence()
        sampler = Sampler(opts, self.config().vocab_size, sequence, end_tokens=self.config().eos_token_ids)
        while len(sampler.output) < max_tokens:
            assert self._logits is not None
            token = sampler.token(self._logits)
            sampler.extend((token,))
            if not opts.ignore_eos and token in (*self.config().eos_token_ids, *opts.stop_tokens):
                break
            if len(sequence) + len(sampler.output) > self.backend.capacity.positions:
                break
            self.decode_get_logits(token)
        return sampler.output

    def close(self) -> None:
        """Frees the slot. The generator cannot be used afterwards."""
        self.backend.free_slot(self._slot)

    def _sequence(self) -> list[int]:
        if self._logits is None:
            raise UsageError("no sequence yet: call prefill first")
        return [*self._tokens, *self._pending]

    def keep(self, tap: int) -> None:
        """From here on keeps this hidden state of every token read, as backends/base.py counts them."""
        self._hidden.setdefault(tap, [])

    def hidden(self, tap: int, context: Sequence[int]) -> list[F32]:
        """A hidden state of every token of the context but the last, read now where it is not held."""
        self.keep(tap)
        states = self._hidden[tap]
        held = [*self._tokens, *self._pending][: len(states)]  # none, where all was read before it was kept
        if common_prefix(held, context[:-1]) < len(context) - 1:
            self.read(context[:-1], [], 1)
        return states[: len(context) - 1]

    def read(self, context: Sequence[int], ahead: Sequence[int], rows: int, *, agreed: int = 0) -> F32:
        """Makes the model read context and `ahead`, recomputing only what its cache does not hold.

        agreed: so many tokens are known to be those of the last call, and are not compared again. Returns the logits of
        the last `rows` rows, float32 [rows, vocab_size]. One pass, but for a long prompt.
        """
        sequence = [*context, *ahead]
        if not context:
            raise UsageError("the context is empty: give at least one token")
        if len(sequence) > self.backend.capacity.positions:
            raise CapacityError(f"{len(sequence)} tokens do not fit the context of {self.backend.capacity.positions}")
        held = [*self._tokens, *self._pending]
        most = min(len(sequence) - rows, *map(len, self._hidden.values()), len(held))
        keep = min(common_prefix(held, sequence, min(agreed, most)), most)
        if keep < len(self._tokens):
            self.backend.truncate(self._slot, keep)
        else:
            self.backend.commit(self._slot, range(keep - len(self._tokens)))
        self._tokens, self._pending = held[:keep], []
        for states in self._hidden.values():
            del states[keep:]
        while len(sequence) - len(self._tokens) > self.backend.capacity.rows:
            chunk = sequence[len(self._tokens) :][: self.backend.capacity.rows - rows]
            self._forward(chunk, 0)
            self.backend.commit(self._slot, range(len(chunk)))
            self._tokens += chunk
        pending = sequence[len(self._tokens) :]
        logits = self._forward(pending, rows)
        self._pending, self._logits = pending, logits[-1]
        return logits

    def _forward(self, tokens: list[int], rows: int) -> F32:
        self.passes += 1
        self.rows_computed += len(tokens)
        share = Rows(self._slot, tokens, logits=range(len(tokens) - rows, len(tokens)))
        result = self.backend.forward([share], tuple(self._hidden))
        for tap, states in self._hidden.items():
            states.extend(result.taps[tap])
        return result.logits


class Qwen3Speculator:
    """A model on either side. Greedy: proposes the arg-max, rows are the softmax of the logits. Sampling: rows are the
    processed distribution and each token is drawn from its row."""

    def __init__(self, generator: Qwen3Generator, opts: SampleOpts | None = None) -> None:
        """Raises UsageError for options that need to know where the answer begins (output penalties, min_tokens)."""
        opts = opts or SampleOpts.greedy()
        for name in ("presence_penalty", "frequency_penalty", "min_tokens", "constraint"):
            if getattr(opts, name):
                raise UsageError(f"{name} looks at the answer, which a speculator cannot tell from its prompt")
        self.generator = generator
        self.opts = opts if opts.seed is not None else replace(opts, seed=fresh_seed())

    def config(self) -> ModelConfig:
        return self.generator.config()

    def propose(self, context: Sequence[int], n: int) -> DraftProposal:
        """n tokens, one row at a time. Raises UsageError for n < 0 or an empty context."""
        if n < 0:
            raise UsageError(f"n must be >= 0, got {n}")
        sampler = self._sampler(context)
        tokens: list[int] = []
        rows: list[F64] = []
        for i in range(n):
            agreed = len(context) if i else 0
            token, row = self._choose(sampler, self.generator.read(context, tokens, 1, agreed=agreed)[0], tokens)
            tokens.append(token)
            rows.append(row)
        return DraftProposal(tokens, self._stack(rows), drawn=self._sampling)

    def verify(self, context: Sequence[int], proposed: Sequence[int]) -> VerifyResult:
        """All positions in one pass. Raises UsageError for an empty context or a token id out of range."""
        if not proposed:
            return VerifyResult(self._stack([]))
        sampler = self._sampler(context)
        # The last proposed token is read too, for the bonus row, unless the context ends right before it.
        room = self.generator.backend.capacity.positions - len(context)
        read = list(proposed) if len(proposed) <= room else list(proposed[:-1])
        logits = self.generator.read(context, read, len(read) + 1)
        rows = [self._row(sampler, row, proposed[:i]) for i, row in enumerate(logits)]
        n = len(proposed)
        return VerifyResult(self._stack(rows[:n]), rows[n] if len(rows) > n else None)

    @property
    def _sampling(self) -> bool:
        return bool(self.opts.temperature)

    def _sampler(self, context: Sequence[int]) -> Sampler:
        return Sampler(self.opts, self.config().vocab_size, context, end_tokens=self.config().eos_token_ids)

    def _choose(self, sampler: Sampler, logits: F32, ahead: Sequence[int]) -> tuple[int, F64]:
        """A draft token and its row."""
        row = self._row(sampler, logits, ahead)
        if not self._sampling:
            return int(np.argmax(row)), row
        place = (sampler.position, sampler.position + len(ahead))
        return sampler.noise.draw(sparse(row), Stream.DRAFT, *place), row

    def _row(self, sampler: Sampler, logits: F32, ahead: Sequence[int]) -> F64:
        # Greedy rows are the whole softmax (temperature 1, no filters), of the logits that the arg-max is taken of.
        opts = self.opts if self._sampling else SampleOpts(temperature=1.0)
        return distribution(sampler.processed(logits, ahead), opts).dense(len(logits))

    def _stack(self, rows: list[F64]) -> F64:
        return np.stack(rows) if rows else np.zeros((0, self.config().vocab_size))


class Qwen3MtpSpeculator(Qwen3Speculator):
    """Proposes with a multi-token-prediction head inside the model, which costs a fraction of its forward pass.

    The head reads the hidden states that the model's own pass left behind, so that a round is n head steps and one
    target pass. Give it as the `draft` (and, being a Qwen3Speculator on the same generator, as the `target` too).
    """

    def __init__(self, generator: Qwen3Generator, head: MtpHead, opts: SampleOpts | None = None) -> None:
        """Raises UsageError when the head belongs to a model of another size."""
        super().__init__(generator, opts)
        ours, its = generator.config(), head.config
        if (ours.hidden_size, ours.vocab_size) != (its.target_hidden_size, its.draft_vocab_size):
            raise UsageError(
                f"the head is for a model of hidden size {its.target_hidden_size} and vocabulary "
                f"{its.draft_vocab_size}, "
                f"this one has {ours.hidden_size} and {ours.vocab_size}"
            )
        self.head = run_head(generator.backend, head.config, head.own, lambda: head.shared)
        self.head_steps = 0
        self.tap = head.tap
        generator.keep(self.tap)
        self._read: list[int] = []  # the head's slot holds rows for all of these but the last
        self._slot = self.head.new_slot()

    def propose(self, context: Sequence[int], n: int) -> DraftProposal:
        """n tokens by the head. With a context of one token there is no hidden state yet: the model proposes."""
        if n <= 0 or len(context) < 2:
            return super().propose(context, n)
        hidden = self.generator.hidden(self.tap, context)
        # At least the last row is computed again: its logits are the first draft.
        keep = min(max(0, common_prefix(self._read, context) - 1), len(hidden) - 1)
        self.head.truncate(self._slot, keep)
        self._read = list(context[: keep + 1])  # should a pass fail
        step = self.head.capacity.rows
        for at in range(keep, len(hidden), step):
            states = np.stack(hidden[at : at + step])
            found = self._pass(context[at + 1 :][: len(states)], states)
            self.head.commit(self._slot, range(len(states)))
        self._read = list(context)
        sampler = self._sampler(context)
        tokens: list[int] = []
        rows: list[F64] = []
        while True:
            token, row = self._choose(sampler, found.logits[-1], tokens)
            tokens.append(token)
            rows.append(row)
            if len(tokens) == n:
                return DraftProposal(tokens, self._stack(rows), drawn=self._sampling)
            found = self._pass([token], found.hidden[-1:], own=True, append=len(tokens) > 1)

    def close(self) -> None:
        """Frees the head's slot, not the generator. The speculator cannot propose afterwards."""
        self.head.free_slot(self._slot)

    def _pass(self, tokens: Sequence[int], states: F32, *, own: bool = False, append: bool = False) -> HeadPass:
        """One pass of the head; its last row's logits and hidden state."""
        self.head_steps += 1
        rows = HeadRows(self._slot, tokens, states, own=own, append=append, logits=[len(tokens) - 1])
        return self.head.forward([rows])


class SpecDecoder:
    """Puts a draft and a target speculator together, round by round."""

    def __init__(
        self,
        draft: Speculator,
        target: Speculator,
        n: int,
        seed: int,
        opts: SampleOpts | None = None,
        bonus: bool = False,
        *,
        rule: StepRule = "rejection",
    ) -> None:
        """n: tokens to propose a round. bonus: also take the token after n accepted ones (n + 1 tokens a round).

        rule "argmax-softmax" reproduces a known flaw of earlier decoders: an arg-max draft is judged by its softmax
        row, which it was not drawn from. At temperature > 0 that changes the target's distribution; never use it for
        answers. Raises UsageError for n < 0 or an unknown rule.
        """
        if n < 0:
            raise UsageError(f"n must be >= 0, got {n}")
        if rule not in ("rejection", "argmax-softmax"):
            raise UsageError(f"rule must be rejection or argmax-softmax, got {rule!r}")
        self.draft, self.target, self.n, self.bonus, self.rule = draft, target, n, bonus, rule
        self.opts = opts or SampleOpts.greedy()
        self.noise = Noise(seed)

    def step(self, context: Sequence[int]) -> list[int]:
        """One round after the context: its new tokens, at least one unless n = 0."""
        proposal = self.draft.propose(context, self.n)
        result = self.target.verify(context, proposal.tokens)
        tokens, n = tuple(proposal.tokens), len(proposal.tokens)
        if not len(proposal.probs) == len(result.probs) == n:
            raise UsageError(f"{n} proposed tokens need {n} rows, got {len(proposal.probs)} and {len(result.probs)}")
        if n == 0:
            return []
        # Without a bonus row the token after a full acceptance does not exist: the row stands in and is left out below.
        takes_bonus = self.bonus and result.bonus is not None
        rows = [*result.probs, result.probs[-1] if result.bonus is None else result.bonus]
        if not self.opts.temperature:
            verdict = verify.match(Draft(tokens), lambda i: int(np.argmax(rows[i])))
        else:
            drawn = proposal.drawn or self.rule == "argmax-softmax"
            draft = Draft(tokens, tuple(sparse(row) for row in proposal.probs) if drawn else None)
            at = len(context)
            verdict = verify.rejection(
                draft,
                lambda i: sparse(rows[i]),
                lambda i: self.noise.uniform(Stream.ACCEPT, at, i),
                lambda row, depth: self.noise.draw(row, Stream.RESIDUAL, at, depth),
            )
        kept = [tokens[i] for i in verdict.kept]
        return kept if len(kept) == n and not takes_bonus else [*kept, verdict.next_token]


def sparse(row: F64) -> Distribution:
    """The Distribution of a dense row [vocab_size]."""
    tokens = np.flatnonzero(row)
    return Distribution(tokens, np.asarray(row[tokens], dtype=np.float64))
