"""Addresses to listen on, and hosts to be reached by."""

import socket

from lighthouse_protocol.identity import Address, parse_address
from lighthouse_protocol.refusals import InvalidRequest


def split_bind(text: str, option: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT, [V6]:PORT or :PORT (every address). Raises InvalidRequest naming `option`."""
    address = parse_address(f"[::]{text}" if text.startswith(":") and not text.startswith("::") else text, option)
    if address.port is None:
        raise InvalidRequest(f"{text!r} has no port; write host:port, or host:0 for a free one", field=option)
    return address.host, address.port


def check_bind(text: str, option: str) -> None:
    """Raises ValueError naming `option`."""
    try:
        split_bind(text, option)
    except InvalidRequest as e:
        raise ValueError(str(e)) from None


def grpc_bind(text: str) -> str:
    host, port = split_bind(text, "--bind")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listening_socket(host: str, port: int) -> socket.socket:
    """On `::` for IPv4 too, where the host has both. Raises OSError."""
    if host == "::" and socket.has_dualstack_ipv6():
        return socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True)
    if host == "::":
        host = "0.0.0.0"
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def check_host(host: str, option: str) -> None:
    """Raises InvalidRequest for what is no host that the peers can reach."""
    address = parse_address(host, option)
    check_reachable(address, option)
    if address.port is not None:
        raise InvalidRequest(f"{host} has a port; give the host alone", field=option)


def check_reachable(address: Address, option: str) -> None:
    """Raises InvalidRequest for an address that only binds can name."""
    if address.is_unspecified:
        raise InvalidRequest(f"{address} is not reachable; give an address that the peers can reach", field=option)
