"""Libraries that a test trains with. CI installs them where its package index has them (`make test-long`)."""

import importlib.util

import pytest


def require(*names: str) -> None:
    """Skip loudly without them."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed, so not tested: {', '.join(missing)}; pip install --group trainers")
