"""Identification of callers. lighthouse_protocol/rules/access.py defines what each caller may do."""

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
ANONYMOUS = Principal("anonymous", frozenset({Role.JOIN, Role.VIEW}))  # without a token, under --insecure


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller before it is identified: its address, metadata and client certificate."""

    peer: str  # address in gRPC's form, or PROXIED for any request through an HTTP proxy
    metadata: Mapping[str, str]
    # SPIFFE ids and DNS names in the client certificate, if one of this server's CAs signed it.
    names: Callable[[], tuple[str, ...]] = tuple

    @property
    def token(self) -> str:
        """The bearer token in the metadata, or an empty string."""
        shown = self.metadata.get(TOKEN_METADATA_KEY, "")
        return shown[len(TOKEN_SCHEME) :].strip() if shown[: len(TOKEN_SCHEME)].lower() == TOKEN_SCHEME.lower() else ""

    @property
    def is_local(self) -> bool:
        return is_local(self.peer)


class Access(Protocol):
    """Identifies the callers of one server."""

    def principal(self, caller: Caller) -> Principal:
        """Identify the caller. Raise NotPermitted for an invalid credential."""
        ...

    def has_good_token(self, caller: Caller) -> bool:
        """Return whether the caller has a valid token. Always False if the server does not use tokens."""
        ...

    @property
    def audit(self) -> Audit: ...

    @property
    def port(self) -> int:
        """The lighthouse's gRPC port, for use in error messages."""
        ...


def admit(to: Access, path: str, caller: Caller) -> Principal:
    """Identify the caller and check that it may use `path`. Raise NotPermitted if it may not.

    A refused call to an operator's path is recorded in the audit log.
    """
    principal = access.NOBODY
    try:
        principal = to.principal(caller)
        access.check(path, principal, to.port)
    except NotPermitted as e:
        if access.is_control(path):
            to.audit.refuse(principal, format_peer(caller.peer), access.method_name(path), str(e))
        raise
    return principal


class LoopbackAccess:
    """Access to a server on a loopback address: every caller may do everything.

    The exception is an HTTP proxy on this host: it may forward requests from other hosts, so its requests count as
    remote.
    """

    port = LIGHTHOUSE_PORT

    def __init__(self, audit: Audit | None = None) -> None:
        self.audit = audit or Audit(None)

    def principal(self, caller: Caller) -> Principal:
        return REMOTE if caller.peer == PROXIED else LOCAL

    def has_good_token(self, caller: Caller) -> bool:
        return False


class LocalOperatorAccess:
    """Access without credentials: callers on this host may do everything, others may only train and view."""

    port = LIGHTHOUSE_PORT

    def __init__(self, audit: Audit | None = None) -> None:
        self.audit = audit or Audit(None)

    def principal(self, caller: Caller) -> Principal:
        return LOCAL if caller.is_local else REMOTE

    def has_good_token(self, caller: Caller) -> bool:
        return False


class CredentialAccess:
    """Access by credentials, for a server that other hosts can reach.

    The token determines the caller's role. Without a token, the certificate does (`identities`). A caller with neither
    is `anonymous`.
    """

    port = LIGHTHOUSE_PORT

    def __init__(
        self,
        tokens: TokenFile,
        audit: Audit,
        identities: WatchedFile[Identities] | None = None,
        anonymous: Principal = access.NOBODY,
    ) -> None:
        self.audit = audit
        self._tokens = tokens
        self._identities = identities
        self._anonymous = anonymous

    def principal(self, caller: Caller) -> Principal:
        if caller.token:
            return self._tokens.value.principal(caller.token, self.port)
        of_certificate = None if self._identities is None else self._identities.value.principal(caller.names())
        return of_certificate or self._anonymous

    def has_good_token(self, caller: Caller) -> bool:
        try:
            return bool(caller.token) and self._tokens.value.principal(caller.token, self.port) is not access.NOBODY
        except NotPermitted:
            return False


class FixedAccess:
    """Access for a port whose clients cannot send a token: every caller is `principal`."""

    port = LIGHTHOUSE_PORT

    def __init__(self, principal: Principal, audit: Audit | None = None) -> None:
        self.audit = audit or Audit(None)
        self._principal = principal

    def principal(self, caller: Caller) -> Principal:
        return self._principal

    def has_good_token(self, caller: Caller) -> bool:
        return False


def names_in_certificate(spiffe: Iterable[str], dns: Iterable[str]) -> tuple[str, ...]:
    """Return the names for Caller.names. DNS names with a slash are dropped, because they could mimic SPIFFE ids."""
    return (*spiffe, *(name for name in dns if "/" not in name))


def is_local(peer: str) -> bool:
    """Return whether `peer` is on this host: a loopback, one of this host's addresses, or a UNIX socket.

    Args:
        peer: Address in gRPC's form.
    """
    if peer.startswith("unix:"):
        return True
    address = address_of(peer)
    return address is not None and (address.is_loopback or is_own_address(address.host))


def format_peer(peer: str) -> str:
    """Convert an address from gRPC's form to host:port. Return other strings unchanged."""
    return str(address_of(peer) or peer)


def address_of(peer: str) -> Address | None:
    """Parse an address in gRPC's form, such as ipv4:127.0.0.1:4711 or ipv6:%5B::1%5D:4711.

    Return None for other strings.
    """
    kind, _, rest = peer.partition(":")
    if not kind.startswith("ip"):
        return None
    try:
        return parse_address(unquote(rest), "peer")
    except InvalidRequest:
        return None
