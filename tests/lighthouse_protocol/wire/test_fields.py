"""Doubles and counts at the boundary: nothing infinite, nothing absurd, and the field is named."""

import math
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from lighthouse_protocol.constraints import check_age, check_count, check_seconds
from lighthouse_protocol.limits import MAX_COUNT, MAX_SECONDS
from lighthouse_protocol.pb.documented import lighthouse_pb2, manager_pb2
from lighthouse_protocol.pb.extensions import generation_pb2, incident_pb2, node_pb2, progress_pb2
from lighthouse_protocol.pb.extensions.evidence_pb2 import RankEvidence
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_protocol.wire import (
    documented,
    generation_wire,
    node_wire,
    progress_wire,
    run_status_wire,
    session_wire,
    status_wire,
    supervisor_wire,
    watch_wire,
)
from lighthouse_protocol.wire.codecs import GATHERED, INCIDENT, INCIDENT_SUMMARY, RANK_EVIDENCE

READERS: list[tuple[type[Message], Any]] = [
    (lighthouse_pb2.SessionRequest, session_wire.session_request_from_wire),
    (lighthouse_pb2.SessionResponse, session_wire.session_response_from_wire),
    (lighthouse_pb2.LighthouseStatusResponse, status_wire.lighthouse_status_from_wire),
    (lighthouse_pb2.QuorumMember, documented.participant_from_native),
    (manager_pb2.ManagerStatusResponse, status_wire.manager_status_from_wire),
    (manager_pb2.WatchRequest, watch_wire.ballot_from_wire),
    (progress_pb2.ProgressSample, progress_wire.sample_from_wire),
    (progress_pb2.GroupProgress, progress_wire.group_view_from_wire),
    (RankEvidence, RANK_EVIDENCE.read),
    (incident_pb2.Incident, INCIDENT.read),
    (incident_pb2.IncidentSummary, INCIDENT_SUMMARY.read),
    (incident_pb2.StacksResponse, GATHERED.read),
    (generation_pb2.RankRequest, generation_wire.rank_request_from_wire),
    (generation_pb2.RunsResponse, run_status_wire.runs_from_wire),
    (generation_pb2.SupervisorResponse, supervisor_wire.supervisor_response_from_wire),
    (node_pb2.NodeResponse, node_wire.node_response_from_wire),
]


def spoiled(message: Message, value: float) -> list[tuple[str, Message]]:
    """Messages like it, each with another double of it, however deep, set to `value`; and that field's name."""
    found: list[tuple[str, Message]] = []

    def walk(descriptor: Any, path: tuple[Any, ...]) -> None:
        for field in descriptor.fields:
            if field.type == FieldDescriptor.TYPE_DOUBLE:
                found.append((field.name, build(path, field)))
            elif field.type == FieldDescriptor.TYPE_MESSAGE and len(path) < 6:
                walk(field.message_type, (*path, field))

    def build(path: tuple[Any, ...], last: Any) -> Message:
        whole = type(message)()
        part: Any = whole
        for field in path:
            part = getattr(part, field.name).add() if field.is_repeated else getattr(part, field.name)
            if not field.is_repeated:
                part.SetInParent()
        setattr(part, last.name, value)
        return whole

    walk(message.DESCRIPTOR, ())
    return found


def doubles(value: object) -> list[float]:
    if isinstance(value, float):
        return [value]
    if isinstance(value, tuple | list):
        return [each for one in value for each in doubles(one)]
    if isinstance(value, dict):
        return doubles(list(value.values()))
    slots = getattr(type(value), "__slots__", ())
    return [each for name in slots if hasattr(value, name) for each in doubles(getattr(value, name))]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1.7e308, 2 * MAX_SECONDS])
@pytest.mark.parametrize(("kind", "read"), READERS, ids=lambda each: getattr(each, "__name__", ""))
def test_no_double_that_is_no_number_of_seconds_gets_past_the_wire(
    kind: type[Message], read: Any, value: float
) -> None:
    for field, message in spoiled(kind(), value):
        try:
            got = read(message)
        except (InvalidRequest, ValueError):  # ValueError: another field, which was left empty, is not readable
            continue
        assert all(math.isfinite(each) and abs(each) <= MAX_SECONDS for each in doubles(got)), field


def sample(**fields: Any) -> progress_pb2.ProgressSample:
    return progress_pb2.ProgressSample(phases=[progress_pb2.OpenPhase(name="p")], **fields)


def test_the_field_is_named() -> None:
    with pytest.raises(InvalidRequest, match="^still_s: is inf; it is a number of seconds from 0 to"):
        progress_wire.sample_from_wire(sample(still_s=math.inf))
    rank = progress_pb2.RankProgress(sample=sample(), beat_age_s=1.7e308)
    with pytest.raises(InvalidRequest, match="^beat_age_s: is 1.7e"):
        progress_wire.group_view_from_wire(progress_pb2.GroupProgress(replica_id="a", ranks=[rank]))
    status = lighthouse_pb2.LighthouseStatusResponse(jobs=[lighthouse_pb2.JobStatus(stall_s=math.inf)])
    with pytest.raises(InvalidRequest, match="^stall_s: is inf"):
        status_wire.lighthouse_status_from_wire(status)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -1.0, 1e300])
def test_lengths_of_time(value: float) -> None:
    for check in (check_age, check_seconds):
        with pytest.raises(InvalidRequest, match="^x_s: is "):
            check(value, "x_s")
    assert (check_age(0.0, "x_s"), check_seconds(1e9, "x_s")) == (0.0, 1e9)


@pytest.mark.parametrize("value", [-1, MAX_COUNT + 1, 2**63 - 2])
def test_counts_and_steps(value: int) -> None:
    with pytest.raises(InvalidRequest, match=f"^step: is {value}; it counts from 0 to {MAX_COUNT}"):
        check_count(value, "step")
    with pytest.raises(InvalidRequest, match=f"^step: is {value}; "):
        documented.participant_from_native(lighthouse_pb2.QuorumMember(replica_id="a", step=value, world_size=1))
    levels = lighthouse_pb2.Levels(
        held=lighthouse_pb2.Held(quorum_id=1, mode=lighthouse_pb2.HOLD_MODE_STANDING, granted=value)
    )
    with pytest.raises(InvalidRequest, match=f"^granted: is {value}; "):
        session_wire.session_request_from_wire(lighthouse_pb2.SessionRequest(beat=lighthouse_pb2.Beat(levels=levels)))
