"""Shared pytest settings: test modules may import the makers in tests/tiny.py as `tiny`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
