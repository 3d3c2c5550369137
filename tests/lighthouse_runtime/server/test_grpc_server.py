"""The gRPC server as both daemons use it."""

import asyncio
import importlib.util
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from lighthouse_protocol.limits import KEEPALIVE_S
from lighthouse_protocol.pb.documented import lighthouse_pb2
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_protocol.rules import access
from lighthouse_runtime.cli import MAX_DURATION_S
from lighthouse_runtime.client import connection
from lighthouse_runtime.security.access import LoopbackAccess
from lighthouse_runtime.server import grpc_server
from lighthouse_runtime.server.grpc_server import Call, GrpcServer, Method, options

Request = lighthouse_pb2.LighthouseHeartbeatRequest


def test_every_option_is_one_that_grpc_knows() -> None:
    """grpc ignores a misspelt option without a word."""
    core = importlib.util.find_spec("grpc._cython.cygrpc")
    assert core is not None
    assert core.origin is not None
    content = Path(core.origin).read_bytes()
    chosen = [*options(KEEPALIVE_S), *connection._OPTIONS]
    assert [name for name, _ in chosen if name.encode() + b"\0" not in content] == []
    assert b"grpc.so_reuseporx" not in content
    for chosen in (options(KEEPALIVE_S), connection._OPTIONS):
        assert len(chosen) == len(dict(chosen)), "each is set once"


async def test_a_keepalive_may_be_as_long_as_a_duration() -> None:
    """It grows with the heartbeat timeout, for which some give years."""
    server = GrpcServer({}, [], LoopbackAccess(), keepalive_s=MAX_DURATION_S)
    await server.start("127.0.0.1:0")
    await server.stop(0)


def test_idle_clients_that_ping_are_kept_and_a_vanished_peer_is_noticed_within_two_seconds() -> None:
    """One second until it is asked, one for its answer; the last two make grpc look while nothing is said."""
    served = dict(options(KEEPALIVE_S))
    assert served["grpc.so_reuseport"] == 0
    assert served["grpc.http2.max_ping_strikes"] == 0
    assert served["grpc.keepalive_permit_without_calls"] == 1
    assert served["grpc.http2.min_ping_interval_without_data_ms"] <= 60_000
    assert served["grpc.keepalive_time_ms"] + served["grpc.keepalive_timeout_ms"] <= 2000
    assert served["grpc.http2.ping_timeout_ms"] <= 1000
    assert served["grpc.http2.max_pings_without_data"] == 0
    assert "grpc.min_reconnect_backoff_ms" not in dict(connection._OPTIONS), "connects are not hurried"


class Handlers:
    """What the server under test does."""

    async def echo(self, request: Request, call: Call) -> bytes:
        return f"{request.replica_id} {call.time_left_s is not None} {call.metadata.get('key')}".encode()

    async def refuse(self, request: Request, call: Call) -> bytes:
        raise InvalidRequest("is odd", field="replica_id")

    async def fail(self, request: Request, call: Call) -> bytes:
        raise ZeroDivisionError("oops")

    async def wait(self, request: Request, call: Call) -> Request:
        call.require_deadline()
        return request


@pytest.fixture(autouse=True)
def policy(monkeypatch: pytest.MonkeyPatch) -> None:
    for service in ("x.Service", "Service"):
        for name in ("echo", "refuse", "fail", "wait"):
            monkeypatch.setitem(access.POLICY, f"/{service}/{name}", access.POLICY["/LighthouseService/Status"])


@pytest.fixture
async def running() -> AsyncIterator[tuple[GrpcServer, grpc.aio.Channel]]:
    handlers = Handlers()
    methods = {name: Method(Request, getattr(handlers, name)) for name in ("echo", "refuse", "fail", "wait")}
    grpc_server = GrpcServer(
        {"x.Service": methods, "Service": methods}, ["lighthouse.v1.LighthouseService"], LoopbackAccess()
    )
    port = await grpc_server.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as client:
        yield grpc_server, client
    await grpc_server.stop(0)


async def call(client: grpc.aio.Channel, method: str, body: bytes = b"", **more: object) -> bytes:
    return await client.unary_unary(f"/x.Service/{method}")(body, **more)  # type: ignore[arg-type,no-any-return]


async def test_a_handler_gets_its_request_and_its_call(running: tuple[GrpcServer, grpc.aio.Channel]) -> None:
    _, client = running
    body = Request(replica_id="a").SerializeToString()
    assert await call(client, "echo", body, timeout=5, metadata=[("key", "v")]) == b"a True v"
    assert await call(client, "echo", body) == b"a False None"
    assert await client.unary_unary("/Service/wait")(body, timeout=5) == body


@pytest.mark.parametrize(
    ("method", "body", "code", "details"),
    [
        ("refuse", b"", grpc.StatusCode.INVALID_ARGUMENT, "replica_id: is odd"),
        ("wait", b"", grpc.StatusCode.INVALID_ARGUMENT, "deadline: no deadline; set one on the call"),
        ("echo", b"\xff", grpc.StatusCode.INVALID_ARGUMENT, "request: cannot parse 1 bytes as lighthouse.v1."),
        ("fail", b"", grpc.StatusCode.INTERNAL, "ZeroDivisionError: oops; see the daemon's log"),
        ("nothing", b"", grpc.StatusCode.UNIMPLEMENTED, "Method not found!"),
    ],
)
async def test_what_a_handler_raises_is_a_status(
    running: tuple[GrpcServer, grpc.aio.Channel],
    caplog: pytest.LogCaptureFixture,
    method: str,
    body: bytes,
    code: grpc.StatusCode,
    details: str,
) -> None:
    _, client = running
    with pytest.raises(grpc.aio.AioRpcError) as e:
        await call(client, method, body)
    assert e.value.code() is code
    assert (e.value.details() or "").startswith(details)
    failures = [record.getMessage() for record in caplog.records if record.name == grpc_server.log.name]
    assert failures == (["x.Service/fail failed"] if method == "fail" else [])


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("192.0.2.99:1", "the port is taken, or the address is not this host's; choose another"),
        ("nowhere.invalid:1", "this host name does not re"),
    ],
)
async def test_what_cannot_be_listened_on_is_refused_with_the_option(where: str, why: str) -> None:
    other = GrpcServer({}, [], LoopbackAccess())
    with pytest.raises(InvalidRequest, match=f"--bind: cannot listen on {where}: {why}"):
        await other.start(where)
    await other.stop(0)


async def test_a_port_that_is_taken_is_refused_with_its_process_before_grpc_prints_a_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    other = GrpcServer({}, [], LoopbackAccess())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        why = f"cannot listen on 127.0.0.1:{taken.getsockname()[1]}: the port is in use by process {os.getpid()} "
        with pytest.raises(InvalidRequest, match=why):
            await other.start(f"127.0.0.1:{taken.getsockname()[1]}")
    await other.stop(0)
    assert capfd.readouterr().err == ""


async def test_a_caller_that_has_gone_while_it_is_refused_is_no_defect() -> None:
    class Gone:
        async def abort(self, *_: object) -> None:
            raise grpc.aio.InternalError("Failed grpc_call_start_batch: 1")

    with pytest.raises(asyncio.CancelledError):
        await GrpcServer({}, [], LoopbackAccess())._refuse("x/y", Gone(), InvalidRequest("is odd"))


async def test_a_server_with_a_method_without_a_policy_does_not_start() -> None:
    with pytest.raises(KeyError, match=r"/x\.Service/new has no entry in lighthouse_protocol/rules/access.py"):
        GrpcServer({"x.Service": {"new": Method(Request, Handlers().echo)}}, [], LoopbackAccess())


def test_who_is_local() -> None:
    hosts = ("ipv4:127.0.0.1:5000", "ipv4:127.9.9.9:5000", "ipv6:[::1]:5000", "ipv6:%5B::1%5D:5000")
    assert all(Call(1.0, peer, {}).is_local for peer in (*hosts, "unix:/run/lighthouse.sock", "unix:"))
    others = ("ipv4:198.51.100.7:5000", "ipv6:[2001:db8::1]:5000", "ipv6:[::ffff:198.51.100.7]:5000")
    assert not any(Call(1.0, peer, {}).is_local for peer in (*others, "", "nonsense"))


@pytest.mark.parametrize(
    ("peer", "caller"),
    [
        ("ipv4:127.0.0.1:5000", "127.0.0.1:5000"),
        ("ipv6:[::1]:5000", "[::1]:5000"),
        ("ipv6:%5B2001:db8::7%5D:5000", "[2001:db8::7]:5000"),
        ("ipv6:[fe80::1%eth0]:5000", "ipv6:[fe80::1%eth0]:5000"),
        ("ip:[10.0.0.1]:80", "10.0.0.1:80"),
        ("unix:/run/lighthouse.sock", "unix:/run/lighthouse.sock"),
        ("nobody", "nobody"),
    ],
)
def test_a_caller_is_shown_as_a_person_writes_an_address(peer: str, caller: str) -> None:
    assert Call(1.0, peer, {}).caller == caller
