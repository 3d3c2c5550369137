"""Identification of a server's callers. lighthouse_protocol/rules/access.py defines what each may do."""

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
    """A caller as a server sees it before any handler runs."""

    peer: str  # address in gRPC's form, or PROXIED for any request through an HTTP proxy
    metadata: Mapping[str, str]
    # SPIFFE ids and DNS names of the client certificate, if a CA of this server has signed it.
    names: Callable[[], tuple[str, ...]] = tuple

    @property
    def token(self) -> str:
        """The token in the metadata, or an empty string."""
        shown = self.metadata.get(TOKEN_METADATA_KEY, "")
        return shown[len(TOKEN_SCHEME) :].strip() if shown[: len(TOKEN_SCHEME)].lower() == TOKEN_SCHEME.lower() else ""

    @property
    def is_local(self) -> bool:
        return is_local(self.peer)


class Access(Protocol):
    """Access rules of one server."""

    def principal(self, caller: Caller) -> Principal:
        """Identify the caller. Raises NotPermitted for an invalid credential."""
        ...

    def has_good_token(self, caller: Caller) -> bool:
        """Check if the caller shows a valid token of this server. Always false if the server does not use tokens."""
        ...

    @property
    def audit(self) -> Audit: ...

    @property
    def port(self) -> int:
        """The lighthouse's gRPC port, for the remedies in refusals."""
        ...


def admit(to: Access, path: str, caller: Caller) -> Principal:
    """Identify the caller and check its role. Raises NotPermitted with the remedy."""
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
    """Access rules of a server on a loopback address: local callers may do everything.

    An HTTP proxy on this host may forward remote requests, so its requests count as remote.
    """

    port = LIGHTHOUSE_PORT

    def __init__(self, audit: Audit | None = None) -> None:
        self.audit = audit or Audit(None)

    def principal(self, caller: Caller) -> Principal:
        return REMOTE if caller.peer == PROXIED else LOCAL

    def has_good_token(self, caller: Caller) -> bool:
        return False


class LocalOperatorAccess:
    """Access rules under which callers on this host may do everything, and others may train and view."""

    port = LIGHTHOUSE_PORT

    def __init__(self, audit: Audit | None = None) -> None:
        self.audit = audit or Audit(None)

    def principal(self, caller: Caller) -> Principal:
        return LOCAL if caller.is_local else REMOTE

    def has_good_token(self, caller: Caller) -> bool:
        return False


class CredentialAccess:
    """Access rules of a server that other hosts can reach.

    A caller's token determines its role, or else its certificate does (`identities`). A caller with neither is
    `anonymous`.
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
    """Access rules under which every caller is `principal`, for a port whose clients cannot send a token."""

    port = LIGHTHOUSE_PORT

    def __init__(self, principal: Principal, audit: Audit | None = None) -> None:
        self.audit = audit or Audit(None)
        self._principal = principal

    def principal(self, caller: Caller) -> Principal:
        return self._principal

    def has_good_token(self, caller: Caller) -> bool:
        return False


def names_in_certificate(spiffe: Iterable[str], dns: Iterable[str]) -> tuple[str, ...]:
    """Return the names for Caller.names. DNS names with a slash are dropped, since they could pass for SPIFFE ids."""
    return (*spiffe, *(name for name in dns if "/" not in name))


def is_local(peer: str) -> bool:
    """Check if `peer`, in gRPC's form, is this host: a loopback, one of its addresses, or a UNIX socket."""
    if peer.startswith("unix:"):
        return True
    address = address_of(peer)
    return address is not None and (address.is_loopback or is_own_address(address.host))


def format_peer(peer: str) -> str:
    """Convert an address from gRPC's form to the usual notation."""
    return str(address_of(peer) or peer)


def address_of(peer: str) -> Address | None:
    """Parse gRPC's form of an address, such as ipv4:127.0.0.1:4711 or ipv6:%5B::1%5D:4711. None if it has no IP."""
    kind, _, rest = peer.partition(":")
    if not kind.startswith("ip"):
        return None
    try:
        return parse_address(unquote(rest), "peer")
    except InvalidRequest:
        return None
