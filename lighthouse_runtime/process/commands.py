"""The commands `lighthouse`, `lighthouse-manager` and `torchft_lighthouse`.

A project may have a `lighthouse` or a `manager` of its own, and PYTHONPATH or the working directory may stand before
ours. So a daemon starts here, under a name that is ours alone, and puts our folder first. Training processes keep their
path: they import neither.
"""

import importlib
import sys
from pathlib import Path

_OURS = str(Path(__file__).resolve().parents[2])

START_LIGHTHOUSE = f"from {__name__} import lighthouse; lighthouse()"
"""What `python -c` runs to start a daemon as a child."""
START_MANAGER = f"from {__name__} import lighthouse_manager; lighthouse_manager()"


def lighthouse() -> None:
    _run("lighthouse.cli", "lighthouse")


def lighthouse_manager() -> None:
    _run("manager.cli", "lighthouse-manager")


def torchft_lighthouse() -> None:
    _run("lighthouse.cli.torchft", "torchft_lighthouse")


def _run(module: str, name: str) -> None:
    if sys.path[0] != _OURS:
        sys.path.insert(0, _OURS)
    importlib.import_module(module).main(prog_name=name)
