"""TLS for clients, which verify the server by the pin in a join string or by a CA of the user's own PKI.

Options or environment variables name the PEM files; a supervisor passes the variables to its training processes. The
files are read again for each connection.

The CA certificate that matches a pin is fetched from the server. A first, unverified handshake gets the certificates of
the server and its CA. No data is sent over this connection, and the CA certificate is trusted only if its SHA-256
equals the pin. A second handshake is verified with that CA and detects expired certificates and wrong clocks, so that
errors can explain them.

Training processes import this module, so it imports the slow `cryptography` only to explain an error.
"""

import contextlib
import hashlib
import os
import select
import socket
import ssl
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lighthouse_protocol.coordinator import NO_FILES, Coordinator, TlsFiles, token_command
from lighthouse_protocol.identity import Address
from lighthouse_protocol.limits import LIGHTHOUSE_HTTP_PORT, LIGHTHOUSE_PORT
from lighthouse_protocol.refusals import Unreachable, Untrusted, WrongProtocol
from lighthouse_runtime.process.files import file_stamp

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
    roots = _roots.get(coordinator.ca_pin) if coordinator.files == NO_FILES else None
    return None if roots is None else ClientTls(roots, SERVER_NAME)


def fetch_tls(coordinator: Coordinator, timeout_s: float, *, waits: bool = False) -> ClientTls:
    """Read the PEM files and, if there is a pin, fetch the CA certificate from the server. Blocks.

    Args:
        coordinator: Lighthouse with a pin or with files.
        timeout_s: Maximum time in seconds for contacting the server.
        waits: Whether to retry while the server is down.

    Raises:
        Unreachable: The server does not answer, or a file is unusable. Retry if the file may be in the middle of a
            replacement.
        WrongProtocol: The server does not speak TLS.
        Untrusted: The certificate has expired or does not match the pin.
    """
    files = coordinator.files
    cert = key = None
    if files.cert:
        cert, key = _read(files.cert, "--client-cert"), _read(files.key, "--client-key")
        try:
            load_key_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), files.cert, files.key)
        except OSError as e:
            raise Unreachable(
                f"--client-cert: {files.cert} with the key {files.key} cannot be used ({e}); pass a PEM certificate "
                "and its key"
            ) from None
    if coordinator.ca_pin:
        return ClientTls(fetch_roots(coordinator, timeout_s, waits=waits), SERVER_NAME, cert, key)
    if not files.ca:
        raise Unreachable(
            f"{coordinator} uses certificates of your own PKI: set --tls-ca ({CA_VARIABLE}) to "
            "the file with the certificate of their CA"
        )
    roots = _read(files.ca, "--tls-ca")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=roots.decode())
    except (OSError, ValueError) as e:
        raise Unreachable(f"--tls-ca: {files.ca} has no CA certificate ({e}); pass a PEM file") from None
    return ClientTls(roots, "", cert, key)


def stamp_of_files(files: TlsFiles) -> object:
    """Return a value that changes whenever one of the files is modified or replaced."""
    return file_stamp(*(Path(path) for path in (files.ca, files.cert, files.key) if path))


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


def load_key_pair(context: ssl.SSLContext, certificate: Path | str, key: Path | str | None) -> None:
    """Load a certificate and its private key into `context`. Raise OSError if they are unusable or `key` is encrypted.

    By default, OpenSSL would ask for the passphrase of an encrypted key on the terminal, and block this thread.
    """

    def refuse() -> str:
        raise OSError("the key is encrypted: remove its passphrase, for example with `openssl pkey`")

    context.load_cert_chain(certificate, key, refuse)


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


# The CA certificate whose pin is in a join string.

SERVER_NAME = "lighthouse.internal"  # in every lighthouse's certificate, so that host names do not matter
_HTTP2 = "h2"  # gRPC's protocol; the lighthouse's HTTP port negotiates http/1.1 or nothing
RETRY_S = 0.2
MAX_RETRY_S = 1.0

_roots: dict[str, bytes] = {}  # CA certificates as PEM, by pin; never outdated, since a pin identifies one certificate


def fetch_roots(coordinator: Coordinator, timeout_s: float, *, waits: bool = False) -> bytes:
    """Return the CA certificate that matches the coordinator's pin, as PEM. The first call for a pin fetches it."""
    ends_at, delay_s = time.monotonic() + timeout_s, RETRY_S
    while (roots := _roots.get(coordinator.ca_pin)) is None:
        try:
            return _fetch(coordinator, ends_at)
        except Unreachable as e:
            if not waits or isinstance(e, WrongProtocol) or time.monotonic() >= ends_at:
                raise
        time.sleep(min(delay_s, max(0.0, ends_at - time.monotonic())))
        delay_s = min(MAX_RETRY_S, 2 * delay_s)
    return roots


def _fetch(coordinator: Coordinator, ends_at: float) -> bytes:
    """Fetch the CA certificate from the first address that answers, and cache it.

    Raise Unreachable if none answers before `ends_at`, a time.monotonic() value.
    """
    error: Unreachable = Unreachable(f"{coordinator} is unreachable: no time was left to connect")
    for address in coordinator.addresses:
        try:
            return _roots.setdefault(coordinator.ca_pin, _fetch_from(address, coordinator.ca_pin, ends_at))
        except Unreachable as e:
            error = e
    raise error


def shown_certificates(address: Address, timeout_s: float) -> list[bytes]:
    """Return the certificates that the server sends, unverified, as DER. The server's own certificate is the first."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with _handshake(address, context, time.monotonic() + timeout_s) as tls:
        return _chain(tls)


def _fetch_from(address: Address, pin: str, ends_at: float) -> bytes:
    chain = shown_certificates(address, ends_at - time.monotonic())
    for certificate in chain:
        if hashlib.sha256(certificate).hexdigest() == pin:
            roots = ssl.DER_cert_to_PEM_cert(certificate)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(cadata=roots)
            with _handshake(address, context, ends_at):
                return roots.encode()
    shown = hashlib.sha256(chain[-1]).hexdigest() if chain else "none"
    raise Untrusted(
        f"{address} has a different CA than the join string (pin {pin[:12]}..., found {shown[:12]}...): the string "
        "belongs to another lighthouse, or its credentials were recreated: run "
        f"{token_command(address.port)} on its host"
    )


def connected(address: Address, timeout_s: float) -> socket.socket:
    """Open a TCP connection. If that fails, raise Unreachable, with the likely cause and the remedy."""
    try:
        return socket.create_connection((address.host, address.port or 0), max(0.01, timeout_s))
    except socket.gaierror:
        raise Unreachable(
            f"{address} is unreachable: this host cannot resolve the name; fix the name or the DNS"
        ) from None
    except OSError as e:
        why = "connection refused" if isinstance(e, ConnectionRefusedError) else str(e)
        raise Unreachable(f"{address} is unreachable: {why}; is it running at this address?") from None


@contextlib.contextmanager
def _handshake(address: Address, context: ssl.SSLContext, ends_at: float) -> Generator[ssl.SSLSocket, None, None]:
    """Connect, complete the TLS handshake before `ends_at` (a time.monotonic() value), and yield the socket."""
    context.set_alpn_protocols([_HTTP2])
    with connected(address, ends_at - time.monotonic()) as raw:
        raw.setblocking(False)
        try:
            with context.wrap_socket(raw, server_hostname=SERVER_NAME, do_handshake_on_connect=False) as tls:
                _shake(tls, ends_at)
                if tls.selected_alpn_protocol() != _HTTP2:
                    raise WrongProtocol(http_port_message(str(address)))
                yield tls
        except ssl.SSLCertVerificationError as e:
            raise Untrusted(bad_certificate_message(str(address), e.verify_message)) from None
        except TimeoutError:
            raise Unreachable(f"{address} is unreachable: the TLS handshake timed out") from None
        except ssl.SSLError as e:
            if e.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"):
                raise WrongProtocol(no_tls_message(str(address))) from None
            raise Unreachable(f"{address} is unreachable: the TLS handshake failed ({e.reason or e})") from None
        except OSError as e:
            raise Unreachable(f"{address} is unreachable: {e} during the TLS handshake") from None


def _shake(tls: ssl.SSLSocket, ends_at: float) -> None:
    while True:
        try:
            return tls.do_handshake()
        except ssl.SSLWantReadError:
            wanted = select.POLLIN
        except ssl.SSLWantWriteError:
            wanted = select.POLLOUT
        poll = select.poll()
        poll.register(tls, wanted)
        left_s = ends_at - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            raise TimeoutError


def _chain(tls: ssl.SSLSocket) -> list[bytes]:
    """Return the certificates that the server sent, as DER. The server's own certificate is the first."""
    if hasattr(tls, "get_unverified_chain"):  # public from Python 3.13 on
        return list(tls.get_unverified_chain())  # pyright: ignore[reportAttributeAccessIssue]
    inner: Any = tls._sslobj  # pyright: ignore[reportAttributeAccessIssue]
    return [ssl.PEM_cert_to_DER_cert(certificate.public_bytes()) for certificate in inner.get_unverified_chain() or ()]


def port_of(address: str) -> int | None:
    """Return the port of HOST:PORT, or None if it has no port. In a comma-separated list, the last address counts."""
    port = address.rpartition(":")[2]
    return int(port) if port.isascii() and port.isdigit() else None


def http_port_message(address: str) -> str:
    """Return an error message for a gRPC client that connected to an HTTP port."""
    return (
        f"{address} is unreachable: this is an HTTP port, not a gRPC port; the defaults of a lighthouse are "
        f"{LIGHTHOUSE_PORT} for gRPC and {LIGHTHOUSE_HTTP_PORT} for HTTP"
    )


def no_tls_message(address: str) -> str:
    """Return an error message for a client with a join string that connected to a port without TLS."""
    return (
        f"{address} does not speak TLS, which the join string requires: this port is an HTTP or torchft port, or the "
        "lighthouse was started with --insecure or on a loopback address; pass HOST:PORT instead of the join string, "
        "or start the lighthouse without --insecure"
    )


def utc_now() -> str:
    """Return the current time as a string such as "2025-01-31 12:00 UTC"."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())


def bad_certificate_message(address: str, why: str, ca_file: str = "") -> str:
    """Return an error message that explains why the server's certificate was rejected.

    `why` is OpenSSL's error. `ca_file` is the CA file that was used, or empty for a pinned CA.
    """
    if "expired" in why:
        remedy = "renew its --tls-cert" if ca_file else "restart the lighthouse to get a new one"
        return (
            f"{address}: the lighthouse's certificate has expired; this host's clock says {utc_now()}: if that is "
            f"right, {remedy}; otherwise set the clock"
        )
    if "not yet valid" in why:
        return (
            f"{address}: the lighthouse's certificate is not valid yet; this host's clock says {utc_now()}: set the "
            "clock of this host or of the lighthouse's host"
        )
    if ca_file and "ame" in why:
        return (
            f"{address}: the certificate does not contain {address.rpartition(':')[0]} ({why.strip()}): use an "
            "address that it contains, or add this one to the lighthouse's --tls-cert as a subject alternative name"
        )
    if ca_file:
        return (
            f"{address}: the certificate was not issued by a CA in {ca_file} ({why.strip()}): set --tls-ca "
            "(LIGHTHOUSE_TLS_CA) to the CA that signed the lighthouse's --tls-cert"
        )
    return (
        f"{address}: the certificate does not match the join string ({why.strip()}): the string belongs to "
        f"another lighthouse, or its credentials were recreated: run {token_command(port_of(address))} on its host"
    )
