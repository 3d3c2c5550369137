"""What the incidents of all jobs share: the policy, the archive, its files, the times that a scrape shows."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from lighthouse.incidents.durations import IncidentTimes
from lighthouse.incidents.rules.archive import SHOWN, IncidentArchive
from lighthouse.incidents.rules.policy import OnStall
from lighthouse_protocol.messages.incident import Incident, IncidentSummary


class IncidentStore(Protocol):
    """Where incidents are filed (files.py)."""

    def load(self) -> Iterable[Incident]: ...

    def save(self, incident: Incident) -> None:
        """Does not wait."""
        ...

    def close(self) -> None: ...


def _no_runs(job: str, reason: str, requested_by: str) -> Iterable[str]:
    return ()


def _restart_none(job: str, name: str, ranks: Collection[int], reason: str) -> bool:
    return False


@dataclass(slots=True)
class IncidentRegistry:
    """`stop_runs(job, reason, requested_by)` stops the runs of a job and returns their names. `restart_ranks(job, name,
    ranks, reason)` has ranks that are behind, and all that run with them, run their function again: where a Wrapper
    runs it; else it returns False."""

    policy: OnStall = OnStall.NOTIFY
    files: IncidentStore | None = None
    stop_runs: Callable[[str, str, str], Iterable[str]] = _no_runs
    restart_ranks: Callable[[str, str, Collection[int], str], bool] = _restart_none
    archive: IncidentArchive = field(default_factory=IncidentArchive)
    times: IncidentTimes = field(default_factory=IncidentTimes)

    def load(self) -> None:
        """What an earlier lighthouse has filed; blocking, and before any job."""
        if self.files is not None:
            self.archive = IncidentArchive(self.files.load())

    def opened(self, incident: Incident) -> None:
        summary = incident.summary
        self.times.began(summary.job, summary.kind)
        self.times.detected(summary.job, summary.kind, summary.noticed_s)
        self.keep(incident)

    def recovered(self, incident: Incident) -> None:
        summary = incident.summary
        self.times.recovered(summary.job, summary.kind, summary.step_s or 0.0)
        self.keep(incident)

    def keep(self, incident: Incident) -> None:
        self.archive.put(incident)
        if self.files is not None:
            self.files.save(incident)

    def make_id(self, unix_s: float) -> str:
        return self.archive.make_id(unix_s)

    def report(self, incident: Incident) -> None:
        """An incident of a run, which is followed elsewhere, is new or has changed."""
        before, after_s = self.archive.find(incident.id), incident.summary.step_s
        if before is None:
            self.times.began(incident.summary.job, incident.summary.kind)
        if after_s is not None and (before is None or before.summary.step_s is None):
            self.recovered(incident)
        else:
            self.keep(incident)

    def newest(self, job: str) -> tuple[IncidentSummary, ...]:
        """Of the job, the newest first."""
        return self.archive.summaries(job)[:SHOWN]

    def close(self) -> None:
        """Blocking, for a moment."""
        if self.files is not None:
            self.files.close()
