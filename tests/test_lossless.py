"""Anything against plain decoding: random models, options, drafters, company, rows, threads, leftovers of old texts.

Every scenario decodes a few prompts together, with drafts, on an engine that has been used before, and each alone,
plainly, on a fresh one: tokens, reasons to finish and logprobs must be equal.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import tiny
from outpace import LanguageModel, Result, SampleOpts, WeightMap
from outpace.backends.native import NativeBackend
from outpace.controller import Controller
from outpace.decode import Decoder
from outpace.drafters import Drafter, DraftModelDrafter, NgramDrafter, State, SuffixDrafter, Want
from outpace.types import Draft

VOCAB, CONTEXT = 67, 128


class Guesser:
    """Random chains or trees, mostly of tokens that occurred lately."""

    def __init__(self, rng: random.Random, tree: bool) -> None:
        self.name = "trees" if tree else "chains"
        self.rng, self.tree, self.free = rng, tree, rng.random() < 0.5

    def propose(self, wanted: Sequence[Want]) -> list[Draft]:
        return [self._draft(want.state, self.rng.randint(0, want.most)) for want in wanted]

    def _draft(self, state: State, n: int) -> Draft:
        recent = state.tokens[-8:]
        tokens = [self.rng.choice(recent) if self.rng.random() < 0.7 else self.rng.randrange(VOCAB) for _ in range(n)]
        parents = tuple(self.rng.randint(-1, i - 1) for i in range(n)) if self.tree else None
        sure = tuple(self.rng.random() for _ in range(n)) if self.rng.random() < 0.5 else None
        return Draft(tuple(tokens), parents=parents, source=self.name, confidence=sure)

    def forget(self, state: State) -> None:
        pass

    def close(self) -> None:
        pass


def backend(variant: str, precision: str, seed: int = 0, **more: Any) -> NativeBackend:
    config, arrays = tiny.random_model(variant, seed)
    return NativeBackend(config, WeightMap.from_tensors(arrays), precision=precision, **more)  # type: ignore[arg-type]


def some_drafters(rng: random.Random, variant: str, precision: str) -> list[Drafter]:
    other = "f32" if precision == "int8" else "int8"
    makers: list[Callable[[], Drafter]] = [
        lambda: Guesser(rng, tree=False),
        lambda: Guesser(rng, tree=True),
        lambda: NgramDrafter(shortest=1),
        lambda: SuffixDrafter(shortest=1, reach=8),
        lambda: DraftModelDrafter(
            backend(variant, other, rows=rng.choice([3, 16, 64]), slots=16)
            if rng.random() < 0.5
            else backend("llama", precision, seed=1, slots=16)
        ),
    ]
    return [make() for make in rng.sample(makers, rng.choice([1, 1, 2, 3]))]


def some_options(rng: random.Random, room: int) -> SampleOpts:
    some: dict[str, Any] = {"seed": rng.randrange(5), "temperature": rng.choice([0, 0, 0.05, 0.3, 0.7, 1.0, 2.0])}
    choices: dict[str, Any] = {
        "top_k": rng.randint(1, VOCAB + 5),
        "top_p": rng.uniform(0.05, 1),
        "typical_p": rng.uniform(0.1, 1),
        "min_p": rng.uniform(0, 0.5),
        "repetition_penalty": rng.choice([0.8, 1.2]),
        "frequency_penalty": rng.choice([-0.5, 0.5]),
        "presence_penalty": rng.choice([-0.5, 0.5]),
        "logit_bias": {rng.randrange(VOCAB): rng.choice([3.0, -3.0, -float("inf")])},
        "allowed_tokens": tuple(rng.sample(range(VOCAB), rng.randint(1, 6))),
        "bad_words": ((rng.randrange(VOCAB),), (rng.randrange(VOCAB), rng.randrange(VOCAB))),
        "stop_tokens": (rng.randrange(VOCAB),),
        "logprobs": rng.choice([0, 2]),
        "processed_logprobs": True,
    }
    some |= {name: value for name, value in choices.items() if rng.random() < 0.2}
    some["max_tokens"] = rng.choice([room, rng.randint(1, room)])
    if rng.random() < 0.2:
        some["min_tokens"] = rng.randint(0, some["max_tokens"])
    if "allowed_tokens" in some:  # a ban on all of them is an error of its own
        some = {name: value for name, value in some.items() if name not in ("bad_words", "logit_bias", "stop_tokens")}
    return SampleOpts(**some)


def some_prompts(rng: random.Random) -> list[list[int]]:
    prompts: list[list[int]] = []
    for _ in range(rng.randint(1, 8)):
        phrase = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 4))]
        prompt = (phrase * rng.randint(1, 30))[: CONTEXT - 3]
        if prompts and rng.random() < 0.4:  # a beginning that is known already
            prompt = prompts[0][: rng.randint(1, len(prompts[0]))]
        prompts.append(prompt)
    return prompts


def scenario(rng: random.Random) -> int:
    """Runs one; returns how many drafted tokens were accepted."""
    variant, precision = rng.choice(list(tiny.VARIANTS)), rng.choice(["int8", "f32"])
    slots, rows = rng.choice([2, 5, 16]), rng.choice([17, 24, 64, 512])
    target = backend(variant, precision, threads=rng.choice([1, 2, 3]), rows=max(rows, slots), slots=slots)
    prompts = some_prompts(rng)
    opts = [some_options(rng, CONTEXT - len(prompt)) for prompt in prompts]
    with LanguageModel(backend(variant, precision, threads=1), None) as fresh:
        want = [fresh.generate(p, o, speculate=False) for p, o in zip(prompts, opts, strict=True)]
    with LanguageModel(target, None) as used:
        controller = Controller(rng.choice([None, 1, 2, 3, 5, 8, 15]))
        used.engine.decoder = Decoder(target, some_drafters(rng, variant, precision), controller)
        for _ in range(rng.randint(0, 3)):  # streams that are left half read
            i = rng.randrange(len(prompts))
            stream = used.stream(prompts[i], opts[i])
            for _ in range(rng.randint(0, 4)):
                next(stream, None)
            if rng.random() < 0.5:
                stream.close()
        found = used.generate_many(prompts, opts)

    def what(result: Result) -> tuple[Any, ...]:
        return result.token_ids, result.finish_reason, result.logprobs

    for result, plain, prompt, o in zip(found, want, prompts, opts, strict=True):
        assert what(result) == what(plain), (variant, precision, prompt, o)
    return sum(result.stats.accepted for result in found)


@pytest.mark.parametrize(
    ("seed", "scenarios"), [(1, 12), (2, 12), *(pytest.param(s, 60, marks=pytest.mark.slow) for s in range(3, 9))]
)
def test_random_scenarios_equal_plain_decoding(seed: int, scenarios: int) -> None:
    rng = random.Random(seed)
    assert sum(scenario(rng) for _ in range(scenarios)) > 5 * scenarios
