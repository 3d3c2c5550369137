"""Load generator: many managers in one process, with a connection each, that train in lockstep.

python -m benchmarks.support.session_crowd ADDRESS JOB [TIMEOUT_S]
"""

import asyncio
import sys
import time
from collections import Counter
from dataclasses import asdict
from typing import Any

import uvloop

from benchmarks.support.children import allow_many_connections
from benchmarks.support.light_manager import LightManager
from benchmarks.support.light_stream import Turns
from benchmarks.support.line_protocol import answer_orders_async
from benchmarks.support.lockstep import Lockstep, Tally
from benchmarks.support.shared_session import SharedQuorums, SharedReader, SharingClient
from lighthouse_protocol.messages.membership import Quorum

CONNECTS_AT_ONCE = 50


class Crowd:
    def __init__(self, address: str, job: str, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.address = address
        self.tally = Tally()
        self.lockstep = Lockstep(self._note_step)
        self.managers: list[LightManager] = []
        self._job = job
        self._reader = SharedReader()
        self._turns = Turns()
        self.quorums = SharedQuorums()
        self._max_step = (0, 0)
        self._entered: Counter[int] = Counter()
        self._expected = 0
        self._all_train = asyncio.Event()
        self._connects = asyncio.Semaphore(CONNECTS_AT_ONCE)
        self._numbers = 0
        self._reported_cpu_s, self._reported_bytes = 0.0, 0

    def connect(self, source: str) -> SharingClient:
        return SharingClient(self.address, self._job, self._reader, self._turns, source)

    def max_step(self, quorum: Quorum) -> int:
        """Return the highest step in the quorum, computed once for all managers."""
        if self._max_step[0] != quorum.quorum_id:
            self._max_step = (quorum.quorum_id, max(member.step for member in quorum.participants))
        return self._max_step[1]

    def welcomed(self) -> None:
        """Let another manager connect, since one has connected."""
        self._connects.release()

    def enter(self, quorum: Quorum) -> None:
        """Count a manager that trains under that quorum."""
        self._entered[quorum.quorum_id] += 1
        if self._entered[quorum.quorum_id] == self._expected:
            self._all_train.set()

    async def do(self, what: str, **fields: Any) -> dict[str, Any]:
        """Run an order (one of the methods below), and return the events since the last report."""
        began_at = time.monotonic()
        await {"add": self.add, "die": self.die, "pace": self.pace, "report": self.report}[what](**fields)
        wall_s, cpu_s = time.monotonic() - began_at, time.process_time()
        carried = self._reader.carried
        spent = {"wall_s": wall_s, "cpu_s": cpu_s - self._reported_cpu_s, "bytes": carried - self._reported_bytes}
        tally, self.tally, self._reported_cpu_s, self._reported_bytes = self.tally, Tally(), cpu_s, carried
        return {**spent, **asdict(tally), "quorums": sorted({m.quorum.quorum_id for m in self.managers if m.quorum})}

    async def add(self, count: int) -> None:
        """Add managers and wait until all train together. They join after all of them have connected."""
        self._expected += count
        self._all_train.clear()
        newcomers = list[LightManager]()
        for _ in range(count):
            await asyncio.wait_for(self._connects.acquire(), self.timeout_s)
            newcomers.append(LightManager(self, self._numbers))
            self._numbers += 1
        for _ in range(CONNECTS_AT_ONCE):
            await asyncio.wait_for(self._connects.acquire(), self.timeout_s)
        for _ in range(CONNECTS_AT_ONCE):
            self._connects.release()
        self.managers += newcomers
        for manager in newcomers:
            manager.start()
        await asyncio.wait_for(self._all_train.wait(), self.timeout_s)

    async def die(self, count: int) -> None:
        """End managers without a notice, and wait until all others train together."""
        self._expected -= count
        self._all_train.clear()
        dying, self.managers = self.managers[:count], self.managers[count:]
        for manager in dying:
            manager.die()
        await asyncio.wait_for(self._all_train.wait(), self.timeout_s)

    async def pace(self, step_s: float) -> None:
        self.lockstep.pace(step_s)

    async def report(self) -> None:
        pass

    def _note_step(self, took_s: float) -> None:
        self.tally.longest_step_s = max(self.tally.longest_step_s, took_s)
        if took_s > 0:  # not the first one after a pause
            self.tally.steps_s.append(took_s)


async def serve(address: str, job: str, timeout_s: str = "60") -> None:
    await answer_orders_async(Crowd(address, job, float(timeout_s)).do)


def main() -> None:
    allow_many_connections()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(*sys.argv[1:]))


if __name__ == "__main__":
    main()
