"""The load: the one rank of a replica group, in a process of its own, that asks for a quorum and votes, step by step.

It does nothing between the steps: a step begins when its group's last one is committed. Through torchft's own
ManagerClient, or through ours.
"""

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from benchmarks.support.line_protocol import answer_orders
from benchmarks.support.torchft_native import native
from lighthouse_runtime.clients import ManagerClient

TIMEOUT_S = 30.0

Call = Callable[[int], None]


def torchft_calls(address: str) -> tuple[Call, Call]:
    """(ask for a quorum, vote) for a step."""
    timeout = timedelta(seconds=TIMEOUT_S)
    client = native().ManagerClient(f"http://{address}", connect_timeout=timeout)

    def quorum(step: int) -> None:
        client._quorum(
            group_rank=0,
            step=step,
            checkpoint_metadata="http://127.0.0.1:1",
            shrink_only=False,
            timeout=timeout,
            commit_failures=0,
            init_sync=True,
        )

    def should_commit(step: int) -> None:
        _must_commit(client.should_commit(0, step, True, timeout))

    return quorum, should_commit


def our_calls(address: str) -> tuple[Call, Call]:
    """(ask for a quorum, vote) for a step."""
    client = ManagerClient(address)
    tags = [0, 0]  # the quorum of the last committed step, and of the present one

    def quorum(step: int) -> None:
        answer = client.quorum(0, step, "http://127.0.0.1:1", timeout_s=TIMEOUT_S, tag_quorum_id=tags[0])
        tags[1] = answer.quorum_id

    def should_commit(step: int) -> None:
        _must_commit(client.should_commit(0, step, True, timeout_s=TIMEOUT_S, quorum_id=tags[1]))
        tags[0] = tags[1]

    return quorum, should_commit


def _must_commit(decision: bool) -> None:
    if not decision:
        raise RuntimeError("a step was discarded")


CLIENTS = {"torchft": torchft_calls, "lighthouse-ft": our_calls}


class Rank:
    def __init__(self, quorum: Call, should_commit: Call) -> None:
        self._quorum = quorum
        self._should_commit = should_commit
        self._step = 0

    def run(self, *, steps: int) -> dict[str, Any]:
        """Seconds of each step's two calls. The first step is left out: the ranks do not begin it together."""
        began_at = time.process_time()
        times = [self._run_step() for _ in range(steps)][1:]
        cpu_s = time.process_time() - began_at
        return {"quorum_s": [q for q, _ in times], "should_commit_s": [c for _, c in times], "cpu_s": cpu_s}

    def _run_step(self) -> tuple[float, float]:
        began_at = time.perf_counter()
        self._quorum(self._step)
        answered_at = time.perf_counter()
        self._should_commit(self._step)
        self._step += 1
        return answered_at - began_at, time.perf_counter() - answered_at


def main() -> None:
    client, address = sys.argv[1:]
    rank = Rank(*CLIENTS[client](address))
    print("ready", flush=True)
    answer_orders(rank.run)


if __name__ == "__main__":
    main()
