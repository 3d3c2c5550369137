"""A client with a join string against real servers: the right one, and each that is not it, in one clear line."""

import asyncio
import contextlib
import datetime
import hashlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
import trustme
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from lighthouse_protocol.coordinator import Coordinator
from lighthouse_protocol.identity import Address
from lighthouse_protocol.refusals import (
    DeadlinePassed,
    LighthouseError,
    NotServed,
    Unreachable,
    Untrusted,
    WrongProtocol,
)
from lighthouse_runtime.client import rpcs
from lighthouse_runtime.client.clients import AsyncLighthouseClient, LighthouseClient
from lighthouse_runtime.security import client_tls
from lighthouse_runtime.security.client_tls import SERVER_NAME, fetch_roots

TOKEN = "lhj_secret"
PAST = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
FUTURE = datetime.datetime(2090, 1, 1, tzinfo=datetime.UTC)
YEAR = datetime.timedelta(days=365)


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is a process of its own, that has fetched nothing."""
    monkeypatch.setattr(client_tls, "_roots", {})


class Server:
    """A gRPC server with a health service alone. `seen`: the tokens of its callers."""

    def __init__(self, credentials: grpc.ServerCredentials | None, port: int = 0) -> None:
        self.seen: list[str] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(2), interceptors=[self])  # type: ignore[list-item]
        servicer = health.HealthServicer()
        servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        where = f"127.0.0.1:{port}"
        add = self._server.add_insecure_port
        self.port = add(where) if credentials is None else self._server.add_secure_port(where, credentials)
        self._server.start()

    def intercept_service(self, go_on, details):  # type: ignore[no-untyped-def]
        self.seen += [value for key, value in details.invocation_metadata if key == "authorization"]
        return go_on(details)

    def stop(self) -> None:
        self._server.stop(0).wait()


class Authority:
    """A CA, and servers with its certificates."""

    def __init__(self) -> None:
        self.ca = trustme.CA()
        self.pin = hashlib.sha256(ssl.PEM_cert_to_DER_cert(self.ca.cert_pem.bytes().decode())).hexdigest()
        self.servers: list[Server] = []
        self.ends = contextlib.ExitStack()

    def credentials(self, name: str = SERVER_NAME, **times: datetime.datetime) -> grpc.ServerCredentials:
        made = self.ca.issue_cert(name, **times)
        chain = b"".join(each.bytes() for each in made.cert_chain_pems) + self.ca.cert_pem.bytes()
        return grpc.ssl_server_credentials([(made.private_key_pem.bytes(), chain)])

    def serve(self, credentials: grpc.ServerCredentials | None, port: int = 0) -> Server:
        self.servers.append(Server(credentials, port))
        return self.servers[-1]

    def https(self) -> int:
        """The port of a server that does TLS and chooses no protocol, as the HTTP side does."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made = self.ca.issue_cert(SERVER_NAME)
        with made.private_key_and_cert_chain_pem.tempfile() as path:
            context.load_cert_chain(path)
        context.load_verify_locations(cadata=self.ca.cert_pem.bytes().decode())  # and shows its CA

        listener = socket.create_server(("127.0.0.1", 0))

        def serve() -> None:
            while True:
                try:
                    raw, _ = listener.accept()
                except OSError:
                    return
                with contextlib.suppress(OSError), context.wrap_socket(raw, server_side=True) as tls:
                    tls.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        self.ends.callback(listener.close)
        self.ends.callback(thread.join)
        self.ends.callback(listener.shutdown, socket.SHUT_RDWR)
        return int(listener.getsockname()[1])

    def at(self, port: int, *more: int) -> Coordinator:
        return Coordinator(tuple(Address("127.0.0.1", each) for each in (port, *more)), self.pin, TOKEN)


@pytest.fixture(scope="module")
def authority() -> Iterator[Authority]:
    authority = Authority()
    with authority.ends:
        yield authority
        for server in authority.servers:
            server.stop()


def ask(coordinator: Coordinator, timeout_s: float = 20.0) -> None:
    with LighthouseClient(coordinator) as client:
        client.invoke(rpcs.health(timeout_s=timeout_s))


async def ask_async(coordinator: Coordinator, timeout_s: float = 20.0) -> None:
    async with AsyncLighthouseClient(coordinator) as client:
        await client.invoke(rpcs.health(timeout_s=timeout_s))


async def ask_by_stream(coordinator: Coordinator) -> None:
    async with AsyncLighthouseClient(coordinator) as client, client.session() as session:
        async for _ in session:
            pass


def ask_by_sync_stream(coordinator: Coordinator) -> None:
    with LighthouseClient(coordinator) as client, client.rank() as stream:
        for _ in stream:
            pass


def test_the_pinned_server_is_asked_over_tls_with_the_token(authority: Authority) -> None:
    server = authority.serve(authority.credentials())
    ask(authority.at(server.port))
    asyncio.run(ask_async(authority.at(server.port)))
    assert server.seen == [f"Bearer {TOKEN}"] * 2


def test_streams_are_open_before_the_certificate_is_there(authority: Authority) -> None:
    server = authority.serve(authority.credentials())
    with pytest.raises(NotServed):  # it has the health service alone
        asyncio.run(ask_by_stream(authority.at(server.port)))
    with pytest.raises(NotServed):
        ask_by_sync_stream(authority.at(server.port))
    assert len(server.seen) == 2


def wrong(authority: Authority, case: str) -> tuple[Coordinator, type[LighthouseError], str]:
    match case:
        case "pin":
            other = Authority()
            there = authority.serve(authority.credentials())
            return other.at(there.port), Untrusted, "has a different CA than the join string (pin "
        case "expired":
            there = authority.serve(authority.credentials(not_before=PAST, not_after=PAST + YEAR))
            return authority.at(there.port), Untrusted, "the lighthouse's certificate has expired; this host's clock"
        case "clock":
            there = authority.serve(authority.credentials(not_before=FUTURE, not_after=FUTURE + YEAR))
            return authority.at(there.port), Untrusted, "certificate is not valid yet; this host's clock says"
        case "name":
            there = authority.serve(authority.credentials("other.internal"))
            return authority.at(there.port), Untrusted, "the certificate does not match the join string"
        case "http":
            return authority.at(authority.https()), WrongProtocol, "this is an HTTP port, not a gRPC port"
        case "plain":
            return (
                authority.at(authority.serve(None).port),
                WrongProtocol,
                "does not speak TLS, which the join string requires",
            )
        case "nothing":
            return authority.at(1), Unreachable, "connection refused"
        case _:
            there = authority.serve(authority.credentials())
            return Coordinator((Address("127.0.0.1", there.port),)), Unreachable, "pass its join string"


@pytest.mark.parametrize("case", ["pin", "expired", "clock", "name", "http", "plain", "nothing", "tls"])
def test_what_is_not_the_pinned_server_is_one_clear_line(authority: Authority, case: str) -> None:
    coordinator, kind, words = wrong(authority, case)
    for attempt in (lambda: asyncio.run(ask_by_stream(coordinator)), lambda: ask_by_sync_stream(coordinator)):
        with pytest.raises(kind) as e:
            attempt()
        assert type(e.value) is kind
        assert words in str(e.value)
        assert TOKEN not in str(e.value)
        assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("case", "words"), [("expired", "has expired"), ("name", "does not match"), ("plain", "does not speak TLS")]
)
def test_a_certificate_that_goes_bad_later_says_so_too(authority: Authority, case: str, words: str) -> None:
    """The process has the CA's certificate by then, and gRPC alone finds out."""
    coordinator, _, _ = wrong(authority, case)
    ask(authority.at(authority.serve(authority.credentials()).port))
    with pytest.raises(WrongProtocol, match=words):
        ask_by_sync_stream(coordinator)


def test_a_server_that_accepts_and_says_nothing_costs_no_more_than_the_deadline(authority: Authority) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began_at = time.monotonic()
        with pytest.raises(Unreachable, match="the TLS handshake timed out"):
            fetch_roots(authority.at(silent.getsockname()[1]), 0.3)
        assert time.monotonic() - began_at < 10


def test_a_server_that_comes_later_is_waited_for(authority: Authority) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    timer = threading.Timer(0.5, lambda: authority.serve(authority.credentials(), port))
    timer.start()
    ask(authority.at(port), timeout_s=60.0)
    timer.join()


def test_the_first_address_that_answers_counts_and_what_answers_wrong_is_told(authority: Authority) -> None:
    port = authority.serve(authority.credentials()).port
    assert fetch_roots(authority.at(1, port), 20.0) == authority.ca.cert_pem.bytes().strip() + b"\n"


def test_a_call_that_waits_ends_with_its_deadline(authority: Authority) -> None:
    began_at = time.monotonic()
    with pytest.raises((Unreachable, DeadlinePassed)):
        ask(authority.at(1), timeout_s=0.5)
    assert time.monotonic() - began_at < 10
