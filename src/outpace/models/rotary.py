"""Rotary position embeddings: frequencies and their scalings (RoFormer, arXiv 2104.09864).

Scalings: linear interpolation (arXiv 2306.15595), Llama 3's wavelength bands, YaRN (arXiv 2309.00071). The formulas
and their float32 arithmetic follow transformers, so that long contexts agree. The convention is the half-split one:
element i of a head turns with element i + head_dim / 2.
"""

from __future__ import annotations

import math

import numpy as np

from ..config import ModelConfig, RopeScaling
from ..types import F32, I64


def rotary_frequencies(config: ModelConfig) -> tuple[F32, float]:
    """Radians per position of each pair, float32 [head_dim / 2], and the factor that multiplies cos and sin."""
    dim, scaling = config.head_dim, config.rope_scaling
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    base = np.full(dim // 2, config.rope_theta, dtype=np.float32)
    frequencies: F32 = (np.float32(1.0) / np.power(base, exponents)).astype(np.float32)
    if scaling is None:
        return frequencies, 1.0
    if scaling.kind == "linear":
        return frequencies / np.float32(scaling.factor), 1.0
    if scaling.kind == "factors":
        divisors: F32 = np.array(scaling.factors, dtype=np.float32)
        return frequencies / divisors, 1.0
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    return _yarn(frequencies, config.rope_theta, scaling), _yarn_attention_factor(scaling)


def rotary_tables(config: ModelConfig, positions: I64) -> tuple[F32, F32]:
    """cos and sin for each position, float32 [n, head_dim / 2]; positions: int64 [n]."""
    frequencies, factor = rotary_frequencies(config)
    angles = positions[:, None].astype(np.float32) * frequencies
    return np.cos(angles) * np.float32(factor), np.sin(angles) * np.float32(factor)


def _llama3(frequencies: F32, scaling: RopeScaling) -> F32:
    """Long wavelengths are stretched by factor, short ones kept, those between blended."""
    context = scaling.original_max_position_embeddings
    assert context is not None
    wavelength = np.float32(2 * math.pi) / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (np.float32(context) / wavelength - np.float32(low)) / np.float32(high - low)
    stretched = frequencies / np.float32(scaling.factor)
    blended = (1 - smooth) * stretched + smooth * frequencies
    short, long = wavelength < context / high, wavelength > context / low
    return np.where(short, frequencies, np.where(long, stretched, blended)).astype(np.float32)


def _yarn(frequencies: F32, theta: float, scaling: RopeScaling) -> F32:
    """Interpolates the pairs that turn fewer than beta_slow times over the original context, keeps those that turn
    more than beta_fast times, and ramps between."""
    half = len(frequencies)
    context = scaling.original_max_position_embeddings
    assert context is not None

    def pair_that_turns(times: float) -> float:
        return half * math.log(context / (times * 2 * math.pi)) / math.log(theta)

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    ramp = np.clip((np.arange(half, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    keep = 1 - ramp
    blended: F32 = (frequencies / np.float32(scaling.factor) * (1 - keep) + frequencies * keep).astype(np.float32)
    return blended


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)
