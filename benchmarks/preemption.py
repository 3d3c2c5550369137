"""Count the steps that peers lose when replica groups are preempted at random moments.

The lighthouse and all managers are real and share one process; each rank is a thread without torch. Several jobs of
three groups run at once. A notice reaches one group of a job at a random moment of a step, as if its HTTP hook had
received it. The group must leave, and no group of the job may discard a step. Then it starts again and joins.
"""

import asyncio
import logging
import random
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import click

from benchmarks.support.figures import Bar, Measured, benchmark, spread, table
from benchmarks.support.lockstep import Lockstep, LockstepRank
from lighthouse.server.config import LighthouseConfig
from lighthouse.server.daemon import LighthouseDaemon
from lighthouse_protocol.messages.hosts import KeptState
from lighthouse_protocol.messages.incident import ProcessSnapshot
from lighthouse_protocol.messages.preemption import PreemptionNoted, PreemptionNotice
from lighthouse_protocol.messages.session import WatchHello
from lighthouse_protocol.refusals import WrongState
from lighthouse_runtime.server.grpc_server import Entry
from manager.evidence import probe_alone
from manager.group.events import GroupGivenUp, Killed, RankGivenUp
from manager.preemption.watch import PreemptionWatch
from manager.server.config import ManagerConfig
from manager.server.daemon import ManagerDaemon

NAMES = ("a", "b", "c")
STEP_S = 0.02
NOTICE_S = 120.0
TIMEOUT_S = 60.0
SETTLED_STEPS = 3


class Daemons:
    """The event loop of all daemons, in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="daemons", daemon=True).start()

    def run(self, task: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(task, self.loop).result(TIMEOUT_S)

    async def start_lighthouse(self) -> str:
        config = LighthouseConfig(bind="127.0.0.1:0", http="127.0.0.1:0", min_replicas=2, log_level="error")
        daemon = LighthouseDaemon(config, lambda _: None)
        await daemon.start()
        return f"127.0.0.1:{daemon.grpc_port}"


class Host:
    """Supervisor of a group, without processes."""

    def __init__(self, lighthouse: str, job: str, name: str) -> None:
        bind, store = "127.0.0.1:0", "127.0.0.1:1"
        config = ManagerConfig(lighthouse=lighthouse, job=job, replica_id=name, bind=bind, store=store)
        self.daemon = ManagerDaemon(config, "", self._ended, self)
        self.preemption = PreemptionWatch(self.daemon.group, asyncio.get_running_loop())
        self.has_left = asyncio.Event()

    def _ended(self, _: int) -> None:
        self.has_left.set()

    def entries(self) -> Mapping[str, Entry]:
        return {}

    async def probe(self, request: WatchHello, is_here: bool) -> ProcessSnapshot:
        return await probe_alone(request, is_here)

    def send_signal(self, rank: int | None, number: int, *, is_largest: bool = False) -> None:
        raise WrongState("this group has no processes")

    def kept_states(self) -> tuple[KeptState, ...]:
        return ()

    def handle_notice(self, source: str, notice: PreemptionNotice | None) -> None:
        self.preemption.set_notice(0, source, notice)

    def handle(self, outcome: RankGivenUp | GroupGivenUp | Killed | PreemptionNoted) -> None:
        if isinstance(outcome, PreemptionNoted):
            self.preemption.record_answer(outcome.others)

    async def leave(self) -> None:
        """Stop the manager once the group has left."""
        await self.has_left.wait()
        self.preemption.close()
        await self.daemon.stop()


@dataclass(slots=True)
class Group:
    host: Host
    rank: LockstepRank


@dataclass(frozen=True, slots=True)
class Preempted:
    """One notice: seconds until the group had left, and the steps that all groups of its job discarded."""

    left_s: float
    discards: int


class Job:
    """Three groups that train in lockstep."""

    def __init__(self, daemons: Daemons, lighthouse: str, name: str) -> None:
        self._daemons, self._lighthouse, self._name = daemons, lighthouse, name
        self._lockstep = Lockstep()
        self._groups = {each: self._start(each) for each in NAMES}

    def _start(self, name: str) -> Group:
        async def start() -> Host:
            host = Host(self._lighthouse, self._name, name)
            await host.daemon.start()
            return host

        host = self._daemons.run(start())
        return Group(host, LockstepRank(name, host.daemon.address, self._lockstep, STEP_S, jitter=0.5))

    def preempt(self) -> Preempted:
        """Preempt a random group at a random moment, and start it again."""
        self._settle(NAMES)
        victim = random.choice(NAMES)
        group = self._groups[victim]
        before = self._discards()
        time.sleep(random.uniform(0, 2 * STEP_S))
        at = time.monotonic()
        notice = PreemptionNotice("http", "benchmark", victim, time.time() + NOTICE_S)
        self._daemons.loop.call_soon_threadsafe(group.host.handle_notice, "http", notice)
        self._daemons.run(group.host.leave())
        left_s = time.monotonic() - at
        group.rank.close()
        self._settle([name for name in NAMES if name != victim])
        discards = self._discards() - before
        if group.rank.error:
            raise RuntimeError(f"{self._name}/{victim}: {group.rank.error}")
        self._groups[victim] = self._start(victim)
        return Preempted(left_s, discards)

    def _discards(self) -> int:
        return sum(group.rank.discards for group in self._groups.values())

    def _settle(self, names: Sequence[str]) -> None:
        """Wait until these groups have committed some steps together."""
        ranks = [self._groups[name].rank for name in names]
        marks: dict[str, int] | None = None
        ends_at = time.monotonic() + TIMEOUT_S
        while marks is None or any(len(rank.commits) < marks[rank.name] + SETTLED_STEPS for rank in ranks):
            if any(rank.error for rank in ranks) or time.monotonic() > ends_at:
                raise TimeoutError(f"{self._name}: {names} do not train: {[rank.error for rank in ranks]}")
            if marks is None and all(rank.size == len(names) for rank in ranks):
                marks = {rank.name: len(rank.commits) for rank in ranks}
            time.sleep(STEP_S / 4)


def measure(notices: int, jobs: int) -> list[Preempted]:
    daemons = Daemons()
    lighthouse = daemons.run(daemons.start_lighthouse())

    def run(number: int) -> list[Preempted]:
        job = Job(daemons, lighthouse, f"job-{number}")
        return [job.preempt() for _ in range(-(-notices // jobs))]

    with ThreadPoolExecutor(jobs) as pool:
        return [each for done in pool.map(run, range(jobs)) for each in done]


def render(results: Sequence[Preempted]) -> str:
    lost = sum(each.discards for each in results)
    left = spread([each.left_s for each in results]).text(0, 1e3)
    return table(["notices", "discarded steps", "ms until the group has left"], [[str(len(results)), str(lost), left]])


@benchmark("30 notices.")
@click.option("--notices", type=click.IntRange(1), default=1000, show_default=True, help="Number of notices.")
@click.option("--jobs", type=click.IntRange(1), default=8, show_default=True, help="Jobs that run in parallel.")
def main(notices: int, jobs: int, quick: bool) -> Measured:
    """Count the steps that replica groups lose when others are preempted at random moments."""
    logging.disable(logging.WARNING)
    results = measure(30 if quick else notices, min(jobs, 3) if quick else jobs)
    bars = [Bar("discarded steps", sum(each.discards for each in results), 0, "")]
    return render(results), bars, {"results": results}


if __name__ == "__main__":
    main()
