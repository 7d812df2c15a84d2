"""Certificates, created when a test needs them."""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

#: A name that only the test proxy can resolve, to 127.0.0.1: loopback itself is never proxied.
FAR = "far.test"
LOCAL = ("localhost", "127.0.0.1", FAR)


@dataclasses.dataclass(frozen=True)
class KeyPair:
    """A certificate and its private key, as PEM files."""

    certificate: Path
    key: Path

    @property
    def thumbprint(self) -> str:
        """The SHA-1 of the certificate, as VMware writes it."""
        der = ssl.PEM_cert_to_DER_cert(self.certificate.read_text())
        return hashlib.sha1(der).digest().hex(":").upper()


class Authority:
    """A certificate authority with its files in ``directory``; clients trust ``certificate``."""

    def __init__(self, directory: Path, name: str = "Test CA") -> None:
        self.directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        usage = x509.KeyUsage(
            digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False,
            key_encipherment=False, data_encipherment=False, key_agreement=False,
            encipher_only=False, decipher_only=False,
        )  # fmt: skip
        certificate = (
            _builder(self._name, self._name, self._key.public_key(), days=30)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        directory.mkdir(parents=True, exist_ok=True)
        self.certificate = directory / "ca.pem"
        self.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        *names: str,
        common_name: str = "localhost",
        client: bool = False,
        days: int = 30,
        after: int = -60,
        own: bool = False,
    ) -> KeyPair:
        """Issue a server certificate for names and addresses (this host by default), or a client one.

        It is valid from ``after`` days from now to ``days`` days from now: a negative number makes an expired
        certificate. ``own``: it is signed by its own key.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        usage = ExtendedKeyUsageOID.CLIENT_AUTH if client else ExtendedKeyUsageOID.SERVER_AUTH
        signer, issuer = (key, _name(common_name)) if own else (self._key, self._name)
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
        builder = (
            _builder(_name(common_name), issuer, key.public_key(), days=days, after=after)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(authority, critical=False)
        )
        if not client:
            alternatives = x509.SubjectAlternativeName([_alternative(name) for name in names or LOCAL])
            builder = builder.add_extension(alternatives, critical=False)
        plain = common_name.replace(".", "-")
        stem = self.directory / f"{plain}-{key.public_key().public_numbers().x:x}"[:80]
        pair = KeyPair(stem.with_suffix(".crt"), stem.with_suffix(".key"))
        pair.certificate.write_bytes(
            builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        )
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return pair


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, *, days: int, after: int = -60
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + dt.timedelta(days=after))
        .not_valid_after(now + dt.timedelta(days=days))
    )


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
