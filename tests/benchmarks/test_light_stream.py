"""A light stream says and hears over a connection to gRPC's server what gRPC's own client would."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from benchmarks.support.light_stream import LightCall, Turns
from benchmarks.support.shared_session import SharedReader, SharingClient
from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.messages.session import Goodbye, Heartbeat, HeartbeatAck, Hello, Leave
from lighthouse_protocol.refusals import Unreachable
from tests.lighthouse_runtime.stream_server import WELCOME, StreamServer, running
from tests.processes import LOCALHOST, PATIENCE_S

HELLO = Hello(Participant("a", "1"), secret="known to this manager alone, of this test")
SOURCE = "127.20.0.7"


@pytest.fixture
async def server() -> AsyncIterator[StreamServer]:
    async with running() as server:
        yield server


def client(server: StreamServer) -> SharingClient:
    return SharingClient(f"{LOCALHOST}:{server.port}", "default", SharedReader(), Turns(), SOURCE)


async def test_what_is_said_arrives_in_order_and_is_answered(server: StreamServer):
    async with asyncio.timeout(PATIENCE_S), client(server) as light, light.session() as session:
        session.send(HELLO)
        assert await anext(session) == WELCOME
        for number in range(300):
            session.send(Heartbeat(number))
        assert [await anext(session) for _ in range(300)] == [HeartbeatAck(n, 1.0) for n in range(300)]
    assert server.heard == [HELLO, *map(Heartbeat, range(300))]


async def test_it_ends_as_the_server_ends_it(server: StreamServer):
    async with asyncio.timeout(PATIENCE_S), client(server) as light, light.session() as session:
        session.send(HELLO)
        session.send(Leave("refuse"))
        assert [await anext(session), await anext(session)] == [WELCOME, Goodbye("first")]
        with pytest.raises(Unreachable, match="closed the stream: a newer session has taken its place"):
            await anext(session)


async def test_its_end_is_the_end_of_its_connection(server: StreamServer):
    async with asyncio.timeout(PATIENCE_S), client(server) as light:
        async with light.session() as session:
            session.send(HELLO)
            assert await anext(session) == WELCOME
            assert light.is_connected
        await server.endings.get()
        assert not light.is_connected


async def test_nobody_there_is_unreachable(server: StreamServer):
    nowhere = SharingClient(f"{LOCALHOST}:1", "default", SharedReader(), Turns(), SOURCE)
    async with asyncio.timeout(PATIENCE_S), nowhere, nowhere.session() as session:
        with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1 is unreachable"):
            await anext(session)


async def test_messages_and_frames_come_in_any_pieces():
    """As a network hands them on."""
    call = LightCall("there", b"", Turns())
    messages = [bytes((n,)) * size for n, size in enumerate((0, 1, 70, 3000))]
    body = b"".join(b"\0" + len(message).to_bytes(4, "big") + message for message in messages)
    frames = [body[at : at + 50] for at in range(0, len(body), 50)]
    wire = b"".join(len(f).to_bytes(3, "big") + b"\0\0" + (1).to_bytes(4, "big") + f for f in frames)
    for at in range(0, len(wire), 7):
        call.data_received(wire[at : at + 7])
    assert [await call.read() for _ in messages] == messages
