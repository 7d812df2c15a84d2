"""The form of cosign 3: a Sigstore bundle with a signed in-toto statement, which names a digest only.

sigstore/protobuf-specs, "sigstore_bundle.proto"; secure-systems-lab/dsse, "protocol.md"; in-toto, Statement.
"""

from __future__ import annotations

from collections.abc import Callable

from cdi_worker import masking
from cdi_worker.formats import signature
from cdi_worker.formats.signature import simple

MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
#: Bytes; most of it are certificates and the proof of the log.
LARGEST = 1 << 20
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT = "https://in-toto.io/Statement/v1"
#: What cosign says with the signature of an image. Other statements (SBOM, provenance) do not vouch for it.
PREDICATE = "https://sigstore.dev/cosign/sign/v1"


def verified(data: bytes, verify: Callable[[bytes, bytes, str], object], name: str) -> signature.Signature:
    """Return what the bundle ``data`` says. ``verify`` gets signature, message and name; returns the signer.

    Raises ``errors.Untrusted``.
    """
    document = simple.load(data, name)
    if "dsseEnvelope" not in document:
        raise signature.malformed(name, "the bundle has no signed statement (dsseEnvelope)")
    found = simple.member(document, "dsseEnvelope", dict, name)
    if found.get("payloadType") != PAYLOAD_TYPE:
        raise signature.malformed(name, f"the payload is not {PAYLOAD_TYPE}")
    proofs = simple.member(found, "signatures", list, name)
    if len(proofs) != 1 or not isinstance(proofs[0], dict):
        raise signature.malformed(name, "the statement does not have exactly one signature")
    payload = simple.decoded(simple.member(found, "payload", str, name), simple.LARGEST, name)
    proof = simple.decoded(simple.member(proofs[0], "sig", str, name), simple.LONGEST_PROOF, name)
    signer = verify(proof, encoded(payload), name)
    return statement(payload, str(signer), name)


def encoded(payload: bytes) -> bytes:
    """Return the signed message: type and payload with their lengths (DSSE, "PAE")."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def statement(payload: bytes, signer: str, name: str) -> signature.Signature:
    """Return what a verified statement says."""
    document = simple.load(payload, name)
    if document.get("_type") != STATEMENT or document.get("predicateType") != PREDICATE:
        kind = masking.quoted(str(document.get("predicateType")))
        raise signature.malformed(name, f"it is not the signature of an image but {kind!r}")
    subjects = simple.member(document, "subject", list, name)
    if len(subjects) != 1 or not isinstance(subjects[0], dict):
        raise signature.malformed(name, "the statement is not about exactly one image")
    digests = simple.member(subjects[0], "digest", dict, name)
    if set(digests) != {"sha256"}:
        # Another one could contradict it, and is not verified: cosign writes none.
        raise signature.malformed(name, "the statement has other digests of the image than sha256")
    return signature.Signature(
        signer=signer,
        digest=f"sha256:{simple.member(digests, 'sha256', str, name)}",
        # cosign leaves it out: then the signature is valid wherever the image is.
        reference=str(subjects[0].get("name") or ""),
    )
