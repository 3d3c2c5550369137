"""TLS settings of clients, which verify the server by the pin in a join string or by a CA of the user's own PKI.

Options or environment variables name the PEM files; a supervisor passes the variables to its training processes. The
files are read again for each connection. Training processes import this module, so it imports the slow `cryptography`
only to explain an error.
"""

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lighthouse_protocol.coordinator import NO_FILES, Coordinator, TlsFiles
from lighthouse_protocol.refusals import Unreachable
from lighthouse_runtime.security.pinned import SERVER_NAME, fetch_roots, known_roots, utc_now
from lighthouse_runtime.security.watched_file import file_stamp

CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE = "LIGHTHOUSE_TLS_CA", "LIGHTHOUSE_CLIENT_CERT", "LIGHTHOUSE_CLIENT_KEY"


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Certificates and private key of a client, as PEM."""

    roots: bytes
    name: str = ""  # expected name in the server's certificate; empty for the host's name
    cert: bytes | None = None
    key: bytes | None = field(default=None, repr=False)


def files_from(variables: Mapping[str, str] = os.environ) -> TlsFiles:
    return TlsFiles(*(variables.get(name, "") for name in (CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE)))


def variables_of(files: TlsFiles) -> dict[str, str]:
    """Return the environment variables that pass the files to a child process, which reads them with files_from()."""
    paths = {CA_VARIABLE: files.ca, CERT_VARIABLE: files.cert, KEY_VARIABLE: files.key}
    return {name: os.path.abspath(path) for name, path in paths.items() if path}


def known_tls(coordinator: Coordinator) -> ClientTls | None:
    """Return what fetch_tls() would return, or None if that requires reading a file or contacting the server."""
    roots = known_roots(coordinator) if coordinator.ca_pin and coordinator.files == NO_FILES else None
    return None if roots is None else ClientTls(roots, SERVER_NAME)


def fetch_tls(coordinator: Coordinator, timeout_s: float, *, waits: bool = False) -> ClientTls:
    """Read the PEM files and, if there is a pin, fetch the CA certificate from the server. Blocks.

    Args:
        coordinator: Lighthouse with a pin or with files.
        timeout_s: Maximum time in seconds for contacting the server.
        waits: Retry while the server is down.

    Raises:
        Unreachable: The server does not answer, or a file is unusable. Retry if the file may be in the middle of a
            replacement.
        WrongProtocol: The server does not speak TLS.
        Untrusted: The certificate has expired or does not match the pin.
    """
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
    """Return a value that changes whenever one of the files is modified or replaced."""
    return tuple(file_stamp(Path(path)) for path in (files.ca, files.cert, files.key) if path)


def refused_client_message(address: str, files: TlsFiles) -> str:
    """Return an error message that explains why a server closed the connection right after the TLS handshake."""
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
