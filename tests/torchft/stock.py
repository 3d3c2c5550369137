"""torchft's released clients and servers, in a process of their own (native.py), as objects of the tests."""

import contextlib
import itertools
import json
import os
import subprocess
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import pytest

from tests.processes import PATIENCE_S, Process
from tests.torchft import native

TIMEOUT_S = 20.0


def require() -> None:
    """Without the wheel: a failure in CI, a skip elsewhere."""
    if native.find() is not None:
        return
    reason = "torchft is not installed: pip install --no-deps torchft==0.2.0"
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


class StockError(Exception):
    """What torchft raised; `kind` is the class's name."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class Stock:
    """One of its objects. `call` returns a future; `do` waits."""

    def __init__(self, owner: "StockTorchft", name: str) -> None:
        self._owner = owner
        self._name = name

    def call(self, method: str, **arguments: Any) -> "Future[Any]":
        return self._owner.request(self._name, method, arguments)

    def do(self, method: str, **arguments: Any) -> Any:
        return self.call(method, **arguments).result(PATIENCE_S)

    # The calls that the tests make most.

    def ask(self, group_rank: int = 0, step: int = 0, **more: Any) -> "Future[Any]":
        """ManagerClient._quorum with torchft's usual arguments."""
        usual = {"checkpoint_metadata": "", "shrink_only": False, "commit_failures": 0, "init_sync": True}
        usual |= {"timeout": TIMEOUT_S}
        return self.call("_quorum", **(usual | {"group_rank": group_rank, "step": step} | more))

    def vote(self, group_rank: int, step: int, vote: bool, timeout: float = TIMEOUT_S) -> "Future[Any]":
        return self.call("should_commit", group_rank=group_rank, step=step, should_commit=vote, timeout=timeout)

    def join(self, replica_id: str, **more: Any) -> "Future[Any]":
        """LighthouseClient.quorum."""
        usual: dict[str, Any] = {"timeout": TIMEOUT_S, "address": "", "store_address": ""}
        return self.call("quorum", **(usual | {"replica_id": replica_id} | more))


class StockTorchft(Process):
    """A process with torchft's module loaded. Its end is the end of every object in it."""

    def __init__(self) -> None:
        code = "import tests.torchft.native as n; n._Stock().serve()"
        super().__init__(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[Any]] = {}
        self._is_ready = threading.Event()
        self.servers: list[Stock] = []

    def ready(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._stack.callback(self._end_reading)
        assert self._is_ready.wait(PATIENCE_S), f"torchft's module does not load:\n{self.log()}"

    def request(self, name: str, method: str, arguments: Mapping[str, Any]) -> "Future[Any]":
        number, answer = next(self._numbers), Future[Any]()
        self._waiting[number] = answer
        line = json.dumps({"number": number, "object": name, "method": method, "arguments": dict(arguments)})
        assert self.popen.stdin is not None
        self.popen.stdin.write(line + "\n")
        self.popen.stdin.flush()
        return answer

    def new(self, kind: str, **arguments: Any) -> Stock:
        """An object of class `kind`; raises StockError."""
        name = f"{kind}{next(self._numbers)}"
        self.request(name, kind, arguments).result(PATIENCE_S)
        return Stock(self, name)

    def lighthouse_client(self, address: str) -> Stock:
        return self.new("LighthouseClient", addr=f"http://{address}", connect_timeout=TIMEOUT_S)

    def manager_client(self, address: str) -> Stock:
        return self.new("ManagerClient", addr=_with_scheme(address), connect_timeout=TIMEOUT_S)

    def manager_server(self, replica_id: str, lighthouse: str, world_size: int = 1, **more: Any) -> Stock:
        usual = {
            "hostname": "127.0.0.1",
            "bind": "127.0.0.1:0",
            "store_addr": f"127.0.0.1:{40000 + next(self._numbers)}",
            "heartbeat_interval": 0.1,
            "connect_timeout": TIMEOUT_S,
            "quorum_retries": 0,
        }
        named = {"replica_id": replica_id, "lighthouse_addr": f"http://{lighthouse}", "world_size": world_size}
        self.servers.append(self.new("ManagerServer", **(usual | named | more)))
        return self.servers[-1]

    def _end_reading(self) -> None:
        """Before its pipe and its log are closed."""
        self.kill()
        self._reader.join(PATIENCE_S)

    def _read(self) -> None:
        assert self.popen.stdout is not None
        with contextlib.suppress(ValueError):  # half a line of a process that was killed
            for line in self.popen.stdout:
                self._take(json.loads(line))
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(StockError("Ended", f"torchft's process ended:\n{self.log()}"))

    def _take(self, said: dict[str, Any]) -> None:
        if said.get("ready"):
            self._is_ready.set()
            return
        answer = self._waiting.pop(said["number"])
        if "error" in said:
            answer.set_exception(StockError(said["error"], said["message"]))
        else:
            answer.set_result(said["value"])


def _with_scheme(address: str) -> str:
    return address if address.startswith("http://") else f"http://{address}"
