"""One client that does one harmful thing at full speed, in a process of its own, and counts what it was let do.

`python -m benchmarks.support.attacker NAME ADDRESS HTTP_PORT`; it has no credential, and does not keep to any rule that
a library would hold it to. Its process yields to all others (nice): its own work belongs to another host. Its
connections come from another loopback address than those of all others, as from another host.
"""

import asyncio
import itertools
import os
import socket
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import grpc.aio
import uvloop

from benchmarks.support.children import allow_many_connections
from benchmarks.support.daemons import HERE
from benchmarks.support.line_protocol import answer_orders_async
from lighthouse_protocol.limits import (
    DEFAULT_JOB,
    JOB_METADATA_KEY,
    MAX_DATA_BYTES,
    MAX_GROUP_WORLD_SIZE,
    MAX_RANKS_PER_HOST,
    MAX_RESPONSE_BYTES,
)
from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.messages.progress import GroupView, OpenPhase, ProgressSample, RankName, RankView
from lighthouse_protocol.messages.run import RankHello, RankId, ReadyReport, RunTerms
from lighthouse_protocol.messages.session import Heartbeat, Hello, JoinRequest
from lighthouse_protocol.pb.documented import lighthouse_pb2
from lighthouse_protocol.pb.extensions import run_pb2
from lighthouse_protocol.wire import streams
from lighthouse_protocol.wire.documented import participant_to_native

NICE = 5
SECRET = "0123456789abcdef" * 2  # of whatever it says that it is
ELSEWHERE = "127.0.0.2"
CHANNELS = 32  # the bound of calls on one connection (grpc_server.py) then bounds no attack
AT_ONCE = 64
PAUSE_S = 0.01
DEAF_S = 5.0
SERVICE = "/lighthouse.v1.LighthouseService/"
OWN_JOB = "attack"
IDLE_CONNECTIONS = 10_000
RANKS_SHOWN = 1500  # as many as one heartbeat may show
KEY_BYTES = 4096
_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", MAX_RESPONSE_BYTES),
]


@dataclass(slots=True)
class Target:
    """A lighthouse, and what the attack has brought about there. `done` counts what was taken, `refused` the rest.
    `address` leads to `direct`, by a relay."""

    address: str
    direct: str
    http_port: int
    done: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])
    last_refusal: str = ""
    _channels: list[grpc.aio.Channel] = field(default_factory=list[grpc.aio.Channel])

    def channel(self) -> grpc.aio.Channel:
        """One of its own."""
        return grpc.aio.insecure_channel(self.address, options=_OPTIONS)

    def channels(self) -> Iterator[grpc.aio.Channel]:
        """A few, in turn, without end."""
        return itertools.cycle([self.channel() for _ in range(CHANNELS)])

    def fail(self, error: BaseException) -> None:
        self.refused[error.code().name if isinstance(error, grpc.RpcError) else type(error).__name__] += 1
        self.last_refusal = (getattr(error, "details", lambda: "")() or str(error))[:300]

    async def tries(self, work: Awaitable[Any]) -> Any:
        """What it returns; None if it was refused."""
        try:
            answer = await work
        except (grpc.RpcError, OSError, asyncio.IncompleteReadError, TimeoutError) as e:
            self.fail(e)
            await asyncio.sleep(PAUSE_S)
            return None
        self.done += 1
        return answer


Attack = Callable[[Target], Coroutine[Any, Any, None]]


# -- sessions


def participant(name: str, world_size: int = 1, incarnation: str = "x") -> Participant:
    return Participant(
        name, incarnation, address="10.0.0.9:1", store_address="10.0.0.9:2", group_world_size=world_size, watched=True
    )


def _session_body(message: Any) -> bytes:
    return streams.SESSION_REQUESTS.write(message).SerializeToString()


async def _talk(target: Target, channel: grpc.aio.Channel, job: str, bodies: Iterator[bytes]) -> None:
    """One session: a hello, then the rest, at full speed, until it is ended."""
    call = channel.stream_stream(SERVICE + "Session")(metadata=((JOB_METADATA_KEY, job),))
    reading = asyncio.create_task(_read_all(target, call))
    try:
        for body in bodies:
            if reading.done():
                break
            await call.write(body)
            target.done += 1
        await reading
    except (grpc.RpcError, asyncio.InvalidStateError) as e:
        target.fail(e)
    finally:
        reading.cancel()
        call.cancel()
    await asyncio.sleep(PAUSE_S)


async def _read_all(target: Target, call: Any) -> None:
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
        if await call.code() is not grpc.StatusCode.OK:
            target.refused[(await call.code()).name] += 1
            target.last_refusal = await call.details()
    except grpc.RpcError as e:
        target.fail(e)


async def _many_talks(target: Target, sessions: int, job: str, bodies: Callable[[int], Iterator[bytes]]) -> None:
    channels, numbers = target.channels(), itertools.count()

    async def again() -> None:
        while True:
            await _talk(target, next(channels), job, bodies(next(numbers)))

    async with asyncio.TaskGroup() as group:
        for _ in range(sessions):
            group.create_task(again())
            await asyncio.sleep(0)


async def bitmaps(target: Target) -> None:
    """1,000 sessions, each with ever new sets of missing ranks of the largest size."""
    sets = [lighthouse_pb2.GroupReport(missing=byte * (MAX_GROUP_WORLD_SIZE // 8)) for byte in (b"\x55", b"\xaa")]
    beats = [lighthouse_pb2.SessionRequest(heartbeat=lighthouse_pb2.Heartbeat(levels=each)) for each in sets]
    beat_bodies = [beat.SerializeToString() for beat in beats]

    def bodies(number: int) -> Iterator[bytes]:
        who = participant_to_native(participant(f"m{number}", MAX_GROUP_WORLD_SIZE))
        yield lighthouse_pb2.SessionRequest(
            hello=lighthouse_pb2.Hello(participant=who, levels=sets[0], secret=SECRET)
        ).SerializeToString()
        yield from itertools.cycle(beat_bodies)

    await _many_talks(target, 1000, OWN_JOB, bodies)


async def progress(target: Target) -> None:
    """10 sessions that show as many ranks as one message holds, over and over."""

    def bodies(number: int) -> Iterator[bytes]:
        name = f"p{number}"
        sample = ProgressSample(1, (OpenPhase("forward"),))
        ranks = tuple(RankView(RankName(name, rank), sample, 60.0) for rank in range(RANKS_SHOWN))
        yield _session_body(Hello(participant(name, RANKS_SHOWN), secret=SECRET))
        beat = _session_body(Heartbeat(1, progress=GroupView(name, "x", ranks)))
        yield from itertools.repeat(beat)

    await _many_talks(target, 10, OWN_JOB, bodies)


async def heartbeats(target: Target) -> None:
    """16 sessions that send heartbeats without a pause."""

    def bodies(number: int) -> Iterator[bytes]:
        yield _session_body(Hello(participant(f"h{number}"), secret=SECRET))
        yield from itertools.repeat(_session_body(Heartbeat(1)))

    await _many_talks(target, 16, OWN_JOB, bodies)


async def deaf_sessions(target: Target) -> None:
    """64 sessions in the honest job that say much and read nothing."""
    channels, numbers = target.channels(), itertools.count()

    async def again() -> None:
        while True:
            call = next(channels).stream_stream(SERVICE + "Session")(metadata=((JOB_METADATA_KEY, OWN_JOB),))
            try:
                await call.write(_session_body(Hello(participant(f"d{next(numbers)}"), secret=SECRET)))
                beat = _session_body(Heartbeat(1))
                while True:
                    await call.write(beat)
                    target.done += 1
            except (grpc.RpcError, asyncio.InvalidStateError) as e:
                target.fail(e)
            call.cancel()
            await asyncio.sleep(PAUSE_S)

    await asyncio.gather(*(again() for _ in range(64)))


async def big_quorums(target: Target) -> None:
    """500 sessions in one job that join with as much data as they may bring, and do not read the quorum of all."""
    channels, numbers = target.channels(), itertools.count()

    async def again() -> None:
        while True:
            name = f"q{next(numbers)}"
            who = replace(participant(name), data="x" * MAX_DATA_BYTES)
            call = next(channels).stream_stream(SERVICE + "Session")(metadata=((JOB_METADATA_KEY, OWN_JOB),))

            async def once(call: Any = call, who: Participant = who) -> None:
                await call.write(_session_body(Hello(who, secret=SECRET)))
                for number in range(1, 15):
                    await call.write(_session_body(JoinRequest(number, who, 60.0)))
                    await call.write(_session_body(Heartbeat(number)))
                    target.done += 1
                    await asyncio.sleep(1.0)
                call.cancel()

            await target.tries(once())

    await asyncio.gather(*(again() for _ in range(500)))


async def come_and_go(target: Target) -> None:
    """Sessions that are opened and given up, one after the other."""

    def bodies(number: int) -> Iterator[bytes]:
        yield _session_body(Hello(participant(f"c{number}"), secret=SECRET))

    channels, numbers = target.channels(), itertools.count()

    async def again() -> None:
        while True:
            call = next(channels).stream_stream(SERVICE + "Session")(metadata=((JOB_METADATA_KEY, OWN_JOB),))

            async def once(call: Any = call) -> None:
                await call.write(next(bodies(next(numbers))))
                await call.read()
                call.cancel()

            await target.tries(once())

    await asyncio.gather(*(again() for _ in range(AT_ONCE)))


async def mute_streams(target: Target) -> None:
    """Streams that are opened and say nothing, as many as there may be."""
    channels = target.channels()

    async def again() -> None:
        while True:
            call = next(channels).stream_stream(SERVICE + "Session")()
            await target.tries(call.read())

    await asyncio.gather(*(again() for _ in range(3000)))


# -- runs


def _run_body(stream: streams.Stream[Any], message: Any) -> bytes:
    return stream.write(message).SerializeToString()


async def slots(target: Target) -> None:
    """Supervisors that come with as many slots as a message may name, each under a name of its own."""
    every = range(MAX_RANKS_PER_HOST)
    channels, numbers = target.channels(), itertools.count()

    async def again() -> None:
        while True:
            hello = run_pb2.SupervisorHello(name=f"s{next(numbers)}", incarnation="x", slots=every, secret=SECRET)
            body = run_pb2.SupervisorRequest(hello=hello).SerializeToString()
            call = next(channels).stream_stream(SERVICE + "Supervise")(metadata=((JOB_METADATA_KEY, OWN_JOB),))

            async def once(call: Any = call, body: bytes = body) -> None:
                await call.write(body)
                await call.read()

            await target.tries(once())

    await asyncio.gather(*(again() for _ in range(40)))


async def _in_a_generation(target: Target) -> tuple[Any, int]:
    """The stream of a rank that is alone in a run of its own, and the number of its generation."""
    call = target.channel().stream_stream(SERVICE + "Rank")(metadata=((JOB_METADATA_KEY, OWN_JOB),))
    await call.write(_run_body(streams.RANK_REQUESTS, RankHello(RankId(0, "x"), RunTerms(1), secret=SECRET)))
    await call.write(_run_body(streams.RANK_REQUESTS, ReadyReport()))
    while True:
        answer = await call.read()
        assert isinstance(answer, bytes), await call.details()
        response = run_pb2.RankResponse.FromString(answer)
        if response.WhichOneof("message") == "formed":
            return call, response.formed.counters.number


def _unary(channel: grpc.aio.Channel, method: str, body: bytes, job: str = OWN_JOB) -> Awaitable[bytes]:
    call: Any = channel.unary_unary(SERVICE + method)
    return call(body, timeout=20.0, metadata=((JOB_METADATA_KEY, job),))


async def _calls(target: Target, bodies: Iterator[tuple[str, bytes, str]]) -> None:
    """Method, body and job of each call, AT_ONCE at a time."""
    channels = target.channels()

    async def again() -> None:
        for method, body, job in bodies:
            await target.tries(_unary(next(channels), method, body, job))

    await asyncio.gather(*(again() for _ in range(AT_ONCE)))


async def put_keys(target: Target) -> None:
    """Keys of a run, each of the largest size."""
    _, generation = await _in_a_generation(target)

    def bodies() -> Iterator[tuple[str, bytes, str]]:
        for number in itertools.count():
            name, value = f"k{number % 4000}", os.urandom(KEY_BYTES)
            key = run_pb2.PutKeyRequest(generation=generation, kind="iteration", name=name, value=value, secret=SECRET)
            yield "PutKey", key.SerializeToString(), OWN_JOB

    await _calls(target, bodies())


async def get_keys(target: Target) -> None:
    """All keys of a run, of which there are as many as there may be, over and over."""
    _, generation = await _in_a_generation(target)
    channel = target.channel()
    for number in range(900):
        key = run_pb2.PutKeyRequest(
            generation=generation, kind="iteration", name=f"k{number}", value=os.urandom(KEY_BYTES), secret=SECRET
        )
        await target.tries(_unary(channel, "PutKey", key.SerializeToString()))
    body = run_pb2.GetKeysRequest().SerializeToString()
    await _calls(target, itertools.repeat(("GetKeys", body, OWN_JOB)))


async def ranks_of_runs(target: Target) -> None:
    """Processes of a run of 65,536 slots that come and go."""
    channels, numbers = target.channels(), itertools.count()

    async def again() -> None:
        while True:
            number = next(numbers)
            hello = RankHello(
                RankId(number % MAX_GROUP_WORLD_SIZE, f"r{number}"), RunTerms(MAX_GROUP_WORLD_SIZE), secret=SECRET
            )
            call = next(channels).stream_stream(SERVICE + "Rank")(metadata=((JOB_METADATA_KEY, OWN_JOB),))

            async def once(call: Any = call, hello: RankHello = hello) -> None:
                await call.write(_run_body(streams.RANK_REQUESTS, hello))
                await call.read()

            await target.tries(once())

    await asyncio.gather(*(again() for _ in range(AT_ONCE)))


# -- calls


def _heartbeat(name: str) -> bytes:
    return lighthouse_pb2.LighthouseHeartbeatRequest(replica_id=name).SerializeToString()


async def jobs(target: Target) -> None:
    """A heartbeat for each of ever new jobs."""
    await _calls(target, (("Heartbeat", _heartbeat("a"), f"job{number}") for number in itertools.count()))


async def replica_ids(target: Target) -> None:
    """A heartbeat of each of ever new replica groups, in the honest job."""
    await _calls(target, (("Heartbeat", _heartbeat(f"id{number}"), DEFAULT_JOB) for number in itertools.count()))


async def status(target: Target) -> None:
    """Status with the place of every rank, over and over, of a job with many members."""
    channel = target.channel()
    for number in range(2000):
        await target.tries(_unary(channel, "Heartbeat", _heartbeat(f"id{number}"), OWN_JOB))
    body = lighthouse_pb2.LighthouseStatusRequest(ranks=True).SerializeToString()
    await _calls(target, itertools.repeat(("Status", body, OWN_JOB)))


# -- HTTP


async def _get(target: Target, path: str) -> None:
    async def once() -> None:
        reader, writer = await asyncio.open_connection(HERE, target.http_port, local_addr=(ELSEWHERE, 0))
        try:
            writer.write(f"GET {path} HTTP/1.0\r\nHost: {HERE}\r\n\r\n".encode())
            answer = await asyncio.wait_for(reader.read(), 20.0)
            if b" 200 " not in answer[:20]:
                raise OSError(answer[:60].decode(errors="replace"))
        finally:
            writer.close()

    while True:
        await target.tries(once())


async def http_status(target: Target) -> None:
    """/status and /metrics, over and over, of a job with many members."""
    channel = target.channel()
    for number in range(2000):
        await target.tries(_unary(channel, "Heartbeat", _heartbeat(f"id{number}"), OWN_JOB))
    await asyncio.gather(*(_get(target, path) for _ in range(AT_ONCE // 2) for path in ("/status", "/metrics")))


async def idle_http(target: Target) -> None:
    """Connections to the HTTP port that say nothing, as many as there may be."""

    async def again() -> None:
        async def once() -> None:
            reader, writer = await asyncio.open_connection(HERE, target.http_port, local_addr=(ELSEWHERE, 0))
            target.done += 1
            await reader.read()
            writer.close()
            raise OSError("closed")

        while True:
            await target.tries(once())

    await asyncio.gather(*(again() for _ in range(4000)))


async def idle_grpc(target: Target) -> None:
    """Connections to the gRPC port that say nothing, as many as there may be."""
    host, _, port = target.direct.rpartition(":")

    async def again() -> None:
        async def once() -> None:
            reader, writer = await asyncio.open_connection(host, int(port), local_addr=(ELSEWHERE, 0))
            target.done += 1
            while await reader.read(1024):
                pass
            writer.close()
            raise OSError("closed")

        while True:
            await target.tries(once())

    await asyncio.gather(*(again() for _ in range(IDLE_CONNECTIONS)))


async def deaf_browsers(target: Target) -> None:
    """Browsers that ask for the events of the page and do not read them."""

    async def again() -> None:
        loop = asyncio.get_running_loop()

        async def once() -> None:
            with socket.socket() as browser:
                browser.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                browser.setblocking(False)
                browser.bind((ELSEWHERE, 0))
                await loop.sock_connect(browser, (HERE, target.http_port))
                await loop.sock_sendall(browser, f"GET /events HTTP/1.1\r\nHost: {HERE}\r\n\r\n".encode())
                first = await asyncio.wait_for(loop.sock_recv(browser, 12), 20.0)
                if b" 200" not in first:
                    raise OSError(first.decode(errors="replace"))
                await asyncio.sleep(DEAF_S)

        while True:
            await target.tries(once())

    await asyncio.gather(*(again() for _ in range(200)))


async def nothing(target: Target) -> None:
    """For comparison: how much the same honest groups differ from one while to the next."""
    await asyncio.Event().wait()


ATTACKS: dict[str, Attack] = {
    attack.__name__.replace("_", "-"): attack
    for attack in (
        nothing,
        bitmaps,
        progress,
        heartbeats,
        deaf_sessions,
        big_quorums,
        come_and_go,
        mute_streams,
        slots,
        put_keys,
        get_keys,
        ranks_of_runs,
        jobs,
        replica_ids,
        status,
        http_status,
        idle_http,
        idle_grpc,
        deaf_browsers,
    )
}


async def serve(name: str, address: str, http_port: str) -> None:
    target = Target(await relay(address), address, int(http_port))

    async def report() -> dict[str, Any]:
        return {"done": target.done, "refused": dict(target.refused), "last_refusal": target.last_refusal}

    attack = asyncio.create_task(ATTACKS[name](target))
    print("begun", flush=True)
    orders = asyncio.create_task(answer_orders_async(report))
    done, _ = await asyncio.wait((attack, orders), return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


class _Half(asyncio.Protocol):
    """One side of a connection that is passed on."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.other: asyncio.Future[_Half] = asyncio.get_running_loop().create_future()
        self._held: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def join(self, other: "_Half") -> None:
        self.other.set_result(other)
        for data in self._held:
            other.transport.write(data)

    def data_received(self, data: bytes) -> None:
        if self.other.done():
            self.other.result().transport.write(data)
        else:
            self._held.append(data)

    def pause_writing(self) -> None:
        if self.other.done():
            self.other.result().transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other.done():
            self.other.result().transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other.done():
            self.other.result().transport.close()


async def relay(address: str) -> str:
    """An address that passes connections on to `address`, from ELSEWHERE: gRPC's clients cannot choose theirs."""
    loop, (host, _, port) = asyncio.get_running_loop(), address.rpartition(":")
    connecting: set[asyncio.Task[None]] = set()

    def accept() -> _Half:
        near = _Half()

        async def connect() -> None:
            _, far = await loop.create_connection(_Half, host, int(port), local_addr=(ELSEWHERE, 0))
            near.join(far)
            far.join(near)

        task = loop.create_task(connect())
        connecting.add(task)
        task.add_done_callback(connecting.discard)
        return near

    server = await loop.create_server(accept, HERE, 0, backlog=1024)
    return f"{HERE}:{server.sockets[0].getsockname()[1]}"


def main() -> None:
    allow_many_connections()
    os.nice(NICE)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(*sys.argv[1:]))


if __name__ == "__main__":
    main()
