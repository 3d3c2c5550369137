"""Every job's driver; made when first asked for, dropped when it has gone quiet."""

import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from lighthouse.incidents.registry import IncidentRegistry
from lighthouse.quorum.driver import JobDriver
from lighthouse.quorum.log import NAMES_LOGGED
from lighthouse.quorum.rules.config import QuorumConfig
from lighthouse.quorum.rules.machine import QuorumMachine
from lighthouse.quorum.rules.record import QuorumRecord
from lighthouse.quorum.store import JobStore, NoJobStore
from lighthouse.runs.driver import RunDriver
from lighthouse_protocol.identity import check_name
from lighthouse_protocol.refusals import LighthouseError, LimitReached, UnknownName, Unreachable
from lighthouse_protocol.rules.stall import FLOOR_S
from lighthouse_runtime.ports import Timers
from lighthouse_runtime.timing.loop_lag import LoopLag

log = logging.getLogger(__name__)

MAX_JOBS = 1000


class JobRegistry:
    """`config` makes a job's settings from its first quorum_id; `memory` is claimed; `give_up` ends the daemon; `wall`:
    seconds since the epoch; `runs`: those of a job."""

    def __init__(
        self,
        config: Callable[[int], QuorumConfig],
        timers: Timers,
        memory: JobStore | None = None,
        give_up: Callable[[int], None] = lambda status: None,
        stall_after_s: float = FLOOR_S,
        incident_registry: IncidentRegistry | None = None,
        wall: Callable[[], float] = time.time,
        runs: Callable[[str], Sequence[RunDriver]] = lambda job: (),
    ) -> None:
        self._config = config
        self._memory = memory or NoJobStore()
        self._give_up = give_up
        self._stall_after_s = stall_after_s
        self._incident_registry = incident_registry or IncidentRegistry()
        self._timers = timers
        self._wall = wall
        self._runs = runs
        self._started_at: float | None = None
        self._records: Mapping[str, QuorumRecord] = {}
        self._drivers: dict[str, JobDriver] = {}
        self._closed = ""
        self.lag = LoopLag(timers)
        self.lag.listen(self._was_late)

    def remember(self, records: Mapping[str, QuorumRecord]) -> None:
        """Called once, when the daemon starts on a claimed memory: quorums of before may still be held."""
        self._records = records
        self._started_at = self._timers.time()

    def __iter__(self) -> Iterator[JobDriver]:
        return iter(self._drivers.values())

    def get(self, job: str) -> JobDriver:
        """Raises a refusal for an unusable name, for too many jobs, and while the lighthouse is going away."""
        if self._closed:
            raise Unreachable(self._closed)
        driver = self._drivers.get(job)
        if driver is None:
            check_name(job, "job")
            self.forget_quiet()
            if len(self._drivers) >= MAX_JOBS:
                raise LimitReached(
                    f"job: {job} would be number {MAX_JOBS + 1}; the lighthouse takes {MAX_JOBS} at once"
                )
            driver = self._drivers[job] = self._make(job)
        return driver

    def find(self, job: str) -> JobDriver:
        """Raises UnknownName for a job that no group has joined."""
        driver = self._drivers.get(check_name(job, "job"))
        if driver is None:
            known = ", ".join(sorted(self._drivers)[:NAMES_LOGGED]) or "none"
            raise UnknownName(f"job: no replica group has asked for a quorum of {job!r}; known jobs: {known}")
        return driver

    def forget_quiet(self) -> None:
        for driver in [driver for driver in self._drivers.values() if driver.is_quiet]:
            driver.close("this job has gone quiet")
            del self._drivers[driver.job]
            with self.guarded():
                self._memory.forget(driver.job)

    def close(self, reason: str) -> None:
        """End every waiting call and every session with `reason`; refuse new ones."""
        self._closed = reason
        self.lag.stop()
        for driver in self._drivers.values():
            driver.close(reason)

    # -- within

    def _make(self, job: str) -> JobDriver:
        self.lag.watch()
        last_id = self._memory.last_id(job)
        # Above every id that an earlier lighthouse, or an earlier life of this job, can have given out, whatever has
        # become of the journal.
        config = self._config(max(last_id + 1, int(self._wall() * 1000)))
        record, self._records = self._records.get(job), {k: v for k, v in self._records.items() if k != job}
        until = None
        if self._started_at is not None:
            until = self._started_at + max(config.lease_s, record.lease_s if record is not None else 0.0)
            until = until if until > self._timers.time() or (record and record.stands) else None
        if record is not None and record.lease_s < config.lease_s:
            record = replace(record, lease_s=config.lease_s)  # in force from the first welcome on
            self._commit(job, record)
        machine = QuorumMachine(config, record=record, holders_until=until)
        return JobDriver(
            job,
            machine,
            self._timers,
            self._wall,
            lambda record: self._commit(job, record),
            self.lag.check,
            self._stall_after_s,
            self._incident_registry,
            lambda: self._runs(job),
        )

    def _commit(self, job: str, record: QuorumRecord) -> None:
        with self.guarded():
            self._memory.commit(job, record)

    @contextmanager
    def guarded(self) -> Generator[None, None, None]:
        """A lighthouse that cannot write down what it is about to tell must not tell it: it ends."""
        try:
            yield
        except LighthouseError as e:
            log.critical("cannot go on without the journal: %s", e)
            self.close(f"the lighthouse cannot write its journal: {e}")
            self._give_up(1)
            raise

    def _was_late(self, by_s: float) -> None:
        for driver in self._drivers.values():
            driver.was_late(by_s)
