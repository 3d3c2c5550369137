"""The compiled codecs: names must agree, refusals name the field, and no bytes break a reader."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st

from lighthouse_protocol.messages.evidence import RankEvidence
from lighthouse_protocol.pb.documented import lighthouse_pb2
from lighthouse_protocol.pb.extensions import evidence_pb2, incident_pb2
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_protocol.wire.codec import Codec, compiled
from lighthouse_protocol.wire.codecs import GATHERED, INCIDENT, INCIDENT_SUMMARY, RANK_EVIDENCE, WORLD

CODECS: list[tuple[type[Message], Codec[Any, Any]]] = [
    (lighthouse_pb2.World, WORLD),
    (evidence_pb2.RankEvidence, RANK_EVIDENCE),
    (incident_pb2.IncidentSummary, INCIDENT_SUMMARY),
    (incident_pb2.Incident, INCIDENT),
    (incident_pb2.StacksResponse, GATHERED),
]


@dataclass(frozen=True, slots=True)
class Renamed:
    replica_id: str
    rank_of_group: RankEvidence


def test_names_that_differ_are_refused_at_import():
    with pytest.raises(TypeError, match=r"Renamed and lighthouse\.v1\.MemberEvidence differ in rank, rank_of_group"):
        compiled(Renamed, incident_pb2.MemberEvidence)


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"group_rank": 65536}, "group_rank: is 65536"),
        ({"worker": "w" * 513}, "worker: has 513 characters"),
        ({"pid": -1}, "pid: is -1"),
        ({"took_s": -0.5}, "took_s: is -0.5"),
    ],
)
def test_a_refusal_names_the_field_however_deep(fields: dict[str, Any], refusal: str):
    member = incident_pb2.MemberEvidence(replica_id="a", rank=evidence_pb2.RankEvidence(**fields))
    with pytest.raises(InvalidRequest, match=f"^{refusal}"):
        GATHERED.read(incident_pb2.StacksResponse(evidence=[member]))


@pytest.mark.parametrize(("kind", "codec"), CODECS, ids=lambda each: getattr(each, "__name__", ""))
@given(raw=st.binary(max_size=64))
def test_of_any_bytes_a_message_is_read_or_refused(kind: type[Message], codec: Codec[Any, Any], raw: bytes):
    with suppress(DecodeError, InvalidRequest):
        message = codec.read(kind.FromString(raw))
        assert codec.read(codec.write(message)) == message


@pytest.mark.parametrize(("kind", "codec"), CODECS, ids=lambda each: getattr(each, "__name__", ""))
def test_an_unknown_field_is_skipped(kind: type[Message], codec: Codec[Any, Any]):
    unknown = b"\xf8\x3f\x01"  # field 1023, a varint
    with suppress(InvalidRequest):
        assert codec.read(kind.FromString(unknown)) == codec.read(kind())
