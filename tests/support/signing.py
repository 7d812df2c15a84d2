"""Signatures of container images as cosign writes them, made with ``cryptography``."""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.x509.oid import NameOID

from tests.support import containers, registries

SIMPLE = "application/vnd.dev.cosign.simplesigning.v1+json"
BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PREDICATE = "https://sigstore.dev/cosign/sign/v1"
INTOTO = "application/vnd.in-toto+json"
PrivateKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey


@dataclasses.dataclass(frozen=True)
class Signer:
    """A private key."""

    key: PrivateKey = dataclasses.field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    @property
    def pem(self) -> bytes:
        """Return the public key in PEM."""
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        return self.key.public_key().public_bytes(serialization.Encoding.PEM, form)

    @property
    def private_pem(self) -> bytes:
        """Return the private key in PEM."""
        form, hidden = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        return self.key.private_bytes(serialization.Encoding.PEM, form, hidden)

    def write(self, path: Path) -> str:
        """Write the public key to a file and return its path."""
        path.write_bytes(self.pem)
        return str(path)

    def sign(self, message: bytes) -> bytes:
        """Return the signature of a message."""
        if isinstance(self.key, ed25519.Ed25519PrivateKey):
            return self.key.sign(message)
        if isinstance(self.key, ec.EllipticCurvePrivateKey):
            return self.key.sign(message, ec.ECDSA(hashes.SHA256()))
        return self.key.sign(message, padding.PKCS1v15(), hashes.SHA256())

    def certificate(self, since: dt.datetime, until: dt.datetime) -> bytes:
        """Return a self-signed certificate in PEM."""
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "signer")])
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(self.key.public_key())
            .serial_number(1)
            .not_valid_before(since)
            .not_valid_after(until)
            .sign(self.key, hashes.SHA256())
        )
        return made.public_bytes(serialization.Encoding.PEM)

    def simple(
        self, digest: str, reference: str, optional: Mapping[str, Any] | None = None
    ) -> containers.Blob:
        """Return a layer with the first form of signature."""
        payload = json.dumps(
            {
                "critical": {
                    "identity": {"docker-reference": reference},
                    "image": {"docker-manifest-digest": digest},
                    "type": "cosign container image signature",
                },
                "optional": optional,
            }
        ).encode()
        return layer(payload, self.sign(payload))

    def bundle(
        self,
        digest: str,
        /,
        *,
        predicate: str = PREDICATE,
        annotations: Mapping[str, str] | None = None,
        **subject: object,
    ) -> containers.Blob:
        """Return a layer with a bundle; ``subject``: more members of the statement's subject."""
        about = {"digest": {"sha256": digest.removeprefix("sha256:")}, "annotations": dict(annotations or {})}
        statement = {
            "_type": "https://in-toto.io/Statement/v1",
            "subject": [{**about, **subject}],
            "predicateType": predicate,
            "predicate": {},
        }
        payload = json.dumps(statement).encode()
        message = b"DSSEv1 %d %s %d %s" % (len(INTOTO), INTOTO.encode(), len(payload), payload)
        envelope = {
            "payload": encoded(payload),
            "payloadType": INTOTO,
            "signatures": [{"sig": encoded(self.sign(message))}],
        }
        hint = {"publicKey": {"hint": "key"}}
        document = {"mediaType": BUNDLE, "verificationMaterial": hint, "dsseEnvelope": envelope}
        return containers.Blob(json.dumps(document).encode(), BUNDLE)


def encoded(data: bytes) -> str:
    """Return base64."""
    return base64.b64encode(data).decode()


def layer(payload: bytes, proof: bytes | str) -> containers.Blob:
    """Return the layer of a payload with its signature."""
    text = proof if isinstance(proof, str) else encoded(proof)
    return containers.Blob(payload, SIMPLE, {"dev.cosignproject.cosign/signature": text})


def attach(registry: registries.Registry, repository: str, digest: str, *layers: containers.Blob) -> None:
    """Push signatures as cosign does by default: with the tag of the digest."""
    image = containers.Image(layers, containers.config())
    registry.push(repository, image, f"{digest.replace(':', '-')}.sig")


def refer(registry: registries.Registry, repository: str, digest: str, *bundles: containers.Blob) -> None:
    """Push bundles as artifacts that refer to a manifest, and list them in the tag of a plain registry."""
    entries = []
    for bundle in bundles:
        manifest = referrer(digest, bundle)
        for blob in (bundle, containers.EMPTY_CONFIG):
            registry.push_blob(repository, blob.data)
        registry.push_manifest(repository, manifest)
        entries.append({**manifest.descriptor, "artifactType": bundle.media_type})
    registry.push_manifest(repository, listing(*entries), digest.replace(":", "-"))


def referrer(digest: str, bundle: containers.Blob) -> containers.Blob:
    """Return the manifest of an artifact that refers to another manifest."""
    subject = {"mediaType": f"{containers.OCI}.manifest.v1+json", "digest": digest, "size": 1}
    document = {
        "schemaVersion": 2,
        "mediaType": f"{containers.OCI}.manifest.v1+json",
        "artifactType": bundle.media_type,
        "config": containers.EMPTY_CONFIG.descriptor,
        "layers": [bundle.descriptor],
        "subject": subject,
    }
    return containers.Blob(json.dumps(document).encode(), f"{containers.OCI}.manifest.v1+json")


def listing(*entries: Mapping[str, Any]) -> containers.Blob:
    """Return an index of referrers."""
    kind = f"{containers.OCI}.index.v1+json"
    document = {"schemaVersion": 2, "mediaType": kind, "manifests": list(entries)}
    return containers.Blob(json.dumps(document).encode(), kind)


def decoded(text: str) -> bytes:
    """Return what base64 encodes."""
    return base64.b64decode(text, validate=True)
