"""Registries that hold the drivers of all jobs and runs.

A driver is created on first use and dropped when its job or run is quiet. Its record stays in the store, and a new
driver continues from it. After `close`, the registries refuse new work until the store has been claimed again.
"""

import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from lighthouse.job.driver import JobDriver
from lighthouse.job.forming import END_KEPT_S, QuorumMachine
from lighthouse.job.incident_driver import IncidentRegistry
from lighthouse.job.log import NAMES_LOGGED
from lighthouse.job.records import Membership, QuorumConfig, QuorumRecord, RunConfig, RunName, RunRecord, SavedRun
from lighthouse.job.restarts import RunMachine
from lighthouse.job.run_driver import Ports, RunDriver
from lighthouse.job.status import saved_run_status
from lighthouse.job.store import MemoryStore, RecordStore
from lighthouse_protocol.identity import check_name
from lighthouse_protocol.messages.incident import Incident, RankEvidence
from lighthouse_protocol.messages.run import RunStatus
from lighthouse_protocol.messages.status import JobStatus
from lighthouse_protocol.refusals import LighthouseError, LimitReached, UnknownName, Unreachable
from lighthouse_protocol.rules.stall import Limits
from lighthouse_runtime.log_event import event
from lighthouse_runtime.timing.timers import LoopLag

log = logging.getLogger(__name__)


MAX_JOBS = 1000
# Any process can send heartbeats under any name, so jobs known only from heartbeats have a separate limit.
MAX_REPORTED_JOBS = 200
ENDED_SHOWN = 16
FORGOTTEN_AT_ONCE = 16  # unused records; each removal is a write
QUIET_LOOKED_FOR_EVERY_S = 1.0


class JobRegistry:
    """The drivers of all jobs. Creates a job's driver on first use, and drops the drivers of quiet jobs."""

    def __init__(
        self,
        config: QuorumConfig,
        ports: Ports,
        memory: RecordStore | None = None,
        give_up: Callable[[int], None] = lambda status: None,
        incident_registry: IncidentRegistry | None = None,
        rank_timeout_s: float = 30.0,
    ) -> None:
        """Create an empty registry.

        Args:
            config: Settings for every job, apart from the first quorum_id.
            ports: Ports for the drivers. The registry replaces `check_lag` and `guarded` with its own functions.
            memory: Record store, which must be claimed before the first job is used, or None for an in-memory store.
            give_up: Function that shuts down the daemon with an exit status.
            incident_registry: Incidents of all jobs, or None to begin without any.
            rank_timeout_s: A rank without a stream is lost this many seconds after its last message.
        """
        self._config = config
        self.store = memory or MemoryStore()
        self._give_up = give_up
        self.incidents = incident_registry or IncidentRegistry()
        self._started_at: float | None = None
        self._records: dict[str, QuorumRecord] = {}  # of jobs without a driver so far
        self._drivers: dict[str, JobDriver] = {}
        self._reported: set[str] = set()
        self._ended: dict[str, JobStatus] = {}
        self._looked_at = -QUIET_LOOKED_FOR_EVERY_S
        self.closed = ""
        """Why the registry refuses new work. Empty while it accepts work."""
        self.lag = LoopLag(ports.timers)
        self.lag.listen(self._handle_pause)
        self.ports = replace(ports, check_lag=self.lag.check, guarded=self.guarded)
        self.runs = RunRegistry(self, rank_timeout_s)

    def load_records(self, records: Mapping[str, QuorumRecord]) -> None:
        """Load the claimed store's quorum records, by job, and begin or resume accepting work.

        This counts as the start of the lighthouse: members may hold an earlier lighthouse's quorums for one more lease.
        """
        self._records = dict(records)
        self._started_at = self.ports.timers.time()
        if self.closed:
            self.closed = ""
            self._reported.clear()
            self._ended.clear()
            self.lag.restart()
            self.runs.reset()

    def __iter__(self) -> Iterator[JobDriver]:
        return iter(self._drivers.values())

    def get_job(self, job: str) -> JobDriver:
        """Return the driver of a job, creating it if needed.

        Raises:
            LighthouseError: The name is invalid, there are too many jobs, or the lighthouse is closing.
        """
        driver = self._find_valid(job)
        if driver is not None and job not in self._reported:
            return driver
        if self._is_full(lambda: len(self._drivers) - len(self._reported), MAX_JOBS):
            raise LimitReached(f"job: {job} would be number {MAX_JOBS + 1}; the lighthouse takes {MAX_JOBS} at once")
        self._reported.discard(job)
        return self._drivers.get(job) or self._add_job(job)

    def get_reported(self, job: str) -> JobDriver:
        """Return the driver for a heartbeat without a session, creating it if needed. Raise the errors of `get_job`.

        Jobs that are known only from such heartbeats have their own limit, MAX_REPORTED_JOBS.
        """
        driver = self._find_valid(job)
        if driver is not None:
            return driver
        if self._is_full(lambda: len(self._reported), MAX_REPORTED_JOBS):
            raise LimitReached(
                f"job: {job} has only sent heartbeats, as {MAX_REPORTED_JOBS} other jobs have; request a quorum for it"
            )
        driver = self._add_job(job)
        self._reported.add(job)
        return driver

    def _find_valid(self, job: str) -> JobDriver | None:
        if self.closed:
            raise Unreachable(self.closed)
        driver = self._drivers.get(job)
        if driver is None:
            check_name(job, "job")
        return driver

    def ended_jobs(self, job: str) -> tuple[JobStatus, ...]:
        """Return the last status of each recently ended job without a driver, or only of `job` if it is not empty."""
        return tuple(last for name, last in self._ended.items() if name not in self._drivers and job in ("", name))

    def _is_full(self, count: Callable[[], int], limit: int) -> bool:
        """Return whether `count()` has reached the limit, even after quiet jobs have been dropped.

        Dropping takes O(n) time, so it runs at most once per QUIET_LOOKED_FOR_EVERY_S.
        """
        now = self.ports.timers.time()
        if count() >= limit and now - self._looked_at >= QUIET_LOOKED_FOR_EVERY_S:
            self._looked_at = now
            self.forget_quiet(is_full=True)
        return count() >= limit

    def _add_job(self, job: str) -> JobDriver:
        driver = self._drivers[job] = self._make_driver(job)
        return driver

    def record_run_incident(self, incident: Incident) -> None:
        self.incidents.record_of_run(incident)

    def handle_run_message(self, job: str) -> None:
        self.get_job(job).handle_run_message()

    def membership(self, job: str, replica_id: str, digest: str) -> Membership:
        driver = self._add_job(job) if job in self._records and not self.closed else self._drivers.get(job)
        return Membership.OPEN if driver is None else driver.machine.presence.membership(replica_id, digest)

    def report_exit(self, job: str, replica_id: str, reason: str, evidence: RankEvidence) -> bool:
        driver = self._drivers.get(job)
        return driver is not None and driver.incidents.handle_exit(replica_id, reason, evidence)

    def peek(self, job: str) -> JobDriver | None:
        """Return the job's driver, or None if the job has no driver. Never create one."""
        return self._drivers.get(job)

    def find_job(self, job: str) -> JobDriver:
        """Return the driver of a job. Raise UnknownName if there is none, because no group has joined the job."""
        driver = self._drivers.get(check_name(job, "job"))
        if driver is None:
            known = ", ".join(sorted(self._drivers)[:NAMES_LOGGED]) or "none"
            raise UnknownName(f"job: no replica group has asked for a quorum of {job!r}; known jobs: {known}")
        return driver

    def take_samples(self) -> None:
        """Drop quiet jobs and runs, and sample the progress of the other jobs. Call this every progress.EVERY_S."""
        self.runs.forget_quiet()
        self.forget_quiet()
        for driver in self:
            driver.take_sample()

    def forget_quiet(self, *, is_full: bool = False) -> None:
        """Drop the drivers of quiet jobs, which have no groups, calls, sessions or ranks.

        After END_KEPT_S, also remove the records of jobs that have not been used since this lighthouse started.
        A record that cannot be removed from the store remains there, which is harmless. Ended jobs are kept, so that
        late groups can be refused, unless `is_full` (a limit on jobs has been reached).
        """
        for driver in [d for d in self._drivers.values() if d.is_quiet and (is_full or not d.should_remember_end)]:
            if driver.machine.job_end.step is not None:
                newest = {**self._ended, driver.job: driver.status()}
                self._ended = dict(list(newest.items())[-ENDED_SHOWN:])
            driver.close("this job has no members any more")
            del self._drivers[driver.job]
            self._reported.discard(driver.job)
            self._forget_record(driver.job)
        if self._started_at is not None and self.ports.timers.time() >= self._started_at + END_KEPT_S:
            for job in list(self._records)[:FORGOTTEN_AT_ONCE]:  # unused since the records were loaded
                if self._records.pop(job).quorum is not None:
                    self._forget_record(job)

    def _forget_record(self, job: str) -> None:
        try:
            self.store.forget(job)
        except LighthouseError as e:
            extra = event("job_not_forgotten", job=job)
            log.warning("cannot remove the inactive job %s from the journal: %s", job, e, extra=extra)

    def close(self, reason: str) -> None:
        """Refuse all pending calls, close all streams with `reason`, and refuse all new calls and streams."""
        self.runs.write_notes()
        self.drop_all(reason)

    def drop_all(self, reason: str) -> None:
        """Do the same as `close`, but write nothing, because this lighthouse no longer owns the store."""
        self._close_jobs(reason)
        self.runs.drop_all_runs(reason)

    # -- internals

    def _close_jobs(self, reason: str) -> None:
        self.closed = reason
        self.lag.stop()
        drivers, self._drivers, self._records = self._drivers, {}, {}
        for driver in drivers.values():
            driver.close(reason)

    def _make_driver(self, job: str) -> JobDriver:
        self.lag.watch()
        last_id = self.store.last_id(job)
        # Above every id that an earlier lighthouse may have assigned to this job, even if the journal was lost.
        config = replace(self._config, first_quorum_id=max(last_id + 1, int(self.ports.wall() * 1000)))
        record = self._records.pop(job, None)
        until = None
        if self._started_at is not None:
            until = self._started_at + max(config.lease_s, record.lease_s if record is not None else 0.0)
            until = until if until > self.ports.timers.time() or (record and record.stands) else None
        if record is not None and record.lease_s < config.lease_s:
            record = replace(record, lease_s=config.lease_s)  # the first welcome already promises this lease
            with self.guarded():
                self.store.commit(job, record)
        machine = QuorumMachine(config, record=record, holders_until=until)
        return JobDriver(
            job,
            machine,
            self.ports,
            self.incidents,
            self.store,
            lambda: self.runs.runs_of_job(job),
            record.secret if record is not None else "",
        )

    @contextmanager
    def guarded(self) -> Generator[None, None, None]:
        """Shut down the daemon if a write inside the `with` block fails: it must not send what it could not store."""
        try:
            yield
        except LighthouseError as e:
            log.critical("shutting down: cannot write the journal: %s", e, extra=event("journal_failed"))
            self._close_jobs(f"the lighthouse cannot write its journal: {e}")
            self._give_up(1)
            raise

    def _handle_pause(self, by_s: float) -> None:
        for driver in self._drivers.values():
            driver.handle_pause(by_s)


MAX_RUNS = 1000
SAVED_SHOWN = 32  # number of runs without processes in a status


class RunRegistry:
    """The drivers of all runs. Creates a run's driver on first use, and drops the drivers of quiet runs."""

    def __init__(self, jobs: JobRegistry, rank_timeout_s: float) -> None:
        """Create an empty registry.

        Args:
            jobs: Registry of the jobs. Its store must be claimed before the first run is used.
            rank_timeout_s: A rank without a stream is lost this many seconds after its last message.
        """
        self.jobs = jobs
        self._store = jobs.store
        self._rank_timeout_s = rank_timeout_s
        jobs.lag.listen(self._handle_pause)
        self._drivers: dict[RunName, RunDriver] = {}
        self._began_at: float | None = None  # when the first run was served
        self._stopped: dict[RunName, RunStatus] = {}

    def __iter__(self) -> Iterator[RunDriver]:
        return iter(self._drivers.values())

    def get_run_driver(self, job: str, run: str) -> RunDriver:
        """Return the driver of a run, creating it if needed.

        Raises:
            LighthouseError: A name is invalid, there are too many runs, or the lighthouse is closing.
        """
        if self.jobs.closed:
            raise Unreachable(self.jobs.closed)
        name = check_name(job, "job"), check_name(run, "run")
        driver = self._drivers.get(name)
        if driver is None:
            self.forget_quiet()
            if len(self._drivers) >= MAX_RUNS:
                raise LimitReached(
                    f"run: {run} would be number {MAX_RUNS + 1}; the lighthouse takes {MAX_RUNS} at once"
                )
            driver = self._drivers[name] = self._make_run_driver(name)
        return driver

    def has_processes(self, job: str, run: str) -> bool:
        """Return whether the run has connected processes."""
        return (job, run) in self._drivers

    def runs_of_job(self, job: str) -> list[RunDriver]:
        """Return the drivers of the job's runs that have processes."""
        return [driver for driver in self if driver.name[0] == job]

    def find_run_driver(self, job: str, run: str) -> RunDriver:
        """Return the driver of a run. Raise UnknownName if the run never had a process."""
        name = check_name(job, "job"), check_name(run, "run")
        if name not in self._drivers and self._store.load_run(name) is None:
            known = ", ".join(sorted(other for at, other in self._run_names() if at == job)[:NAMES_LOGGED]) or "none"
            raise UnknownName(f"job {job!r} has no run {run!r}; known runs: {known}")
        return self.get_run_driver(job, run)

    def run_statuses(self, job: str = "", run: str = "") -> tuple[RunStatus, ...]:
        """Return the status of one run, all runs of a job, or all runs. Include stored runs without processes."""
        self.forget_quiet()
        names = [(job, run)] if run else [name for name in self._run_names() if not job or name[0] == job]
        found = [self._load_status(name) for name in names]
        return tuple(status for status in found if status is not None)

    def live_status(self, job: str = "") -> tuple[RunStatus, ...]:
        """Return the status of all runs with processes, or only of the runs of `job` if it is not empty."""
        self.forget_quiet()
        return tuple(driver.status() for driver in self if job in ("", driver.name[0]))

    def stopped_status(self) -> tuple[RunStatus, ...]:
        """Return the last status of stopped runs whose processes have exited, ending with the newest."""
        return tuple(self._stopped.values())

    def forget_quiet(self) -> None:
        for driver in [driver for driver in self if driver.is_quiet]:
            driver.write_notes()
            if driver.machine.stop is not None:
                self._stopped[driver.name] = driver.status()
            driver.close("this run has no members any more")
            del self._drivers[driver.name]
        while len(self._stopped) > SAVED_SHOWN:
            del self._stopped[next(iter(self._stopped))]

    def write_notes(self) -> None:
        for driver in self:
            driver.write_notes()

    def drop_all_runs(self, reason: str) -> None:
        """Close every stream with `reason`, without writing to the store."""
        drivers, self._drivers = self._drivers, {}
        for driver in drivers.values():
            driver.close(reason)

    def reset(self) -> None:
        """Discard cached state, because the store has been claimed again."""
        self._stopped.clear()
        self._began_at = None

    # -- internals

    def _make_run_driver(self, name: RunName) -> RunDriver:
        self.jobs.lag.watch()
        self._stopped.pop(name, None)
        now = self.jobs.ports.timers.time()
        self._began_at = now if self._began_at is None else self._began_at
        saved = self._store.load_run(name) or SavedRun(RunRecord())
        jobs, limits = self.jobs, Limits(self.jobs.ports.stall_after_s)
        config = RunConfig(self._rank_timeout_s, wall_offset_s=jobs.ports.wall() - now, run=name[1], limits=limits)
        machine = RunMachine(
            config,
            record=saved.record,
            keys=saved.keys,
            now=now,
            make_id=jobs.incidents.archive.make_id,
            began_at=self._began_at,
        )
        return RunDriver(name, machine, self._store, jobs.ports, jobs)

    def _run_names(self) -> list[RunName]:
        return sorted({*self._store.run_names(SAVED_SHOWN), *self._drivers})

    def _load_status(self, name: RunName) -> RunStatus | None:
        if (driver := self._drivers.get(name)) is not None:
            return driver.status()
        saved = self._store.load_run(name)
        return None if saved is None else saved_run_status(name, saved)

    def _handle_pause(self, by_s: float) -> None:
        for driver in self:
            driver.handle_pause(by_s)
