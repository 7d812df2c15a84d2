"""A Sigstore instance: an authority for certificates, their log, a log of signatures, and its root.

RFC 6962 (certificate transparency and Merkle trees); sigstore/rekor, dsse 0.0.1; C2SP signed-note.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tests.support import containers, signing

ISSUER = "https://issuer.example.org"
IDENTITY = "builder@example.org"
#: Extensions of Fulcio's certificates (sigstore/fulcio, "oid-info.md"), and the list of SCTs.
OIDC_ISSUER = x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.1")
SCTS = x509.ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")
#: Signatures are of this time; certificates are valid for ten minutes.
NOW = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)


def _new() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _public(key: ec.EllipticCurvePrivateKey) -> bytes:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(serialization.Encoding.DER, form)


def _sign(key: ec.EllipticCurvePrivateKey, data: bytes) -> bytes:
    return key.sign(data, ec.ECDSA(hashes.SHA256()))


def _id(key: ec.EllipticCurvePrivateKey) -> bytes:
    return hashlib.sha256(_public(key)).digest()


def _name(text: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "tests"),
            x509.NameAttribute(NameOID.COMMON_NAME, text),
        ]
    )


@dataclasses.dataclass
class Sigstore:
    """The instance. Its keys are new for each."""

    root_key: ec.EllipticCurvePrivateKey = dataclasses.field(default_factory=_new)
    ct_key: ec.EllipticCurvePrivateKey = dataclasses.field(default_factory=_new)
    rekor_key: ec.EllipticCurvePrivateKey = dataclasses.field(default_factory=_new)

    def __post_init__(self) -> None:
        key = self.root_key.public_key()
        years = dt.timedelta(days=3650)
        self.root = (
            self._builder("root", key, NOW - years, NOW + years)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(certificates=True), critical=True)
            .sign(self.root_key, hashes.SHA256())
        )

    def _builder(
        self, name: str, key: ec.EllipticCurvePublicKey, since: dt.datetime, until: dt.datetime
    ) -> x509.CertificateBuilder:
        subject = _name(name) if name else x509.Name([])
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(_name("root"))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(since)
            .not_valid_after(until)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.root_key.public_key()), critical=False
            )
        )

    def certificate(
        self,
        key: ec.EllipticCurvePrivateKey,
        identity: str = IDENTITY,
        issuer: str = ISSUER,
        since: dt.datetime = NOW - dt.timedelta(minutes=1),
    ) -> x509.Certificate:
        """Return a certificate for ten minutes, with the receipt of the log of certificates."""
        builder = (
            self._builder("", key.public_key(), since, since + dt.timedelta(minutes=10))
            .add_extension(_usage(certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.RFC822Name(identity)]), critical=True)
            .add_extension(x509.UnrecognizedExtension(OIDC_ISSUER, issuer.encode()), critical=False)
        )
        plain = builder.sign(self.root_key, hashes.SHA256()).tbs_certificate_bytes
        stamp = struct.pack("!Q", int(since.timestamp() * 1000))
        length = len(plain).to_bytes(3, "big")
        entry = b"\0\0" + stamp + b"\0\1" + _id(self.root_key) + length + plain + b"\0\0"
        proof = _sign(self.ct_key, entry)
        sct = b"\0" + _id(self.ct_key) + stamp + b"\0\0" + b"\4\3" + struct.pack("!H", len(proof)) + proof
        listed = struct.pack("!HH", len(sct) + 2, len(sct)) + sct
        # DER: an octet string shorter than 256 bytes.
        value = (b"\4\x81" if len(listed) > 127 else b"\4") + bytes([len(listed)]) + listed
        return builder.add_extension(x509.UnrecognizedExtension(SCTS, value), critical=False).sign(
            self.root_key, hashes.SHA256()
        )

    def trusted_root(self, path: Path) -> str:
        """Write the trusted root and return its path."""
        start = {"start": "2021-01-01T00:00:00Z"}

        def log(key: ec.EllipticCurvePrivateKey) -> dict[str, Any]:
            details = {"keyDetails": "PKIX_ECDSA_P256_SHA_256", "validFor": start}
            return {
                "baseUrl": "https://log.invalid",
                "hashAlgorithm": "SHA2_256",
                "publicKey": {"rawBytes": signing.encoded(_public(key)), **details},
                "logId": {"keyId": signing.encoded(_id(key))},
            }

        authority = {
            "subject": {"organization": "tests", "commonName": "root"},
            "uri": "https://fulcio.invalid",
            "certChain": {"certificates": [{"rawBytes": _der(self.root)}]},
            "validFor": start,
        }
        document = {
            "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
            "tlogs": [log(self.rekor_key)],
            "certificateAuthorities": [authority],
            "ctlogs": [log(self.ct_key)],
        }
        path.write_text(json.dumps(document))
        return str(path)

    def bundle(
        self,
        digest: str,
        when: dt.datetime = NOW,
        annotations: dict[str, str] | None = None,
        **certificate: Any,
    ) -> containers.Blob:
        """Return a layer with a bundle that is in the log; ``certificate``: arguments of ``certificate``."""
        key = _new()
        made = signing.Signer(key).bundle(digest, annotations=annotations)
        document = json.loads(made.data)
        issued = self.certificate(key, **certificate)
        document["verificationMaterial"] = {
            "certificate": {"rawBytes": _der(issued)},
            "tlogEntries": [self._entry(document["dsseEnvelope"], issued, int(when.timestamp()))],
        }
        return dataclasses.replace(made, data=json.dumps(document).encode())

    def _entry(self, envelope: dict[str, Any], issued: x509.Certificate, when: int) -> dict[str, Any]:
        """Return the entry of an envelope, the only one of its log."""
        pem = signing.encoded(issued.public_bytes(serialization.Encoding.PEM))

        def digest(data: bytes) -> dict[str, str]:
            return {"algorithm": "sha256", "value": hashlib.sha256(data).hexdigest()}

        spec = {
            "envelopeHash": digest(json.dumps(envelope).encode()),
            "payloadHash": digest(base64.b64decode(envelope["payload"])),
            "signatures": [{"signature": envelope["signatures"][0]["sig"], "verifier": pem}],
        }
        body = _canonical({"apiVersion": "0.0.1", "kind": "dsse", "spec": spec})
        log_id = _id(self.rekor_key)
        promised = {
            "body": signing.encoded(body),
            "integratedTime": when,
            "logID": log_id.hex(),
            "logIndex": 0,
        }
        root = hashlib.sha256(b"\0" + body).digest()
        note = f"log.invalid\n1\n{signing.encoded(root)}\n"
        proof = signing.encoded(log_id[:4] + _sign(self.rekor_key, note.encode()))
        return {
            "logIndex": "0",
            "logId": {"keyId": signing.encoded(log_id)},
            "kindVersion": {"kind": "dsse", "version": "0.0.1"},
            "integratedTime": str(when),
            "inclusionPromise": {
                "signedEntryTimestamp": signing.encoded(_sign(self.rekor_key, _canonical(promised)))
            },
            "inclusionProof": {
                "logIndex": "0",
                "rootHash": signing.encoded(root),
                "treeSize": "1",
                "hashes": [],
                "checkpoint": {"envelope": f"{note}\n\N{EM DASH} log.invalid {proof}\n"},
            },
            "canonicalizedBody": signing.encoded(body),
        }


def _usage(*, certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=certificates,
        crl_sign=certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _der(certificate: x509.Certificate) -> str:
    return signing.encoded(certificate.public_bytes(serialization.Encoding.DER))


def _canonical(document: dict[str, Any]) -> bytes:
    """Return JSON as RFC 8785 writes what these documents contain."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
