"""Load generator: the rank of a replica group of one, in a separate process, which requests a quorum and votes.

Each step begins when the last one has committed. The rank uses torchft's ManagerClient, or ours. Ours has a watch, so
its quorum can stand, and the reply to a vote then contains the next grant.
"""

import secrets
import sys
import time
from abc import ABC, abstractmethod
from typing import Any

from agent_client.manager_client.client import ManagerConnection
from benchmarks.support.children import answer_orders
from benchmarks.support.torchft_native import Client

TIMEOUT_S = 30.0


class Rank(ABC):
    def __init__(self) -> None:
        self._step = self._round_trips = 0

    @abstractmethod
    def request_quorum(self) -> int:
        """Request the quorum of the step. Return the number of calls that were sent."""

    @abstractmethod
    def vote(self) -> bool:
        """Vote to commit the step, and return the decision."""

    def run(self, *, steps: int) -> dict[str, Any]:
        """Return the seconds of both calls in each step but the first, which the ranks do not begin together."""
        self._round_trips = 0
        times = [self._run_step() for _ in range(steps)][1:]
        return {
            "quorum_s": [quorum_s for quorum_s, _ in times],
            "should_commit_s": [commit_s for _, commit_s in times],
            "round_trips": self._round_trips / steps,
        }

    def _run_step(self) -> tuple[float, float]:
        began_at = time.perf_counter()
        self._round_trips += self.request_quorum() + 1
        answered_at = time.perf_counter()
        if not self.vote():
            raise RuntimeError("a step was discarded")
        self._step += 1
        return answered_at - began_at, time.perf_counter() - answered_at


class TorchftRank(Rank):
    def __init__(self, address: str) -> None:
        super().__init__()
        self._client = Client(address, TIMEOUT_S)

    def request_quorum(self) -> int:
        self._client.quorum(self._step)
        return 1

    def vote(self) -> bool:
        return self._client.should_commit(self._step)


class OurRank(Rank):
    def __init__(self, address: str) -> None:
        super().__init__()
        self._quorum_id = 0
        self._link = ManagerConnection(address, 0, secrets.token_hex(6), lambda *revoked: None, returns_within_s=0)

    def request_quorum(self) -> int:
        is_granted = self._link._granted is not None  # pyright: ignore[reportPrivateUsage]
        tag = self._quorum_id
        quorum = self._link.ask(self._step, "", tag_quorum_id=tag, commit_failures=0, timeout_s=TIMEOUT_S)
        self._quorum_id = quorum.quorum_id
        return 0 if is_granted else 1

    def vote(self) -> bool:
        return self._link.vote(self._step, True, quorum_id=self._quorum_id, timeout_s=TIMEOUT_S)


RANKS = {"torchft": TorchftRank, "lighthouse-ft": OurRank}


def main() -> None:
    client, address = sys.argv[1:]
    rank = RANKS[client](address)
    print("ready", flush=True)
    answer_orders(rank.run)


if __name__ == "__main__":
    main()
