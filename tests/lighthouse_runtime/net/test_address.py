"""The addresses that a process listens on and advertises."""

import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from lighthouse_protocol.identity import Address
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_runtime.net import address
from lighthouse_runtime.net.address import (
    advertised_host,
    grpc_bind,
    interface_host,
    listening_host,
    listening_socket,
    own_name,
    resolves_to_loopback,
    served_host,
    split_bind,
)


@pytest.mark.parametrize("wanted", ["10.0.0.5", "node7.cluster", "fd00::5", "[fd00::5]", "http://10.0.0.5"])
def test_what_is_asked_for_is_advertised(wanted: str) -> None:
    assert advertised_host("localhost:29510", wanted) == wanted.removeprefix("http://").strip("[]")


def test_what_cannot_be_an_address_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="--advertise: 'a b' is not an address"):
        advertised_host("localhost:29510", "a b")


@pytest.mark.parametrize("bind", ["localhost", "127.0.0.1", "::1", "10.0.0.9", "node7"])
@pytest.mark.parametrize("peer", ["localhost:29510", "coordinator:29510"])
def test_a_server_that_listens_on_one_address_advertises_that_one(
    monkeypatch: pytest.MonkeyPatch, bind: str, peer: str
) -> None:
    monkeypatch.setattr(address, "_source_address", lambda _: "10.0.0.7")
    monkeypatch.setattr(address, "_global_address", lambda: "10.0.0.7")
    assert (advertised_host(peer, None, bind), served_host(bind)) == (bind, bind)
    for everywhere in ("::", "0.0.0.0"):
        assert advertised_host(peer, None, everywhere) == "10.0.0.7"


@pytest.mark.parametrize("bind", ["localhost", "127.0.0.1", "::1"])
def test_what_a_loopback_does_not_serve_is_not_promised(bind: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"--advertise: 10.0.0.5 is not served: --bind {bind} listens for this"):
        advertised_host("localhost:29510", "10.0.0.5", bind)
    assert advertised_host("localhost:29510", "localhost", bind) == "localhost"


def test_the_source_of_the_route_to_the_peer_is_advertised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "_source_address", lambda host: {"coordinator": "10.0.0.7"}[host])
    assert advertised_host("coordinator:29510") == "10.0.0.7"
    assert advertised_host("http://coordinator:29510/") == "10.0.0.7"


@pytest.mark.parametrize("peer", ["localhost:29510", "127.0.0.1:29510", "[::1]:29510", "::1"])
def test_beside_the_peer_a_global_address_is_advertised_if_there_is_one(
    monkeypatch: pytest.MonkeyPatch, peer: str
) -> None:
    monkeypatch.setattr(address, "_global_address", lambda: "10.0.0.7")
    assert advertised_host(peer) == "10.0.0.7"
    monkeypatch.setattr(address, "_global_address", lambda: None)
    assert Address(advertised_host(peer), None).is_loopback


def test_where_no_route_is_known_a_global_address_or_the_loopback_is_advertised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(address, "_source_address", lambda _: None)
    monkeypatch.setattr(address, "_global_address", lambda: "10.0.0.7")
    assert advertised_host("nowhere.invalid:1") == "10.0.0.7"
    monkeypatch.setattr(address, "_global_address", lambda: None)
    assert advertised_host("nowhere.invalid:1") == "127.0.0.1"


def test_the_routing_table_is_asked_without_a_packet() -> None:
    assert address._source_address("127.0.0.1") == "127.0.0.1"
    assert address._source_address("nowhere.invalid") is None


def test_the_global_address_is_one_of_this_host() -> None:
    found = address._global_address()
    if found is None:
        pytest.skip("this host has a loopback only")
    assert not Address(found, None).is_loopback
    with socket.create_server((found, 0), family=socket.AF_INET6 if ":" in found else socket.AF_INET):
        pass


IF_INET6 = """\
fe8000000000000000fc00fffe000001 04 40 20 80     eth0
00000000000000000000000000000001 01 80 10 80       lo
fd000000000000000000000000000007 04 40 00 c0     eth0
fd000000000000000000000000000002 04 40 00 82     eth0
"""


def have(monkeypatch: pytest.MonkeyPatch, *addresses: str, routes: Mapping[str, str] | None = None) -> None:
    """This host has these addresses of IPv4 (name=address), and such routes to others."""
    names = list(dict.fromkeys(text.partition("=")[0] for text in addresses))
    found = [(name, ip) for name, _, ip in (text.partition("=") for text in addresses) if ip]
    monkeypatch.setattr(address, "_ipv4_addresses", lambda: found)
    monkeypatch.setattr(address, "_ipv6_addresses", lambda: [("ib0", "fd00::5")] if "ib0" in names else [])
    monkeypatch.setattr(address.socket, "if_nameindex", lambda: list(enumerate(names, start=1)))
    monkeypatch.setattr(address, "_source_address", lambda host: (routes or {}).get(host))


def test_the_default_route_leads_past_the_bridge_of_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a lower index, and its address on every host."""
    bridged = ("lo=127.0.0.1", "docker0=172.17.0.1", "eth0=10.1.0.5")
    somewhere, of_ipv6 = address._REMOTE
    have(monkeypatch, *bridged, routes={somewhere: "10.1.0.5", "localhost": "127.0.0.1"})
    assert advertised_host("localhost:29510") == "10.1.0.5"
    have(monkeypatch, *bridged, routes={somewhere: "169.254.3.3", of_ipv6: "fd00::7"})
    assert advertised_host("localhost:29510") == "fd00::7"
    have(monkeypatch, *bridged)
    assert advertised_host("localhost:29510") == "172.17.0.1"


def test_where_there_is_none_of_ipv4_one_of_ipv6_is_the_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not one of this link alone, the loopback, or one that is still being checked (0x40)."""
    addresses = tmp_path / "if_inet6"
    addresses.write_text(IF_INET6)
    monkeypatch.setattr(address, "_IPV6_ADDRESSES", addresses)
    monkeypatch.setattr(address, "_source_address", lambda _: None)
    monkeypatch.setattr(address, "_ipv4_addresses", lambda: [("lo", "127.0.0.1"), ("eth0", "169.254.1.1")])
    assert address._global_address() == "fd00::2"
    assert advertised_host("[::1]:29510") == "fd00::2"
    monkeypatch.setattr(address, "_ipv4_addresses", lambda: [("lo", "127.0.0.1"), ("eth0", "10.0.0.7")])
    assert address._global_address() == "10.0.0.7"


class TestInterfaces:
    """eth0 routes to the lighthouse; ib0 has addresses of both versions."""

    @pytest.fixture(autouse=True)
    def _host(self, monkeypatch: pytest.MonkeyPatch) -> None:
        there = ("lo=127.0.0.1", "eth0=10.1.0.1", "eth1=10.3.0.1", "ib0=10.2.0.1", "ib0=169.254.1.1", "wlan0")
        have(monkeypatch, *there, routes={"coordinator": "10.1.0.1", "six": "fd00::1"})

    @pytest.mark.parametrize(
        ("wanted", "expected"),
        [
            ("ib0", "10.2.0.1"),
            ("eth1", "10.3.0.1"),
            ("lo", "127.0.0.1"),
            ("ib0,eth1", "10.2.0.1"),
            ("eth1, eth0", "10.1.0.1"),
        ],
    )
    def test_by_name(self, wanted: str, expected: str) -> None:
        assert interface_host(wanted, "GLOO_SOCKET_IFNAME", "coordinator:1") == expected
        assert interface_host(f"={wanted}", "NCCL_SOCKET_IFNAME", "coordinator:1", by_prefix=True) == expected

    @pytest.mark.parametrize(
        ("wanted", "expected"),
        [
            ("ib", "10.2.0.1"),
            ("eth", "10.1.0.1"),
            ("^eth", "10.2.0.1"),
            ("^=eth0,ib", "10.3.0.1"),
            ("^=eth0,ib0", "10.3.0.1"),
            ("^docker,lo", "10.1.0.1"),
        ],
    )
    def test_as_nccl_takes_it(self, wanted: str, expected: str) -> None:
        assert interface_host(wanted, "NCCL_SOCKET_IFNAME", "coordinator:1", by_prefix=True) == expected

    def test_of_the_same_version_as_the_route_to_the_peer(self) -> None:
        assert interface_host("ib0", "GLOO_SOCKET_IFNAME", "six:1") == "fd00::5"
        assert interface_host("eth1", "GLOO_SOCKET_IFNAME", "six:1") == "10.3.0.1"

    @pytest.mark.parametrize(
        ("wanted", "by_prefix", "why"),
        [
            ("nosuch", False, "no interface 'nosuch'"),
            ("ib0,nosuch", False, "no interface 'nosuch'"),
            ("ib", False, "no interface 'ib'"),
            ("^ib0", False, "no interface '^ib0'"),
            ("=ib", True, "no interface 'ib'"),
            ("wlan0", False, "no address on such an interface"),
            ("^eth,ib", True, "no address on such an interface"),
            (",", False, "no address on such an interface"),
        ],
    )
    def test_what_is_wrong_is_said_with_what_there_is(self, wanted: str, by_prefix: bool, why: str) -> None:
        there = "it has lo (127.0.0.1), eth0 (10.1.0.1), eth1 (10.3.0.1), ib0 (10.2.0.1), ib0 (fd00::5)"
        with pytest.raises(InvalidRequest) as refused:
            interface_host(wanted, "NAME", "coordinator:1", by_prefix=by_prefix)
        assert str(refused.value) == f"NAME: {wanted!r}: this host has {why}; {there}"


def test_a_host_without_ipv6_has_none_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(address, "_IPV6_ADDRESSES", tmp_path / "none")
    assert list(address._ipv6_addresses()) == []


def test_a_name_that_is_a_loopback_at_home_is_not_given_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address.socket, "gethostname", lambda: "debian")
    monkeypatch.setattr(address, "_global_address", lambda: "10.0.0.7")
    monkeypatch.setattr(address, "resolves_to_loopback", lambda host: host == "debian")
    assert own_name() == "10.0.0.7"
    monkeypatch.setattr(address, "_global_address", lambda: None)
    assert own_name() == "debian"
    monkeypatch.setattr(address, "resolves_to_loopback", lambda _: False)
    monkeypatch.setattr(address, "resolves", lambda _: True)
    assert own_name() == "debian"


def test_a_name_that_does_not_resolve_is_not_given_to_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(address.socket, "gethostname", lambda: "nowhere-1.invalid")
    monkeypatch.setattr(address, "_global_address", lambda: "10.0.0.7")
    assert (own_name(), own_name(), served_host("::")) == ("10.0.0.7",) * 3
    told = "this host's name, nowhere-1.invalid, does not resolve; other hosts get its address 10.0.0.7 instead"
    assert caplog.messages == [told]
    monkeypatch.setattr(address, "_global_address", lambda: None)
    assert own_name() == "nowhere-1.invalid"


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.1.1", True), ("::1", True), ("x.localhost", True), ("10.0.0.1", False), ("nowhere.invalid", False)]
    + [(text, True) for text in ("0", "127.1", "2130706433")],  # known by resolving
)
def test_a_loopback_is_known_however_it_is_written(host: str, expected: bool) -> None:
    assert resolves_to_loopback(host) is expected


def test_a_name_that_resolves_to_a_loopback_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's /etc/hosts gives the host's own name 127.0.1.1."""
    found = {"myhost": "127.0.1.1", "peer": "10.0.0.1"}
    monkeypatch.setattr(
        address.socket, "getaddrinfo", lambda host, *_, **__: [(socket.AF_INET, 1, 6, "", (found[host], 0))]
    )
    assert resolves_to_loopback("myhost")
    assert not resolves_to_loopback("peer")


@pytest.mark.parametrize("loopback", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_what_is_reached_by_a_loopback_listens_on_that_alone(loopback: str) -> None:
    assert listening_host(loopback) == loopback


def test_what_is_reached_by_an_address_of_this_host_listens_on_that_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "is_own_address", lambda ip: ip == "10.0.0.5")
    assert listening_host("10.0.0.5") == "10.0.0.5"


@pytest.mark.parametrize("elsewhere", ["203.0.113.7", "no.such.name.invalid", "0.0.0.0"])
def test_what_is_reached_by_another_address_listens_on_all(elsewhere: str) -> None:
    """It is translated on the way, or a name that only its peers resolve."""
    assert listening_host(elsewhere) == ""


def test_a_name_that_is_a_loopback_at_home_listens_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Debian, where the host's own name is 127.0.1.1: its peers know its address."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert listening_host("node7") == ""


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


def test_it_listens_on_a_name_that_has_only_an_address_of_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [entry])
    with address.listening_socket("node", 0) as listener:
        host, port, *_ = listener.getsockname()
        assert host == "::1"
        assert address.is_port_taken("node", port)


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
