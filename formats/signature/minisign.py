"""minisign's keys and signatures (https://jedisct1.github.io/minisign/#signature-format)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from cryptography import exceptions
from cryptography.hazmat.primitives.asymmetric import ed25519

from cdi_worker import errors
from cdi_worker.formats import signature

#: What a signature file begins with.
BEGIN: Final = b"untrusted comment:"
_KEY: Final = re.compile(rb"^(RW[A-Za-z0-9+/]{54})\s*$", re.MULTILINE)
_TRUSTED: Final = b"trusted comment: "
#: The algorithms in a signature: of the file, and of its BLAKE2b hash.
_PURE, _HASHED = b"Ed", b"ED"


class Key(NamedTuple):
    """A public key and its number, in the order of its bytes."""

    number: bytes
    public: ed25519.Ed25519PublicKey

    def __str__(self) -> str:
        return f"minisign key {_shown(self.number)}"


def read(data: bytes) -> Iterator[Key]:
    """Yield the public keys in a file; none if it is of another form."""
    for found in _KEY.finditer(data):
        raw = base64.b64decode(found[1])
        if raw[:2] == _PURE:
            yield Key(raw[2:10], ed25519.Ed25519PublicKey.from_public_bytes(raw[10:]))


def signer(keys: Sequence[Key], proof: bytes, message: bytes, name: str) -> str:
    """Return who signed ``message``; ``proof`` is the signature's file. Raises ``errors.Untrusted``."""
    lines = [line.removesuffix(b"\r") for line in proof.split(b"\n")]
    try:
        _, first, comment, last = lines[:4]
        raw = base64.b64decode(first, validate=True)
        overall = base64.b64decode(last, validate=True)
    except (ValueError, binascii.Error) as err:
        raise _fault(name, signature.MALFORMED, "not a signature of minisign") from err
    algorithm, number, inner = raw[:2], raw[2:10], raw[10:]
    if algorithm not in {_PURE, _HASHED} or len(inner) != 64 or not comment.startswith(_TRUSTED):
        raise _fault(name, signature.MALFORMED, "not a signature of minisign")
    for key in keys:
        if key.number == number:
            hashed = hashlib.blake2b(message).digest() if algorithm == _HASHED else message
            try:
                key.public.verify(inner, hashed)
                key.public.verify(overall, inner + comment.removeprefix(_TRUSTED))
            except exceptions.InvalidSignature as err:
                raise _fault(name, signature.OTHER_DATA, f"it is not {key}'s signature of this file") from err
            return str(key)
    reason = f"it is by minisign key {_shown(number)}, which is not in the keyring"
    raise _fault(name, signature.OTHER_KEY, reason)


def _shown(number: bytes) -> str:
    """Return the number of a key as minisign prints it."""
    return f"{int.from_bytes(number, 'little'):016X}"


def _fault(name: str, fault: str, reason: str) -> errors.Untrusted:
    return errors.Untrusted(url=name, fault=fault, reason=reason)
