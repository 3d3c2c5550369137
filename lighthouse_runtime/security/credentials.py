"""Credentials of a lighthouse: CA, server certificate and tokens, in a folder that only its user can read.

    ca.pem, ca.key          created once; the join string contains the pin of ca.pem
    server.pem, server.key  renewed RENEWED_BEFORE they expire; server.pem also contains the CA's certificate
    tokens.json             one or two tokens per role

`cryptography` (certificates.py) is imported only to create a certificate or to read its expiry date.
"""

import contextlib
import datetime
import hashlib
import hmac
import json
import logging
import os
import re
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
from lighthouse_runtime.process.files import WatchedFile, make_private, write_private
from lighthouse_runtime.security.client_tls import SERVER_NAME, load_key_pair

log = logging.getLogger(__name__)


# Tokens.
#
# Each role has up to two valid tokens, the newest and its predecessor, so that clients can change to a new token one by
# one. A token's prefix shows its role. Logs name a token by its role and six digits of its SHA-256.

FILE = "tokens.json"
VALID_AT_A_TIME = 2
# Token prefixes by role.
ROLES: Mapping[Role, str] = {Role.JOIN: "lhj_", Role.OPERATE: "lho_", Role.VIEW: "lhv_", Role.CHAOS: "lhc_"}


@dataclass(frozen=True, slots=True, repr=False)
class Tokens:
    """The valid tokens of each role, newest first."""

    by_role: Mapping[Role, tuple[str, ...]]

    @classmethod
    def make(cls) -> "Tokens":
        return cls({role: (_new(role),) for role in ROLES})

    @classmethod
    def read(cls, folder: Path) -> "Tokens":
        """Read the tokens in a folder. Raise InvalidRequest if the file is missing or malformed."""
        path = folder / FILE
        try:
            found = {Role.CHAOS.value: (), **json.loads(path.read_text())}  # earlier versions had no role chaos
            tokens = cls({role: tuple(map(str, found[role.value])) for role in ROLES})
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise InvalidRequest(
                f"cannot read {path} ({type(e).__name__}: {e}); remove the folder; the next start recreates it",
                field="--credentials",
            ) from None
        has_all = all(found for role, found in tokens.by_role.items() if role is not Role.CHAOS)
        if not has_all or not all(map(_is_token, tokens.all())):
            raise InvalidRequest(f"{path} has a role without a token, or an empty one", field="--credentials")
        return tokens

    def write(self, folder: Path) -> None:
        content = {role.value: list(tokens) for role, tokens in self.by_role.items()}
        write_private(folder / FILE, (json.dumps(content, indent=2) + "\n").encode())

    def rotated(self, role: Role) -> "Tokens":
        """Return a copy with a new token for `role`. The current token stays valid, but its predecessor does not."""
        kept = self.by_role[role][: VALID_AT_A_TIME - 1]
        return Tokens({**self.by_role, role: (_new(role), *kept)})

    def newest(self, role: Role) -> str:
        """Return the newest token of `role`. Raise InvalidRequest if there is none."""
        if not self.by_role[role]:
            raise InvalidRequest(f"there is no token of role {role} yet; `lighthouse token rotate {role}` creates one")
        return self.by_role[role][0]

    def all(self) -> tuple[str, ...]:
        return tuple(token for tokens in self.by_role.values() for token in tokens)

    def principal(self, shown: str, port: int = LIGHTHOUSE_PORT) -> Principal:
        """Return the principal whose token is `shown`, compared in constant time. Raise NotPermitted if none has it.

        `port` is the lighthouse's gRPC port, for the command that the error suggests.
        """
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
        return Principal(token_name(role, token), frozenset({role}))


class TokenFile(WatchedFile[Tokens]):
    """The tokens in a folder, reloaded when their file changes. The first read raises InvalidRequest if it fails."""

    def __init__(self, folder: Path) -> None:
        super().__init__(lambda: Tokens.read(folder), folder / FILE)


def token_name(role: Role, token: str) -> str:
    """Return the name by which logs refer to a token, without revealing it."""
    return f"{role.value}-{hashlib.sha256(token.encode()).hexdigest()[:6]}"


def _new(role: Role) -> str:
    return ROLES[role] + secrets.token_urlsafe(24)


def _is_token(token: str) -> bool:
    return len(token) >= 16 and token.isascii() and token.isprintable() and " " not in token


RENEWED_BEFORE = datetime.timedelta(days=30)
# Files that a first start leaves if it is killed before it has written ca.pem. Without ca.pem, ca.key is of no use.
_BEFORE_CA = re.compile(r"tokens\.json|ca\.key|\.(tokens\.json|ca\.key|ca\.pem)\.\d+")
_OPTION = "--credentials"


@dataclass(frozen=True, slots=True)
class Credentials:
    """A folder of credentials that load_or_make() or load_or_make_tokens() has prepared."""

    folder: Path
    ca_pin: str  # empty if the certificates belong to another PKI, and the folder contains only tokens
    is_new: bool = False  # created by this call

    @property
    def certificate(self) -> Path:
        return self.folder / "server.pem"

    @property
    def key(self) -> Path:
        return self.folder / "server.key"


def load_or_make(folder: Path, names: Iterable[str]) -> Credentials:
    """Load the credentials in `folder`, or create them if it contains none. Raise InvalidRequest if that fails.

    `names` are DNS names and addresses of this host for the server certificate, in addition to SERVER_NAME.
    """
    try:
        is_new = not (folder / "ca.pem").exists()
        if is_new:
            _make_tokens(folder)
            from lighthouse_runtime.security import certificates

            key, pem = certificates.make_ca()
            write_private(folder / "ca.key", key)
            write_private(folder / "ca.pem", pem)  # last, because this file marks the folder as complete
        credentials = Credentials(folder, pin_of((folder / "ca.pem").read_bytes()), is_new)
        renew_if_due(credentials, names)
        if not _is_valid(folder / "ca.pem"):
            log.error(
                "by this host's clock, %s is not valid, so clients reject this lighthouse: set the clock; if it was "
                "wrong when the CA was created, remove %s, start again, and use the new join string",
                folder / "ca.pem",
                folder,
                extra=event("ca_not_valid", folder=str(folder)),
            )
        _warn_of_readers(folder)
    except (OSError, ValueError) as e:
        raise InvalidRequest(f"cannot use {folder}: {e}", field=_OPTION) from None
    return credentials


def load_or_make_tokens(folder: Path) -> Credentials:
    """Load or create only the tokens, for a lighthouse whose certificates come from the user's own PKI.

    Raise InvalidRequest on failure.
    """
    try:
        is_new = not (folder / FILE).exists()
        if is_new:
            _make_tokens(folder)
        _warn_of_readers(folder)
    except OSError as e:
        raise InvalidRequest(f"cannot use {folder}: {e}", field=_OPTION) from None
    return Credentials(folder, "", is_new)


def _warn_of_readers(folder: Path) -> None:
    """Log a warning for each secret file that other users can read."""
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
    """Create the folder and the tokens unless they exist. Raise OSError if a write fails.

    Raise InvalidRequest if the folder contains other files, or other users can read it.
    """
    make_private(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    if not all(_BEFORE_CA.fullmatch(path.name) for path in folder.iterdir()):
        raise InvalidRequest(f"{folder} has files and no ca.pem; name an empty folder", field=_OPTION)
    _check_owner(folder)
    if not (folder / FILE).exists():
        Tokens.make().write(folder)


def renew_if_due(credentials: Credentials, names: Iterable[str]) -> bool:
    """Create a server certificate if there is none or it expires soon. Return whether one was created.

    Also replace a certificate that is not valid yet, because the clock was ahead when it was created. Without the CA's
    key, keep an existing certificate in any case. Raise OSError or ValueError on failure.
    """
    has_key = (credentials.folder / "ca.key").exists()
    if credentials.certificate.exists() and (
        not has_key
        or (_is_valid(credentials.certificate) and time_until_expiry(credentials.certificate) > RENEWED_BEFORE)
    ):
        return False
    if not has_key:
        raise ValueError("server.pem is missing, and so is ca.key, which is needed to create a new one")
    from lighthouse_runtime.security import certificates

    folder = credentials.folder
    key, pem = certificates.make_server(
        (folder / "ca.pem").read_bytes(), (folder / "ca.key").read_bytes(), [SERVER_NAME, *names]
    )
    # A handshake between the two writes sees a mismatched pair and fails; the client retries.
    write_private(folder / "server.key", key)
    write_private(folder / "server.pem", pem)
    return True


def pin_of(pem: bytes) -> str:
    """Return the pin of a certificate, which is the SHA-256 of its DER form in hexadecimal.

    Raise ValueError if `pem` is not a PEM certificate.
    """
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem.decode())).hexdigest()


def read_pin(folder: Path) -> str:
    """Return the pin of the CA in a folder of credentials. Raise InvalidRequest if there is no CA certificate."""
    try:
        return pin_of((folder / "ca.pem").read_bytes())
    except (OSError, ValueError) as e:
        raise InvalidRequest(f"{folder} has no certificate of a CA: {e}", field=_OPTION) from None


class CertificateFiles:
    """Server certificate for gRPC and HTTP, reloaded when its files change. Open connections are not affected.

    If the new files are invalid, the old certificate stays in use, and `error` has the reason.
    """

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None = None) -> None:
        """Read the files. Raise OSError or ValueError if one is unusable.

        The file `client_ca` contains the CAs that sign client certificates. If it is None, no client needs a
        certificate. Otherwise gRPC clients must send one. HTTP clients may, because probes and browsers have none.
        """
        self._certificate = certificate
        self._key = key
        self._client_ca = client_ca
        self._lock = threading.Lock()
        paths = (certificate, key) if client_ca is None else (certificate, key, client_ca)
        self._files = WatchedFile(self._read, *paths)
        self._fetched = self._files.current[1]

    def for_grpc(self) -> grpc.ServerCredentials:
        fetch: Any = self._fetch  # the stub's type lacks None, which keeps the current certificate
        return grpc.dynamic_ssl_server_credentials(self._fetched, fetch, self._client_ca is not None)

    def for_http(self) -> ssl.SSLContext:
        """Return an SSL context whose handshakes use the newest certificate.

        Each handshake switches to a context of the newest files, because an existing context cannot drop a CA.
        """
        front = self._context()

        def newest(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            connection.context = self._files.current[0]

        front.sni_callback = newest
        return front

    def reload_if_changed(self) -> None:
        """Read the files if they have changed. gRPC calls this at each handshake; for HTTP, call it periodically."""
        with self._lock:
            self._files.reload_if_changed()

    @property
    def error(self) -> str:
        return self._files.error

    def _fetch(self) -> "grpc.ServerCertificateConfiguration | None":
        """Return the certificate, or None if it has not changed. gRPC calls this in a thread for each handshake."""
        self.reload_if_changed()
        with self._lock:
            newest = self._files.current[1]
            if newest is self._fetched:
                return None
            self._fetched = newest
            return newest

    def _read(self) -> tuple[ssl.SSLContext, grpc.ServerCertificateConfiguration]:
        """Read the files and check that the key matches, since gRPC itself would report a mismatch only to clients."""
        context = self._context()
        roots = None if self._client_ca is None else self._client_ca.read_bytes()
        pair = (self._key.read_bytes(), self._certificate.read_bytes())
        return context, grpc.ssl_server_certificate_configuration([pair], roots)

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            load_key_pair(context, self._certificate, self._key)
        except OSError as e:
            raise ValueError(f"{self._certificate} with the key {self._key} cannot be used: {e}") from None
        if self._client_ca is not None:
            context.verify_mode = ssl.CERT_OPTIONAL
            try:
                context.load_verify_locations(self._client_ca)
            except OSError as e:
                raise ValueError(f"{self._client_ca} has no certificates of CAs: {e}") from None
        return context


def _check_owner(folder: Path) -> None:
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise InvalidRequest(
            f"{folder} is another user's, or others may read it (mode {found.st_mode & 0o777:o}): chmod 700 it, as the "
            "user of the lighthouse",
            field=_OPTION,
        )


def _is_valid(certificate: Path) -> bool:
    from lighthouse_runtime.security import certificates

    return certificates.is_valid_at(certificate.read_bytes(), datetime.datetime.now(datetime.UTC))


def time_until_expiry(certificate: Path) -> datetime.timedelta:
    """Return how long a certificate is still valid, negative if expired. Raise OSError or ValueError on failure."""
    from lighthouse_runtime.security import certificates

    return certificates.expires_at(certificate.read_bytes()) - datetime.datetime.now(datetime.UTC)
