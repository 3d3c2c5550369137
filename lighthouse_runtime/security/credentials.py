"""The certificates of a lighthouse: its own CA and one server certificate, in a folder that only its user reads.

    ca.pem, ca.key          made once; the join string pins ca.pem
    server.pem, server.key  made anew, by the same CA, long before they expire; server.pem holds the CA's, too
    tokens.json             see tokens.py

`cryptography` (certificates.py) is imported only where a certificate is made or its end is read.
"""

import contextlib
import datetime
import hashlib
import hmac
import json
import logging
import os
import secrets
import ssl
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from lighthouse_protocol.coordinator import token_command
from lighthouse_protocol.limits import LIGHTHOUSE_PORT
from lighthouse_protocol.refusals import InvalidRequest, NotPermitted
from lighthouse_protocol.rules.access import Principal, Role
from lighthouse_runtime.log_event import event
from lighthouse_runtime.process.state_folder import make_private, write_private
from lighthouse_runtime.security.pinned import SERVER_NAME
from lighthouse_runtime.security.watched_file import WatchedFile, stamp_of

log = logging.getLogger(__name__)


# -- tokens -------------------------------------------------------------------
#
# The tokens of a lighthouse: a file beside its certificates, which it reads again when it changes.
#
# Each role has one token or two: the newest, and the one before it, so that a rotation cuts nobody off. Their first
# letters tell a person what they are for; in logs a token is its role and six digits of its SHA-256.

FILE = "tokens.json"
VALID_AT_A_TIME = 2
ROLES: Mapping[Role, str] = {Role.JOIN: "lhj_", Role.OPERATE: "lho_", Role.VIEW: "lhv_"}
"""The roles that have tokens, and how those begin."""


@dataclass(frozen=True, slots=True, repr=False)
class Tokens:
    """By role, the newest first."""

    by_role: Mapping[Role, tuple[str, ...]]

    @classmethod
    def make(cls) -> "Tokens":
        return cls({role: (_new(role),) for role in ROLES})

    @classmethod
    def read(cls, folder: Path) -> "Tokens":
        """Raises InvalidRequest that names the file, and what to do."""
        path = folder / FILE
        try:
            found = json.loads(path.read_text())
            tokens = cls({role: tuple(map(str, found[role.value])) for role in ROLES})
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise InvalidRequest(
                f"cannot read {path} ({type(e).__name__}: {e}); remove the folder; the next start recreates it",
                field="--credentials",
            ) from None
        if not all(tokens.by_role.values()) or not all(map(_is_token, tokens.all())):
            raise InvalidRequest(f"{path} has a role without a token, or an empty one", field="--credentials")
        return tokens

    def write(self, folder: Path) -> None:
        """Raises OSError."""
        content = {role.value: list(tokens) for role, tokens in self.by_role.items()}
        write_private(folder / FILE, (json.dumps(content, indent=2) + "\n").encode())

    def rotated(self, role: Role) -> "Tokens":
        """With a new token for `role`; its newest one stays valid beside it, older ones do not."""
        kept = self.by_role[role][: VALID_AT_A_TIME - 1]
        return Tokens({**self.by_role, role: (_new(role), *kept)})

    def newest(self, role: Role) -> str:
        return self.by_role[role][0]

    def all(self) -> tuple[str, ...]:
        return tuple(token for tokens in self.by_role.values() for token in tokens)

    def principal(self, shown: str, port: int = LIGHTHOUSE_PORT) -> Principal:
        """Whose token `shown` is, at the lighthouse with that gRPC port. Raises NotPermitted; how long that takes tells
        nothing about any token."""
        matching = [
            (role, token)
            for role, tokens in self.by_role.items()
            for token in tokens
            if hmac.compare_digest(token.encode(), shown.encode(errors="replace"))
        ]
        if not matching:
            role = next((role.value for role, begin in ROLES.items() if shown.startswith(begin)), "")
            raise NotPermitted(
                "the token is not one of this lighthouse's, or was rotated away: run "
                f"{token_command(port, role)} on its host, and use what it prints"
            )
        role, token = matching[0]
        return Principal(name_of(role, token), frozenset({role}))


class TokenFile(WatchedFile[Tokens]):
    """The tokens of `folder` as they are now. Raises as Tokens.read() when it is made."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / FILE, lambda: Tokens.read(folder))


def name_of(role: Role, token: str) -> str:
    """What logs call a token."""
    return f"{role.value}-{hashlib.sha256(token.encode()).hexdigest()[:6]}"


def _new(role: Role) -> str:
    return ROLES[role] + secrets.token_urlsafe(24)


def _is_token(token: str) -> bool:
    return len(token) >= 16 and token.isascii() and token.isprintable() and " " not in token


RENEWED_BEFORE = datetime.timedelta(days=30)
_OPTION = "--credentials"


@dataclass(frozen=True, slots=True)
class Credentials:
    """`is_new`: this call has made them."""

    folder: Path
    ca_pin: str
    """Empty: its certificates are of another PKI, and the folder has the tokens alone."""
    is_new: bool = False

    @property
    def certificate(self) -> Path:
        return self.folder / "server.pem"

    @property
    def key(self) -> Path:
        return self.folder / "server.key"


def load_or_make(folder: Path, names: Iterable[str]) -> Credentials:
    """Those in `folder`; all of them are made where it has none. `names`: of this host, beside the fixed one.

    Raises InvalidRequest, naming --credentials, for a folder that cannot be used.
    """
    try:
        is_new = not (folder / "ca.pem").exists()
        if is_new:
            _make_tokens(folder)
            from lighthouse_runtime.security import certificates

            key, pem = certificates.make_ca()
            write_private(folder / "ca.key", key)
            write_private(folder / "ca.pem", pem)  # last: by it a folder counts as complete
        credentials = Credentials(folder, pin_of((folder / "ca.pem").read_bytes()), is_new)
        renew_if_due(credentials, names)
        _warn_of_readers(folder)
    except (OSError, ValueError) as e:
        raise InvalidRequest(f"cannot use {folder}: {e}", field=_OPTION) from None
    return credentials


def load_or_make_tokens(folder: Path) -> Credentials:
    """As load_or_make(), for a lighthouse whose certificates are of another PKI: the tokens alone."""
    try:
        is_new = not (folder / FILE).exists()
        if is_new:
            _make_tokens(folder)
        _warn_of_readers(folder)
    except OSError as e:
        raise InvalidRequest(f"cannot use {folder}: {e}", field=_OPTION) from None
    return Credentials(folder, "", is_new)


def _warn_of_readers(folder: Path) -> None:
    """Log the files of secrets that others may read."""
    for name in (FILE, "ca.key", "server.key"):
        with contextlib.suppress(FileNotFoundError):
            mode = (folder / name).stat().st_mode & 0o777
            if mode & 0o077:
                log.warning(
                    "%s is readable by others (mode %o): chmod 600 it and run `lighthouse token rotate`",
                    folder / name,
                    mode,
                    extra=event("credentials_readable", file=str(folder / name)),
                )


def _make_tokens(folder: Path) -> None:
    """Where there are none yet. Raises OSError, InvalidRequest."""
    make_private(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    if any(path.name != FILE for path in folder.iterdir()):
        raise InvalidRequest(f"{folder} has files and no ca.pem; name an empty folder", field=_OPTION)
    _check_owner(folder)
    if not (folder / FILE).exists():
        Tokens.make().write(folder)


def renew_if_due(credentials: Credentials, names: Iterable[str]) -> bool:
    """Make the server's certificate anew if it is missing or expires soon, and the CA's key is here. Raises OSError,
    ValueError."""
    has_key = (credentials.folder / "ca.key").exists()
    if credentials.certificate.exists() and (not has_key or left(credentials.certificate) > RENEWED_BEFORE):
        return False
    if not has_key:
        raise ValueError("server.pem is missing, and so is ca.key, with which a new one could be made")
    from lighthouse_runtime.security import certificates

    folder = credentials.folder
    key, pem = certificates.make_server(
        (folder / "ca.pem").read_bytes(), (folder / "ca.key").read_bytes(), [SERVER_NAME, *names]
    )
    # A handshake between the two writes finds a pair that does not fit and fails; its client tries again.
    write_private(folder / "server.key", key)
    write_private(folder / "server.pem", pem)
    return True


def pin_of(pem: bytes) -> str:
    """The SHA-256 of a certificate's DER, hex. Raises ValueError."""
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem.decode())).hexdigest()


def read_pin(folder: Path) -> str:
    """Of the CA in `folder`. Raises InvalidRequest."""
    try:
        return pin_of((folder / "ca.pem").read_bytes())
    except (OSError, ValueError) as e:
        raise InvalidRequest(f"{folder} has no certificate of a CA: {e}", field=_OPTION) from None


class CertificateFiles:
    """What gRPC and HTTP serve with, read again when the files change: open connections go on.

    `client_ca`: the CAs whose certificates callers must show over gRPC, and may show over HTTP, where probes and
    browsers come without. A change that cannot be used changes nothing: `error` says why.
    """

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None = None) -> None:
        """Raises OSError (ssl.SSLError is one), ValueError."""
        self._certificate = certificate
        self._key = key
        self._client_ca = client_ca
        self._lock = threading.Lock()
        self._stamp = self._stat()
        self.error = ""
        self._http, self._grpc = self._read()
        self._is_told = True

    def for_grpc(self) -> grpc.ServerCredentials:
        fetch: Any = self._fetch  # its type has no None, which keeps what there is
        return grpc.dynamic_ssl_server_credentials(self._grpc, fetch, self._client_ca is not None)

    def for_http(self) -> ssl.SSLContext:
        """It hands each handshake to the context of the newest files: no CA can be taken out of a context again."""
        front = self._context()

        def newest(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            connection.context = self._http

        front.sni_callback = newest
        return front

    def look(self) -> None:
        """Read the files again if they have changed. gRPC looks at each handshake; HTTP takes what was read last."""
        with self._lock:
            stamp = self._stat()
            if stamp == self._stamp:
                return
            self._stamp = stamp
            try:
                self._http, self._grpc = self._read()
                self._is_told, self.error = False, ""
            except (OSError, ValueError) as e:
                self.error = str(e)

    def _fetch(self) -> "grpc.ServerCertificateConfiguration | None":
        """At each handshake, on a thread of gRPC's. None: as before."""
        self.look()
        with self._lock:
            if self._is_told:
                return None
            self._is_told = True
            return self._grpc

    def _read(self) -> tuple[ssl.SSLContext, grpc.ServerCertificateConfiguration]:
        """Raises OSError, ValueError: gRPC takes a key that does not fit its certificate, and then serves nobody."""
        context = self._context()
        roots = None if self._client_ca is None else self._client_ca.read_bytes()
        pair = (self._key.read_bytes(), self._certificate.read_bytes())
        return context, grpc.ssl_server_certificate_configuration([pair], roots)

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self._certificate, self._key)
        except OSError as e:
            raise ValueError(f"{self._certificate} with the key {self._key} cannot be used: {e}") from None
        if self._client_ca is not None:
            context.verify_mode = ssl.CERT_OPTIONAL
            try:
                context.load_verify_locations(self._client_ca)
            except OSError as e:
                raise ValueError(f"{self._client_ca} has no certificates of CAs: {e}") from None
        return context

    def _stat(self) -> tuple[tuple[int, int], ...]:
        paths = (self._certificate, self._key, self._client_ca)
        return tuple(stamp_of(path) for path in paths if path is not None)


def _check_owner(folder: Path) -> None:
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise InvalidRequest(
            f"{folder} is another user's, or others may read it (mode {found.st_mode & 0o777:o}): chmod 700 it, as the "
            "user of the lighthouse",
            field=_OPTION,
        )


def left(certificate: Path) -> datetime.timedelta:
    """Until it expires. Raises OSError, ValueError."""
    from lighthouse_runtime.security import certificates

    return certificates.expires_at(certificate.read_bytes()) - datetime.datetime.now(datetime.UTC)
