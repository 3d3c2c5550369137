"""A library that is not there: how to install it."""

import contextlib
from collections.abc import Generator


@contextlib.contextmanager
def library(name: str, requirement: str) -> Generator[None]:
    """Enclose its imports. `requirement`: what pip installs. Raises ModuleNotFoundError, with the command."""
    try:
        yield
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] != name:
            raise  # one that the library itself lacks
        raise ModuleNotFoundError(f"{name} is not installed: pip install '{requirement}'", name=e.name) from e
