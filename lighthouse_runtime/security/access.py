"""Identification of callers, and the audit log of operators' actions and of refused attempts.

lighthouse_protocol/rules/access.py defines what each caller may do. Anyone can cause refusals, so they are logged at a
limited rate and to a separate file, where they cannot displace the records of actions.
"""

import json
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from lighthouse_protocol.identity import Address, parse_address
from lighthouse_protocol.limits import LIGHTHOUSE_PORT, TOKEN_METADATA_KEY, TOKEN_SCHEME, cut_reason
from lighthouse_protocol.refusals import InvalidRequest, LighthouseError, NotPermitted
from lighthouse_protocol.rules import access
from lighthouse_protocol.rules.access import Identities, Principal, Role
from lighthouse_protocol.rules.rate_limits import TokenBucket
from lighthouse_runtime.log_event import event
from lighthouse_runtime.net.address import is_own_address
from lighthouse_runtime.process.files import WatchedFile
from lighthouse_runtime.security.credentials import TokenFile

PROXIED = "a proxy"
LOCAL = Principal("local", frozenset({Role.OPERATE, Role.CHAOS}))
REMOTE = Principal("remote", frozenset({Role.JOIN, Role.VIEW}))
ANONYMOUS = Principal("anonymous", frozenset({Role.JOIN, Role.VIEW}))  # without a token, under --insecure
TORCHFT = Principal("torchft", frozenset({Role.JOIN}))


@dataclass(frozen=True, slots=True)
class Caller:
    """What a server knows about a caller before identifying it: address, metadata and client certificate."""

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


log = logging.getLogger(__name__)

MAX_FILE_BYTES = 8 * 1024 * 1024
GENERATIONS = 4
REFUSALS_PER_S = 2.0
REFUSALS_AT_ONCE = 50.0


class Audit:
    """Writes audit records as JSON lines."""

    def __init__(self, path: Path | None) -> None:
        """Write actions to the file `path`, or only to the normal log if `path` is None.

        Refusals are written to a file next to it, for example `audit.refused.jsonl` for `audit.jsonl`. Only
        this user can read the files. They are rotated to `<path>.1` ... `<path>.GENERATIONS`.
        """
        self._path = path
        self._has_failed = False
        self._left_out = 0
        self._refusals = TokenBucket(REFUSALS_PER_S, REFUSALS_AT_ONCE)

    def act(self, principal: Principal, peer: str, what: str, target: str, result: str = "done") -> None:
        self._write(self._path, principal, peer, what, target, result)

    @contextmanager
    def action(self, principal: Principal, peer: str, what: str, target: str) -> Generator[None, None, None]:
        """Record the action of an operator inside the `with` block, and its result: done, refused or failed.

        `what` names the action, and `target` what it acts on. `peer` is the operator's address.
        """
        result = "failed"
        try:
            yield
            result = "done"
        except LighthouseError as e:
            result = f"refused: {e}"
            raise
        finally:
            self.act(principal, peer, what, target, result)

    def refuse(self, principal: Principal, peer: str, what: str, reason: str, target: str = "") -> None:
        if not self._refusals.try_take(time.monotonic()):
            self._left_out += 1
            return
        more = f" ({self._left_out} more refusals were not recorded)" if self._left_out else ""
        self._left_out = 0
        path = None if self._path is None else self._path.with_suffix(".refused" + self._path.suffix)
        self._write(path, principal, peer, what, target, f"refused: {reason}{more}")

    def _write(self, path: Path | None, principal: Principal, peer: str, what: str, target: str, result: str) -> None:
        target, result = cut_reason(target), cut_reason(result)
        roles = "+".join(sorted(principal.roles)) or "none"
        act = f"{what} {target}".strip()
        log.info(
            "audit: %s by %s (role %s) at %s: %s",
            act,
            principal.name,
            roles,
            peer,
            result,
            extra=event(
                "audit", what=what, target=target, credential=principal.name, role=roles, peer=peer, result=result
            ),
        )
        if path is None:
            return
        entry = {
            "time": round(time.time(), 3),
            "role": roles,
            "credential": principal.name,
            "peer": peer,
            "what": what,
            "target": target,
            "result": result,
        }
        try:
            _append(path, (json.dumps(entry, ensure_ascii=False) + "\n").encode(errors="backslashreplace"))
        except OSError as e:
            if not self._has_failed:
                log.error(
                    "cannot write the audit log to %s: %s; audit records go to this log only",
                    path,
                    e,
                    extra=event("audit_not_written"),
                )
            self._has_failed = True
        else:
            self._has_failed = False


def _append(path: Path, line: bytes) -> None:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        if os.fstat(descriptor).st_size > MAX_FILE_BYTES:
            older = [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, GENERATIONS + 1))]
            for target, source in zip(reversed(older[1:]), reversed(older[:-1]), strict=True):
                with suppress(FileNotFoundError):
                    os.replace(source, target)
            os.close(descriptor)
            descriptor = os.open(path, flags, 0o600)
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


class Access(ABC):
    """Identifies the callers of one server. The subclasses accept different credentials."""

    port = LIGHTHOUSE_PORT  # the lighthouse's gRPC port, for error messages

    def __init__(self, audit: Audit | None = None) -> None:
        self.audit = audit or Audit(None)

    @abstractmethod
    def principal(self, caller: Caller) -> Principal:
        """Identify the caller. Raise NotPermitted for an invalid credential."""

    def has_good_token(self, caller: Caller) -> bool:
        """Return whether the caller sent a valid token. If the server does not use tokens, return False."""
        return False


def admit(to: Access, path: str, caller: Caller) -> Principal:
    """Identify the caller and check that it may use `path`. Raise NotPermitted if it may not.

    `path` is the path of an RPC, or an HTTP route such as `POST /kill`. The audit log records a refused call if `path`
    needs the role OPERATE or CHAOS.
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


class LoopbackAccess(Access):
    """Access to a server on a loopback address: every caller except an HTTP proxy may do everything.

    An HTTP proxy may forward requests from other hosts, so its requests count as remote.
    """

    def principal(self, caller: Caller) -> Principal:
        return REMOTE if caller.peer == PROXIED else LOCAL


class LocalOperatorAccess(Access):
    """Access without credentials: callers on this host may do everything, others may only train and view."""

    def principal(self, caller: Caller) -> Principal:
        return LOCAL if caller.is_local else REMOTE


class CredentialAccess(Access):
    """Access by credentials, for a server that other hosts can reach.

    The token determines the caller's role. Without a token, `identities` maps the names in the client certificate to a
    role. A caller with neither is `anonymous`.
    """

    def __init__(
        self,
        tokens: TokenFile,
        audit: Audit,
        identities: WatchedFile[Identities] | None = None,
        anonymous: Principal = access.NOBODY,
    ) -> None:
        super().__init__(audit)
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


class TorchftAccess(Access):
    """Access for torchft's port, whose clients cannot send a token: every caller may join."""

    def principal(self, caller: Caller) -> Principal:
        return TORCHFT


def names_in_certificate(spiffe: Iterable[str], dns: Iterable[str]) -> tuple[str, ...]:
    """Combine the names in a client certificate. Drop DNS names with a slash, because they could mimic SPIFFE ids."""
    return (*spiffe, *(name for name in dns if "/" not in name))


def is_local(peer: str) -> bool:
    """Return whether `peer`, in gRPC's form, is a loopback address, an address of this host, or a UNIX socket."""
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
