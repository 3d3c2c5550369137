"""Sessions and watches over real connections: what is said arrives, and each end learns how the stream ended."""

import asyncio
import itertools
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import grpc
import grpc.aio
import pytest

from lighthouse_protocol.limits import MAX_REQUEST_BYTES
from lighthouse_protocol.messages.membership import Decision, Participant
from lighthouse_protocol.messages.progress import ProgressSample
from lighthouse_protocol.messages.session import (
    Goodbye,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Leave,
    Leaving,
    Revoked,
    ToRank,
    Vote,
    VoteAnswer,
    WatchHello,
    WatchOpened,
)
from lighthouse_protocol.pb.documented import lighthouse_pb2, manager_pb2
from lighthouse_protocol.refusals import (
    Drained,
    InternalError,
    InvalidRequest,
    LighthouseError,
    LimitReached,
    Superseded,
    Unreachable,
    WrongState,
)
from lighthouse_protocol.wire.streams import SESSION_RESPONSES, WATCH_REQUESTS
from lighthouse_runtime.client.clients import AsyncLighthouseClient, ManagerClient
from lighthouse_runtime.client.connection import refusal
from lighthouse_runtime.client.streams import SESSION, WATCH, Session, Watch
from lighthouse_runtime.server.streams import Ending, Sender
from tests.lighthouse_runtime.stream_server import NEXT, WELCOME, RemoteStreamServer, StreamServer, running
from tests.processes import LOCALHOST, PATIENCE_S, eventually

HELLO = Hello(Participant("a", "1"), secret="known to this manager alone, of this test")
ACKS = [HeartbeatAck(number, 1.0) for number in range(100)]
# Either is what the end of a peer without a word looks like.
GONE = (Ending.PEER, Ending.BROKEN)


@pytest.fixture
async def server() -> AsyncIterator[StreamServer]:
    async with running() as server:
        yield server


@pytest.fixture
async def client(server: StreamServer) -> AsyncIterator[AsyncLighthouseClient]:
    async with AsyncLighthouseClient(f"{LOCALHOST}:{server.port}") as connected:
        yield connected


async def ending(server: StreamServer) -> Ending | None:
    return await asyncio.wait_for(server.endings.get(), PATIENCE_S)


async def greeted(session: Session, server: StreamServer) -> Sender:
    """The server's side of a session that is under way."""
    session.send(HELLO)
    assert await anext(session) == WELCOME
    return server.senders[-1]


class TestSession:
    async def test_what_is_said_arrives_in_order(self, server: StreamServer, client: AsyncLighthouseClient):
        async with client.session() as session:
            session.send(HELLO)
            for number in range(100):
                session.send(Heartbeat(number))
            session.send(Leave())
            session.end()
            heard = [message async for message in session]
            assert not session.is_open
        assert heard == [WELCOME, *ACKS, Goodbye("bye")]
        assert server.heard == [HELLO, *map(Heartbeat, range(100)), Leave()]
        assert await ending(server) is Ending.PEER
        assert server.observed == [("Session", "OK")]

    async def test_what_is_not_known_is_skipped_and_what_is_no_message_is_a_defect_of_the_other_side(
        self, server: StreamServer, client: AsyncLighthouseClient
    ):
        async with client.session() as session:
            sender = await greeted(session, server)
            for message in (lighthouse_pb2.SessionResponse(), SESSION_RESPONSES.write(Goodbye("known")), b"\xff"):
                sender.send(message)
            assert await anext(session) == Goodbye("known")
            with pytest.raises(InternalError, match=r"cannot parse 1 bytes as lighthouse\.v1\.SessionResponse"):
                await anext(session)

    async def test_the_handler_refuses(self, server: StreamServer, client: AsyncLighthouseClient):
        """Once all that was queued before has been sent."""
        async with client.session() as session:
            await greeted(session, server)
            session.send(Leave("refuse"))
            assert await anext(session) == Goodbye("first")
            with pytest.raises(Superseded, match=r"^a newer session has taken its place$"):
                await anext(session)
        assert server.observed == [("Session", "ABORTED")]

    async def test_the_reason_of_a_refusal_arrives_though_the_client_writes_on(
        self, server: StreamServer, client: AsyncLighthouseClient
    ):
        for _ in range(50):
            async with client.session() as session:
                await greeted(session, server)
                session.send(Leave("refuse"))
                for number in range(3):
                    session.send(Heartbeat(number))
                assert await anext(session) == Goodbye("first")
                with pytest.raises(Superseded, match=r"^a newer session has taken its place$"):
                    while True:
                        await anext(session)
                        session.send(Heartbeat(9))

    async def test_the_handler_fails(
        self, server: StreamServer, client: AsyncLighthouseClient, caplog: pytest.LogCaptureFixture
    ):
        async with client.session() as session:
            await greeted(session, server)
            session.send(Leave("fail"))
            with pytest.raises(InternalError, match=r"^ZeroDivisionError: oops; see the daemon's log$"):
                await anext(session)
        assert SESSION.path[1:] + " failed" in caplog.messages
        assert server.observed == [("Session", "INTERNAL")]

    @pytest.mark.parametrize("error", [None, Superseded("a newer one")])
    async def test_the_server_ends_it_from_outside(
        self, server: StreamServer, client: AsyncLighthouseClient, error: LighthouseError | None
    ):
        """Its first end counts, and what was queued before it is sent."""
        async with client.session() as session:
            sender = await greeted(session, server)
            for ack in ACKS:
                sender.send(SESSION_RESPONSES.write(ack))
            sender.end(error)
            assert sender.ending is Ending.OURS
            assert not sender.is_open
            sender.send(SESSION_RESPONSES.write(Goodbye("too late")))
            sender.end(InvalidRequest("too late"))
            assert [await anext(session) for _ in ACKS] == ACKS
            with pytest.raises(type(error or StopAsyncIteration()), match=str(error) if error else None):
                await anext(session)
        assert await ending(server) is Ending.OURS

    @pytest.mark.parametrize("why", [None, Unreachable("no echo")])
    async def test_the_client_gives_it_up(
        self, server: StreamServer, client: AsyncLighthouseClient, why: LighthouseError | None
    ):
        async with client.session() as session:
            await greeted(session, server)
            asyncio.get_running_loop().call_later(0.05, session.cancel, why)
            for _ in range(2):
                with pytest.raises(type(why or StopAsyncIteration()), match=str(why) if why else None):
                    await anext(session)
            session.cancel()
        assert await ending(server) in GONE
        assert not session.is_open
        session.send(Heartbeat(1))

    async def test_a_cancelled_reader_is_cancelled(self, server: StreamServer, client: AsyncLighthouseClient):
        async with client.session() as session:
            await greeted(session, server)
            with pytest.raises(TimeoutError) as e:
                async with asyncio.timeout(0.05):
                    await anext(session)
            assert not isinstance(e.value, LighthouseError)
        assert await ending(server) in GONE

    async def test_a_handler_that_waits_elsewhere_is_cancelled_there(
        self, server: StreamServer, client: AsyncLighthouseClient
    ):
        async with client.session() as session:
            sender = await greeted(session, server)
            session.send(Leave("wait"))
            await asyncio.sleep(0.05)
        await ending(server)
        async with asyncio.timeout(PATIENCE_S):
            while sender.is_open:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert sender.ending is Ending.BROKEN

    async def test_a_stop_tells_all_and_does_not_wait(self, server: StreamServer, client: AsyncLighthouseClient):
        async with client.session() as one:
            sender = await greeted(one, server)
            async with client.session() as other:
                await greeted(other, server)
                sender.send(SESSION_RESPONSES.write(Goodbye("bye")))
                began_at = time.monotonic()
                await server.server.stop(PATIENCE_S)
                assert time.monotonic() - began_at < PATIENCE_S / 2
                assert await anext(one) == Goodbye("bye")
                for session in (one, other):
                    with pytest.raises(Unreachable, match="the server is stopping"):
                        await anext(session)
        assert [await ending(server), await ending(server)] == [Ending.OURS, Ending.OURS]


class TestLimits:
    """Of the number of messages that wait: net/test_outbox.py."""

    async def test_a_peer_that_does_not_read_is_sent_away(self, server: StreamServer, client: AsyncLighthouseClient):
        message = SESSION_RESPONSES.write(Goodbye("x" * 900)).SerializeToString() * 1000
        async with client.session() as session:
            sender = await greeted(session, server)
            sent_bytes = 0
            while sender.is_open:  # noqa: ASYNC110
                sender.send(message)
                sent_bytes += len(message)
                assert sent_bytes < 256 * 1024 * 1024
                await asyncio.sleep(0)
            assert await ending(server) is Ending.SLOW
            with pytest.raises(LimitReached, match=r"more than 10000 messages or 16 MiB wait to be read; read faster"):
                async for _ in session:
                    pass
        assert sent_bytes > 16 * 1024 * 1024
        assert server.observed == [("Session", "RESOURCE_EXHAUSTED")]

    async def test_a_peer_that_has_not_read_anything_yet_is_sent_away_and_hears_why(
        self, server: StreamServer, client: AsyncLighthouseClient
    ):
        """The first message is still on its way when the stream is ended."""
        message = SESSION_RESPONSES.write(Goodbye("x" * 900)).SerializeToString() * 8000
        async with client.session() as session:
            session.send(Leave("hush"))
            async with asyncio.timeout(PATIENCE_S):
                while not server.senders:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            (sender,) = server.senders
            sender.send(message)
            await asyncio.sleep(0.05)
            while sender.is_open:
                sender.send(message)
            assert await ending(server) is Ending.SLOW
            async with asyncio.timeout(20):
                with pytest.raises(LimitReached, match="read faster"):
                    async for _ in session:
                        pass

    async def test_a_server_that_does_not_read_is_given_up(self, server: StreamServer, client: AsyncLighthouseClient):
        async with client.session() as session:
            await greeted(session, server)
            for number in range(10_002):
                session.send(Heartbeat(number))
            with pytest.raises(Unreachable, match="does not read its messages"):
                async for _ in session:
                    pass

    async def test_a_request_that_is_too_big_is_not_sent(self, server: StreamServer, client: AsyncLighthouseClient):
        async with client.session() as session:
            await greeted(session, server)
            with pytest.raises(LimitReached, match=rf"Hello has \d+ bytes; at most {MAX_REQUEST_BYTES}"):
                session.send(Hello(Participant("a", data="x" * MAX_REQUEST_BYTES), secret=HELLO.secret))
            session.send(Heartbeat(1))
            assert await anext(session) == HeartbeatAck(1, 1.0)

    @pytest.mark.parametrize(
        ("body", "status"),
        [
            (b"x" * (MAX_REQUEST_BYTES + 1), grpc.StatusCode.RESOURCE_EXHAUSTED),
            (b"\xff", grpc.StatusCode.INVALID_ARGUMENT),
        ],
    )
    async def test_what_a_server_does_not_take(self, server: StreamServer, body: bytes, status: grpc.StatusCode):
        async with grpc.aio.insecure_channel(f"{LOCALHOST}:{server.port}") as channel:
            call: Any = channel.stream_stream(SESSION.path)()
            await call.write(body)
            assert await call.code() is status
        await ending(server)


@pytest.fixture
def remote() -> Iterator[RemoteStreamServer]:
    with RemoteStreamServer() as process:
        yield process


async def test_the_death_of_a_server_is_unreachable(remote: RemoteStreamServer):
    async with AsyncLighthouseClient(remote.address) as client, client.session() as session:
        session.send(HELLO)
        assert await anext(session) == WELCOME
        remote.popen.kill()
        with pytest.raises(Unreachable, match=re.escape(f"{remote.address} is unreachable")):
            await asyncio.wait_for(anext(session), PATIENCE_S)
        session.send(Heartbeat(1))
        assert not session.is_open


REQUEST = WatchHello(1, "w")
OPENED = [WatchOpened(), Revoked(7, "of rank 1")]


class TestWatch:
    def test_it_votes_from_any_thread(self, remote: RemoteStreamServer):
        with ManagerClient(remote.address) as client, client.watch(REQUEST) as watch:
            assert [next(watch), next(watch)] == OPENED
            voting = threading.Thread(target=watch.send, args=(Vote(5, 3, True, 7, True, 1.0),))
            voting.start()
            assert next(watch) == VoteAnswer(5, Decision(True, NEXT))
            voting.join()
            watch.send(Vote(7, 0, True, 7, False, 1.0))
            refused = next(watch)
            assert isinstance(refused, VoteAnswer)
            assert isinstance(refused.outcome, Drained)
            watch.send(Vote(8, 0, True, 7, False, 0.0))
            with pytest.raises(InvalidRequest, match="time_left_s"):
                next(watch)

    def test_another_thread_cancels_it(self, remote: RemoteStreamServer):
        with ManagerClient(remote.address) as client, client.watch(REQUEST) as watch, ThreadPoolExecutor() as threads:
            assert [next(watch), next(watch)] == OPENED
            rest = threads.submit(list[ToRank], watch)
            watch.cancel()
            assert rest.result(PATIENCE_S) == []
            watch.cancel()
            assert list(watch) == []

    def test_a_refusal_and_a_death_are_raised(self, remote: RemoteStreamServer):
        with ManagerClient(remote.address) as client:
            with client.watch(WatchHello(9, "w")) as watch, pytest.raises(WrongState, match="9 is not of this"):
                next(watch)
            with client.watch(REQUEST) as watch, ThreadPoolExecutor() as threads:
                assert [next(watch), next(watch)] == OPENED
                rest = threads.submit(list[ToRank], watch)
                remote.popen.kill()
                with pytest.raises(Unreachable):
                    rest.result(PATIENCE_S)
            with client.watch(REQUEST) as watch, pytest.raises(Unreachable):
                next(watch)

    def test_what_is_repeated_goes_beside_what_is_said(self):
        taken: list[Iterator[bytes]] = []
        steps = itertools.count()
        watch = Watch(lambda messages: taken.append(messages) or mock.Mock(), "m", WATCH, refusal)
        watch.send(WatchHello(0, "w"))
        words = (WATCH_REQUESTS.read(manager_pb2.WatchRequest.FromString(body)) for body in taken[0])
        assert WATCH_REQUESTS.read(manager_pb2.WatchRequest.FromString(next(taken[0]))) == WatchHello(0, "w")
        watch.repeat(lambda: None if (step := next(steps)) == 1 else ProgressSample(step), 0.01)
        assert [next(words) for _ in range(3)] == [ProgressSample(0), ProgressSample(2), ProgressSample(3)]
        ballot = Vote(5, 3, True, 7, False, 1.0)
        watch.send(ballot)
        assert ballot in itertools.islice(words, 100)

    def test_what_is_repeated_can_be_said_before_the_rest_and_always_by_one_thread(self):
        taken: list[Iterator[bytes]] = []
        steps = itertools.count()
        watch = Watch(lambda messages: taken.append(messages) or mock.Mock(), "m", WATCH, refusal)
        words = (WATCH_REQUESTS.read(manager_pb2.WatchRequest.FromString(body)) for body in taken[0])
        watch.repeat_now()  # nothing is repeated yet
        watch.send(Leaving(1))
        assert next(words) == Leaving(1)
        watch.repeat(lambda: ProgressSample(next(steps)), 600)
        assert next(words) == ProgressSample(0)
        watch.repeat_now()
        watch.send(Leaving(2))
        assert next(steps) == 1, "not by whoever asks for it"
        assert [next(words) for _ in range(2)] == [ProgressSample(2), Leaving(2)]

    def test_one_that_has_ended_leaves_no_thread(self, remote: RemoteStreamServer):
        """Whoever has ended it, and whether or not anybody has read that."""
        kept: list[Watch] = []
        with ManagerClient(remote.address) as client:
            before = threading.active_count()
            for number in range(20):
                watch = client.watch(REQUEST if number % 2 else WatchHello(9, "w"))
                kept.append(watch)
                match number % 4:
                    case 0:
                        with pytest.raises(WrongState):
                            next(watch)
                    case 1:
                        watch.cancel()
                    case 3:
                        assert [next(watch), next(watch)] == OPENED
            assert threading.active_count() > before
            remote.popen.kill()
            eventually(lambda: threading.active_count() <= before, f"as few threads as before: {before}")
