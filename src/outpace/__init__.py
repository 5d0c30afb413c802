"""outpace: the same words, faster. Lossless speculative decoding for Qwen3-family models on your own machine.

The public names are imported on first use, so that `outpace --help` does not wait for NumPy and the native core.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .api import Delta, LanguageModel, Result, load
    from .config import ModelConfig, Qwen3Config
    from .heads.mtp import MtpHead
    from .speculator import (
        DraftProposal,
        Qwen3Generator,
        Qwen3MtpSpeculator,
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

_HOME = {
    "Delta": "api",
    "LanguageModel": "api",
    "Result": "api",
    "load": "api",
    "ModelConfig": "config",
    "Qwen3Config": "config",
    "DraftProposal": "speculator",
    "MtpHead": "heads.mtp",
    "Qwen3Generator": "speculator",
    "Qwen3MtpSpeculator": "speculator",
    "Qwen3Speculator": "speculator",
    "SpecDecoder": "speculator",
    "Speculator": "speculator",
    "VerifyResult": "speculator",
    "CapacityError": "types",
    "ContextError": "types",
    "Device": "types",
    "HubError": "types",
    "ModelError": "types",
    "NumericalError": "types",
    "OutpaceError": "types",
    "RewindError": "types",
    "SampleOpts": "types",
    "Stats": "types",
    "TokenLogprobs": "types",
    "UsageError": "types",
    "WeightMap": "weights.weight_map",
}

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
    "MtpHead",
    "NumericalError",
    "OutpaceError",
    "Qwen3Config",
    "Qwen3Generator",
    "Qwen3MtpSpeculator",
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


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'outpace' has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
