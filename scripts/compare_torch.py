#!/usr/bin/env python3
"""Compares one row of outpace with PyTorch's, in turns within one run, at the size of SmolLM2-135M with random weights.

PyTorch's is transformers' LlamaForCausalLM, in eager float32 and with its linear layers in dynamic int8 (fbgemm).

    scripts/compare_torch.py [--threads N] [--seconds S] [--context N] [--json OUT.json]

A pass reads one token after a context that both hold in their caches. Needs the test tools (torch, transformers).
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from outpace.backends.base import Rows
from outpace.backends.cores import usable_cores
from outpace.backends.native import NativeBackend
from outpace.bench import shapes
from outpace.bench.kernels import in_turns, processor, read_prompt, tokens


def llama(shape: str) -> LlamaForCausalLM:
    """The same sizes in transformers, float32."""
    config = shapes.shape(shape)
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            max_position_embeddings=config.max_position_embeddings,
            tie_word_embeddings=config.tie_word_embeddings,
        )
    ).eval()


class OneToken:
    """A pass of one token after a context, which stays as it was."""

    def __init__(self, model: Any, prompt: list[int]) -> None:
        self.model = model
        self.cache = DynamicCache()
        model(torch.tensor([prompt]), past_key_values=self.cache, use_cache=True)
        self.token = torch.tensor([[1]])

    def __call__(self) -> None:
        self.model(self.token, past_key_values=self.cache, use_cache=True)
        self.cache.crop(-1)  # takes the token off again


def main() -> None:
    """Prints milliseconds and ratios; the shape is SmolLM2-135M's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.backends.quantized.engine = "fbgemm"
    jobs: list[tuple[str, Any]] = []
    for bits in (8, 4):
        config = shapes.shape("smollm2-135m")
        target = NativeBackend(config, shapes.random_weights(config, bits), slots=1, threads=args.threads)
        prompt = tokens(target, args.context)
        slot = target.new_slot()
        read_prompt(target, slot, prompt)
        jobs.append((f"outpace, {bits} bits", lambda target=target, slot=slot: target.forward([Rows(slot, [1])])))
    with torch.inference_mode():
        float32 = llama("smollm2-135m")
        int8 = torch.ao.quantization.quantize_dynamic(float32, {torch.nn.Linear}, dtype=torch.qint8)
        jobs += [("PyTorch, eager f32", OneToken(float32, prompt)), ("PyTorch, fbgemm int8", OneToken(int8, prompt))]
        times = in_turns(jobs, args.seconds, settle=0.02)  # OpenMP's threads spin on for a while
    median = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    fastest = {name: 1e3 * min(values) for name, values in times.items()}
    print(f"{processor()}, {args.threads} threads, one row at context {args.context}, random weights")
    print(f"{'':22}{'median ms':>11}{'fastest':>10}{'over 8 bits':>13}{'over 4 bits':>13}")
    for name in median:
        ratios = "".join(f"{median[name] / median[f'outpace, {bits} bits']:13.2f}" for bits in (8, 4))
        print(f"{name:22}{median[name]:11.2f}{fastest[name]:10.2f}{ratios}")
    if args.json:
        args.json.write_text(json.dumps({"median_ms": median, "fastest_ms": fastest}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
