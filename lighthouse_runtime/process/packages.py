"""Which versions are installed here, without importing any of them."""

from collections.abc import Mapping
from importlib import metadata

PACKAGES = ("lighthouse-ft", "grpcio", "protobuf", "aiohttp", "prometheus-client", "uvloop", "torch")
NOT_INSTALLED = "not installed"
OLDEST_TORCH = "2.8"
"""As in pyproject.toml: an older TCPStore does not take a socket that already listens."""


def installed_versions() -> Mapping[str, str]:
    """Of PACKAGES, in their order."""
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return NOT_INSTALLED
