"""How a client makes sure of its lighthouse, and proves itself: by the pin of a join string, or by files of the user's
own PKI, which are read again for each connection.

Files are named by options, or by variables, which a training process gets from its supervisor. No `cryptography` here
but where an error is put into words: training processes import this.
"""

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lighthouse_protocol.coordinator import NO_FILES, Coordinator, TlsFiles
from lighthouse_protocol.refusals import Unreachable
from lighthouse_runtime.security.pinned import SERVER_NAME, fetch_roots, known_roots, utc_now
from lighthouse_runtime.security.watched_file import stamp_of

CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE = "LIGHTHOUSE_TLS_CA", "LIGHTHOUSE_CLIENT_CERT", "LIGHTHOUSE_CLIENT_KEY"


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM. `name`: what the server's certificate must say, in place of the host's name; empty: that name."""

    roots: bytes
    name: str = ""
    cert: bytes | None = None
    key: bytes | None = field(default=None, repr=False)


def files_from(variables: Mapping[str, str] = os.environ) -> TlsFiles:
    return TlsFiles(*(variables.get(name, "") for name in (CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE)))


def variables_of(files: TlsFiles) -> dict[str, str]:
    """For a child process: the inverse of files_from()."""
    told = {CA_VARIABLE: files.ca, CERT_VARIABLE: files.cert, KEY_VARIABLE: files.key}
    return {name: os.path.abspath(path) for name, path in told.items() if path}


def known_tls(coordinator: Coordinator) -> ClientTls | None:
    """What fetch_tls() returns, where no file and no server has to be asked; None: ask it."""
    roots = known_roots(coordinator) if coordinator.ca_pin and coordinator.files == NO_FILES else None
    return None if roots is None else ClientTls(roots, SERVER_NAME)


def fetch_tls(coordinator: Coordinator, timeout_s: float, *, waits: bool = False) -> ClientTls:
    """Blocks: reads files, and for a pin asks the server, as fetch_roots(). Raises as that, and Unreachable for a file
    that cannot be used: it may be one that is being replaced."""
    files = coordinator.files
    cert, key = (_read(files.cert, "--client-cert"), _read(files.key, "--client-key")) if files.cert else (None, None)
    if files.cert:
        _check_pair(files)
    if coordinator.ca_pin:
        return ClientTls(fetch_roots(coordinator, timeout_s, waits=waits), SERVER_NAME, cert, key)
    if not files.ca:
        raise Unreachable(
            f"{coordinator} uses certificates of your own PKI: set --tls-ca ({CA_VARIABLE}) to "
            "the file with the certificate of their CA"
        )
    return ClientTls(_read_ca(files.ca), "", cert, key)


def stamp_of_files(files: TlsFiles) -> object:
    """Another one when one of them has changed."""
    return tuple(stamp_of(Path(path)) for path in (files.ca, files.cert, files.key) if path)


def refused_client(address: str, files: TlsFiles) -> str:
    """In words, why a server may have ended a connection right after a handshake that was good for its client."""
    if not files.cert:
        return (
            f"{address} ends the connection after the handshake, as a lighthouse with --tls-client-ca does to a client "
            "without a certificate: set --client-cert and --client-key "
            f"({CERT_VARIABLE}, {KEY_VARIABLE})"
        )
    if _has_expired(files.cert):
        return (
            f"{address} ends the connection after the handshake: this client's certificate {files.cert} has expired; "
            f"this host's clock says {utc_now()}: renew the certificate, or set the clock"
        )
    return (
        f"{address} ends the connection after the handshake, as a lighthouse does to a client whose certificate it "
        f"does not know: {files.cert} must be signed by a CA in its --tls-client-ca, be good for client "
        "authentication, and be valid by its clock"
    )


def _has_expired(path: str) -> bool:
    import datetime

    try:
        from lighthouse_runtime.security import certificates

        return certificates.expires_at(Path(path).read_bytes()) < datetime.datetime.now(datetime.UTC)
    except (ImportError, OSError, ValueError):
        return False


def _read(path: str, option: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as e:
        raise Unreachable(f"{option}: cannot read {path}: {e.strerror or e}; fix the file, or name another") from None


def _check_pair(files: TlsFiles) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(files.cert, files.key)
    except OSError as e:
        raise Unreachable(
            f"--client-cert: {files.cert} with the key {files.key} cannot be used ({e}); pass a PEM certificate "
            "and its key"
        ) from None


def _read_ca(path: str) -> bytes:
    read = _read(path, "--tls-ca")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=read.decode())
    except (OSError, ValueError) as e:
        raise Unreachable(f"--tls-ca: {path} has no CA certificate ({e}); pass a PEM file") from None
    return read
