"""A PKI of a user's own, as files: a CA, and what it issues, by trustme, with SPIFFE ids where names are such."""

import datetime
from dataclasses import dataclass
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from lighthouse_protocol.coordinator import TlsFiles
from lighthouse_runtime.process.files import write_private

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Pair:
    cert: Path
    key: Path


class Pki:
    """In `folder`. Its CA's certificate is `ca`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder = folder
        self.authority = trustme.CA()
        self.ca = folder / f"{name}.pem"
        write_private(self.ca, self.authority.cert_pem.bytes())

    def issue(
        self, file: str, *names: str, begins: datetime.timedelta = -DAY, lasts: datetime.timedelta = 2 * DAY
    ) -> Pair:
        """Files that replace what is there, the key first. `begins`: from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        ca = x509.load_pem_x509_certificate(self.authority.cert_pem.bytes())
        signer = serialization.load_pem_private_key(self.authority.private_key_pem.bytes(), None)
        assert isinstance(signer, ec.EllipticCurvePrivateKey)
        start = datetime.datetime.now(datetime.UTC) + begins
        made = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, file)]))
            .issuer_name(ca.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(start + lasts)
            .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
            .sign(signer, hashes.SHA256())
        )
        form = serialization.PrivateFormat.PKCS8
        pem = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
        pair = Pair(self.folder / f"{file}.pem", self.folder / f"{file}.key")
        write_private(pair.key, pem)
        write_private(pair.cert, made.public_bytes(serialization.Encoding.PEM))
        return pair

    def files(self, client: Pair | None = None) -> TlsFiles:
        """Of a client that trusts this CA."""
        return TlsFiles(str(self.ca), *((str(client.cert), str(client.key)) if client is not None else ("", "")))


def _general_name(name: str) -> x509.GeneralName:
    if name.startswith("spiffe://"):
        return x509.UniformResourceIdentifier(name)
    return x509.DNSName(name)
