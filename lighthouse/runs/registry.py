"""Every run's driver; made when first asked for, dropped when it has gone quiet. Its record stays (run_memory.py)."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext

from lighthouse.members.rules.identity import Membership
from lighthouse.runs.driver import RunDriver
from lighthouse.runs.rules.config import RunConfig
from lighthouse.runs.rules.machine import RunMachine
from lighthouse.runs.rules.record import RunName, RunRecord, SavedRun
from lighthouse.runs.rules.status import saved_run_status
from lighthouse.runs.store import RunStore
from lighthouse_protocol.identity import check_name
from lighthouse_protocol.messages.evidence import RankEvidence
from lighthouse_protocol.messages.incident import Incident
from lighthouse_protocol.messages.run_status import RunStatus
from lighthouse_protocol.refusals import LimitReached, UnknownName, Unreachable
from lighthouse_protocol.rules.stall import Limits
from lighthouse_runtime.timing.loop_lag import LoopLag

log = logging.getLogger(__name__)

MAX_RUNS = 1000
SAVED_SHOWN = 32  # of those without processes at present, the newest
NAMES_SHOWN = 16


class RunRegistry:
    """`store` is claimed when the first run is asked for; `guarded` ends the daemon where it cannot be
    written.

    `make_id` makes an id for each incident, `report` gets each one that changes; `moved` is called with the job of a
    rank that has said more than its hello; `limits` say when ranks stall; `membership` says of a job's replica group,
    and the digest of its secret, whether it is in the quorum; `exited`: as RunDriver's, of a job.
    """

    def __init__(
        self,
        store: RunStore,
        rank_timeout_s: float,
        lateness: LoopLag,
        guarded: Callable[[], AbstractContextManager[None]] = nullcontext,
        make_id: Callable[[float], str] = str,
        report: Callable[[Incident], None] = lambda incident: None,
        moved: Callable[[str], None] = lambda job: None,
        limits: Limits | None = None,
        membership: Callable[[str, str, str], Membership] = lambda job, replica_id, digest: Membership.OPEN,
        exited: Callable[[str, str, str, RankEvidence], bool] = lambda job, replica_id, reason, evidence: False,
    ) -> None:
        self._store = store
        self._guarded = guarded
        self._rank_timeout_s = rank_timeout_s
        self._make_id = make_id
        self._report = report
        self._moved = moved
        self._limits = limits or Limits()
        self._membership = membership
        self._exited = exited
        self._lateness = lateness
        self._lateness.listen(self._was_late)
        self._drivers: dict[RunName, RunDriver] = {}
        self._closed = ""
        self._began_at: float | None = None  # to serve runs
        self._stopped: dict[RunName, RunStatus] = {}

    def __iter__(self) -> Iterator[RunDriver]:
        return iter(self._drivers.values())

    def get(self, job: str, run: str) -> RunDriver:
        """Raises a refusal for an unusable name, for too many runs, and while the lighthouse is going away."""
        if self._closed:
            raise Unreachable(self._closed)
        name = check_name(job, "job"), check_name(run, "run")
        driver = self._drivers.get(name)
        if driver is None:
            self.forget_quiet()
            if len(self._drivers) >= MAX_RUNS:
                raise LimitReached(
                    f"run: {run} would be number {MAX_RUNS + 1}; the lighthouse takes {MAX_RUNS} at once"
                )
            driver = self._drivers[name] = self._make(name)
        return driver

    def has(self, job: str, run: str) -> bool:
        """Whether it has processes."""
        return (job, run) in self._drivers

    def of_job(self, job: str) -> list[RunDriver]:
        """Those that have processes."""
        return [driver for driver in self if driver.name[0] == job]

    def find(self, job: str, run: str) -> RunDriver:
        """Raises UnknownName for a run that never had a process."""
        name = check_name(job, "job"), check_name(run, "run")
        if name not in self._drivers and self._store.load_run(name) is None:
            known = ", ".join(sorted(other for at, other in self._names() if at == job)[:NAMES_SHOWN]) or "none"
            raise UnknownName(f"run: job {job!r} has no run {run!r}; known runs: {known}")
        return self.get(job, run)

    def status(self, job: str = "", run: str = "") -> tuple[RunStatus, ...]:
        """Of `run`; or of every run of `job`, or of all, those without processes at present included."""
        self.forget_quiet()
        names = [(job, run)] if run else [name for name in self._names() if not job or name[0] == job]
        found = [self._status(name) for name in names]
        return tuple(status for status in found if status is not None)

    def live_status(self, job: str = "") -> tuple[RunStatus, ...]:
        """Of those that have processes, of `job` or of all."""
        self.forget_quiet()
        return tuple(driver.status() for driver in self if job in ("", driver.name[0]))

    def stopped_status(self) -> tuple[RunStatus, ...]:
        """Of those without processes that were stopped, and not resumed, since this lighthouse serves; the newest
        last."""
        return tuple(self._stopped.values())

    def stop_all(self, job: str, reason: str, who: str) -> list[str]:
        """Stop those of `job` that have processes and are not over. Returns their names."""
        machines = {driver: driver.machine for driver in self.of_job(job) if not driver.is_quiet}
        live = [driver for driver, machine in machines.items() if machine.stop is None and machine.completed is None]
        for driver in live:
            driver.stop(reason, who)
        return [driver.name[1] for driver in live]

    def restart(self, job: str, name: str, ranks: Collection[int], reason: str) -> bool:
        """As RunDriver.restart, of the run of `job` in which they are active."""
        return any(driver.restart(name, ranks, reason) for driver in self.of_job(job))

    def forget_quiet(self) -> None:
        for driver in [driver for driver in self if driver.is_quiet]:
            driver.write_notes()
            if driver.machine.stop is not None:
                self._stopped[driver.name] = driver.status()
            driver.close("this run has no members any more")
            del self._drivers[driver.name]
        while len(self._stopped) > SAVED_SHOWN:
            del self._stopped[next(iter(self._stopped))]

    def close(self, reason: str) -> None:
        """Write down what is noted, end every stream with `reason`, refuse new ones."""
        for driver in self:
            driver.write_notes()
        self.drop(reason)

    def drop(self, reason: str) -> None:
        """As close, where nothing can be written any more."""
        self._closed = reason
        drivers, self._drivers = self._drivers, {}
        for driver in drivers.values():
            driver.close(reason)

    def begin_anew(self) -> None:
        """After a close: what the store has by now counts."""
        self._closed = ""
        self._stopped.clear()
        self._began_at = None

    # -- within

    def _make(self, name: RunName) -> RunDriver:
        self._lateness.watch()
        self._stopped.pop(name, None)
        now = asyncio.get_running_loop().time()
        self._began_at = now if self._began_at is None else self._began_at
        saved = self._store.load_run(name) or SavedRun(RunRecord())
        config = RunConfig(self._rank_timeout_s, wall_offset_s=time.time() - now, run=name[1], limits=self._limits)
        machine = RunMachine(
            config,
            record=saved.record,
            keys=saved.keys,
            now=now,
            make_id=self._make_id,
            began_at=self._began_at,
        )
        loop = asyncio.get_running_loop()
        return RunDriver(
            name,
            machine,
            self._store,
            loop,
            self._lateness.check,
            self._report,
            self._guarded,
            lambda: self._moved(name[0]),
            lambda replica_id, digest: self._membership(name[0], replica_id, digest),
            lambda replica_id, reason, evidence: self._exited(name[0], replica_id, reason, evidence),
        )

    def _names(self) -> list[RunName]:
        return sorted({*self._store.run_names(SAVED_SHOWN), *self._drivers})

    def _status(self, name: RunName) -> RunStatus | None:
        if (driver := self._drivers.get(name)) is not None:
            return driver.status()
        saved = self._store.load_run(name)
        return None if saved is None else saved_run_status(name, saved)

    def _was_late(self, by_s: float) -> None:
        for driver in self:
            driver.was_late(by_s)
