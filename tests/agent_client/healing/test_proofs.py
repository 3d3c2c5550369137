"""Source and target prove to each other that they are members of the quorum, before a byte of a state is sent or used;
and what a stranger can make the server do is bounded."""

import logging
import math
import socket
import threading
from contextlib import ExitStack
from functools import partial

import pytest
import torch

from agent_client.healing import server
from agent_client.healing.connection import NONCE_HEADER, PROOF_HEADER, StateUnavailable
from lighthouse_protocol.rules.access import TARGET_WORD, prove
from tests.agent_client.healing import sources
from tests.agent_client.healing.sources import KEY, connected, fetch, took
from tests.agent_client.state.trees import same
from tests.processes import eventually

SECRET, OTHER = "known to the members of quorum 7", "known to the members of quorum 8"
STATE = {"w": torch.arange(6.0)}
PATH = f"/manifest/{KEY[0]}/{KEY[1]}/{KEY[2]}"


pytestmark = pytest.mark.usefixtures("no_threads_left")
serving = partial(sources.serving, STATE, secret=SECRET)


def ask(connection: socket.socket, path: str, headers: dict[str, str] | None = None) -> str:
    """The head of the answer, and what follows until the connection is quiet."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    connection.sendall(f"GET {path} HTTP/1.1\r\n{lines}\r\n".encode())
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += (got := connection.recv(4096))
        assert got, answer
    return answer.decode(errors="replace")


def nonce_of(answer: str) -> str:
    return next(line.partition(": ")[2] for line in answer.splitlines() if line.startswith(NONCE_HEADER))


def test_a_member_gets_the_state():
    with serving() as it:
        assert same(fetch(it.address, KEY, 60, secret=SECRET), STATE)


@pytest.mark.parametrize("secret", ["", OTHER])
def test_a_stranger_gets_none(secret: str, caplog: pytest.LogCaptureFixture):
    with serving() as it, pytest.raises(StateUnavailable, match="403"):
        fetch(it.address, KEY, 60, secret=secret)
    assert "is not a member of that quorum" in caplog.text


@pytest.mark.parametrize("secret", ["", OTHER])
def test_nor_does_one_give_any(secret: str, caplog: pytest.LogCaptureFixture):
    """It serves what it likes under the key, and cannot prove that it is a member."""
    with serving(secret=secret) as it, pytest.raises(StateUnavailable, match="did not prove|403"):
        fetch(it.address, KEY, 60, secret=SECRET)


def test_a_copy_of_a_request_opens_nothing(caplog: pytest.LogCaptureFixture):
    with serving() as it:
        with connected(it.address) as first:
            nonces = nonce_of(ask(first, "/challenge")), "of the target"
            proof = prove(SECRET, TARGET_WORD, it.address, *KEY, *nonces)
            headers = {NONCE_HEADER: nonces[1], PROOF_HEADER: proof}
            assert " 200 " in ask(first, PATH, headers)
        with connected(it.address) as second:
            assert " 403 " in ask(second, PATH, headers)
            ask(second, "/challenge")
            assert " 403 " in ask(second, PATH, headers)


def test_a_nonce_is_good_once(caplog: pytest.LogCaptureFixture):
    with serving() as it, connected(it.address) as connection:
        nonces = nonce_of(ask(connection, "/challenge")), "of the target"
        headers = {NONCE_HEADER: nonces[1], PROOF_HEADER: prove(OTHER, TARGET_WORD, it.address, *KEY, *nonces)}
        assert " 403 " in ask(connection, PATH, headers)
        headers[PROOF_HEADER] = prove(SECRET, TARGET_WORD, it.address, *KEY, *nonces)
        assert " 403 " in ask(connection, PATH, headers)


def test_a_request_that_is_passed_on_opens_nothing(caplog: pytest.LogCaptureFixture):
    """The target is led to a stranger, which carries all that is said to the source, and back."""

    def carry(a: socket.socket, b: socket.socket) -> None:
        while data := a.recv(4096):
            b.sendall(data)
        b.shutdown(socket.SHUT_WR)

    def pass_on(door: socket.socket, to: str) -> None:
        caller, _ = door.accept()
        with caller, connected(to) as source:
            back = threading.Thread(target=carry, args=(source, caller))
            back.start()
            carry(caller, source)
            back.join()

    with serving() as it, socket.create_server(("127.0.0.1", 0)) as door:
        stranger = threading.Thread(target=pass_on, args=(door, it.address))
        stranger.start()
        with pytest.raises(StateUnavailable, match="403"):
            fetch(f"http://127.0.0.1:{door.getsockname()[1]}", KEY, 60, secret=SECRET)
        stranger.join()


def test_a_copy_that_is_kept_has_the_secret_of_its_quorum(caplog: pytest.LogCaptureFixture):
    older = KEY._replace(quorum_id=KEY.quorum_id - 1)
    with serving() as it:
        it.keep(older, STATE, frozenset("bc"), math.inf, OTHER)
        assert same(fetch(it.address, older, 60, secret=OTHER), STATE)
        with pytest.raises(StateUnavailable, match="403"):
            fetch(it.address, older, 60, secret=SECRET)


def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(server, "MAX_CONNECTIONS_OF_A_HOST", 3)
    with serving() as it, ExitStack() as open_:
        held = [open_.enter_context(connected(it.address)) for _ in range(3)]
        for connection in held:
            ask(connection, "/challenge")
        with connected(it.address) as one_more:
            assert one_more.recv(100).startswith(b"HTTP/1.1 503 ")
        assert len(it._listener._connections) == 3
        for connection in held[:2]:  # a target reads checksums on one connection and pieces on another
            connection.close()
        assert eventually(lambda: len(it._listener._connections) < 2)
        assert same(fetch(it.address, KEY, 60, secret=SECRET), STATE)


def test_a_request_that_drips_in_is_cut_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "HEADERS_TIMEOUT_S", 0.4)
    with serving() as it, connected(it.address) as slow, took(0.3, 20):
        slow.settimeout(0.05)
        with pytest.raises((ConnectionError, EOFError)):
            while True:
                slow.sendall(b"G")
                try:
                    if not slow.recv(1):
                        raise EOFError
                except TimeoutError:
                    continue


def test_nor_do_pieces_go_to_a_stranger():
    with serving() as it, connected(it.address) as stranger:
        assert " 403 " in ask(stranger, PATH.replace("manifest", f"pieces/{'0' * 32}/0-8"))
