"""How a server learns which credential a caller has. What that may do is in lighthouse_protocol/rules/access.py."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import unquote

from lighthouse_protocol.identity import Address, parse_address
from lighthouse_protocol.limits import LIGHTHOUSE_PORT, TOKEN_METADATA_KEY, TOKEN_SCHEME
from lighthouse_protocol.refusals import InvalidRequest, NotPermitted
from lighthouse_protocol.rules import access
from lighthouse_protocol.rules.access import Identities, Principal, Role
from lighthouse_runtime.net.address import is_own_address
from lighthouse_runtime.security.audit import Audit
from lighthouse_runtime.security.credentials import TokenFile
from lighthouse_runtime.security.watched_file import WatchedFile

PROXIED = "a proxy"
LOCAL = Principal("local", frozenset({Role.OPERATE}))
REMOTE = Principal("remote", frozenset({Role.JOIN, Role.VIEW}))
ANONYMOUS = Principal("anonymous", frozenset({Role.JOIN, Role.VIEW}))
"""A caller without a token, where a server was started with --insecure."""


@dataclass(frozen=True, slots=True)
class Caller:
    """What a server sees of a caller before any handler runs. `peer` as gRPC writes it; PROXIED, where the request came
    through an HTTP proxy, wherever that runs. `names`: the SPIFFE ids and DNS names of its certificate, which a CA of
    this server's has signed."""

    peer: str
    metadata: Mapping[str, str]
    names: Callable[[], tuple[str, ...]] = tuple

    @property
    def token(self) -> str:
        """Empty: none was shown."""
        shown = self.metadata.get(TOKEN_METADATA_KEY, "")
        return shown[len(TOKEN_SCHEME) :].strip() if shown[: len(TOKEN_SCHEME)].lower() == TOKEN_SCHEME.lower() else ""

    @property
    def is_local(self) -> bool:
        return is_local(self.peer)


class Access(Protocol):
    """Of one server."""

    def principal(self, caller: Caller) -> Principal:
        """Raises NotPermitted for a credential that is shown and not good."""
        ...

    def has_good_token(self, caller: Caller) -> bool:
        """Whether the caller shows a token of this server's. A server that reads no tokens knows no good one."""
        ...

    @property
    def audit(self) -> Audit: ...

    @property
    def port(self) -> int:
        """Of the lighthouse's gRPC, for the remedies of refusals."""
        ...


def admit(to: Access, path: str, caller: Caller) -> Principal:
    """The caller, if it may. Raises NotPermitted with the remedy."""
    principal = access.NOBODY
    try:
        principal = to.principal(caller)
        access.check(path, principal, to.port)
    except NotPermitted as e:
        if access.is_control(path):
            to.audit.refuse(principal, as_written(caller.peer), access.name_of(path), str(e))
        raise
    return principal


class HostOnly:
    """Of a server that listens on a loopback: whatever reaches it is of this host, and may do all, but for an HTTP
    proxy, which may speak for others."""

    port = LIGHTHOUSE_PORT

    def __init__(self, audit: Audit | None = None) -> None:
        self.audit = audit or Audit(None)

    def principal(self, caller: Caller) -> Principal:
        return REMOTE if caller.peer == PROXIED else LOCAL

    def has_good_token(self, caller: Caller) -> bool:
        return False


class LocalOperates:
    """Callers of this host may do all; those of others may train and look."""

    port = LIGHTHOUSE_PORT

    def __init__(self, audit: Audit | None = None) -> None:
        self.audit = audit or Audit(None)

    def principal(self, caller: Caller) -> Principal:
        return LOCAL if caller.is_local else REMOTE

    def has_good_token(self, caller: Caller) -> bool:
        return False


class ByCredential:
    """Of a server that other hosts reach: a caller has the role of the token that it shows; without one, that of its
    certificate in `identities`. `without`: a caller that shows neither."""

    port = LIGHTHOUSE_PORT

    def __init__(
        self,
        tokens: TokenFile,
        audit: Audit,
        identities: WatchedFile[Identities] | None = None,
        without: Principal = access.NOBODY,
    ) -> None:
        self.audit = audit
        self._tokens = tokens
        self._identities = identities
        self._without = without

    def principal(self, caller: Caller) -> Principal:
        if caller.token:
            return self._tokens.value.principal(caller.token, self.port)
        of_certificate = None if self._identities is None else self._identities.value.principal(caller.names())
        return of_certificate or self._without

    def has_good_token(self, caller: Caller) -> bool:
        try:
            return bool(caller.token) and self._tokens.value.principal(caller.token, self.port) is not access.NOBODY
        except NotPermitted:
            return False


class OpenTo:
    """All callers are `principal`: of a port that serves those that cannot show a token."""

    port = LIGHTHOUSE_PORT

    def __init__(self, principal: Principal, audit: Audit | None = None) -> None:
        self.audit = audit or Audit(None)
        self._principal = principal

    def principal(self, caller: Caller) -> Principal:
        return self._principal

    def has_good_token(self, caller: Caller) -> bool:
        return False


def names_in_certificate(spiffe: Iterable[str], dns: Iterable[str]) -> tuple[str, ...]:
    """For Caller.names. A DNS name that looks like a SPIFFE id is none."""
    return (*spiffe, *(name for name in dns if "/" not in name))


def is_local(peer: str) -> bool:
    """From this host: its loopback, an address of its own, or a UNIX socket. `peer` as gRPC writes it."""
    if peer.startswith("unix:"):
        return True
    address = address_of(peer)
    return address is not None and (address.is_loopback or is_own_address(address.host))


def as_written(peer: str) -> str:
    """Where a caller calls from, as a person writes an address."""
    return str(address_of(peer) or peer)


def address_of(peer: str) -> Address | None:
    """Of a caller, whom gRPC writes as ipv4:127.0.0.1:4711 or ipv6:%5B::1%5D:4711. None: it is no IP address."""
    kind, _, rest = peer.partition(":")
    if not kind.startswith("ip"):
        return None
    try:
        return parse_address(unquote(rest), "peer")
    except InvalidRequest:
        return None
