"""Every job's driver; made when first asked for, dropped when it has gone quiet."""

import logging
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from lighthouse.incidents.registry import IncidentRegistry
from lighthouse.members.rules.identity import Membership
from lighthouse.progress.rules.job_progress import RanksKept
from lighthouse.quorum.driver import JobDriver
from lighthouse.quorum.log import NAMES_LOGGED
from lighthouse.quorum.rules.config import QuorumConfig
from lighthouse.quorum.rules.machine import QuorumMachine
from lighthouse.quorum.rules.record import QuorumRecord
from lighthouse.quorum.store import JobStore, NoJobStore
from lighthouse.runs.driver import RunDriver
from lighthouse_protocol.identity import check_name
from lighthouse_protocol.limits import SECRET_BYTES
from lighthouse_protocol.messages.evidence import RankEvidence
from lighthouse_protocol.messages.status import JobStatus
from lighthouse_protocol.refusals import LighthouseError, LimitReached, UnknownName, Unreachable
from lighthouse_protocol.rules.stall import FLOOR_S
from lighthouse_runtime.log_event import event
from lighthouse_runtime.ports import Timers
from lighthouse_runtime.timing.loop_lag import LoopLag

log = logging.getLogger(__name__)

MAX_JOBS = 1000
# Anyone can send heartbeats under any name: jobs of which nothing else is known have a limit of their own.
MAX_REPORTED_JOBS = 200
ENDED_SHOWN = 16
QUIET_LOOKED_FOR_EVERY_S = 1.0


class JobRegistry:
    """`config` makes a job's settings from its first quorum_id; `memory` is claimed; `give_up` ends the daemon; `wall`:
    seconds since the epoch; `runs`: those of a job; `refused` is called with each refused join's error; `draw_secret`:
    for each new quorum."""

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
        refused: Callable[[LighthouseError], None] = lambda error: None,
        draw_secret: Callable[[], str] = lambda: secrets.token_hex(SECRET_BYTES),
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._is_busy = is_busy
        self._draw_secret = draw_secret
        self._config = config
        self._memory = memory or NoJobStore()
        self._give_up = give_up
        self._stall_after_s = stall_after_s
        self._incident_registry = incident_registry or IncidentRegistry()
        self._timers = timers
        self._wall = wall
        self._runs = runs
        self._refused = refused
        self._started_at: float | None = None
        self._records: Mapping[str, QuorumRecord] = {}
        self._drivers: dict[str, JobDriver] = {}
        self._reported: set[str] = set()
        self._ended: dict[str, JobStatus] = {}
        self._ranks_kept = RanksKept()
        self._looked_at = -QUIET_LOOKED_FOR_EVERY_S
        self._closed = ""
        self.lag = LoopLag(timers)
        self.lag.listen(self._was_late)

    def remember(self, records: Mapping[str, QuorumRecord]) -> None:
        """The memory has just been claimed: quorums of before may still be held. After a `close`, it serves again."""
        self._records = records
        self._started_at = self._timers.time()
        if self._closed:
            self._closed = ""
            self.lag.begin_anew()

    def __iter__(self) -> Iterator[JobDriver]:
        return iter(self._drivers.values())

    def get(self, job: str) -> JobDriver:
        """Raises a refusal for an unusable name, for too many jobs, and while the lighthouse is going away."""
        driver = self._known(job)
        if driver is not None and job not in self._reported:
            return driver
        if self._is_full(lambda: len(self._drivers) - len(self._reported), MAX_JOBS):
            raise LimitReached(f"job: {job} would be number {MAX_JOBS + 1}; the lighthouse takes {MAX_JOBS} at once")
        self._reported.discard(job)
        return self._drivers.get(job) or self._add(job)

    def get_reported(self, job: str) -> JobDriver:
        """The same for a heartbeat without a session."""
        driver = self._known(job)
        if driver is not None:
            return driver
        if self._is_full(lambda: len(self._reported), MAX_REPORTED_JOBS):
            raise LimitReached(
                f"job: {job} is known by heartbeats alone, as {MAX_REPORTED_JOBS} others are; ask for a quorum of it"
            )
        driver = self._add(job)
        self._reported.add(job)
        return driver

    def _known(self, job: str) -> JobDriver | None:
        if self._closed:
            raise Unreachable(self._closed)
        driver = self._drivers.get(job)
        if driver is None:
            check_name(job, "job")
        return driver

    def ended(self, job: str) -> tuple[JobStatus, ...]:
        """Last status of the newest jobs that have ended and been forgotten, or of `job` alone."""
        return tuple(last for name, last in self._ended.items() if name not in self._drivers and job in ("", name))

    def _is_full(self, count: Callable[[], int], limit: int) -> bool:
        """Looks for quiet jobs first; not at every call, which would be O(n) each."""
        now = self._timers.time()
        if count() >= limit and now - self._looked_at >= QUIET_LOOKED_FOR_EVERY_S:
            self._looked_at = now
            self.forget_quiet(is_full=True)
        return count() >= limit

    def _add(self, job: str) -> JobDriver:
        driver = self._drivers[job] = self._make(job)
        return driver

    def membership(self, job: str, replica_id: str, digest: str) -> Membership:
        """Of that group in the quorum of that job, by the digest of its secret."""
        driver = self._add(job) if job in self._records and not self._closed else self._drivers.get(job)
        return Membership.OPEN if driver is None else driver.machine.presence.membership(replica_id, digest)

    def exited(self, job: str, replica_id: str, reason: str, evidence: RankEvidence) -> bool:
        """As IncidentDriver.exited, of that job."""
        driver = self._drivers.get(job)
        return driver is not None and driver.incidents.exited(replica_id, reason, evidence)

    def peek(self, job: str) -> JobDriver | None:
        """None: no job of that name is here."""
        return self._drivers.get(job)

    def find(self, job: str) -> JobDriver:
        """Raises UnknownName for a job that no group has joined."""
        driver = self._drivers.get(check_name(job, "job"))
        if driver is None:
            known = ", ".join(sorted(self._drivers)[:NAMES_LOGGED]) or "none"
            raise UnknownName(f"job: no replica group has asked for a quorum of {job!r}; known jobs: {known}")
        return driver

    def forget_quiet(self, *, is_full: bool = False) -> None:
        """What the memory has of one stays where it cannot be written: nothing is told because of that.

        Jobs that have ended are kept for groups that come late, unless the registry `is_full`.
        """
        for driver in [d for d in self._drivers.values() if d.is_quiet and (is_full or not d.remembers_end)]:
            if driver.machine.job_end.step is not None:
                newest = {**self._ended, driver.job: driver.status()}
                self._ended = dict(list(newest.items())[-ENDED_SHOWN:])
            driver.close("this job has no members any more")
            del self._drivers[driver.job]
            self._reported.discard(driver.job)
            try:
                self._memory.forget(driver.job)
            except LighthouseError as e:
                log.warning(
                    "cannot remove the inactive job %s from the journal: %s",
                    driver.job,
                    e,
                    extra=event("job_not_forgotten", job=driver.job),
                )

    def close(self, reason: str) -> None:
        """End every waiting call and every session with `reason`; refuse new ones."""
        self._closed = reason
        self.lag.stop()
        drivers, self._drivers = self._drivers, {}
        for driver in drivers.values():
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
            self._refused,
            self._ranks_kept,
            self._draw_secret,
            record.secret if record is not None else "",
            self._is_busy,
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
            log.critical("shutting down: cannot write the journal: %s", e, extra=event("journal_failed"))
            self.close(f"the lighthouse cannot write its journal: {e}")
            self._give_up(1)
            raise

    def _was_late(self, by_s: float) -> None:
        for driver in self._drivers.values():
            driver.was_late(by_s)
