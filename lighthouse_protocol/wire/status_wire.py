"""to_wire / from_wire between status.py and the messages."""

from collections.abc import Iterable
from typing import Any

from lighthouse_protocol.messages.status import (
    JobStatus,
    LighthouseStatus,
    ManagerStatus,
    MemberState,
    MemberStatus,
    RankPlace,
    RankState,
    TimelineEntry,
    TimelineKind,
)
from lighthouse_protocol.pb.documented import lighthouse_pb2, manager_pb2
from lighthouse_protocol.wire.codecs import INCIDENT_SUMMARY
from lighthouse_protocol.wire.doubles_wire import check_doubles

_PARTS = ("members", "ranks", "timeline", "incidents")


def lighthouse_status_to_wire(status: LighthouseStatus) -> lighthouse_pb2.LighthouseStatusResponse:
    return lighthouse_pb2.LighthouseStatusResponse(
        version=status.version,
        uptime_s=status.uptime_s,
        jobs=[_job_to_wire(job) for job in status.jobs],
    )


def _job_to_wire(job: JobStatus) -> lighthouse_pb2.JobStatus:
    members = [lighthouse_pb2.MemberStatus(**_fields(member)) for member in job.members]
    ranks = [lighthouse_pb2.RankPlace(**_fields(rank)) for rank in job.ranks]
    timeline = [lighthouse_pb2.TimelineEntry(**_fields(entry)) for entry in job.timeline]
    incidents = list(map(INCIDENT_SUMMARY.write, job.incidents))
    rest = _fields(job, but=_PARTS)
    return lighthouse_pb2.JobStatus(**rest, members=members, ranks=ranks, timeline=timeline, incidents=incidents)


def lighthouse_status_from_wire(message: lighthouse_pb2.LighthouseStatusResponse) -> LighthouseStatus:
    check_doubles(message)
    return LighthouseStatus(message.version, message.uptime_s, tuple(_job_from_wire(job) for job in message.jobs))


def _job_from_wire(job: lighthouse_pb2.JobStatus) -> JobStatus:
    members = tuple(
        MemberStatus(**_fields(member, names=MemberStatus.__slots__, instead={"state": MemberState(member.state)}))
        for member in job.members
    )
    ranks, timeline = tuple(map(_place_from_wire, job.ranks)), tuple(map(_entry_from_wire, job.timeline))
    names = [name for name in JobStatus.__slots__ if name not in _PARTS]
    parts: dict[str, Any] = {"members": members, "ranks": ranks, "timeline": timeline}
    incidents = tuple(map(INCIDENT_SUMMARY.read, job.incidents))
    return JobStatus(**_fields(job, names=names), **parts, incidents=incidents)


def _place_from_wire(rank: lighthouse_pb2.RankPlace) -> RankPlace:
    instead = {"state": RankState(rank.state), "total": rank.total if rank.HasField("total") else None}
    return RankPlace(**_fields(rank, names=RankPlace.__slots__, instead=instead))


def _entry_from_wire(entry: lighthouse_pb2.TimelineEntry) -> TimelineEntry:
    instead = {"kind": TimelineKind(entry.kind), "replica_ids": tuple(entry.replica_ids)}
    return TimelineEntry(**_fields(entry, names=TimelineEntry.__slots__, instead=instead))


def manager_status_to_wire(status: ManagerStatus) -> manager_pb2.ManagerStatusResponse:
    return manager_pb2.ManagerStatusResponse(**_fields(status))


def manager_status_from_wire(message: manager_pb2.ManagerStatusResponse) -> ManagerStatus:
    check_doubles(message)
    waiting = {"ranks_waiting": tuple(message.ranks_waiting)}
    return ManagerStatus(**_fields(message, names=ManagerStatus.__slots__, instead=waiting))


def _fields(
    source: object, *, names: Iterable[str] = (), but: tuple[str, ...] = (), instead: dict[str, Any] | None = None
) -> dict[str, Any]:
    chosen = names or getattr(type(source), "__slots__", ())
    return {name: getattr(source, name) for name in chosen if name not in but} | (instead or {})
