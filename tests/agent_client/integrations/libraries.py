"""Libraries that a test trains with. CI installs them where its package index has them (`make test-long`)."""

import importlib.util

import pytest


def require(*names: str, group: str = "trainers") -> None:
    """Skip loudly without them, which the `group` of pyproject.toml has."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed, so not tested: {', '.join(missing)}; pip install --group {group}")
