"""torchft's released servers and client, from its native module only, since its Python package imports torch.

Run as a program, it is one of these servers: it prints its port and serves until its standard input closes.
"""

import importlib
import sys
import types
from datetime import timedelta
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from typing import Any

MISSING = "torchft is not installed: `pip install --no-deps torchft==0.2.0`"


def released_version() -> str | None:
    try:
        return version("torchft")
    except PackageNotFoundError:
        return None


def native() -> Any:
    """Import torchft._torchft, with a stub in place of its package."""
    if "torchft" not in sys.modules:
        spec = PathFinder.find_spec("torchft")
        if spec is None or spec.submodule_search_locations is None:
            raise ModuleNotFoundError(MISSING)
        stub = types.ModuleType("torchft")
        stub.__path__ = list(spec.submodule_search_locations)
        sys.modules["torchft"] = stub
    return importlib.import_module("torchft._torchft")


def lighthouse(host: str, min_replicas: str, heartbeat_timeout_ms: str) -> Any:
    """Start a lighthouse with the defaults of torchft's command, such as a join timeout of 60 s."""
    return native().LighthouseServer(
        bind=f"{host}:0",
        min_replicas=int(min_replicas),
        join_timeout_ms=60_000,
        heartbeat_timeout_ms=int(heartbeat_timeout_ms),
    )


def manager(host: str, lighthouse_address: str, replica_id: str) -> Any:
    """Start the manager of a group of one rank, with the intervals of torchft's Manager."""
    return native().ManagerServer(
        replica_id=replica_id,
        lighthouse_addr=f"http://{lighthouse_address}",
        hostname=host,
        bind=f"{host}:0",
        store_addr=f"{host}:1",
        world_size=1,
        heartbeat_interval=timedelta(milliseconds=100),
        connect_timeout=timedelta(seconds=10),
        quorum_retries=0,
    )


class Client:
    """torchft's client of a group of one rank."""

    def __init__(self, manager: str, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._client = native().ManagerClient(f"http://{manager}", connect_timeout=self._timeout)

    def quorum(self, step: int, commit_failures: int = 0) -> Any:
        return self._client._quorum(
            group_rank=0, step=step, checkpoint_metadata="http://127.0.0.1:1", shrink_only=False,
            timeout=self._timeout, commit_failures=commit_failures, init_sync=True,
        )  # fmt: skip

    def should_commit(self, step: int) -> bool:
        return self._client.should_commit(0, step, True, self._timeout)


def main() -> None:
    kind, *arguments = sys.argv[1:]
    server = {"lighthouse": lighthouse, "manager": manager}[kind](*arguments)
    print(server.address().rpartition(":")[2], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
