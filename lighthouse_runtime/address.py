"""Which address of this host its peers can reach."""

import fcntl
import socket
import struct

from protos.identity import Address, parse_address

_SIOCGIFADDR = 0x8915


def advertised_host(peer: str, wanted: str | None = None) -> str:
    """`wanted`, or the address of this host that routes to `peer` (host:port).

    Where that is a loopback (the peer was given as localhost), the host's first global address, if it has one: other
    hosts could not reach the loopback.
    """
    if wanted:
        return parse_address(wanted, "advertise").host
    routed = _source_address(parse_address(peer, "lighthouse").host)
    if routed is not None and not Address(routed, None).is_loopback:
        return routed
    return _first_global_address() or routed or "127.0.0.1"


def resolves_to_loopback(host: str) -> bool:
    """Whether `host` is a loopback by its text or by this host's resolver (127.0.1.1 is common)."""
    if Address(host, None).is_loopback:
        return True
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(Address(str(entry[4][0]), None).is_loopback for entry in found)


def is_own_address(ip: str) -> bool:
    """Whether `ip` is one of this host's: only those can be bound."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((ip, 0))
        except OSError:
            return False
    return True


def _source_address(host: str) -> str | None:
    """No packet is sent: connecting a datagram socket only asks the routing table."""
    try:
        candidates = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, where in candidates:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(where)
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return None


def _first_global_address() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                found = socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
            except OSError:
                continue
            if not Address(found, None).is_loopback and not found.startswith("169.254."):
                return found
    return None
