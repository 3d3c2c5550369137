"""What the compiled codecs are made from: names must agree, and refusals name the field, however deep."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pytest

from lighthouse_protocol.messages.incident import EvidenceAsked, RankEvidence
from lighthouse_protocol.messages.session import Killed, RankGone
from lighthouse_protocol.pb.documented import lighthouse_pb2, manager_pb2
from lighthouse_protocol.pb.extensions import evidence_pb2, incident_pb2
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_protocol.wire.codec import GATHERED, Oneof, compiled


class Half(StrEnum):
    STANDING = "standing"


@dataclass(frozen=True, slots=True)
class Renamed:
    replica_id: str
    rank_of_group: RankEvidence


@dataclass(frozen=True, slots=True)
class OtherMessage:
    replica_id: str
    rank: Killed


@dataclass(frozen=True, slots=True)
class OtherEnum:
    quorum_id: int
    mode: Half
    granted: int
    wants_next: bool


@pytest.mark.parametrize(
    ("cls", "schema", "refusal"),
    [
        (Renamed, incident_pb2.MemberEvidence, r"Renamed and \S*MemberEvidence differ in rank, rank_of_group"),
        (OtherMessage, incident_pb2.MemberEvidence, r"MemberEvidence\.rank is RankEvidence, not Killed"),
        (OtherEnum, lighthouse_pb2.HeldQuorum, r"Half and \S*HoldState differ in JOINING, LEAVING, RECALLED, RE"),
    ],
)
def test_what_differs_from_its_schema_is_refused_at_import(cls: type[Any], schema: Any, refusal: str):
    with pytest.raises(TypeError, match=refusal):
        compiled(cls, schema)


def test_so_is_a_stream_whose_messages_differ():
    [oneof] = manager_pb2.WatchResponse.DESCRIPTOR.oneofs
    with pytest.raises(
        TypeError,
        match=r"WatchResponse\.message and its classes differ in "
        r"FaultOrder, PreemptionChanged, Released, Revoked, VoteAnswer",
    ):
        Oneof(Killed | RankGone | EvidenceAsked, oneof)


def test_a_refusal_names_the_field_however_deep():
    member = incident_pb2.MemberEvidence(replica_id="a", rank=evidence_pb2.RankEvidence(took_s=-0.5))
    with pytest.raises(InvalidRequest, match=r"^took_s: is -0\.5"):
        GATHERED.read(incident_pb2.StacksResponse(evidence=[member]))
