"""The command line: `outpace generate`, `chat`, `pull`, `models`, `rm`, `info`, `quantize`, `index`, `bench`.

Neighbours: everything a command does goes through api.py and hub.py. Importing this package is cheap: app.py, which
brings typer, is imported when the command line runs, the modules that bring NumPy and the model code when a command
does.
"""

from .quick import prepare

__all__ = ["main"]


def main() -> None:
    """Runs the command line and ends the process (app.main), under settings that make even its imports quicker."""
    prepare()
    from .app import main as run

    run()
