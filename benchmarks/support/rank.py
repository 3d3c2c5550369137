"""Load generator: the rank of a replica group of one, in a separate process, which requests a quorum and votes.

Each step begins when the last one has committed. The rank uses torchft's ManagerClient, or ours. Ours has a watch, so
its quorum can stand, and the reply to a vote then contains the next grant.
"""

import secrets
import sys
import time
from typing import Any, Protocol

from agent_client.manager_client.client import ManagerConnection
from benchmarks.support.line_protocol import answer_orders
from benchmarks.support.torchft_native import Client

TIMEOUT_S = 30.0


class Calls(Protocol):
    """Calls to the manager."""

    round_trips: int  # number of calls that were sent

    def quorum(self, step: int) -> None: ...

    def should_commit(self, step: int) -> None: ...


class TorchftCalls:
    def __init__(self, address: str) -> None:
        self.round_trips = 0
        self._client = Client(address, TIMEOUT_S)

    def quorum(self, step: int) -> None:
        self.round_trips += 1
        self._client.quorum(step)

    def should_commit(self, step: int) -> None:
        self.round_trips += 1
        _must_commit(self._client.should_commit(step))


class OurCalls:
    def __init__(self, address: str) -> None:
        self.round_trips = 0
        self._link = ManagerConnection(
            address, 0, secrets.token_hex(6), lambda quorum_id, reason: None, returns_within_s=0
        )
        self._quorum_id = 0

    def quorum(self, step: int) -> None:
        self.round_trips += self._link._granted is None  # pyright: ignore[reportPrivateUsage]
        tag_quorum_id = self._quorum_id
        quorum = self._link.ask(step, "", tag_quorum_id=tag_quorum_id, commit_failures=0, timeout_s=TIMEOUT_S)
        self._quorum_id = quorum.quorum_id

    def should_commit(self, step: int) -> None:
        self.round_trips += 1
        _must_commit(self._link.vote(step, True, quorum_id=self._quorum_id, timeout_s=TIMEOUT_S))


def _must_commit(decision: bool) -> None:
    if not decision:
        raise RuntimeError("a step was discarded")


CLIENTS = {"torchft": TorchftCalls, "lighthouse-ft": OurCalls}


class Rank:
    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._step = 0

    def run(self, *, steps: int) -> dict[str, Any]:
        """Return the seconds of both calls in each step but the first, which the ranks do not begin together."""
        trips = self._calls.round_trips
        times = [self._run_step() for _ in range(steps)][1:]
        return {
            "quorum_s": [quorum_s for quorum_s, _ in times],
            "should_commit_s": [commit_s for _, commit_s in times],
            "round_trips": (self._calls.round_trips - trips) / steps,
        }

    def _run_step(self) -> tuple[float, float]:
        began_at = time.perf_counter()
        self._calls.quorum(self._step)
        answered_at = time.perf_counter()
        self._calls.should_commit(self._step)
        self._step += 1
        return answered_at - began_at, time.perf_counter() - answered_at


def main() -> None:
    client, address = sys.argv[1:]
    rank = Rank(CLIENTS[client](address))
    print("ready", flush=True)
    answer_orders(rank.run)


if __name__ == "__main__":
    main()
