"""Shared pytest settings: test modules may import the makers in tests/tiny.py as `tiny`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest

from outpace import hub


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's GGUF file, fetched once into the user's model folder."""
    return hub.pull("smollm2-135m")
