"""Creation of X.509 certificates. Import this module lazily, because importing `cryptography` is slow."""

import datetime
import ipaddress
from collections.abc import Sequence

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from lighthouse_protocol.identity import Address

CA_LASTS = datetime.timedelta(days=20 * 365)
SERVER_LASTS = datetime.timedelta(days=90)
CLOCKS_DIFFER = datetime.timedelta(days=1)  # certificates are backdated by this, because clocks differ


def make_ca() -> tuple[bytes, bytes]:
    """Create a CA. Return its private key and its certificate as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "lighthouse CA")])
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        _builder(name, name, key.public_key(), CA_LASTS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return _key_pem(key), _pem(builder.sign(key, hashes.SHA256()))


def make_server(ca_pem: bytes, ca_key_pem: bytes, names: Sequence[str]) -> tuple[bytes, bytes]:
    """Create a server certificate that a CA signs. Raise ValueError if the CA's key or certificate is unusable.

    Return the private key, and the certificate followed by the CA's, both as PEM. The first of `names` is also the
    subject's common name.
    """
    ca = x509.load_pem_x509_certificate(ca_pem)
    try:
        ca_key = serialization.load_pem_private_key(ca_key_pem, None)
    except (TypeError, UnsupportedAlgorithm) as e:  # TypeError: the key is encrypted
        raise ValueError(f"ca.key cannot be used: {e}") from None
    if not isinstance(ca_key, ec.EllipticCurvePrivateKey):
        raise ValueError("ca.key is not an elliptic-curve key")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, names[0])])
    alternatives: list[x509.GeneralName] = [
        x509.IPAddress(ipaddress.ip_address(name)) if Address(name, None).is_ip else x509.DNSName(name)
        for name in dict.fromkeys(names)
    ]
    builder = (
        _builder(subject, ca.subject, key.public_key(), SERVER_LASTS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
    )
    return _key_pem(key), _pem(builder.sign(ca_key, hashes.SHA256())) + ca_pem


def expires_at(pem: bytes) -> datetime.datetime:
    """Return when the first certificate in a PEM file's content expires. Raise ValueError if there is none."""
    return x509.load_pem_x509_certificate(pem).not_valid_after_utc


def is_valid_at(pem: bytes, now: datetime.datetime) -> bool:
    """Return whether the first certificate in a PEM file's content is valid. Raise ValueError if there is none."""
    certificate = x509.load_pem_x509_certificate(pem)
    return certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, lasts: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCKS_DIFFER)
        .not_valid_after(now + lasts)
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
