"""Statuses there and back."""

from dataclasses import replace

from lighthouse_protocol.messages.incident import IncidentKind, IncidentSummary
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
from lighthouse_protocol.pb.extensions import incident_pb2
from lighthouse_protocol.wire.status_wire import (
    lighthouse_status_from_wire,
    lighthouse_status_to_wire,
    manager_status_from_wire,
    manager_status_to_wire,
)


def test_of_the_lighthouse_there_and_back():
    member = MemberStatus("a", "i1", MemberState.STRAGGLER, True, 3, 2, 1.5, 1, "h:1", "h:2")
    job = JobStatus("j", 4, 2.5, "formed", "3 train", 1, 9, (member, replace(member, state=MemberState.EXPIRED)))
    rank = RankPlace("a", 1, RankState.BEHIND, 3, "v", 0, 0, 1.5, "all_reduce", True, "x", 0.5, 2.5, 60.0, "h", 7)
    ranks = rank, replace(rank, total=None, state=RankState.LOST)
    timeline = (
        TimelineEntry(9.5, TimelineKind.LOST, ("a", "b"), 3, "silent"),
        TimelineEntry(9, TimelineKind.MOVES, (), 0, ""),
    )
    incidents = (IncidentSummary("20251122-101501", "j", IncidentKind.STALL, "a/1", ("a/1",), 9.5, 61.5, step_s=0.0),)
    stalled = replace(job, ranks=ranks, stall="a/1", stall_s=61.5, timeline=timeline, incidents=incidents)
    status = LighthouseStatus("1.0", 12.5, (stalled, replace(job, job="k", members=())))
    assert lighthouse_status_from_wire(lighthouse_status_to_wire(status)) == status


def test_of_the_manager_there_and_back():
    status = ManagerStatus("1", 2.5, "a", "i1", "j", 2, "h:1", "h:2", "l:1", True, "", 4, 5, "idle", (0, 1), 6, 7)
    assert manager_status_from_wire(manager_status_to_wire(status)) == status


def test_the_messages_have_the_fields_of_the_classes():
    for cls, message in (
        (MemberStatus, lighthouse_pb2.MemberStatus),
        (JobStatus, lighthouse_pb2.JobStatus),
        (RankPlace, lighthouse_pb2.RankPlace),
        (TimelineEntry, lighthouse_pb2.TimelineEntry),
        (IncidentSummary, incident_pb2.IncidentSummary),
        (LighthouseStatus, lighthouse_pb2.LighthouseStatusResponse),
        (ManagerStatus, manager_pb2.ManagerStatusResponse),
    ):
        assert [f.name for f in message.DESCRIPTOR.fields] == list(cls.__slots__)
