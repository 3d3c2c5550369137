"""Parsing of join strings and address lists, and the search for the leader among several lighthouses.

This module performs no I/O. A join string or address list has one of these forms:

lighthouse://CA-PIN.TOKEN@host:port[,host:port...]     TLS; CA-PIN is the SHA-256 of the CA certificate (DER)
lighthouse://tls.TOKEN@host:port                       TLS; the client has the CA certificate in a file (--tls-ca)
lighthouse://insecure.TOKEN@host:port                  no TLS; the token is sent unencrypted
host:port[,host:port...]                               no token; TLS only if the client has a CA certificate in a file;
                                                       a leading http:// is ignored
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lighthouse_protocol.identity import Address, parse_target
from lighthouse_protocol.limits import LIGHTHOUSE_PORT
from lighthouse_protocol.refusals import InvalidRequest, LighthouseError, NotLeader

SCHEME = "lighthouse://"
INSECURE = "insecure"
OWN_PKI = "tls"
PIN_CHARS = 64
MAX_COORDINATORS = 16
MAX_TOKEN_CHARS = 256
MAX_COORDINATOR_CHARS = 16 * 1024

_PIN = re.compile(f"[0-9a-f]{{{PIN_CHARS}}}")
_TOKEN = re.compile(f"[A-Za-z0-9_-]{{1,{MAX_TOKEN_CHARS}}}")
_COPY_AGAIN = "copy the whole string that `lighthouse token` prints on the lighthouse's host"


def token_command(port: int | None, role: str = "") -> str:
    """Return the `lighthouse token` command that prints a join string on the lighthouse's host.

    Args:
        port: gRPC port of the lighthouse, or None for the default.
        role: Role of the token, or empty for the command's default.
    """
    words = ["lighthouse", "token", role, "" if port in (None, LIGHTHOUSE_PORT) else f"--port {port}"]
    return f"`{' '.join(filter(None, words))}`"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of the client's PEM files for TLS. An empty path means no file."""

    ca: str = ""  # certificates of the CAs that may sign the lighthouse's certificate
    cert: str = ""  # client certificate
    key: str = ""  # private key of `cert`


NO_FILES = TlsFiles()


@dataclass(frozen=True, slots=True, repr=False)
class Coordinator:
    """How to connect to a lighthouse: addresses, CA and token.

    `str()` returns the addresses only. join_string() is the only method whose result contains the token.
    """

    addresses: tuple[Address, ...]  # each with a port
    ca_pin: str = ""  # SHA-256 of the CA certificate's DER in hexadecimal; empty without a pin
    token: str = ""
    has_own_pki: bool = False  # TLS without a pin: `files` must name the CA
    files: TlsFiles = NO_FILES  # on the caller's host, not part of the text

    def __str__(self) -> str:
        return ",".join(map(str, self.addresses))

    def __repr__(self) -> str:
        token = "..." if self.token else ""
        return f"Coordinator({str(self)!r}, ca_pin={self.ca_pin!r}, token={token!r})"

    @property
    def is_loopback(self) -> bool:
        """True if every address is a loopback IP or localhost. Other host names are not resolved."""
        return all(address.is_loopback for address in self.addresses)

    @property
    def has_tls(self) -> bool:
        return bool(self.ca_pin or self.has_own_pki or self.files.ca)

    def with_files(self, files: TlsFiles) -> "Coordinator":
        """Return a copy with the caller's PEM files.

        Raise InvalidRequest if the join string requires a CA file and there is none, or if a client certificate or its
        key is given without the other.
        """
        if self.has_own_pki and not files.ca:
            raise InvalidRequest(
                "is missing: the join string is of a lighthouse with certificates of its own PKI; give the file with "
                "its CA's certificate (LIGHTHOUSE_TLS_CA)",
                field="--tls-ca",
            )
        if bool(files.cert) != bool(files.key):
            missing, given = ("--client-key", "--client-cert") if files.cert else ("--client-cert", "--client-key")
            raise InvalidRequest(f"is missing: {given} is half of a pair", field=missing)
        return replace(self, files=files)

    def with_token(self, token: str) -> "Coordinator":
        """Return a copy with `token`, or self if `token` is empty."""
        return replace(self, token=token) if token else self

    def at(self, address: Address) -> "Coordinator":
        """Return a copy with `address` as its only address."""
        return replace(self, addresses=(address,))

    def join_string(self) -> str:
        """Return the text that parse_coordinator() parses. It is a secret if it contains a token."""
        if not self.token:
            return str(self)
        return f"{SCHEME}{self.ca_pin or (OWN_PKI if self.has_tls else INSECURE)}.{self.token}@{self}"


@functools.lru_cache(maxsize=1024)
def parse_coordinator(text: str, field: str = "lighthouse", default_port: int | None = LIGHTHOUSE_PORT) -> Coordinator:
    """Parse a join string or an address list in one of the forms that the module docstring lists.

    If `default_port` is None, every address needs a port. If `text` is malformed, raise InvalidRequest. Its message
    names `field` and a remedy, and never contains the token.
    """
    text = text.strip()
    if len(text) > MAX_COORDINATOR_CHARS:
        raise InvalidRequest(f"has {len(text)} characters; at most {MAX_COORDINATOR_CHARS} are allowed", field=field)
    if not text.startswith(SCHEME):
        return Coordinator(_addresses(text, field, default_port))
    credential, at, hosts = text.removeprefix(SCHEME).rpartition("@")
    if not at:
        raise InvalidRequest(f"the join string has no @ before its address; {_COPY_AGAIN}", field=field)
    pin, dot, token = credential.partition(".")
    if pin not in (INSECURE, OWN_PKI) and not _PIN.fullmatch(pin.lower()):
        raise InvalidRequest(
            f"the pin of the join string has {len(pin)} characters; it is {PIN_CHARS} hexadecimal digits, or the word "
            f"{OWN_PKI} or {INSECURE}; {_COPY_AGAIN}",
            field=field,
        )
    if not dot or not token:
        raise InvalidRequest(f"the join string has no token after its pin; {_COPY_AGAIN}", field=field)
    if not _TOKEN.fullmatch(token):
        raise InvalidRequest(
            f"the token of the join string has {len(token)} characters, or one that is not A-Z a-z 0-9 _ -; "
            f"{_COPY_AGAIN}",
            field=field,
        )
    places, has_own_pki = _addresses(hosts, field, default_port), pin == OWN_PKI
    return Coordinator(places, "" if pin == INSECURE or has_own_pki else pin.lower(), token, has_own_pki)


def _addresses(text: str, field: str, default_port: int | None) -> tuple[Address, ...]:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > MAX_COORDINATORS:
        raise InvalidRequest(f"has {len(parts)} addresses; at most {MAX_COORDINATORS} are allowed", field=field)
    return tuple(parse_target(part, field, default_port) for part in parts)


class LeaderSearch:
    """Chooses which lighthouse a client calls next. `address` is the current choice.

    - After a successful call, the client stays with that lighthouse.
    - If a follower refuses a call and names the leader, the client calls the leader at once. If that call fails too,
      the client ignores the leaders that further refusals name, until a call succeeds or the client pauses.
    - After any other failure, the client at once calls the next address of its list that it has not tried. It pauses
      when it has tried all of them.
    """

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._addresses = tuple(addresses)
        self._at = 0
        self._named: Address | None = None
        self._has_followed = False
        self._tried: set[Address] = set()  # since the last success or pause
        self._has_met_follower = False

    @property
    def has_choice(self) -> bool:
        """True if there are several lighthouses. They may share one listed address, such as a load balancer's."""
        return len(self._addresses) > 1 or self._has_met_follower

    @property
    def address(self) -> Address:
        return self._named or self._addresses[self._at]

    def mark_served(self) -> None:
        """Record a successful call. The client stays with `address`."""
        self._tried.clear()
        self._has_followed = False

    def mark_failed(self, error: LighthouseError) -> bool:
        """Record that a call has failed, and set `address` to the next lighthouse to try.

        Return True if all addresses have failed, so the caller should pause before the next call.
        """
        self._has_met_follower |= isinstance(error, NotLeader)
        failed = self.address
        self._tried.add(failed)
        named = None if self._has_followed else _leader(error)
        if named is not None and named != failed:
            self._named, self._has_followed = named, True
            return False
        self._named = None
        following = (*self._addresses[self._at + 1 :], *self._addresses[: self._at + 1])
        untried = [address for address in following if address not in self._tried]
        others = untried or [address for address in following if address != failed] or following
        self._at = self._addresses.index(others[0])
        if untried:
            return False
        self._tried.clear()
        self._has_followed = False
        return True


def _leader(error: LighthouseError) -> Address | None:
    if not isinstance(error, NotLeader) or not error.leader:
        return None
    try:
        return parse_target(error.leader, "leader")
    except InvalidRequest:
        return None
