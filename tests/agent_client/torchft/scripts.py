"""Code of a test in a process of its own that has torch imported, and not torchft: a rank of ranks.py."""

import sys
from typing import Any

import agent_client.torchft

NATIVE_NAMES = [name for name in agent_client.torchft.__all__ if name != "install"]


class Script:
    def __init__(self) -> None:
        self._main = sys.modules["__main__"].__dict__

    def run(self, *lines: str) -> None:
        """As a script's own lines."""
        exec("\n".join(lines), self._main)

    def value(self, expression: str) -> Any:
        return eval(expression, self._main)

    def holders(self) -> dict[str, str]:
        """`module.name` of whoever holds a class of one of the native names: the package that it comes from."""
        modules = [name for name in sys.modules if name.partition(".")[0] in ("torchft", "__main__")]
        return {
            f"{module}.{name}": value.__module__.partition(".")[0]
            for module in modules
            for name, value in vars(sys.modules[module]).items()
            if isinstance(value, type) and value.__name__ in NATIVE_NAMES
        }
