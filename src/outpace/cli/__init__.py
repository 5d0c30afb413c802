"""The command line: `outpace generate`, `chat`, `pull`, `models`, `rm`, `info`, `quantize`, `index`, `bench`.

Neighbours: everything a command does goes through api.py and hub.py. Importing this package is cheap: the modules that
bring NumPy and the model code are imported when a command runs.
"""

from .app import build, main

__all__ = ["build", "main"]
