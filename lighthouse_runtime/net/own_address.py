"""Which address of this host its peers can reach."""

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from lighthouse_protocol.identity import Address, parse_address
from lighthouse_protocol.refusals import InvalidRequest

_SIOCGIFFLAGS = 0x8913
_SIOCGIFADDR = 0x8915
_IFF_UP = 1
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_IPV6_GLOBAL_SCOPE = "00"
_IPV6_NOT_YET_OR_NO_MORE = 0x40 | 0x20 | 0x08  # tentative, deprecated, a duplicate


def advertised_host(peer: str, wanted: str | None = None, bind: str = "::") -> str:
    """The host by which others reach a server that listens on the host `bind`.

    `wanted`; or `bind` itself, where that is one address; or the address of this host that routes to `peer`
    (host:port). Where that is a loopback (the peer was given as localhost), the host's first global address, if it has
    one: other hosts could not reach the loopback. Raises InvalidRequest for a `wanted` that `bind` does not serve.
    """
    listens = Address(bind, None)
    if wanted:
        host = parse_address(wanted, "--advertise").host
        if listens.is_loopback and not resolves_to_loopback(host):
            raise InvalidRequest(
                f"{wanted} is not served: --bind {bind} listens for this host only; give --bind [::]:PORT, or leave "
                "--advertise out if all replica groups run on this host",
                field="--advertise",
            )
        return host
    if not listens.is_unspecified:
        return bind
    routed = _source_address(parse_address(peer, "lighthouse").host)
    if routed is not None and not Address(routed, None).is_loopback:
        return routed
    return _first_global_address() or routed or "127.0.0.1"


def listening_host(advertised: str) -> str:
    """On which a server listens that is reached by `advertised` alone: that address, where it is one of this host;
    otherwise (a name that is a loopback at home, an address that is translated on the way) empty: on all."""
    address = Address(advertised, None)
    if address.is_loopback:
        return advertised
    try:
        found = socket.getaddrinfo(advertised, None, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    ips = {str(entry[4][0]) for entry in found}
    ip = ips.pop() if len(ips) == 1 else ""
    return ip if ip and not Address(ip, None).is_loopback and is_own_address(ip) else ""


def served_host(bind: str) -> str:
    """The host by which others reach a server that listens on the host `bind`, where no peer is known."""
    return own_name() if Address(bind, None).is_unspecified else bind


def own_name() -> str:
    """What other hosts may call this one: its name, or where that is a loopback at home, as on Debian, its first
    global address."""
    name = socket.gethostname()
    return (_first_global_address() or name) if resolves_to_loopback(name) else name


def resolves_to_loopback(host: str) -> bool:
    """Whether `host` is a loopback by its text or by this host's resolver (127.0.1.1 is common)."""
    if Address(host, None).is_loopback:
        return True
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    addresses = [Address(str(entry[4][0]), None) for entry in found]
    return any(address.is_loopback or address.is_unspecified for address in addresses)


def resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def is_own_address(ip: str) -> bool:
    """Whether `ip` is one of this host's: only a packet to such an address has it as its source, too.

    Binding to it would tell nothing: with ip_nonlocal_bind any address can be bound.
    """
    return _source_address(ip) == ip


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
    """Of an interface that is up; of IPv6 where there is none of IPv4."""
    return next((ip for ip in (*_ipv4_addresses(), *_ipv6_addresses()) if _is_global(ip)), None)


def _is_global(ip: str) -> bool:
    return not Address(ip, None).is_loopback and not ipaddress.ip_address(ip).is_link_local


def _ipv4_addresses() -> Iterator[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                [flags] = struct.unpack("H", fcntl.ioctl(probe.fileno(), _SIOCGIFFLAGS, request)[16:18])
                found = socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
            except OSError:
                continue
            if flags & _IFF_UP:
                yield found


def _ipv6_addresses() -> Iterator[str]:
    """The kernel lists them for this network namespace: address, index, prefix, scope, flags, interface."""
    try:
        lines = _IPV6_ADDRESSES.read_text().splitlines()
    except OSError:
        return
    for digits, _, _, scope, flags, _ in map(str.split, lines):
        if scope == _IPV6_GLOBAL_SCOPE and not int(flags, 16) & _IPV6_NOT_YET_OR_NO_MORE:
            yield str(ipaddress.IPv6Address(int(digits, 16)))
