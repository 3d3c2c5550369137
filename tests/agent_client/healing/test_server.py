"""State over HTTP: the right state, or an error of the right class within its deadline; and nothing left behind."""

import http.client
import logging
import math
import os
import socket
import stat
import struct
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import pytest
import torch

from agent_client.healing.connection import StateKey, StateUnavailable, split_address
from agent_client.healing.fetch import Fetch
from agent_client.healing.server import MAX_CONNECTIONS, MAX_CONNECTIONS_OF_A_HOST, StateServer
from agent_client.state.codec import Encoding, allocate, encode
from agent_client.state.tree import CorruptState
from tests.agent_client.healing.sources import (
    KEY,
    Script,
    answering,
    connected,
    fetch,
    ok,
    sends,
    serving,
    threads,
    took,
)
from tests.agent_client.state.trees import same
from tests.processes import eventually

OTHER = StateKey(8, 12, 0)
STATE = {"model": {"w": torch.arange(6.0).reshape(2, 3)}, "step": 12}
BIG = {"w": torch.arange(4 * 2**20, dtype=torch.int64)}
BIG_BYTES = encode(BIG).length


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 loopback here")


@pytest.fixture(autouse=True)
def _nothing_left_behind(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Every test: no thread of ours survives it, nothing was printed, and nothing was logged that one must see."""
    yield
    assert eventually(lambda: not threads()), threads()
    out, err = capfd.readouterr()
    # gRPC says so of a fork where an earlier test of this process has left it its threads.
    assert (out, [line for line in err.splitlines() if "fork_posix.cc" not in line]) == ("", [])
    assert [record for record in caplog.get_records("call") if record.levelno >= logging.WARNING] == []


@contextmanager
def reading(server: StateServer, key: StateKey = KEY, wait_s: float = 0) -> Iterator[socket.socket]:
    """A reader in hand that has sent its request; what the kernel buffers for it is far less than BIG."""
    held = server._held
    encoding = held.encoding if held else encode(BIG)
    path = f"/pieces/{encoding.layout}/0-{encoding.body_length}/{key[0]}/{key[1]}/{key[2]}?wait_s={wait_s:.1f}"
    with connected(server.address) as reader:
        reader.sendall(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        yield reader


def read_to_end(reader: socket.socket) -> int:
    """How many bytes still come before the connection ends, in whatever way."""
    count = 0
    try:
        while chunk := reader.recv(2**20):
            count += len(chunk)
    except ConnectionError:
        pass
    return count


def read_exactly(reader: socket.socket, count: int) -> int:
    for _ in range(count // 2**10):
        left = 2**10
        while left:
            left -= len(reader.recv(left)) or pytest.fail("the connection has ended")
    return count


def is_refused(server: StateServer, key: StateKey = KEY) -> bool:
    server.refuse_up_to(*key[:2])
    try:
        fetch(server.address, key, 60)
    except StateUnavailable:
        return True
    return False


@contextmanager
def swallowing() -> Iterator[Any]:
    """An address that does not even refuse: its queue of connections is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, ExitStack() as filling:
        for _ in range(4):
            connection = filling.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(listener.getsockname())
        yield listener.getsockname()


MANIFEST = encode(STATE).head + b"".join(encode(STATE).checksums())


class Noted:
    """Instead of a Pace."""

    def __init__(self, paced: set[str], side: str) -> None:
        self._paced, self._side = paced, side

    def rest(self) -> None:
        self._paced.add(self._side)


class TestFetch:
    def test_only_a_reader_that_nobody_waits_for_gives_way(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One of what was put is waited for, also the second one."""
        paced: set[str] = set()
        for side in ("server", "fetch"):
            monkeypatch.setattr(f"agent_client.healing.{side}.Pace", lambda side=side: Noted(paced, side))
        with serving(STATE) as server:
            for _ in range(3):
                fetch(server.address, KEY, 60)
            assert paced == set()
            server.keep(OTHER, STATE, frozenset("bc"), math.inf)
            fetch(server.address, OTHER, 60)
            assert paced == {"server"}
            beside = Fetch({"a": lambda: server.address}, OTHER, 5, accept=lambda _: None, is_background=True)
            assert same(beside.run(), STATE)
            assert paced == {"server", "fetch"}
            assert eventually(lambda: is_refused(server, OTHER)), "the source hears of a read a moment later"

    def test_concurrent_readers(self) -> None:
        with serving(BIG) as server, ThreadPoolExecutor(8) as pool:
            for received in pool.map(lambda _: fetch(server.address, KEY, 60), range(8)):
                assert same(received, BIG)

    @pytest.mark.parametrize("asked", [OTHER, KEY._replace(step=13), KEY._replace(group_rank=1)])
    def test_another_key_is_refused_by_name(self, asked: StateKey) -> None:
        with serving(STATE) as server:
            with took(0, 20), pytest.raises(StateUnavailable) as caught:
                server.refuse_up_to(*asked[:2])
                fetch(server.address, asked, 60)
        message = str(caught.value)
        assert server.address in message
        assert f"quorum {asked[0]} step {asked[1]} group rank {asked[2]}" in message
        assert f'"asked": {{"quorum_id": {asked[0]}, "step": {asked[1]}, "group_rank": {asked[2]}}}' in message
        assert '"held": {"quorum_id": 7, "step": 12, "group_rank": 0}' in message

    def test_waits_until_the_source_has_its_snapshot(self) -> None:
        with serving(STATE) as server, ThreadPoolExecutor(1) as pool, took(0.2, 20):
            received = pool.submit(fetch, server.address, OTHER, 60)
            time.sleep(0.2)
            assert not received.done()
            server.publish(OTHER, {"other": 1})
            assert received.result() == {"other": 1}

    def test_waits_no_longer_than_the_server_allows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("agent_client.healing.server.MAX_WAIT_S", 0.2)
        with serving() as server, took(0.2, 20), pytest.raises(StateUnavailable, match="409"):
            fetch(server.address, KEY, 60)

    def test_waits_no_longer_than_its_share_of_the_timeout(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("agent_client.healing.fetch.WAIT_SHARE", 0.01)
        with serving() as server, took(0.3, 20), pytest.raises(StateUnavailable, match="409"):
            fetch(server.address, KEY, 30)

    @pytest.mark.parametrize("path", ["/", "/manifest/1/2", "/manifest/1/2/x", "/manifest/1/2/3?wait_s=nan"])
    def test_any_other_path_is_not_found(self, path: str) -> None:
        with serving() as server, connected(server.address) as client:
            client.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            assert client.recv(100).split()[1] == b"404"

    @pytest.mark.parametrize(
        "address", ["", "host:1", "https://host:1", "http://host", "http://:1", "http://host:99999", "http://host:1/x"]
    )
    def test_a_malformed_address(self, address: str) -> None:
        with pytest.raises(ValueError):
            fetch(address, KEY, 60)

    def test_proxies_of_the_environment_are_ignored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.create_server(("127.0.0.1", 0)) as proxy, serving() as server:
            for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
                monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
            monkeypatch.delenv("no_proxy", raising=False)
            server.publish(KEY, STATE)
            assert same(fetch(server.address, KEY, 60), STATE)
            proxy.settimeout(0)
            with pytest.raises(BlockingIOError):
                proxy.accept()


def resolve_to(patch: pytest.MonkeyPatch, addresses: list[Any]) -> None:
    families = [socket.AF_INET6 if ":" in address[0] else socket.AF_INET for address in addresses]
    found = [(family, socket.SOCK_STREAM, 0, "", address) for family, address in zip(families, addresses, strict=True)]
    patch.setattr(socket, "getaddrinfo", lambda *_, **__: found)


class TestAddresses:
    @needs_ipv6
    def test_one_host(self) -> None:
        with serving(STATE, bind_host="::1", advertise="::1") as server:
            assert server.address.startswith("http://[::1]:")
            assert same(fetch(server.address, KEY, 60), STATE)

    @needs_ipv6
    def test_both_by_default(self) -> None:
        with serving(STATE, bind_host="", advertise="localhost") as server:
            port = server.address.rsplit(":", 1)[1]
            for host in ("127.0.0.1", "[::1]", "localhost"):
                assert same(fetch(f"http://{host}:{port}", KEY, 60), STATE)

    @needs_ipv6
    def test_the_next_address_of_a_name_is_tried(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with serving(STATE, bind_host="127.0.0.1", advertise="localhost") as server:
            port = int(server.address.rsplit(":", 1)[1])
            resolve_to(monkeypatch, [("::1", port, 0, 0), ("127.0.0.1", port)])
            assert same(fetch(server.address, KEY, 60), STATE)

    def test_an_address_that_swallows_everything_takes_its_share_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with serving(STATE) as server, swallowing() as nowhere:
            here = ("127.0.0.1", int(server.address.rsplit(":", 1)[1]))
            resolve_to(monkeypatch, [nowhere, here])
            with took(3.9, 8):
                assert same(fetch(server.address, KEY, 8), STATE)
            resolve_to(monkeypatch, [nowhere])
            with took(0.3, 20), pytest.raises(TimeoutError):
                fetch(server.address, KEY, 0.3)

    def test_an_address_of_another_host(self) -> None:
        with pytest.raises(OSError) as caught:
            StateServer("192.0.2.1", advertise="x")
        assert "on 192.0.2.1" in caught.value.__notes__[0]


class TestWithdraw:
    @pytest.mark.parametrize("publishes_another", [False, True])
    def test_aborts_streams_in_flight(self, publishes_another: bool) -> None:
        with serving(BIG) as server:
            with reading(server) as reader:
                assert reader.recv(1000)
                with took(0, 20):
                    server.publish(OTHER, STATE) if publishes_another else server.withdraw()
                assert read_to_end(reader) < BIG_BYTES - 2**20
            assert is_refused(server)
            assert is_refused(server, OTHER) is not publishes_another

    def test_nothing_reads_the_state_afterwards(self) -> None:
        tensor = torch.zeros(32 * 2**20, dtype=torch.uint8)
        with serving(tensor) as server:
            with reading(server) as reader:
                read_exactly(reader, 2**20)
                server.withdraw()
                tensor.fill_(0xEE)
                seen = b"".join(iter(lambda: reader.recv(2**20), b""))
        assert bytes([0xEE] * 8) not in seen

    def test_cuts_off_one_that_takes_longer_than_the_grace(self) -> None:
        with serving(BIG) as server:
            with reading(server) as reader:
                assert reader.recv(10)
                with took(0.4, 20):
                    server.withdraw(grace_s=0.5)

    def test_a_cut_off_ends_the_grace(self) -> None:
        with serving(BIG) as server, ThreadPoolExecutor(1) as pool:
            with reading(server) as reader, took(0, 20):
                assert reader.recv(10)
                withdrawn = pool.submit(server.withdraw, 60)
                assert eventually(lambda: is_refused(server))
                server.disconnect_readers()
                withdrawn.result(20)

    def test_the_target_learns_of_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def allocate_once_withdrawn(*args: Any) -> Any:
            server.withdraw()
            return allocate(*args)

        monkeypatch.setattr("agent_client.healing.fetch.allocate", allocate_once_withdrawn)
        with serving(BIG) as server:
            with pytest.raises(StateUnavailable, match=r"is not available: it answered 409.*null"):
                fetch(server.address, KEY, 60)

    def test_what_cannot_be_sent_leaves_the_former_in_place(self) -> None:
        with serving(STATE) as server:
            with pytest.raises(TypeError, match=r"state\['hook'\]"):
                server.publish(OTHER, {"hook": print})
            assert same(fetch(server.address, KEY, 60), STATE)

    def test_says_so_when_a_reader_does_not_let_go(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def hang(_: Encoding, start: int, stop: int) -> Iterator[memoryview]:
            device.wait(5)
            yield memoryview(b"")

        monkeypatch.setattr("agent_client.healing.server.ABORT_TIMEOUT_S", 0.1)
        monkeypatch.setattr(Encoding, "stripe", hang)
        device = threading.Event()
        with serving(STATE) as server:
            with reading(server) as reader:
                assert reader.recv(10)
                with pytest.raises(TimeoutError, match="quorum 7 step 12 group rank 0 is still being read"):
                    server.withdraw()
                device.set()


def half_then_end(connection: socket.socket) -> None:
    connection.sendall(ok(len(MANIFEST), MANIFEST[: len(MANIFEST) // 2]))


def half_then_reset(connection: socket.socket) -> None:
    half_then_end(connection)
    time.sleep(0.05)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def half_then_silence(connection: socket.socket) -> None:
    half_then_end(connection)
    connection.recv(1)


def drip(content: bytes) -> Script:
    def script(connection: socket.socket) -> None:
        for byte in content:
            connection.sendall(bytes([byte]))
            time.sleep(0.02)

    return script


class TestFailingSource:
    def test_nobody_listens(self) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            address = f"http://127.0.0.1:{unused.getsockname()[1]}"
            with took(0, 20), pytest.raises(StateUnavailable, match=f"quorum 7 step 12 .* {address}.*refused"):
                fetch(address, KEY, 60)

    def test_an_unknown_host(self) -> None:
        with pytest.raises(StateUnavailable, match="no checkpoint server answers"):
            fetch("http://no-such-host.invalid:1", KEY, 60)

    def test_its_connection_is_reset_mid_stream(self) -> None:
        with answering(half_then_reset) as address, took(0, 20), pytest.raises(StateUnavailable, match=address):
            fetch(address, KEY, 60)

    @pytest.mark.parametrize(
        ("script", "words"),
        [
            (lambda connection: connection.recv(1), "sends nothing"),
            (half_then_silence, "sends nothing"),
            (drip(ok(len(MANIFEST), MANIFEST)), ""),
            (drip(b"HTTP/1.0 409 Conflict\r\n\r\n" + b"x" * 200), ""),
        ],
        ids=["nothing", "silence", "drip", "dripping refusal"],
    )
    def test_the_deadline_is_that_of_the_whole(self, script: Script, words: str) -> None:
        with answering(script) as address, took(0.5, 20):
            with pytest.raises(TimeoutError, match=rf"quorum 7 .* within 0\.5 s, from {address}.*{words}"):
                fetch(address, KEY, 0.5)

    @pytest.mark.parametrize(
        ("answer", "failure", "words"),
        [
            (b"HTTP/1.0 200 OK\r\n\r\n" + MANIFEST, CorruptState, "not the checksums"),
            (ok("many", MANIFEST), CorruptState, "not the checksums"),
            (ok(len(MANIFEST) - 1, MANIFEST), CorruptState, "not the checksums"),
            (ok(len(MANIFEST) + 1, MANIFEST + b"x"), CorruptState, "not the checksums"),
            (ok(2**60, MANIFEST), CorruptState, "not the checksums"),
            (ok(len(MANIFEST), b"x" + MANIFEST[1:]), CorruptState, "not a state"),
            (ok(len(MANIFEST), MANIFEST[:40] + b"x" + MANIFEST[41:]), CorruptState, "checksum of the header"),
            (ok(5, b"<html"), StateUnavailable, "ends early"),
            (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", StateUnavailable, "ends early"),
            (b"HTTP/1.0 302 Found\r\nLocation: http://localhost:1/\r\n\r\n", StateUnavailable, "302"),
            (b"HTTP/1.0 500 No\r\n\r\nthe reason", StateUnavailable, "500: the reason"),
            (b"SSH-2.0-OpenSSH_9.6\r\n", StateUnavailable, "no checkpoint server"),
            (b"", StateUnavailable, "no checkpoint server"),
        ],
    )
    def test_a_wrong_answer(self, answer: bytes, failure: type[Exception], words: str) -> None:
        with answering(sends(answer)) as address, took(0, 20):  # noqa: SIM117
            with pytest.raises(failure, match=f"quorum 7 step 12 group rank 0 from {address}.*{words}"):
                fetch(address, KEY, 60)


class TestServer:
    def test_a_reader_that_stalls_is_cut_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("agent_client.healing.server.STALL_TIMEOUT_S", 0.2)
        with serving(BIG) as server:
            with reading(server) as reader:
                assert reader.recv(10)
                assert eventually(lambda: threads() == {"checkpoint-accept"})
                assert read_to_end(reader) < BIG_BYTES - 2**20

    def test_a_slow_reader_is_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("agent_client.healing.server.STALL_TIMEOUT_S", 0.4)
        with serving(BIG) as server:
            with reading(server) as reader, took(0.8, 20):
                count = 0
                for _ in range(20):
                    time.sleep(0.04)
                    count += read_exactly(reader, 2**20)
                assert count + read_to_end(reader) > BIG_BYTES

    def test_a_client_that_asks_nothing_is_cut_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("agent_client.healing.server.STALL_TIMEOUT_S", 0.2)
        with serving() as server, connected(server.address) as client, took(0.1, 20):
            assert client.recv(1) == b""

    def test_readers_that_leave_disturb_nobody(self) -> None:
        with serving(BIG) as server:
            for _ in range(5):
                with reading(server) as reader:
                    assert reader.recv(10)
            assert eventually(lambda: threads() == {"checkpoint-accept"})
            assert same(fetch(server.address, KEY, 60), BIG)

    def test_a_tensor_that_cannot_be_read_is_logged(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(_: Encoding, start: int, stop: int) -> Iterator[memoryview]:
            raise RuntimeError("the device is gone")
            yield

        with serving(STATE) as server:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Encoding, "stripe", fail)
                with pytest.raises(StateUnavailable, match="breaks off within piece 0"):
                    fetch(server.address, KEY, 60)
            assert "the device is gone" in caplog.text
            assert same(fetch(server.address, KEY, 60), STATE)
        caplog.clear()

    def test_close_ends_everything_at_once(self) -> None:
        with serving(BIG) as server, ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(fetch, server.address, OTHER, 60)
            with reading(server) as reader, reading(server, OTHER, wait_s=60), connected(server.address):
                assert reader.recv(10)
                assert eventually(
                    lambda: [thread.name for thread in threading.enumerate()].count("checkpoint-stream") == 4
                )
                with took(0, 20):
                    server.close()
                assert threads() == set()
                assert read_to_end(reader) < BIG_BYTES - 2**20
                with pytest.raises(StateUnavailable):
                    waiting.result(20)
                with pytest.raises(StateUnavailable, match="refused"):
                    fetch(server.address, KEY, 60)
            server.close()

    def test_a_forked_child_holds_none_of_its_sockets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        start = threading.Thread.start
        # On a busy machine a thread runs for a while before start() returns.
        monkeypatch.setattr(threading.Thread, "start", lambda thread: [start(thread), time.sleep(0.1)])
        with serving(BIG) as server:
            with reading(server) as reader:
                assert reader.recv(10)
                listener = server._listener
                held = [sock.fileno() for sock in (listener.socket, *listener._connections)]
                assert len(held) == 2
                assert sockets_in_a_fork(held) == 0
            assert same(fetch(server.address, KEY, 60), BIG)


def sockets_in_a_fork(descriptors: list[int]) -> int:
    """How many of `descriptors` are sockets in a child that was forked now."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        count = 0
        for descriptor in descriptors:
            with suppress(OSError):
                count += stat.S_ISSOCK(os.fstat(descriptor).st_mode)
        os._exit(count)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class TestPieces:
    """What fetch.py asks for; a source that answers otherwise than it should is in test_striped.py."""

    @pytest.mark.parametrize("ranges", ["0-8", "0-8,8-16", "16-24"])
    def test_are_the_bytes_after_the_head(self, ranges: str) -> None:
        encoding = encode(STATE)
        body = b"".join(encoding)[len(encoding.head) :]
        stripes = [tuple(map(int, part.split("-"))) for part in ranges.split(",")]
        with serving(STATE) as server:
            status, found = get(server, f"pieces/{encoding.layout}/{ranges}")
        assert (status, found) == (200, b"".join(body[first:last] for first, last in stripes))

    @pytest.mark.parametrize("ranges", ["8-8", "8-0", "0-999999999", "0", "-", "0-8,", "0-8-9"])
    def test_others_are_refused(self, ranges: str) -> None:
        with serving(STATE) as server:
            assert get(server, f"pieces/{encode(STATE).layout}/{ranges}")[0] == 412

    def test_those_of_other_tensors_too(self) -> None:
        with serving(STATE) as server:
            assert get(server, f"pieces/{'0' * 32}/0-8")[0] == 412

    def test_the_manifest_is_the_head_and_the_checksum_of_each_piece(self) -> None:
        encoding = encode(STATE)
        with serving(STATE) as server:
            assert get(server, "manifest") == (200, encoding.head + b"".join(encoding.checksums()))


def get(server: StateServer, what: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*split_address(server.address), timeout=10)
    with closing(connection):
        connection.request("GET", f"/{what}/{KEY.quorum_id}/{KEY.step}/{KEY.group_rank}")
        response = connection.getresponse()
        return response.status, response.read()


def test_strangers_that_wait_make_room_for_a_reader_of_another_host(caplog: pytest.LogCaptureFixture) -> None:
    """Each may ask for a state that never comes, and hold its connection meanwhile."""
    server, strangers = StateServer("0.0.0.0", advertise="127.0.0.1"), list[socket.socket]()
    try:
        port = int(server.address.rpartition(":")[2])
        server.publish(StateKey(7, 3, 0), {"a": torch.zeros(4)})

        def ask(source: str, path: str) -> socket.socket:
            connection = socket.create_connection(("127.0.0.1", port), 20, (source, 0))
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            return connection

        for source in ("127.0.0.2", "127.0.0.3"):
            strangers += [ask(source, "/manifest/9/9/0?wait_s=60") for _ in range(MAX_CONNECTIONS_OF_A_HOST)]
        eventually(lambda: len(server._listener._connections) == MAX_CONNECTIONS, "all connections are taken")
        with ask("127.0.0.4", "/manifest/7/3/0") as reader:
            assert reader.recv(12) == b"HTTP/1.1 200"
        # The reader has its state and the cut stranger is gone: one place is free, which a reader takes that waits.
        eventually(lambda: len(server._listener._connections) == MAX_CONNECTIONS - 1, "one connection is free")
        strangers.append(ask("127.0.0.4", "/manifest/9/9/0?wait_s=60"))
        eventually(lambda: len(server._listener._connections) == MAX_CONNECTIONS, "all connections are taken again")
        with ask("127.0.0.2", "/manifest/7/3/0") as another_stranger:
            assert another_stranger.recv(12) == b"HTTP/1.1 503"
        assert {record.getMessage()[:23] for record in caplog.records} == {"too many connections fo"}
        caplog.clear()
    finally:
        server.close()
        for each in strangers:
            each.close()
