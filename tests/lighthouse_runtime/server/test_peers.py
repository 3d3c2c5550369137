"""Which connections are one peer's, and what the log says of a refusal."""

import asyncio

import pytest

from lighthouse_protocol.refusals import LimitReached
from lighthouse_protocol.rules.rate_limits import PeerLimits, Rate, Resource
from lighthouse_runtime.server.grpc_server import Peers, peer_name


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("ipv4:10.0.0.1:4711", "10.0.0.1"),
        ("ipv6:%5B::ffff:10.0.0.1%5D:4711", "10.0.0.1"),
        ("ipv6:%5B2001:db8::7%5D:4711", "2001:db8::/64"),
        ("ipv6:[2001:db8::8]:4712", "2001:db8::/64"),
        ("ipv6:%5B::1%5D:4711", "::1"),
        ("ip:[10.0.0.1]:80", "10.0.0.1"),
        ("unix:/run/lighthouse.sock", "a local process"),
        ("", "a local process"),
    ],
)
def test_a_peer_is_a_host(address: str, name: str):
    assert peer_name(address) == name


async def test_what_is_open_counts_for_its_host():
    peers = Peers(PeerLimits(open=1))
    first = peers.enter("ipv4:10.0.0.1:1")
    with pytest.raises(LimitReached):
        peers.enter("ipv4:10.0.0.1:2")
    peers.enter("ipv4:10.0.0.2:1")
    first.leave()
    assert peers.enter("ipv4:10.0.0.1:3") is first


async def test_what_is_used_counts_for_its_host():
    peers = Peers(PeerLimits(jobs=Rate(1e-9, 1)))
    peers.charge("ipv4:10.0.0.1:5", Resource.JOBS)
    assert not peers.try_charge("ipv4:10.0.0.1:6", Resource.JOBS)
    assert peers.try_charge("ipv4:10.0.0.2:6", Resource.JOBS)


async def test_a_flood_of_refusals_is_one_line(caplog: pytest.LogCaptureFixture):
    peers = Peers()
    for number in range(100):
        peers.log_refusal(LimitReached(f"number {number}"))
    assert [record.getMessage() for record in caplog.records] == ["refused: number 0"]


async def test_answers_that_cost_much_are_made_a_few_at_a_time_for_each_peer():
    peers, running, most = Peers(PeerLimits(reads=2)), 0, 0

    async def read(address: str) -> None:
        nonlocal running, most
        async with peers.expensive_read(address):
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1

    await asyncio.gather(*(read("ipv4:10.0.0.1:1") for _ in range(10)))
    assert most == 2
    await asyncio.gather(*(read(f"ipv4:10.0.0.{host}:1") for host in range(5)))
    assert most == 5
    assert peers._gates == {}
