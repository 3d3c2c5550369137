"""to_wire / from_wire between status.py and the messages."""

from collections.abc import Iterable
from typing import Any

from protos import lighthouse_pb2, manager_pb2
from protos.status import JobStatus, LighthouseStatus, ManagerStatus, MemberState, MemberStatus


def lighthouse_status_to_wire(status: LighthouseStatus) -> lighthouse_pb2.LighthouseStatusResponse:
    return lighthouse_pb2.LighthouseStatusResponse(
        version=status.version,
        uptime_s=status.uptime_s,
        jobs=[_job_to_wire(job) for job in status.jobs],
    )


def _job_to_wire(job: JobStatus) -> lighthouse_pb2.JobStatus:
    members = [lighthouse_pb2.MemberStatus(**_fields(member)) for member in job.members]
    return lighthouse_pb2.JobStatus(**_fields(job, but=("members",)), members=members)


def lighthouse_status_from_wire(message: lighthouse_pb2.LighthouseStatusResponse) -> LighthouseStatus:
    return LighthouseStatus(message.version, message.uptime_s, tuple(_job_from_wire(job) for job in message.jobs))


def _job_from_wire(job: lighthouse_pb2.JobStatus) -> JobStatus:
    members = tuple(
        MemberStatus(**_fields(member, names=MemberStatus.__slots__, instead={"state": MemberState(member.state)}))
        for member in job.members
    )
    names = [name for name in JobStatus.__slots__ if name != "members"]
    return JobStatus(**_fields(job, names=names), members=members)


def manager_status_to_wire(status: ManagerStatus) -> manager_pb2.ManagerStatusResponse:
    return manager_pb2.ManagerStatusResponse(**_fields(status))


def manager_status_from_wire(message: manager_pb2.ManagerStatusResponse) -> ManagerStatus:
    waiting = {"ranks_waiting": tuple(message.ranks_waiting)}
    return ManagerStatus(**_fields(message, names=ManagerStatus.__slots__, instead=waiting))


def _fields(
    source: object, *, names: Iterable[str] = (), but: tuple[str, ...] = (), instead: dict[str, Any] | None = None
) -> dict[str, Any]:
    chosen = names or getattr(type(source), "__slots__", ())
    return {name: getattr(source, name) for name in chosen if name not in but} | (instead or {})
