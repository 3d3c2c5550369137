"""How a lighthouse proves itself to etcd, and etcd to it."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from lighthouse_protocol.refusals import InvalidRequest


@dataclass(frozen=True, slots=True)
class StoreCredentials:
    """Files; `ca`, `cert` and `key` in PEM form. Without a CA etcd is spoken to in the clear.

    etcd's gateway takes no user from a certificate: one that asks for users needs `user_file` (NAME:PASSWORD), too.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    user_file: Path | None = None

    def tls(self) -> ssl.SSLContext | None:
        """Raises InvalidRequest that names the option."""
        if self.ca is None:
            if self.cert is not None:
                raise InvalidRequest("also needs --store-ca", field="--store-cert")
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except (OSError, ssl.SSLError) as e:
            raise InvalidRequest(f"cannot read {self.ca}: {e}", field="--store-ca") from e
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.cert is not None:
            try:
                context.load_cert_chain(self.cert, self.key)
            except (OSError, ssl.SSLError) as e:
                raise InvalidRequest(f"cannot read {self.cert} with --store-key: {e}", field="--store-cert") from e
        return context

    def user(self) -> tuple[str, str] | None:
        """Name and password. Raises InvalidRequest that names the option, and does not show the password."""
        if self.user_file is None:
            return None
        try:
            name, colon, password = self.user_file.read_text().strip().partition(":")
        except (OSError, UnicodeDecodeError) as e:
            raise InvalidRequest(f"cannot read {self.user_file}: {e}", field="--store-user-file") from e
        if not (name and colon and password):
            raise InvalidRequest(f"{self.user_file} must hold one line, NAME:PASSWORD", field="--store-user-file")
        return name, password
