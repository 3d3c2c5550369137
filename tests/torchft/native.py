"""torchft's native module without its Python package, which would want torch and more.

As a program it serves torchft's own clients and servers to the tests: a hang or an abort of theirs is then a test's
failure and not the tests' end. It reads one JSON request a line and answers each in its own time; `StockTorchft` in
stock.py is the other end.
"""

import importlib
import json
import sys
import threading
import types
from datetime import timedelta
from importlib.machinery import PathFinder
from typing import Any


def find() -> list[str] | None:
    """Where the released package lies; None where it is not installed."""
    here = PathFinder.find_spec("torchft")
    return list(here.submodule_search_locations or ()) if here is not None else None


def load() -> Any:
    """`torchft._torchft`. Raises ModuleNotFoundError."""
    where = find()
    if where is None:
        raise ModuleNotFoundError("torchft is not installed: pip install --no-deps torchft==0.2.0")
    package = types.ModuleType("torchft")
    package.__path__ = where
    sys.modules["torchft"] = package
    return importlib.import_module("torchft._torchft")


def _plain(value: Any) -> Any:
    """torchft's results as JSON."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    names = [name for name in dir(value) if not name.startswith("_")]
    return {name: _plain(getattr(value, name)) for name in names if not callable(getattr(value, name))}


def _duration(name: str, value: Any) -> Any:
    return timedelta(seconds=value) if name in ("timeout", "connect_timeout", "heartbeat_interval") else value


class _Stock:
    def __init__(self) -> None:
        self._module = load()
        self._objects: dict[str, Any] = {}
        self._writing = threading.Lock()

    def serve(self) -> None:
        self._say({"ready": True})
        for line in sys.stdin:
            threading.Thread(target=self._answer, args=(json.loads(line),), daemon=True).start()

    def _answer(self, request: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"number": request["number"]}
        try:
            arguments = {name: _duration(name, value) for name, value in request["arguments"].items()}
            answer["value"] = self._do(request["object"], request["method"], arguments)
        except BaseException as e:  # noqa: BLE001 - pyo3's PanicException is no Exception
            answer |= {"error": type(e).__name__, "message": str(e)}
        self._say(answer)

    def _do(self, name: str, method: str, arguments: dict[str, Any]) -> Any:
        if method[0].isupper():
            self._objects[name] = getattr(self._module, method)(**arguments)
            return None
        return _plain(getattr(self._objects[name], method)(**arguments))

    def _say(self, answer: dict[str, Any]) -> None:
        with self._writing:
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _Stock().serve()
