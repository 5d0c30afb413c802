"""outpace: the same words, faster. Lossless speculative decoding for Qwen3-family models on your own machine."""

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
