"""Drafters with learned heads: drafts that are the head's own, answers that are the target's own.

Heads are random, so that they are seldom right; at a high temperature the shared noise decides, and they often are.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from heads_files import HEADS, TARGET, TARGET_ARRAYS, d2t
from outpace import LanguageModel, Result, SampleOpts, WeightMap
from outpace.backends.native import NativeBackend
from outpace.backends.reference_head import ReferenceHead
from outpace.controller import Controller
from outpace.decode import Decoder
from outpace.drafters import BlockDrafter, HeadDrafter, SuffixDrafter
from outpace.drafters.head import FeatureReader
from test_head_contract import tensors

VOCAB, CONTEXT = 67, 128


def target(**more: Any) -> NativeBackend:
    return NativeBackend(TARGET, WeightMap.from_tensors(TARGET_ARRAYS), precision="f32", **more)


def drafter(name: str, **more: Any) -> FeatureReader:
    config = HEADS[name]
    head = ReferenceHead(config, tensors(config), d2t(config), **{"positions": CONTEXT, "slots": 16} | more)
    return BlockDrafter(head) if config.algorithm == "dflash" else HeadDrafter(head)


# ------------------------------------------------------------------------------------------------------------- lossless


def some_options(rng: random.Random, room: int) -> SampleOpts:
    some: dict[str, Any] = {"seed": rng.randrange(5), "temperature": rng.choice([0, 0, 0.7, 2.0, 8.0])}
    choices: dict[str, Any] = {
        "top_k": rng.randint(1, VOCAB + 5), "top_p": rng.uniform(0.05, 1), "min_p": rng.uniform(0, 0.5),
        "repetition_penalty": rng.choice([0.8, 1.2]), "frequency_penalty": rng.choice([-0.5, 0.5]),
        "logit_bias": {rng.randrange(VOCAB): rng.choice([3.0, -float("inf")])},
        "allowed_tokens": tuple(rng.sample(range(VOCAB), rng.randint(1, 6))), "stop_tokens": (rng.randrange(VOCAB),),
    }  # fmt: skip
    some |= {name: value for name, value in choices.items() if rng.random() < 0.15}
    if "allowed_tokens" in some:
        some = {name: value for name, value in some.items() if name not in ("logit_bias", "stop_tokens")}
    return SampleOpts(**some, max_tokens=rng.choice([room, rng.randint(1, room)]))


def some_prompts(rng: random.Random) -> list[list[int]]:
    prompts: list[list[int]] = []
    for _ in range(rng.randint(1, 5)):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 9, 40, CONTEXT - 9]))]
        if prompts and rng.random() < 0.5:  # a beginning that is known already
            prompt = [*prompts[0][: rng.randint(1, len(prompts[0]))], *prompt[:5]][: CONTEXT - 2]
        prompts.append(prompt)
    return prompts


def scenario(rng: random.Random, name: str) -> int:
    """Prompts together with drafts, on a used engine, and each alone without; how many drafted tokens were kept."""
    slots = rng.choice([2, 16])
    prompts = some_prompts(rng)
    opts = [some_options(rng, min(40, CONTEXT - len(prompt))) for prompt in prompts]
    with LanguageModel(target(threads=1), None) as fresh:
        want = [fresh.generate(p, o, speculate=False) for p, o in zip(prompts, opts, strict=True)]
    backend = target(threads=1, rows=rng.choice([24, 64, 512]), slots=slots)
    own = drafter(name, rows=rng.choice([16, 256]), slots=slots, positions=rng.choice([CONTEXT, CONTEXT, 50]))
    with LanguageModel(backend, None) as used:
        drafters = [own, *([SuffixDrafter()] if rng.random() < 0.4 else [])]
        used.engine.decoder = Decoder(backend, drafters, Controller(rng.choice([None, None, 1, 3, 8])))
        used.drafters = tuple(drafters)
        for _ in range(rng.randint(0, 3)):  # streams that are left half read, and texts without drafts
            i = rng.randrange(len(prompts))
            stream = used.stream(prompts[i], opts[i], speculate=rng.random() < 0.8)
            for _ in range(rng.randint(0, 4)):
                next(stream, None)
            if rng.random() < 0.5:
                stream.close()
        found = used.generate_many(prompts, opts)

    def what(result: Result) -> tuple[Any, ...]:
        return result.token_ids, result.finish_reason

    for result, plain, prompt, o in zip(found, want, prompts, opts, strict=True):
        assert what(result) == what(plain), (name, prompt, o)
    head = own.head
    assert isinstance(head, ReferenceHead)
    assert not head._slots  # closed
    return sum(result.stats.by_source.get(own.name, [0, 0])[1] for result in found)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["mtp", "eagle3", "eagle3_qwen3", "dflash", "dspark", "dflash_small"])
@pytest.mark.parametrize("scenarios", [5, pytest.param(40, marks=pytest.mark.slow)])
def test_random_scenarios_equal_plain_decoding(name: str, scenarios: int) -> None:
    rng = random.Random(name)
    kept = sum(scenario(rng, name) for _ in range(scenarios))
    assert kept > scenarios
