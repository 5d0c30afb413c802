"""The one place that imports PyTorch, so that its absence is one clear line."""

from __future__ import annotations

import os

from ..types import UsageError

# Threads that wait must sleep: spinning, they take the time of whatever else runs, and of each other, which made a step
# six times as long on a busy machine. OpenMP reads this once, when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

try:
    import torch
except ImportError as error:
    raise UsageError(f"training needs PyTorch ({error}); install it with: pip install 'outpace[train]'") from None

__all__ = ["torch"]
