"""Validation and parsing of replica ids, incarnations and addresses. Host names are not resolved.

torchft's replica ids have the form `name:uuid`, with a new uuid at every start. Lighthouse uses the name as the replica
id and the uuid as the incarnation. A colon that is not followed by a uuid is part of the replica id.
"""

import functools
import ipaddress
import re
import string
from dataclasses import dataclass

from lighthouse_protocol.limits import MAX_ADDRESS_CHARS, MAX_REPLICA_ID_CHARS
from lighthouse_protocol.refusals import InvalidRequest

REPLICA_ID_ALPHABET = "A-Z a-z 0-9 . _ : / @ + = -"
_ALLOWED = frozenset(string.ascii_letters + string.digits + "._:/@+=-")
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_OF_HOST = re.compile(r"/[0-9]+$")
_BRACKETED = re.compile(r"\[([^\[\]]*)\](?::(.*))?")
_LABEL = r"[A-Za-z0-9_-]{1,63}"
_HOST = re.compile(rf"(?=[A-Za-z0-9]){_LABEL}(?:\.{_LABEL})*(?<=[A-Za-z0-9_])\.?")


def check_name(value: str, field: str = "replica_id") -> str:
    """Return `value` if it is a valid name, such as a replica id, or else raise InvalidRequest with `field`."""
    if not value:
        raise InvalidRequest("is empty; give each replica group its own name", field=field)
    if len(value) > MAX_REPLICA_ID_CHARS:
        raise InvalidRequest(f"has {len(value)} characters; at most {MAX_REPLICA_ID_CHARS} are allowed", field=field)
    odd = sorted(set(value) - _ALLOWED)
    if odd:
        raise InvalidRequest(f"{value!r} has {odd[0]!r}; allowed are {REPLICA_ID_ALPHABET}", field=field)
    return value


def group_run(run: str, replica_id: str) -> str:
    """Return the run id for one replica group of `run`, whose ranks then restart independently of other groups."""
    return f"{run}.{replica_id}"


def supervisor_name(replica_id: str, host: int, hosts: int) -> str:
    """Return the name, unique in a run, of the supervisor on host number `host` of a group that has `hosts` hosts."""
    return replica_id if hosts == 1 else f"{replica_id}/{host}"


def group_of_supervisor(name: str) -> str:
    """Return the replica id from which supervisor_name() created `name`.

    The result is wrong for a group on a single host whose own id ends in a slash and a number.
    """
    return _OF_HOST.sub("", name)


@functools.lru_cache(maxsize=32768)
def read_identity(wire_id: str, incarnation: str = "") -> tuple[str, str]:
    """Return a caller's (replica_id, incarnation). Raise InvalidRequest if one of them is malformed.

    In torchft's form, name:uuid, `wire_id` contains the incarnation. Other callers send the incarnation separately.
    """
    name, implied = split_replica_id(check_name(wire_id))
    if incarnation and check_name(incarnation, "incarnation") != implied:
        return wire_id, incarnation
    return name, implied


def split_replica_id(wire_id: str) -> tuple[str, str]:
    """Split torchft's name:uuid into (name, uuid). Return (wire_id, "") for any other id."""
    name, colon, tail = wire_id.rpartition(":")
    return (name, tail) if colon and name and _UUID.fullmatch(tail) else (wire_id, "")


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port. `port` is None if the address has no port."""

    host: str
    port: int | None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port is None else f"{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """True for a loopback IP or localhost. Other names are not resolved and never count as loopback."""
        name = self.host.lower().removesuffix(".")
        if name == "localhost" or name.endswith(".localhost"):
            return True
        ip = _ip(self.host)
        return ip is not None and ip.is_loopback

    @property
    def is_ip(self) -> bool:
        return _ip(self.host) is not None

    @property
    def is_unspecified(self) -> bool:
        ip = _ip(self.host)
        return ip is not None and ip.is_unspecified


@functools.lru_cache(maxsize=32768)
def parse_address(text: str, field: str) -> Address:
    """Parse `host`, `host:port` or `[v6]:port`, with or without http(s)://. Raise InvalidRequest if it is malformed."""
    rest = text.removeprefix("http://").removeprefix("https://").rstrip("/")
    if len(text) > MAX_ADDRESS_CHARS:
        raise InvalidRequest(f"has {len(text)} characters; at most {MAX_ADDRESS_CHARS} are allowed", field=field)
    host, port = _split_port(rest)
    if "%" in host or not rest.isprintable():
        raise InvalidRequest(f"{text!r} has a zone or an odd character; write host:port", field=field)
    if _ip(host) is None and not (_HOST.fullmatch(host) and len(host) <= 253):
        raise InvalidRequest(f"{text!r} is not an address; write host:port, or [v6-address]:port", field=field)
    if port is not None and not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 65536):
        raise InvalidRequest(f"{text!r} has no valid port; a port is a number from 0 to 65535", field=field)
    return Address(host, None if port is None else int(port))


def parse_target(text: str, field: str, default_port: int | None = None) -> Address:
    """Parse a server's address, adding `default_port` if it has no port. Raise InvalidRequest if it is invalid."""
    address = parse_address(text, field)
    port = address.port if address.port is not None else default_port
    if not port:
        why = "has no port" if port is None else "port 0 is not a port to connect to"
        raise InvalidRequest(f"{text!r} {why}; write host:port", field=field)
    return Address(address.host, port)


def _split_port(text: str) -> tuple[str, str | None]:
    if text.startswith("["):
        bracketed = _BRACKETED.fullmatch(text)
        return (bracketed[1], bracketed[2]) if bracketed else ("", None)
    if text.count(":") > 1:
        return text, None
    host, colon, port = text.partition(":")
    return host, port if colon else None


@functools.lru_cache(maxsize=32768)
def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    if not host[:1].isdigit() and ":" not in host:  # the common case: a name
        return None
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found
