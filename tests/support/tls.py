"""Certificates, created when a test needs them."""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
import ipaddress
import ssl
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tests.support import policy

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
        """The SHA-1 of the certificate, as VMware writes it; its SHA-256 under a policy without SHA-1."""
        return self.digest("sha1" if policy.is_offered("sha1") else "sha256")

    def digest(self, algorithm: str) -> str:
        """Return a thumbprint of the certificate."""
        der = ssl.PEM_cert_to_DER_cert(self.certificate.read_text())
        return hashlib.new(algorithm, der, usedforsecurity=False).digest().hex(":").upper()


class Authority:
    """A certificate authority with its files in ``directory``; clients trust ``certificate``.

    ``bare``: its certificates have no key identifiers and no key usage, and their basic constraints are not
    critical, as those of many private authorities. ``parent``: it is an intermediate of this one.
    """

    def __init__(
        self, directory: Path, name: str = "Test CA", *, bare: bool = False, parent: Authority | None = None
    ) -> None:
        self.directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        self._bare = bare
        signer = parent or self
        usage = x509.KeyUsage(
            digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False,
            key_encipherment=False, data_encipherment=False, key_agreement=False,
            encipher_only=False, decipher_only=False,
        )  # fmt: skip
        own, above = self._key.public_key(), signer._key.public_key()
        builder = _builder(self._name, signer._name, own, days=30)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=not bare)
        if not bare:
            builder = builder.add_extension(usage, critical=True)
            own_id = x509.SubjectKeyIdentifier(_identifier(own))
            builder = builder.add_extension(own_id, critical=False)
        if parent and not bare:
            above_id = x509.AuthorityKeyIdentifier(_identifier(above), None, None)
            builder = builder.add_extension(above_id, critical=False)
        made = builder.sign(signer._key, hashes.SHA256())
        directory.mkdir(parents=True, exist_ok=True)
        self.certificate = directory / "ca.pem"
        self.certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))

    def __getstate__(self) -> dict[str, Any]:
        """Return what ``pickle`` writes, for the other processes of a test run."""
        return {**self.__dict__, "_key": _pem(self._key), "_name": self._name.rfc4514_string()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what ``__getstate__`` returned."""
        key = serialization.load_pem_private_key(state["_key"], None)
        self.__dict__ |= {**state, "_key": key, "_name": x509.Name.from_rfc4514_string(state["_name"])}

    def become_first_version(self) -> Authority:
        """Replace the certificate by one of X.509 version 1, which has no extensions (RFC 5280, 4.1)."""
        made = _builder(self._name, self._name, self._key.public_key(), days=30)
        signed = made.sign(self._key, hashes.SHA256())
        # The first field, [0] EXPLICIT, is the version: left out, it is 1.
        fields = _content(signed.tbs_certificate_bytes).removeprefix(bytes.fromhex("a003020102"))
        body = _sequence(fields)
        signature = self._key.sign(body, ec.ECDSA(hashes.SHA256()))
        # ecdsa-with-SHA256 (RFC 5758, 3.2); a bit string.
        algorithm = _sequence(bytes.fromhex("06082a8648ce3d040302"))
        der = _sequence(body + algorithm + bytes([3, len(signature) + 1, 0]) + signature)
        self.certificate.write_text(ssl.DER_cert_to_PEM_cert(der))
        return self

    def lose_its_right(self) -> Authority:
        """Replace the certificate by one that is not a CA's (RFC 5280, 4.2.1.9)."""
        made = _builder(self._name, self._name, self._key.public_key(), days=30)
        made = made.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        signed = made.sign(self._key, hashes.SHA256())
        self.certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        return self

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
        authority = x509.AuthorityKeyIdentifier(_identifier(signer.public_key()), None, None)
        builder = (
            _builder(_name(common_name), issuer, key.public_key(), days=days, after=after)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        )
        if not self._bare:
            builder = builder.add_extension(authority, critical=False)
        if not client:
            alternatives = x509.SubjectAlternativeName([_alternative(name) for name in names or LOCAL])
            builder = builder.add_extension(alternatives, critical=False)
        plain = common_name.replace(".", "-")
        stem = self.directory / f"{plain}-{key.public_key().public_numbers().x:x}"[:80]
        pair = KeyPair(stem.with_suffix(".crt"), stem.with_suffix(".key"))
        pair.certificate.write_bytes(
            builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        )
        pair.key.write_bytes(_pem(key))
        return pair


def _identifier(key: ec.EllipticCurvePublicKey) -> bytes:
    """Return the identifier of a key by SHA-256 (RFC 7093, 2): the usual one is by SHA-1."""
    form = serialization.PublicFormat.UncompressedPoint
    return hashlib.sha256(key.public_bytes(serialization.Encoding.X962, form)).digest()[:20]


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)


def _sequence(content: bytes) -> bytes:
    """Return a SEQUENCE in DER (X.690, 8.1.3: lengths)."""
    size = len(content).to_bytes(2, "big").lstrip(b"\0")
    return b"\x30" + (b"" if len(content) < 128 else bytes([0x80 + len(size)])) + size + content


def _content(sequence: bytes) -> bytes:
    """Return the content of a SEQUENCE."""
    return sequence[2 + (sequence[1] & 0x7F if sequence[1] & 0x80 else 0) :]


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
