"""What a learned head costs beside its target, and what it would bring at a given acceptance. `outpace bench head`.

The costs are measured, whatever the weights say. With random weights nothing that a head guesses is right, so the
second part is a simulation and says so: the loop, the passes, the head's steps and the controller are real, but the
drafts' tokens are replaced by ones that are right as often as the acceptance asks for.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ..api import LanguageModel
from ..backends.base import Rows
from ..backends.head import HeadBackend, HeadRows
from ..backends.native import NativeBackend
from ..backends.native_head import NativeHead
from ..costs import measure_shape
from ..drafters import HeadDrafter
from ..drafters.base import Want, drafts_of
from ..heads.config import HeadConfig, head_tensors
from ..types import Draft, OutpaceError, SampleOpts, UsageError
from ..weights.tensor import Tensor
from ..weights.weight_map import WeightMap
from .kernels import CONTEXT_OF_ROWS, in_turns, processor, read_prompt, tokens

STEP_ROWS = (1, 2, 4, 8)  # of a draft step: a chain, and levels of a tree
TARGET_ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
MARGIN = 0.03  # of a target pass that a step may cost beyond its share of the bytes


def random_head(target: NativeBackend, draft_vocab: int | None = None) -> NativeHead:
    """An EAGLE-3 head of the size that public ones have, in its target's bits: one layer as wide as the target's, three
    taps, a draft vocabulary of 32000 (or as asked) tokens; random weights. Raises UsageError."""
    config = target.config
    size = min(32000, config.vocab_size) if draft_vocab is None else draft_vocab
    if not 1 <= size <= config.vocab_size:
        raise UsageError(f"the draft vocabulary must be in 1 .. {config.vocab_size}, got {size}")
    layers = config.num_hidden_layers
    head = HeadConfig(
        algorithm="eagle3",
        layers=replace(config, num_hidden_layers=1, tie_word_embeddings=False),
        target_layers=layers,
        target_hidden_size=config.hidden_size,
        taps=tuple(sorted({min(1, layers - 1), layers // 2 - 1, max(0, layers - 4)})),
        draft_vocab_size=size,
        own_lm_head=True,
    )
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.standard_normal(shape, dtype=np.float32) * np.float32(0.02) if len(shape) == 2 else np.ones(shape)
        for name, shape in head_tensors(head).items()
    }
    own = WeightMap({name: Tensor.from_array(array.astype(np.float32)) for name, array in tensors.items()})
    ids = None if size == config.vocab_size else np.arange(size, dtype=np.int64)
    return NativeHead(target, head, own, ids, precision=target.head_precision)


def measure_head(target: NativeBackend, head: NativeHead, *, seconds: float = 10.0) -> dict[str, Any]:
    """Steps of an mtp or eagle3 head in turns with passes of its target, after 32 tokens of context.

    Returns what can be written as JSON:

    machine          processor, kernel family (isa), threads
    bytes            that a pass of one row reads: of the head, of the target, and their ratio
    step_ms          rows of a draft step -> median milliseconds; pass_ms: the target's
    step_share       median step of one row over median pass of one row
    most_share       what it may be: the ratio of the bytes and 3 %
    read_ms          reading 64 tokens' features, for prompts and for catching up
    needed           draft length -> tokens a round at which a chain of it costs as much as plain decoding

    Raises UsageError for a head that drafts blocks.
    """
    if head.config.algorithm == "dflash":
        raise UsageError("outpace bench head measures mtp and eagle3 heads; a dflash head drafts a block at once")
    rng = np.random.default_rng(1)
    context = tokens(target, 2 * CONTEXT_OF_ROWS)
    features = rng.standard_normal((len(context), head.config.feature_width), dtype=np.float32)
    own = rng.standard_normal((max(STEP_ROWS), head.config.layers.hidden_size), dtype=np.float32)
    slot, its = target.new_slot(), head.new_slot()
    read_prompt(target, slot, context[:CONTEXT_OF_ROWS])
    head.forward([HeadRows(its, context[:CONTEXT_OF_ROWS], features[:CONTEXT_OF_ROWS], logits=[])])
    head.commit(its, range(CONTEXT_OF_ROWS))
    jobs: list[tuple[tuple[str, int], Callable[[], object]]] = [
        (("pass", n), partial(target.forward, [Rows(slot, context[:n])])) for n in TARGET_ROWS
    ]
    for n in STEP_ROWS:
        rows = HeadRows(its, context[:n], own[:n], own=True, parents=[-1] * n)
        jobs.append((("step", n), partial(head.forward, [rows])))
    jobs.append((("read", 64), partial(head.forward, [HeadRows(its, context, features, logits=[])])))
    times = {key: 1e3 * statistics.median(of) for key, of in in_turns(jobs, seconds).items()}
    target.free_slot(slot)
    head.free_slot(its)
    one, step = times["pass", 1], times["step", 1]
    ratio = head.pass_bytes / target.pass_bytes
    return {
        "machine": {"processor": processor(), "isa": target.isa, "threads": target.threads},
        "bytes": {"head": head.pass_bytes, "target": target.pass_bytes, "ratio": ratio},
        "step_ms": {n: times["step", n] for n in STEP_ROWS},
        "pass_ms": {n: times["pass", n] for n in TARGET_ROWS},
        "step_share": step / one,
        "most_share": ratio + MARGIN,
        "read_ms": times["read", 64],
        "needed": {n - 1: (times["pass", n] + (n - 1) * step) / one for n in TARGET_ROWS[1:] if n <= 8},
    }


class ScriptedDrafter(HeadDrafter):
    """A head's drafts at their cost, with tokens that are right as often as `chance` says, one place after another."""

    def __init__(self, head: HeadBackend, truth: Sequence[int], start: int, chance: float, seed: int = 0) -> None:
        """truth: the answer, which begins at position `start` of the text."""
        super().__init__(head)
        self._truth, self._start, self._chance = truth, start, chance
        self._rng = random.Random(seed)

    def propose(self, wanted: Sequence[Want]) -> list[Draft | Exception]:
        drafts = drafts_of(super().propose([Want(want.state, want.most) for want in wanted]))
        return [self._scripted(want, len(draft)) for want, draft in zip(wanted, drafts, strict=True)]

    def _scripted(self, want: Want, n: int) -> Draft:
        after = self._truth[len(want.state.tokens) - self._start :][:n]
        right = 0
        while right < len(after) and self._rng.random() < self._chance:
            right += 1
        wrong = [(token + 1) % want.state.sampler.vocab_size for token in after[right:]]
        return Draft((*after[:right], *wrong), source=self.name)


def simulate_head(
    target: NativeBackend,
    head: NativeHead,
    tau: float,
    *,
    chain: int = 7,
    answer: int = 192,
    turns: int = 3,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Decoding with drafts that are right as a head's that reaches `tau` tokens a round (the bonus token included) with
    a chain of `chain`, over plain decoding in the same turn: the median over `turns`. A simulation.

    Returns {"tau", "chain", "chance" of each place, "controller" and "fixed": {"factor", "tokens_per_round"}}: with
    the controller choosing lengths, and with the chain always drafted. Raises UsageError for a tau that no acceptance
    gives.
    """
    chance = chance_of(tau, chain)
    shape = measure_shape(target)
    prompt = tokens(target, CONTEXT_OF_ROWS)
    opts = SampleOpts.greedy(max_tokens=answer, ignore_eos=True)
    with LanguageModel(target, None) as plain:
        truth = plain.generate(prompt, opts).token_ids
    speeds: dict[str, list[float]] = {"controller": [], "fixed": []}
    rounds: dict[str, list[float]] = {"controller": [], "fixed": []}
    for turn in range(turns):
        progress(f"turn {turn + 1} of {turns}")
        base = _timed(LanguageModel(target, None), prompt, opts, truth)
        for name, fixed in (("controller", None), ("fixed", chain)):
            drafter = ScriptedDrafter(head, truth, len(prompt), chance, turn)
            model = LanguageModel(target, None, drafters=[drafter], draft_tokens=fixed, shape=shape)
            seconds, per_round = _timed(model, prompt, opts, truth)
            speeds[name].append(base[0] / seconds)
            rounds[name].append(per_round)
    return {
        "tau": tau,
        "chain": chain,
        "chance": chance,
        **{
            name: {"factor": statistics.median(speeds[name]), "tokens_per_round": statistics.median(rounds[name])}
            for name in speeds
        },
    }


def _timed(model: LanguageModel, prompt: list[int], opts: SampleOpts, truth: list[int]) -> tuple[float, float]:
    """Seconds of an answer, and its tokens a round."""
    with model:
        start = time.perf_counter()
        result = model.generate(prompt, opts)
        seconds = time.perf_counter() - start
    if result.token_ids != truth:
        raise OutpaceError("the answer with drafts differs from the one without: please report it")
    return seconds, result.stats.tokens_per_round


def chance_of(tau: float, chain: int) -> float:
    """The chance of each token of a chain, given those before it, at which rounds emit `tau` tokens on average:
    1 + a + a^2 + ... + a^chain = tau. Raises UsageError where there is none."""
    if not 1.0 <= tau < chain + 1:
        raise UsageError(f"tokens per round must be in 1 .. {chain + 1} for a chain of {chain}, got {tau:g}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(chain + 1)) < tau else (low, middle)
    return low
