"""cosign's first form of signatures: a payload, signed in an annotation of the layer that holds it.

cosign, "SIGNATURE_SPEC.md"; containers/image, containers-signature(5).
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from cdi_worker import masking
from cdi_worker.formats import signature, smalljson

MEDIA_TYPE = "application/vnd.dev.cosign.simplesigning.v1+json"
SIGNATURE = "dev.cosignproject.cosign/signature"
PAYLOAD_TYPE = "cosign container image signature"
#: Bytes; a payload has some hundred, and the annotations that a signer adds.
LARGEST = 128 << 10
#: Bytes of a signature: RSA of 16384 bits has 2048.
LONGEST_PROOF = 8192


@dataclasses.dataclass(frozen=True)
class Signed:
    """A payload with the annotations of its layer."""

    payload: bytes
    annotations: Mapping[str, str]


def verified(signed: Signed, verify: Callable[[bytes, bytes, str], object], name: str) -> signature.Signature:
    """Return what a signature says. ``verify`` gets signature, payload and name, and returns the signer.

    The payload is parsed only after it was verified. Raises ``errors.Untrusted``.
    """
    proof = decoded(signed.annotations.get(SIGNATURE, ""), LONGEST_PROOF, name)
    signer = verify(proof, signed.payload, name)
    document = load(signed.payload, name)
    critical = member(document, "critical", dict, name)
    if critical.get("type") != PAYLOAD_TYPE:
        kind = masking.quoted(str(critical.get("type")))
        raise signature.malformed(name, f"its type is {kind!r}, not {PAYLOAD_TYPE!r}")
    image, identity = (member(critical, key, dict, name) for key in ("image", "identity"))
    return signature.Signature(
        signer=str(signer),
        digest=member(image, "docker-manifest-digest", str, name),
        reference=member(identity, "docker-reference", str, name),
    )


def load(data: bytes, name: str) -> dict[str, Any]:
    """Return a JSON object, without repeated names. Raises ``errors.Untrusted``."""
    try:
        document = smalljson.parse(data, unique=True)
    except ValueError as err:
        raise signature.malformed(name, "it is not JSON") from err
    if not isinstance(document, dict):
        raise signature.malformed(name, "it is not a JSON object")
    return document


def member(document: Mapping[str, Any], key: str, kind: type, name: str) -> Any:
    """Return a member of a JSON object that must have this type."""
    value = document.get(key)
    if not isinstance(value, kind):
        raise signature.malformed(name, f"it has no valid {key!r}")
    return value


def decoded(text: str, limit: int, name: str) -> bytes:
    """Return the bytes that ``text`` encodes in base64. Raises ``errors.Untrusted``."""
    try:
        found = base64.b64decode(text, validate=True) if len(text) <= 2 * limit else b""
    except (binascii.Error, ValueError) as err:
        raise signature.malformed(name, "it is not base64") from err
    if not 0 < len(found) <= limit:
        raise signature.malformed(name, f"it is empty or larger than {limit} bytes")
    return found
