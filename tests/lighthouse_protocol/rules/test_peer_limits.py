"""What one peer may hold and use."""

import pytest

from lighthouse_protocol.refusals import LimitReached
from lighthouse_protocol.rules.rate_limits import Peer, PeerLimits, PeerTable, Rate, Resource, StreamMeter

SMALL = PeerLimits(
    open=2,
    jobs=Rate(1, 2),
    messages=Rate(1, 5),
    bytes=Rate(10, 100),
    stream_messages=Rate(1, 3),
    stream_bytes=Rate(10, 60),
)


def refusal(take: object, *values: object) -> str:
    with pytest.raises(LimitReached) as refused:
        take(*values)  # type: ignore[operator]
    return str(refused.value)


def test_so_many_calls_and_streams_are_open_at_once():
    peer = Peer("10.0.0.1", SMALL)
    peer.enter()
    peer.enter()
    assert refusal(peer.enter) == (
        "10.0.0.1 has 2 calls and streams open; at most 2 for each peer: close some, or raise --max-open-per-peer"
    )
    peer.leave()
    peer.enter()
    assert peer.open == 2


def test_each_resource_counts_by_itself_and_a_refusal_names_it():
    peer = Peer("10.0.0.1", SMALL)
    for _ in range(2):
        peer.charge(Resource.JOBS, 0.0)
    assert refusal(peer.charge, Resource.JOBS, 0.5) == (
        "new jobs by 10.0.0.1: at most 2 at once and 1 a second are taken; send less, or later"
    )
    peer.charge(Resource.RUNS, 0.5)
    peer.charge(Resource.JOBS, 1.0)
    assert [peer.try_charge(Resource.JOBS, 1.0), peer.try_charge(Resource.JOBS, 2.0)] == [False, True]


@pytest.mark.parametrize("resource", Resource)
def test_every_resource_has_a_rate(resource: Resource):
    assert PeerLimits().rate(resource).at_once >= PeerLimits().rate(resource).per_s > 0


def test_where_more_managers_share_an_address_they_may_send_as_much_more():
    usual, twice = PeerLimits(), PeerLimits.for_open(2 * PeerLimits().open)
    assert PeerLimits.for_open(usual.open) == usual
    assert PeerLimits.for_open(10) == PeerLimits(open=10), "a lower limit of streams is no reason for less of the rest"
    assert (twice.open, twice.reads) == (2 * usual.open, usual.reads)
    assert twice.replica_ids == Rate(100, 10_000)
    assert twice.messages == Rate(8_000, 400_000)
    assert (twice.stream_messages, twice.stream_bytes) == (usual.stream_messages, usual.stream_bytes)


def test_a_stream_may_send_less_than_its_peer():
    peer = Peer("p", SMALL)
    one, other = StreamMeter(peer, SMALL), StreamMeter(peer, SMALL)
    for _ in range(3):
        one.charge(1, 0.0)
    assert refusal(one.charge, 1, 0.0).startswith("messages on one stream by p")
    assert refusal(other.charge, 61, 0.0).startswith("bytes on one stream by p")
    other.charge(60, 0.0)
    assert refusal(StreamMeter(peer, SMALL).charge, 60, 0.0).startswith("bytes sent by p")


def test_peers_that_hold_nothing_make_room_and_no_others():
    table = PeerTable(SMALL, max_peers=2)
    held, used = table.get("held", 0.0), table.get("used", 0.0)
    held.enter()
    used.charge(Resource.JOBS, 0.0)
    assert refusal(table.get, "new", 0.5) == "2 peers hold something here already; try again later"
    assert table.get("used", 0.5) is used
    assert refusal(table.get, "new", 1.4), "they are looked at once a second"
    assert table.get("new", 1.5) is table.get("new", 1.5)
    assert (table.get("held", 1.5), len(table)) == (held, 2)


def test_the_hosts_of_the_largest_job_leave_room_for_others():
    table = PeerTable(PeerLimits())
    for host in range(10_000):
        table.get(f"10.0.{host // 250}.{host % 250}", 0.0).enter()
    assert table.get("an operator's", 0.0).open == 0
