"""Public keys in PEM, and the signatures that they verify.

PKIX public keys as cosign writes them (RFC 7468, 13), and X.509 certificates, whose validity is checked.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
import re
from collections.abc import Sequence
from typing import TypeAlias

from cryptography import exceptions, x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa

from cdi_worker import errors
from cdi_worker.formats import signature

PublicKey: TypeAlias = "ec.EllipticCurvePublicKey | rsa.RSAPublicKey | ed25519.Ed25519PublicKey"
KINDS = (ec.EllipticCurvePublicKey, rsa.RSAPublicKey, ed25519.Ed25519PublicKey)
_PEM = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----(?:(?!-----BEGIN).)*?-----END \1-----", re.DOTALL)
#: Smallest RSA key, in bits: shorter ones are forged.
SHORTEST_RSA = 2048


@dataclasses.dataclass(frozen=True)
class Key:
    """A public key. ``until``: the end of the validity of its certificate; None without one."""

    public: PublicKey
    since: dt.datetime | None = None
    until: dt.datetime | None = None

    def __str__(self) -> str:
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        data = self.public.public_bytes(serialization.Encoding.DER, form)
        return f"key SHA256:{hashlib.sha256(data).hexdigest()}"

    def verifies(self, proof: bytes, message: bytes) -> bool:
        """Return whether ``proof`` is this key's signature of ``message`` (SHA-256, except Ed25519)."""
        try:
            if isinstance(self.public, ed25519.Ed25519PublicKey):
                self.public.verify(proof, message)
            elif isinstance(self.public, ec.EllipticCurvePublicKey):
                self.public.verify(proof, message, ec.ECDSA(hashes.SHA256()))
            else:
                self.public.verify(proof, message, padding.PKCS1v15(), hashes.SHA256())
        except exceptions.InvalidSignature:
            return False
        return True


def read(data: bytes, where: str) -> tuple[Key, ...]:
    """Return the keys in a PEM file; ``where`` names it in messages. Raises ``errors.RequestError``."""
    found = []
    for block in _PEM.finditer(data):
        label = block[1].decode()
        if "PRIVATE KEY" in label:
            raise errors.RequestError(f"{where}: a private key; name the file with the public key")
        try:
            if label == "CERTIFICATE":
                certificate = x509.load_pem_x509_certificate(block[0])
                since, until = certificate.not_valid_before_utc, certificate.not_valid_after_utc
                found.append(Key(_usable(certificate.public_key()), since, until))
            else:
                found.append(Key(_usable(serialization.load_pem_public_key(block[0]))))
        except (ValueError, exceptions.UnsupportedAlgorithm) as err:
            raise errors.RequestError(f"{where}: malformed {label.lower()}: {err}") from err
    if not found:
        raise errors.RequestError(f"{where}: no public key in PEM form (-----BEGIN PUBLIC KEY-----)")
    return tuple(found)


def signer(keys: Sequence[Key], proof: bytes, message: bytes, name: str) -> Key:
    """Return the key that signed ``message``, whose certificate is valid now. Raises ``errors.Untrusted``.

    A renewed certificate has the key of the earlier one, and files may list both.
    """
    failed: errors.Untrusted | None = None
    for key in keys:
        if key.verifies(proof, message):
            now = dt.datetime.now(dt.UTC)
            if key.until is not None and now > key.until:
                reason = f"the certificate of {key} was valid until {key.until:%Y-%m-%d %H:%M} UTC"
            elif key.since is not None and now < key.since:
                reason = f"the certificate of {key} is valid from {key.since:%Y-%m-%d %H:%M} UTC"
            else:
                return key
            failed = errors.Untrusted(url=name, fault=signature.EXPIRED, reason=reason)
    if failed is not None:
        raise failed
    known = " or ".join(map(str, keys[:3])) + (" or others" if len(keys) > 3 else "")
    raise errors.Untrusted(url=name, fault=signature.OTHER_KEY, reason=f"it is not by {known}")


def _usable(public: object) -> PublicKey:
    """Return ``public`` if it is of a kind that signs images. Raises ``ValueError``."""
    if not isinstance(public, KINDS):
        raise ValueError("not an ECDSA, RSA or Ed25519 key")  # noqa: TRY004 - a fault of the file
    if isinstance(public, rsa.RSAPublicKey) and public.key_size < SHORTEST_RSA:
        raise ValueError(f"an RSA key of {public.key_size} bits; at least {SHORTEST_RSA} are needed")
    return public
