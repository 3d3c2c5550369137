"""Anything at all, sent to every method and every port: the daemon goes on, and its log shows no defect."""

import contextlib
import re
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lighthouse.server.services import LighthouseService
from lighthouse_protocol.messages.membership import Participant
from lighthouse_runtime.client.clients import LighthouseClient, ManagerClient
from lighthouse_runtime.server.grpc_server import Method
from manager.server.service import ManagerService
from tests.processes import LOCALHOST, PATIENCE_S, Lighthouse, Manager, http_get

CALL_S = 0.05
FUZZ = settings(max_examples=200, database=None, suppress_health_check=list(HealthCheck))

# A defect of the daemon: never an answer to what a caller sent.
DEFECTS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}


def methods(service: Any) -> list[tuple[str, type[Message]]]:
    """(path, request) of everything that `service` serves."""
    return [
        (f"/{name}/{method}", entry.request)
        for name, entries in service.services().items()
        for method, entry in entries.items()
        if isinstance(entry, Method)
    ]


LIGHTHOUSE = methods(LighthouseService(None, None))  # type: ignore[arg-type]
# A Kill that is understood ends the manager, as it should.
MANAGER = [
    (path, request)
    for path, request in methods(ManagerService(None, None))  # type: ignore[arg-type]
    if not path.endswith("/Kill")
]


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[Lighthouse]:
    with Lighthouse("--heartbeat-timeout", "1s", "--join-timeout", "1s") as process:
        yield process


@pytest.fixture(scope="module")
def manager(lighthouse: Lighthouse) -> Iterator[Manager]:
    with Manager(lighthouse.address, "fuzzed", "--job", "fuzzed", ranks=2) as process:
        yield process


@pytest.fixture(scope="module")
def channels(lighthouse: Lighthouse, manager: Manager) -> Iterator[dict[str, grpc.Channel]]:
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(grpc.insecure_channel(daemon.address))
            for name, daemon in (("lighthouse", lighthouse), ("manager", manager))
        }


@pytest.fixture(autouse=True)
def they_go_on(lighthouse: Lighthouse, manager: Manager) -> Iterator[None]:
    daemons = (lighthouse, manager)
    before = [len(daemon.log()) for daemon in daemons]
    yield
    for daemon, length in zip(daemons, before, strict=True):
        assert daemon.is_alive
        assert not re.search(r"Traceback|(?<!rank \d) failed", said := daemon.log()[length:]), said[:2000]
        assert http_get(daemon.http + "/livez") == (200, "ok\n")
        assert http_get(daemon.http + "/metrics")[0] == http_get(daemon.http + "/status")[0] == 200
    with LighthouseClient(lighthouse.address, job="afterwards") as client:
        assert client.quorum(Participant("a"), timeout_s=30).participants[0].replica_id == "a"
    with ManagerClient(manager.address) as rank:
        assert rank.status(timeout_s=30).replica_id == "fuzzed"


def status_of(
    channel: grpc.Channel, path: str, body: bytes, metadata: Sequence[tuple[str, Any]] = (), within_s: float = CALL_S
) -> str:
    call = channel.unary_unary(path).future(body, timeout=within_s, metadata=metadata)
    code, details = call.code(), call.details() or ""
    assert code not in DEFECTS, (path, body, code, details)
    assert "Stream removed (received metadata" not in details, (path, body)
    return code.name


# -- messages

INTS = st.one_of(st.sampled_from([0, 1, 2, -1, 2**31, 2**62, 2**63 - 1, -(2**63)]), st.integers(-(2**63), 2**63 - 1))
UNSIGNED = st.one_of(st.sampled_from([0, 1, 2, 65536, 65537, 2**64 - 1]), st.integers(0, 2**64 - 1))
TEXTS = st.one_of(
    st.sampled_from(["", "a", "b", "a:b:c", "a:00000000-0000-0000-0000-000000000000", "x" * 129, "x" * 5000]),
    st.sampled_from(["127.0.0.1:1", "[::1]:2", "http://10.0.0.1:1", "0.0.0.0:0", "::1", "[::", "fe80::1%\n", "a:-1"]),
    st.sampled_from(["\0", "\n", "é", "\U0001f600" * 30, "{}", "%s", "../..", "<b>"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
)
_BY_KIND = {
    FieldDescriptor.CPPTYPE_INT64: INTS,
    FieldDescriptor.CPPTYPE_UINT64: UNSIGNED,
    FieldDescriptor.CPPTYPE_STRING: TEXTS,
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
}


def messages(kind: type[Message]) -> st.SearchStrategy[Message]:
    """Any message of `kind`, each field set or not."""

    def value(field: FieldDescriptor) -> st.SearchStrategy[Any]:
        one = messages(field.message_type._concrete_class) if field.message_type else _BY_KIND[field.cpp_type]
        return st.lists(one, max_size=3) if field.is_repeated else one

    fields = {field.name: value(field) for field in kind.DESCRIPTOR.fields}
    return st.fixed_dictionaries({}, optional=fields).map(lambda chosen: kind(**chosen))


def calls(served: list[tuple[str, type[Message]]]) -> st.SearchStrategy[tuple[str, bytes]]:
    """(path, body): a message, perhaps with unknown fields behind it, or any bytes."""
    unknown = st.sampled_from([b"", b"", b"\xaa\x06\x05hello", b"\x08", b"\xff"])

    def bodies(entry: tuple[str, type[Message]]) -> st.SearchStrategy[tuple[str, bytes]]:
        path, request = entry
        sound = st.builds(lambda message, more: message.SerializeToString() + more, messages(request), unknown)
        return st.tuples(st.just(path), st.one_of(sound, sound, st.binary(max_size=200)))

    return st.sampled_from(served).flatmap(bodies)


# of the job, ASCII is all that gRPC carries as text; what it does not carry, the client refuses to send
METADATA = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(["lighthouse-job", "authorization"]),
            st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=140),
        ),
        st.tuples(st.just("anything-bin"), st.binary(max_size=20)),
    ),
    max_size=3,
)


@FUZZ
@given(call=calls(LIGHTHOUSE), metadata=METADATA)
def test_no_call_hurts_the_lighthouse(
    channels: dict[str, grpc.Channel], call: tuple[str, bytes], metadata: list[tuple[str, Any]]
) -> None:
    status_of(channels["lighthouse"], *call, metadata)


@FUZZ
@given(call=calls(MANAGER), metadata=METADATA)
def test_no_call_hurts_the_manager(
    channels: dict[str, grpc.Channel], call: tuple[str, bytes], metadata: list[tuple[str, Any]]
) -> None:
    status_of(channels["manager"], *call, metadata)


@FUZZ
@given(path=st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=60), body=st.binary(max_size=50))
def test_no_unknown_method_hurts(channels: dict[str, grpc.Channel], path: str, body: bytes) -> None:
    for channel in channels.values():
        assert status_of(channel, "/" + path, body) in ("UNIMPLEMENTED", "DEADLINE_EXCEEDED")


@pytest.mark.parametrize("body", [b"\0", b"\xff" * 9, b"\x0a\xff"])
def test_a_kill_that_is_not_understood_kills_nobody(channels: dict[str, grpc.Channel], body: bytes) -> None:
    for path in ("/manager.v1.ManagerService/Kill", "/ManagerService/Kill", "/torchft.ManagerService/Kill"):
        assert status_of(channels["manager"], path, body, within_s=PATIENCE_S) == "INVALID_ARGUMENT"


# -- bytes on the ports

_LINES = b"GET |POST |/status|/metrics|/..%2f| HTTP/1.1\r\n| HTTP/9.9\r\n|\r\n|\n|\0".split(b"|")
_HEADERS = [b"Host: x\r\n", b"Content-Length: 5\r\n", b"Content-Length: -1\r\n", b"Upgrade: h2c\r\n", b"x" * 9000]
_CHUNKS = [b"Transfer-Encoding: chunked\r\n\r\n", b"ffffffffffffffff\r\n", b"Expect: 100-continue\r\n"]
_PREFACE, _SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\0\0\0\4\0\0\0\0\0"
_FRAMES = [_PREFACE, _SETTINGS, b"\0\0\x12\4", b"\0\0\1\1\5\0\0\0\1\x82", b"\x80" * 20]
_TOKENS = st.sampled_from([*_LINES, *_HEADERS, *_CHUNKS, *_FRAMES])
BYTES = st.lists(st.one_of(_TOKENS, st.binary(max_size=30)), max_size=12).map(b"".join)


def send(port: int, data: bytes) -> None:
    """Write, look at what comes for a moment, go away."""
    with socket.create_connection((LOCALHOST, port), timeout=5) as caller, contextlib.suppress(OSError):
        caller.sendall(data)
        caller.settimeout(0.01)
        caller.recv(1000)


@FUZZ
@given(data=BYTES, number=st.integers(0, 3))
def test_no_bytes_on_a_port_hurt(lighthouse: Lighthouse, manager: Manager, data: bytes, number: int) -> None:
    ports = [lighthouse.port, lighthouse.http_port, int(manager.address.rpartition(":")[2])]
    ports.append(int(manager.http.rpartition(":")[2]))
    send(ports[number], data)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE"])
def test_http_answers_other_methods_with_a_status(lighthouse: Lighthouse, method: str) -> None:
    with socket.create_connection((LOCALHOST, lighthouse.http_port), timeout=10) as caller:
        caller.sendall(f"{method} /status HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = caller.makefile("rb").readline()
    assert answer.startswith(b"HTTP/1.1 200" if method == "HEAD" else b"HTTP/1.1 405")
