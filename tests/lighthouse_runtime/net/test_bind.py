"""Addresses to listen on."""

import socket

import pytest

from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_runtime.net.address import grpc_bind, listening_socket, split_bind


@pytest.mark.parametrize(
    ("text", "host", "port", "for_grpc"),
    [
        ("127.0.0.1:29510", "127.0.0.1", 29510, "127.0.0.1:29510"),
        ("0.0.0.0:0", "0.0.0.0", 0, "0.0.0.0:0"),
        ("[::]:29510", "::", 29510, "[::]:29510"),
        ("[::1]:1", "::1", 1, "[::1]:1"),
        (":29510", "::", 29510, "[::]:29510"),
        ("node7:80", "node7", 80, "node7:80"),
        ("http://node7:80", "node7", 80, "node7:80"),
    ],
)
def test_an_address_is_split(text: str, host: str, port: int, for_grpc: str) -> None:
    assert split_bind(text, "--bind") == (host, port)
    assert grpc_bind(text) == for_grpc


@pytest.mark.parametrize("text", ["", ":", "node7", "[::]", "::", "::1", "node7:", "node7:x", "node7:65536", "a b:1"])
def test_what_names_no_port_is_refused_with_the_option(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^--http: "):
        split_bind(text, "--http")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::", "localhost"])
def test_it_listens(host: str) -> None:
    with listening_socket(host, 0) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("::1" if host == "::1" else "127.0.0.1", port), timeout=5):
            pass


def test_every_address_is_both_families() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this host has no IPv6")
    with listening_socket("::", 0) as listener:
        for host in ("127.0.0.1", "::1"):
            with socket.create_connection((host, listener.getsockname()[1]), timeout=5):
                pass


def test_without_ipv6_every_address_is_those_of_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with listening_socket("::", 0) as listener:
        assert listener.family == socket.AF_INET


def test_a_taken_port_is_an_error() -> None:
    with listening_socket("127.0.0.1", 0) as listener, pytest.raises(OSError, match="in use"):
        listening_socket("127.0.0.1", listener.getsockname()[1])
