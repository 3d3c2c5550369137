"""What the supervisors of a group's hosts say to each other, to the wire and back."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lighthouse_protocol.limits import cut_reason
from lighthouse_protocol.messages.evidence import ProcessSnapshot
from lighthouse_protocol.messages.hosts import (
    FromHost,
    GroupEnded,
    HaltRanks,
    HostCheckFailed,
    HostEndAsked,
    HostHeartbeat,
    HostHello,
    HostRankEnded,
    HostWelcome,
    ProbeRequest,
    ProbeResult,
    StartRanks,
    ToHost,
)
from lighthouse_protocol.messages.session import EvidenceOffer
from lighthouse_protocol.pb.extensions import node_pb2 as pb
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_protocol.wire.node_wire import (
    node_request_from_wire,
    node_request_to_wire,
    node_response_from_wire,
    node_response_to_wire,
)

NAMES = st.text("abc/-", min_size=1, max_size=20)
TEXTS = st.text(max_size=50).map(cut_reason)
RANKS = st.integers(0, 65535)
COUNTS = st.integers(0, 2**53)
SOME_TEXTS = st.lists(TEXTS, max_size=3).map(tuple)
STATUSES = st.integers(-64, 255)

REQUESTS = st.one_of(
    st.builds(lambda n, r, k, more, p, i: HostHello(n, r, k, k + more, p, i), NAMES, NAMES, st.integers(1, 99),
              st.integers(1, 99), st.integers(1, 99), NAMES),
    st.just(HostHeartbeat()),
    st.builds(HostRankEnded, RANKS, st.integers(0, 2**31), STATUSES, TEXTS),
    st.builds(HostCheckFailed, TEXTS),
    st.builds(HostEndAsked, STATUSES),
    st.builds(ProbeResult, COUNTS, st.builds(ProcessSnapshot, TEXTS, TEXTS, SOME_TEXTS, SOME_TEXTS, st.booleans())),
)  # fmt: skip
RESPONSES = st.one_of(
    st.builds(HostWelcome, TEXTS, st.integers(1, 65535)),
    st.builds(StartRanks, st.lists(RANKS).map(tuple), st.integers(0, 2**31)),
    st.builds(HaltRanks, st.lists(RANKS).map(tuple), st.floats(0, 1e6)),
    st.builds(GroupEnded, STATUSES, TEXTS, TEXTS),
    st.just(HostHeartbeat()),
    st.builds(ProbeRequest, COUNTS, RANKS, COUNTS, TEXTS, COUNTS, st.builds(EvidenceOffer, COUNTS, COUNTS)),
)


@given(REQUESTS)
def test_a_request_survives(message: FromHost) -> None:
    body = node_request_to_wire(message).SerializeToString()
    assert node_request_from_wire(pb.NodeRequest.FromString(body)) == message


@given(RESPONSES)
def test_a_response_survives(message: ToHost) -> None:
    body = node_response_to_wire(message).SerializeToString()
    assert node_response_from_wire(pb.NodeResponse.FromString(body)) == message


def test_what_is_not_known_is_skipped() -> None:
    assert node_request_from_wire(pb.NodeRequest()) is None
    assert node_response_from_wire(pb.NodeResponse()) is None


def entry(**changes: object) -> pb.NodeRequest:
    fields = {"replica_id": "a", "run": "r", "node_rank": 1, "nnodes": 2, "nproc": 1, "incarnation": "i"} | changes
    return pb.NodeRequest(entry=pb.NodeEntry(**fields))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("field", "value"),
    [("replica_id", ""), ("run", "a b"), ("node_rank", 0), ("node_rank", 2), ("nproc", 0), ("incarnation", "")],
)
def test_an_entry_names_its_wrong_field(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=field):
        node_request_from_wire(entry(**{field: value}))


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.NodeRequest(ended=pb.RankEnded(rank=65536)), "rank"),
        (pb.NodeRequest(ended=pb.RankEnded(status=256)), "status"),
        (pb.NodeRequest(end=pb.NodeEndAsked(status=-129)), "status"),
    ],
)
def test_other_requests_too(message: pb.NodeRequest, field: str) -> None:
    with pytest.raises(InvalidRequest, match=field):
        node_request_from_wire(message)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.NodeResponse(welcome=pb.NodeWelcome(master_port=0)), "master_port"),
        (pb.NodeResponse(start=pb.NodeStart(ranks=[1, 65536])), "rank"),
        (pb.NodeResponse(halt=pb.NodeHalt(grace_s=math.nan)), "grace_s"),
        (pb.NodeResponse(over=pb.NodeOver(status=300)), "status"),
    ],
)
def test_and_responses(message: pb.NodeResponse, field: str) -> None:
    with pytest.raises(InvalidRequest, match=field):
        node_response_from_wire(message)
