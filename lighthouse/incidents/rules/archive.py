"""The newest incidents of all jobs, and their ids. No I/O.

An id is the second at which the incident was noticed, and a number where that second has another one. Evidence takes
memory: that of the newest incidents is kept, MAX_BYTES together.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from lighthouse.incidents.rules.evidence_round import size_of
from lighthouse_protocol.messages.incident import Incident, IncidentSummary
from lighthouse_protocol.refusals import UnknownName

LIMIT = 200
SHOWN = 50
MAX_BYTES = 64 * 1024 * 1024
DROPPED = "the evidence of an incident as old as this is not kept in memory"


def surplus(kept: Sequence[tuple[str, str, int]], limit: int, max_bytes: int) -> list[str]:
    """Choose the incidents to drop so that at most `limit` are left, of at most `max_bytes` together.

    Each job has an equal share: the oldest goes of the job that has most, so no job pushes out those of others.

    Args:
        kept: (id, job, bytes) of each, the oldest first.
        limit: How many are kept.
        max_bytes: How many bytes are kept. The newest incident stays, however large it is.
    """
    by_job: dict[str, list[tuple[str, int]]] = {}
    for id, job, size in kept:
        by_job.setdefault(job, []).append((id, size))
    counts = {job: len(entries) for job, entries in by_job.items()}
    sizes = {job: sum(size for _, size in entries) for job, entries in by_job.items()}
    dropped: list[str] = []
    while (is_over := sum(counts.values()) > limit) or (sum(sizes.values()) > max_bytes and sum(counts.values()) > 1):
        measure = counts if is_over else sizes
        job = max(measure, key=lambda name: measure[name])
        id, size = by_job[job].pop(0)
        counts[job] -= 1
        sizes[job] -= size
        dropped.append(id)
    return dropped


class IncidentArchive:
    def __init__(self, incidents: Iterable[Incident] = ()) -> None:
        """`incidents`: of a life before this one."""
        self._by_id: dict[str, Incident] = {}
        self._taken: set[str] = set()
        for incident in sorted(incidents, key=lambda i: (i.summary.opened_unix_s, i.id)):
            self.put(incident)

    def make_id(self, unix_s: float) -> str:
        stem = datetime.fromtimestamp(unix_s, UTC).strftime("%Y%m%d-%H%M%S")
        number = 1
        while (name := stem if number == 1 else f"{stem}-{number}") in self._taken:
            number += 1
        self._taken.add(name)
        return name

    def put(self, incident: Incident) -> None:
        """It is new, or has changed."""
        self._by_id[incident.id] = incident
        self._taken.add(incident.id)
        if len(self._by_id) > LIMIT:
            every = [(each.id, each.summary.job, 0) for each in self._by_id.values()]
            for id in surplus(every, LIMIT, 0):
                del self._by_id[id]
                self._taken.discard(id)
        if incident.evidence:
            self._save_memory()

    def find(self, id: str) -> Incident | None:
        return self._by_id.get(id)

    def get(self, id: str) -> Incident:
        """Raises UnknownName."""
        incident = self._by_id.get(id)
        if incident is None:
            newest = ", ".join(summary.id for summary in self.summaries()[:8]) or "none"
            raise UnknownName(f"no incident {id!r}; the newest: {newest}")
        return incident

    def summaries(self, job: str = "") -> tuple[IncidentSummary, ...]:
        """Of `job`, or of every one, the newest first."""
        newest = reversed(self._by_id.values())
        return tuple(incident.summary for incident in newest if job in ("", incident.summary.job))

    def _save_memory(self) -> None:
        left = MAX_BYTES
        for incident in reversed(tuple(self._by_id.values())):
            left -= sum(size_of(one.rank) for one in incident.evidence)
            if left < 0 and incident.evidence:
                self._by_id[incident.id] = replace(incident, evidence=(), missing=(*incident.missing, DROPPED))
