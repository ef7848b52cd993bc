"""Authorities and certificates for tests of TLS, made anew for each."""

from __future__ import annotations

import datetime
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)
LOCAL = (
    x509.DNSName("localhost"),
    x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
)
"""Names of a server of this machine."""


@dataclass(frozen=True)
class Pair:
    """A certificate and its key."""

    certificate: bytes
    """PEM."""
    key: bytes
    """PEM, not encrypted."""

    @property
    def serial(self) -> int:
        """Number of the certificate."""
        return x509.load_pem_x509_certificate(self.certificate).serial_number

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate, hexadecimal."""
        return x509.load_pem_x509_certificate(self.certificate).fingerprint(hashes.SHA256()).hex()

    def write(self, folder: Path, name: str = "server") -> tuple[str, str]:
        """Puts both into a folder, in place of those before; returns their paths."""
        paths = folder / f"{name}.crt", folder / f"{name}.key"
        for path, content in zip(paths, (self.certificate, self.key), strict=True):
            replace(path, content)
        return str(paths[0]), str(paths[1])


def replace(path: Path, content: bytes | None) -> None:
    """Puts a file in place of another at once, readable by its owner alone; None removes it."""
    if content is None:
        path.unlink()
        return
    new = path.with_suffix(".new")
    new.touch(mode=0o600)
    new.write_bytes(content)
    os.replace(new, path)


def tenant_uri(name: str, domain: str = "example.org") -> x509.UniformResourceIdentifier:
    """Returns the alternative name that makes a certificate a tenant's."""
    return x509.UniformResourceIdentifier(f"spiffe://{domain}/drafthouse/tenant/{name}")


class Authority:
    """Signs certificates."""

    def __init__(self, name: str = "authority of a test") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        builder = self._builder(self._name, self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        identifier = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        signs = x509.KeyUsage(
            digital_signature=True, key_cert_sign=True, crl_sign=True,
            content_commitment=False, key_encipherment=False, data_encipherment=False,
            key_agreement=False, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        builder = builder.add_extension(identifier, critical=False)
        builder = builder.add_extension(signs, critical=True)
        self.pem = _pem(builder.sign(self._key, hashes.SHA256()))

    def _builder(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        not_after: datetime.datetime | None = None,
        not_before: datetime.datetime | None = None,
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(not_before or now - _DAY)
            .not_valid_after(not_after or now + _DAY)
            .add_extension(  # without it, and a key's usage above, Python 3.13 trusts none
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )

    def issue(
        self,
        *names: x509.GeneralName,
        not_after: datetime.datetime | None = None,
        not_before: datetime.datetime | None = None,
    ) -> Pair:
        """Returns a certificate with alternative names; without any, those of this machine."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(_name("a test"), key, not_after, not_before).add_extension(
            x509.SubjectAlternativeName(names or LOCAL), critical=False
        )
        return Pair(
            _pem(builder.sign(self._key, hashes.SHA256())),
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
        )

    def write(self, folder: Path, name: str = "ca") -> str:
        """Puts its certificate into a folder; returns the path."""
        path = folder / f"{name}.crt"
        replace(path, self.pem)
        return str(path)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
