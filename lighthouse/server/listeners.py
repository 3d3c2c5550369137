"""TLS and authentication of the lighthouse's listeners.

A listener on a loopback address uses neither, unless certificates are configured. Every other listener uses TLS, and
authenticates callers by token and, with --tls-client-ca, by client certificate. --insecure disables TLS. On its first
start, a lighthouse creates a CA and the tokens in its credentials folder.
"""

import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lighthouse.server.config import LighthouseConfig
from lighthouse.store.sqlite import default_path
from lighthouse_protocol.coordinator import Coordinator, token_command
from lighthouse_protocol.identity import Address
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_protocol.rules.access import FIELD as IDENTITIES_OPTION
from lighthouse_protocol.rules.access import Identities, Role, parse_identities
from lighthouse_runtime.log_event import event
from lighthouse_runtime.net.address import own_name, served_host, split_bind
from lighthouse_runtime.process.files import WatchedFile
from lighthouse_runtime.security.access import ANONYMOUS, Access, Audit, CredentialAccess, LoopbackAccess, TorchftAccess
from lighthouse_runtime.security.credentials import (
    CertificateFiles,
    Credentials,
    TokenFile,
    load_or_make,
    load_or_make_tokens,
    renew_if_due,
    time_until_expiry,
)
from lighthouse_runtime.security.serving import Serving, write_serving_file

log = logging.getLogger(__name__)


TOLD_BEFORE_DAYS = 3


@dataclass(frozen=True, slots=True)
class PortSecurity:
    access: Access
    files: CertificateFiles | None  # None without TLS


class ListenerSecurity:
    """TLS and access rules of all listeners.

    Raises:
        InvalidRequest: If the credentials are unusable.
    """

    def __init__(self, config: LighthouseConfig) -> None:
        self._config = config
        self._is_exposed = not (_is_loopback(config.bind) and _is_loopback(config.http))
        torchft = config.torchft_listen
        is_open = torchft is not None and not _is_loopback(torchft)
        self.is_insecure = is_open or (config.insecure and self._is_exposed)
        self.audit = Audit(_audit_path(config))
        self._credentials: Credentials | None = None
        self._files: CertificateFiles | None = None
        self._tokens: TokenFile | None = None
        self._identities: WatchedFile[Identities] | None = None
        self._errors: dict[str, str] = {}
        if self._is_exposed or config.is_tls_required:
            folder = config.credentials_folder()
            has_own_ca = config.tls_cert is None
            self._credentials = load_or_make(folder, self._names()) if has_own_ca else load_or_make_tokens(folder)
            self._tokens = TokenFile(self._credentials.folder)
            if not config.insecure:
                self._files = _certificate_files(config, self._credentials)
            if config.tls_identities is not None:
                path = config.tls_identities
                self._identities = WatchedFile(lambda: _read_identities(path), path)
        self.grpc = self._port_security(config.bind)
        self.http = self._port_security(config.http)
        self.torchft = TorchftAccess(self.audit)

    @property
    def ca_pin(self) -> str:
        """Pin of the lighthouse's own CA. It is empty without TLS, or if another CA signed the server certificate."""
        return self._credentials.ca_pin if self._credentials is not None and self._files is not None else ""

    def _port_security(self, bind: str) -> PortSecurity:
        if _is_loopback(bind) and not self._config.is_tls_required:
            return PortSecurity(LoopbackAccess(self.audit), None)
        assert self._tokens is not None
        if self._config.insecure:
            return PortSecurity(CredentialAccess(self._tokens, self.audit, anonymous=ANONYMOUS), None)
        return PortSecurity(CredentialAccess(self._tokens, self.audit, self._identities), self._files)

    def announce(self, port: int) -> None:
        """Write the file through which this user's other processes find the credentials for the gRPC port.

        The method also stores the port, so that error messages to callers can name it. The daemon calls it as soon as
        it knows the port.
        """
        for port_security in (self.grpc, self.http):
            if isinstance(port_security.access, CredentialAccess):
                port_security.access.port = port
        found = None
        if self._credentials is not None and not isinstance(self.grpc.access, LoopbackAccess):
            has_own_pki = self._config.tls_cert is not None
            found = Serving(self.ca_pin, self._credentials.folder, has_own_pki)
        try:
            write_serving_file(port, found)
        except (OSError, InvalidRequest) as e:
            log.warning(
                "other processes of this user on this host also need the join string: %s",
                e,
                extra=event("not_announced"),
            )

    def greet(self, port: int) -> None:
        """Log how to get the join string of new credentials, or a warning if other hosts can connect without TLS."""
        if self._is_exposed and self._config.insecure:
            log.warning(
                "INSECURE: other hosts reach this lighthouse without TLS: anyone can join jobs and read model weights; "
                "leave --insecure out, and give managers the join string",
                extra=event("insecure"),
            )
        elif self._credentials is not None and self._credentials.is_new and self._tokens is not None:
            where = Address(served_host(split_bind(self._config.bind, "--bind")[0]), port)
            token = self._tokens.value.newest(Role.JOIN)
            join = Coordinator((where,), self.ca_pin, token, has_own_pki=not self.ca_pin)
            log.info(
                "created credentials in %s; %s prints the join string for other hosts",
                self._credentials.folder,
                token_command(port, Role.JOIN),
                extra=event("credentials_made", folder=str(self._credentials.folder)),
            )
            if sys.stderr.isatty():  # a log collector would store the token where others can read it
                print(f"LIGHTHOUSE_ADDRESS={join.join_string()}", file=sys.stderr, flush=True)

    def renew(self) -> None:
        """Renew or reload certificates, tokens and identities, and log each new error once. Call this periodically."""
        files, credentials = self._files, self._credentials
        if files is not None and credentials is not None:
            try:
                if credentials.ca_pin and renew_if_due(credentials, self._names()):
                    log.info("new server certificate in %s", credentials.folder, extra=event("certificate_made"))
                if self._config.tls_cert is not None:
                    self._log_new_error("certificate_expires", _expiry(self._config.tls_cert))
            except (OSError, ValueError) as e:
                self._log_new_error("certificate_not_renewed", f"the server certificate cannot be renewed: {e}")
            else:
                self._log_new_error("certificate_not_renewed", "")
            files.reload_if_changed()
            self._log_new_error(
                "certificate_unreadable", files.error and f"keeping the previous certificates: {files.error}"
            )
        for watched, name in ((self._tokens, "tokens"), (self._identities, "identities")):
            if watched is not None:
                watched.reload_if_changed()
                self._log_new_error(
                    f"{name}_unreadable", watched.error and f"keeping the previous {name}: {watched.error}"
                )

    def _log_new_error(self, what: str, error: str) -> None:
        if error and self._errors.get(what) != error:
            log.error("%s", error, extra=event(what))
        self._errors[what] = error

    def _names(self) -> Iterator[str]:
        """Yield the host names and addresses to put into the server certificate."""
        yield from ("localhost", "127.0.0.1", "::1", own_name())
        for bind in (self._config.bind, self._config.http):
            host = split_bind(bind, "--bind")[0]
            if not Address(host, None).is_unspecified:
                yield host


def _certificate_files(config: LighthouseConfig, credentials: Credentials) -> CertificateFiles:
    """Load the certificate files. Raise InvalidRequest if one is unusable."""
    certificate, key = config.tls_cert or credentials.certificate, config.tls_key or credentials.key
    try:
        return CertificateFiles(certificate, key, config.tls_client_ca)
    except (OSError, ValueError) as e:
        if config.tls_client_ca is not None and str(config.tls_client_ca) in str(e):
            raise InvalidRequest(str(e), field="--tls-client-ca") from None
        raise InvalidRequest(str(e), field="--credentials" if config.tls_cert is None else "--tls-cert") from None


def _read_identities(path: Path) -> Identities:
    """Read the file of --tls-identities. Raise InvalidRequest if it cannot be read or parsed."""
    try:
        return parse_identities(path.read_text())
    except (OSError, UnicodeDecodeError) as e:
        raise InvalidRequest(f"cannot read {path}: {e}", field=IDENTITIES_OPTION) from None


def _expiry(certificate: Path) -> str:
    """Return a warning if the certificate expires soon, or "". Raise OSError or ValueError if it is unreadable."""
    days = time_until_expiry(certificate).days
    if days >= TOLD_BEFORE_DAYS:
        return ""
    when = f"expires in {days} days" if days > 0 else "expires within a day" if days == 0 else "has expired"
    return f"the certificate {certificate} {when}: renew it; the file is read again when it changes"


def _is_loopback(bind: str) -> bool:
    return Address(split_bind(bind, "--bind")[0], None).is_loopback


def _audit_path(config: LighthouseConfig) -> Path | None:
    """Return the path of the audit log, next to the credentials or the journal, or None if there is neither."""
    if config.is_tls_required or not (_is_loopback(config.bind) and _is_loopback(config.http)):
        return config.credentials_folder().parent / "audit.jsonl"
    if config.journal == "none" or (config.journal is None and not split_bind(config.bind, "--bind")[1]):
        return None
    try:
        return (Path(config.journal) if config.journal else default_path()).parent / "audit.jsonl"
    except InvalidRequest:
        return None
