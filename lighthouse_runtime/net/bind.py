"""Addresses to listen on."""

import socket

from lighthouse_protocol.identity import parse_address
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
