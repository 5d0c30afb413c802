"""Reading numbers, flags and lists from files that nobody vouches for: typed, range-checked, with clear errors.

Neighbours: config.py keeps its own fields within these ranges; config_hf.py and config_gguf.py read through Reader.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .types import ModelError

BIG = 2**31 - 1
MAX_EXPERTS_IN_ALL = 2**17  # layers * experts: bounds the list of tensor names
INT_RANGES = {  # field: (lowest, highest) allowed value; the upper ends bound what a hostile file can ask for
    "vocab_size": (1, 2**24),
    "hidden_size": (1, 2**18),
    "intermediate_size": (1, 2**21),
    "num_hidden_layers": (1, 1024),
    "num_attention_heads": (1, 4096),
    "num_key_value_heads": (1, 4096),
    "head_dim": (2, 8192),
    "max_position_embeddings": (1, BIG),
    "sliding_window": (1, BIG),
    "max_window_layers": (0, BIG),
    "num_experts": (0, 4096),
    "num_experts_used": (0, 4096),
    "expert_ffn_size": (0, 2**21),
    "shared_expert_ffn_size": (0, 2**21),
    "bos_token_id": (0, BIG),
    "pad_token_id": (0, BIG),
}


def show(value: object) -> str:
    """A value for an error message, cut so that a hostile file cannot flood the screen."""
    text = repr(value[:60] if isinstance(value, str) else value) if not isinstance(value, int) else _show_int(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _show_int(value: int) -> str:
    return str(value) if abs(value) < 10**30 else "a number of more than 30 digits"


def check_int(name: str, value: object, low: int, high: int) -> int:
    """The value as an int from low to high. Raises ModelError naming the field."""
    if isinstance(value, np.integer):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ModelError(f"{name} must be a whole number from {low} to {high}, got {show(value)}")
    return value


def check_number(
    name: str, value: object, *, low: float = -math.inf, high: float = math.inf, above: float = -math.inf
) -> float:
    """The value as a finite float, low <= value <= high and value > above. Raises ModelError naming the field."""
    if isinstance(value, (np.integer, np.floating)):
        value = value.item()
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**30:
        value = float(value)
    if not isinstance(value, float) or not math.isfinite(value) or not low <= value <= high or value <= above:
        rule = f"greater than {above:g}" if above > -math.inf else f"at least {low:g}" if low > -math.inf else "finite"
        rule += f" and at most {high:g}" if high < math.inf else ""
        raise ModelError(f"{name} must be a number {rule}, got {show(value)}")
    return value


class Reader:
    """Typed, range-checked access to an untrusted mapping. None and a missing key are the same."""

    def __init__(self, data: Mapping[str, Any], prefix: str = "") -> None:
        self.data = data
        self.prefix = prefix

    def get(self, name: str) -> Any:
        return self.data.get(self.prefix + name)

    def integer(self, name: str, default: int | None = None, *, field: str = "", high: int = BIG) -> int:
        """field: the ModelConfig field whose range applies. Without a default the value must be there."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            raise ModelError(f"{self.prefix}{name} is missing")
        return check_int(self.prefix + name, value, *INT_RANGES.get(field or name, (0, high)))

    def number(self, name: str, default: float) -> float:
        value = self.get(name)
        return default if value is None else check_number(self.prefix + name, value)

    def optional_number(self, name: str) -> float | None:
        return None if self.get(name) is None else self.number(name, 0.0)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, (bool, np.bool_)):
            raise ModelError(f"{self.prefix}{name} must be true or false, got {show(value)}")
        return bool(value)

    def text(self, name: str, default: str) -> str:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise ModelError(f"{self.prefix}{name} must be a string, got {show(value)}")
        return value

    def items(self, name: str) -> list[Any] | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, (list, tuple, np.ndarray)) or np.ndim(value) != 1 or len(value) > 4096:
            raise ModelError(f"{self.prefix}{name} must be a list of at most 4096 entries, got {show(value)}")
        return list(value)

    def token(self, name: str) -> int | None:
        """A token id; -1 is an old spelling of "none"."""
        value = self.get(name)
        if value is None or (isinstance(value, int) and value == -1):
            return None
        return check_int(self.prefix + name, value, 0, BIG)

    def tokens(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them."""
        values = self.items(name) if isinstance(self.get(name), (list, tuple)) else [self.get(name)]
        return tuple(check_int(name, v, 0, BIG) for v in values or () if v is not None and v != -1)
