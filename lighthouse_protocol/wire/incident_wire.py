"""To and from the messages of incident.proto. Readers raise InvalidRequest naming the field."""

from collections.abc import Iterable, Sequence
from typing import Any

from lighthouse_protocol.messages.incident import Gathered, Incident, IncidentKind, IncidentSummary, MemberEvidence
from lighthouse_protocol.pb.extensions import incident_pb2 as pb
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_protocol.wire import evidence_wire
from lighthouse_protocol.wire.doubles_wire import check_doubles

_OPTIONAL = ("evidence_s", "acted_s", "quorum_s", "step_s", "over_s")
_PLAIN = ("id", "job", "text", "opened_unix_s", "noticed_s", "action", "quorum_id")


def summary_to_wire(summary: IncidentSummary) -> pb.IncidentSummary:
    fields = {name: getattr(summary, name) for name in (*_PLAIN, *_OPTIONAL)}
    return pb.IncidentSummary(**fields, kind=summary.kind.value, suspects=summary.suspects)


def summary_from_wire(message: pb.IncidentSummary) -> IncidentSummary:
    try:
        kind = IncidentKind(message.kind)
    except ValueError:
        known = ", ".join(IncidentKind)
        raise InvalidRequest(f"is {message.kind!r}; this version knows {known}", field="kind") from None
    check_doubles(message)
    told: dict[str, Any] = {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}
    plain: dict[str, Any] = {name: getattr(message, name) for name in _PLAIN}
    return IncidentSummary(**plain, **told, kind=kind, suspects=tuple(message.suspects))


def incident_to_wire(incident: Incident) -> pb.IncidentResponse:
    evidence = evidence_to_wire(incident.evidence)
    summary = summary_to_wire(incident.summary)
    return pb.IncidentResponse(incident=pb.Incident(summary=summary, evidence=evidence, missing=incident.missing))


def incident_from_wire(message: pb.IncidentResponse) -> Incident:
    incident = message.incident
    evidence = tuple(map(_evidence_from_wire, incident.evidence))
    return Incident(summary_from_wire(incident.summary), evidence, tuple(incident.missing))


def incidents_to_wire(incidents: Iterable[IncidentSummary]) -> pb.IncidentsResponse:
    return pb.IncidentsResponse(incidents=map(summary_to_wire, incidents))


def incidents_from_wire(message: pb.IncidentsResponse) -> tuple[IncidentSummary, ...]:
    return tuple(map(summary_from_wire, message.incidents))


def gathered_to_wire(gathered: Gathered) -> pb.StacksResponse:
    return pb.StacksResponse(evidence=evidence_to_wire(gathered.evidence), missing=gathered.missing)


def gathered_from_wire(message: pb.StacksResponse) -> Gathered:
    return Gathered(tuple(map(_evidence_from_wire, message.evidence)), tuple(message.missing))


def evidence_to_wire(evidence: Sequence[MemberEvidence]) -> list[pb.MemberEvidence]:
    return [
        pb.MemberEvidence(replica_id=one.replica_id, rank=evidence_wire.evidence_to_wire(one.rank)) for one in evidence
    ]


def _evidence_from_wire(message: pb.MemberEvidence) -> MemberEvidence:
    return MemberEvidence(message.replica_id, evidence_wire.evidence_from_wire(message.rank))
