"""Addresses of this host, to advertise to peers and to listen on."""

import errno
import fcntl
import functools
import ipaddress
import logging
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from lighthouse_protocol.identity import Address, parse_address
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_runtime.log_event import event

log = logging.getLogger(__name__)


_REMOTE = ("8.8.8.8", "2001:4860:4860::8888")  # packets to these would take the default route; none is sent
_SIOCGIFFLAGS = 0x8913
_SIOCGIFADDR = 0x8915
_IFF_UP = 1
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_IPV6_GLOBAL_SCOPE = "00"
_IPV6_NOT_YET_OR_NO_MORE = 0x40 | 0x20 | 0x08  # tentative, deprecated, a duplicate


def advertised_host(peer: str, wanted: str | None = None, bind: str = "::") -> str:
    """Return the host at which peers can reach a server that listens on `bind`.

    The result is the first of these that applies:
    - `wanted`, if given;
    - `bind`, if it is a single address;
    - the address of this host on the route to `peer` (host:port), unless it is a loopback address;
    - the address of this host on its default route, or its first global address;
    - a loopback address.

    Raises:
        InvalidRequest: `bind` is a loopback address and `wanted` is not, so peers could not connect.
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
    return _global_address() or routed or "127.0.0.1"


def interface_host(wanted: str, variable: str, peer: str, *, by_prefix: bool = False) -> str:
    """Return an address of this host on an interface selected by an environment variable.

    If several addresses match, prefer the one on the route to `peer`, then one with the route's IP version, then the
    first.

    Args:
        wanted: Value of the variable. Interface names separated by commas, as gloo reads them.
        variable: Name of the variable, for errors.
        peer: host:port of a peer.
        by_prefix: Read `wanted` as NCCL does: as prefixes, or as full names after `=`. A leading `^` excludes the
            interfaces that match.

    Raises:
        InvalidRequest: No interface matches. The message lists this host's interfaces.
    """
    excludes = by_prefix and wanted.startswith("^")
    rest = wanted.removeprefix("^") if by_prefix else wanted
    is_whole = not by_prefix or rest.startswith("=")
    names = [name for name in rest.removeprefix("=").replace(" ", "").split(",") if name]

    def is_named(interface: str, name: str) -> bool:
        return interface == name if is_whole else interface.startswith(name)

    found = [(name, ip) for name, ip in (*_ipv4_addresses(), *_ipv6_addresses()) if not _is_of_link(ip)]
    if excludes:
        chosen = [ip for there, ip in found if _is_global(ip) and not any(is_named(there, name) for name in names)]
    else:
        chosen = [ip for name in names for there, ip in found if is_named(there, name)]
    unknown = [name for name in names if not any(is_named(there, name) for _, there in socket.if_nameindex())]
    if not chosen or (unknown and not excludes):
        why = f"no interface {unknown[0]!r}" if unknown and not excludes else "no address on such an interface"
        there = ", ".join(f"{name} ({ip})" for name, ip in found) or "none with an address"
        raise InvalidRequest(f"{wanted!r}: this host has {why}; it has {there}", field=variable)
    routed = _source_address(parse_address(peer, "peer").host)
    if routed in chosen:
        return routed
    version = ipaddress.ip_address(routed).version if routed else 4
    return next((ip for ip in chosen if ipaddress.ip_address(ip).version == version), chosen[0])


def listening_host(advertised: str) -> str:
    """Return the address to listen on so that the server can be reached at `advertised` only.

    If `advertised` is not a single address of this host, return an empty string, which means all addresses. Examples
    are a name that this host resolves to a loopback address, and the outer address of a NAT.
    """
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
    """Return a host at which others can reach a server that listens on `bind`.

    Unlike advertised_host(), this needs no peer to find the right interface, and may return the host's name.
    """
    return own_name() if Address(bind, None).is_unspecified else bind


def own_name() -> str:
    """Return the name or address at which other hosts can reach this one.

    This is the host name. If the name does not resolve, or resolves to a loopback address as on Debian, it is a global
    address of this host, if there is one.
    """
    name = socket.gethostname()
    if resolves_to_loopback(name):
        return _global_address() or name
    if not resolves(name) and (address := _global_address()) is not None:
        _log_replaced(name, address)
        return address
    return name


@functools.cache
def _log_replaced(name: str, address: str) -> None:
    log.warning(
        "this host's name, %s, does not resolve; other hosts get its address %s instead",
        name,
        address,
        extra=event("host_name_replaced", host=name, address=address),
    )


def resolves_to_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address, or a name that this host resolves to one (often 127.0.1.1)."""
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
    """Return whether `ip` is an address of this host.

    The routing table is queried: on the route to one of its own addresses, a host uses the same address as the source.
    Binding to `ip` would prove nothing, because ip_nonlocal_bind allows any address.
    """
    return _source_address(ip) == ip


def _source_address(host: str) -> str | None:
    # No packet is sent: connecting a datagram socket only queries the routing table.
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


def _global_address() -> str | None:
    """Return the source address of the default route, or else the first global address of an interface that is up.

    Prefer IPv4. Try the default route first, because an interface may be a container bridge, whose address other hosts
    cannot reach.
    """
    by_route = (_source_address(where) for where in _REMOTE)
    by_interface = (ip for _, ip in (*_ipv4_addresses(), *_ipv6_addresses()))
    return next((ip for found in (by_route, by_interface) for ip in found if ip and _is_global(ip)), None)


def _is_global(ip: str) -> bool:
    return not Address(ip, None).is_loopback and not _is_of_link(ip)


def _is_of_link(ip: str) -> bool:
    return ipaddress.ip_address(ip).is_link_local


def _ipv4_addresses() -> Iterator[tuple[str, str]]:
    """Yield (name, IPv4 address) of each interface that is up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                [flags] = struct.unpack("H", fcntl.ioctl(probe.fileno(), _SIOCGIFFLAGS, request)[16:18])
                found = socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
            except OSError:
                continue
            if flags & _IFF_UP:
                yield name, found


def _ipv6_addresses() -> Iterator[tuple[str, str]]:
    # Columns of the kernel's list for this network namespace: address, index, prefix, scope, flags, interface.
    try:
        lines = _IPV6_ADDRESSES.read_text().splitlines()
    except OSError:
        return
    for digits, _, _, scope, flags, name in map(str.split, lines):
        if scope == _IPV6_GLOBAL_SCOPE and not int(flags, 16) & _IPV6_NOT_YET_OR_NO_MORE:
            yield name, str(ipaddress.IPv6Address(int(digits, 16)))


# Binds and hosts from options.


def split_bind(text: str, option: str) -> tuple[str, int]:
    """Split HOST:PORT, [V6]:PORT or :PORT (all addresses) into host and port.

    Raise InvalidRequest for other text. The error names `option`, the command-line option that has this value.
    """
    address = parse_address(f"[::]{text}" if text.startswith(":") and not text.startswith("::") else text, option)
    if address.port is None:
        raise InvalidRequest(f"{text!r} has no port; write host:port, or host:0 for a free one", field=option)
    return address.host, address.port


def check_bind(text: str, option: str) -> None:
    """Raise ValueError if `text`, the value of `option`, is not an address to listen on."""
    try:
        split_bind(text, option)
    except InvalidRequest as e:
        raise ValueError(str(e)) from None


def grpc_bind(text: str) -> str:
    host, port = split_bind(text, "--bind")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listening_socket(host: str, port: int) -> socket.socket:
    """Open a listening TCP socket. The host `::` means all IPv4 and IPv6 addresses. Raise OSError on failure."""
    host, family = _family(host)
    return socket.create_server((host, port), family=family, dualstack_ipv6=host == "::")


def _family(host: str) -> tuple[str, socket.AddressFamily]:
    """Return the host to bind and its address family.

    Without IPv6, `::` becomes all IPv4 addresses. A name that has only IPv6 addresses becomes the first of them.
    """
    if host == "::" and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"
    if ":" not in host:
        with suppress(OSError):  # the name does not resolve; bind() reports that
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            if all(entry[0] == socket.AF_INET6 for entry in found):
                host = str(found[0][4][0])
    return host, socket.AF_INET6 if ":" in host else socket.AF_INET


def is_port_taken(host: str, port: int) -> bool:
    """Return whether another process uses this port. Port 0 is never taken.

    The check does not listen, so it neither accepts a client nor takes the port from a process that starts meanwhile.
    """
    host, family = _family(host)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == "::":
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            probe.bind((host, port))
        except OSError as e:
            return e.errno == errno.EADDRINUSE
    return False


def is_http_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        return False


def check_host(host: str, option: str) -> None:
    """Raise InvalidRequest unless `host`, the value of `option`, is a name or address that peers can connect to.

    A port or a wildcard address is refused.
    """
    address = parse_address(host, option)
    check_reachable(address, option)
    if address.port is not None:
        raise InvalidRequest(f"{host} has a port; give the host alone", field=option)


def check_reachable(address: Address, option: str) -> None:
    """Raise InvalidRequest if `address`, the value of `option`, is a wildcard address. Peers cannot connect to it."""
    if address.is_unspecified:
        raise InvalidRequest(f"{address} is not reachable; give an address that the peers can reach", field=option)
