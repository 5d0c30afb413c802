"""outpace: the same words, faster. Lossless speculative decoding for Qwen3-family models on your own machine."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import Delta, LanguageModel, Result, load
    from .config import ModelConfig, Qwen3Config
    from .speculator import (
        DraftProposal,
        Qwen3Generator,
        Qwen3Speculator,
        SpecDecoder,
        Speculator,
        VerifyResult,
    )
    from .types import (
        CapacityError,
        ContextError,
        Device,
        HubError,
        ModelError,
        NumericalError,
        OutpaceError,
        RewindError,
        SampleOpts,
        Stats,
        TokenLogprobs,
        UsageError,
    )
    from .weights.weight_map import WeightMap

__version__ = "0.1.0"

__all__ = [
    "CapacityError",
    "ContextError",
    "Delta",
    "Device",
    "DraftProposal",
    "HubError",
    "LanguageModel",
    "ModelConfig",
    "ModelError",
    "NumericalError",
    "OutpaceError",
    "Qwen3Config",
    "Qwen3Generator",
    "Qwen3Speculator",
    "Result",
    "RewindError",
    "SampleOpts",
    "SpecDecoder",
    "Speculator",
    "Stats",
    "TokenLogprobs",
    "UsageError",
    "VerifyResult",
    "WeightMap",
    "load",
]

# Names are looked up when first used, so that `outpace --help` and a type import do not load the whole engine.
_HOMES = {
    "api": ("Delta", "LanguageModel", "Result", "load"),
    "config": ("ModelConfig", "Qwen3Config"),
    "speculator": (
        "DraftProposal",
        "Qwen3Generator",
        "Qwen3Speculator",
        "SpecDecoder",
        "Speculator",
        "VerifyResult",
    ),
    "weights.weight_map": ("WeightMap",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'outpace' has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME.get(name, 'types')}", __name__), name)
    globals()[name] = value
    return value
