"""Signatures by certificates of Fulcio that are in a log, with a Sigstore instance of the tests."""

from __future__ import annotations

import base64
import datetime as dt
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cdi_worker import errors
from cdi_worker.formats import signature
from cdi_worker.sources import trust
from cdi_worker.sources.trust import keyless
from tests.support import containers, fulcio, pulled, registries, signing

IMAGE = containers.Image((containers.layer(*containers.disk(pulled.DISK)),))
INSTANCE = fulcio.Sigstore()


@pytest.fixture
def root(tmp_path: Path) -> str:
    return INSTANCE.trusted_root(tmp_path / "trusted_root.json")


def pull(registry: registries.Registry, name: str, root: str, **changes: Any) -> bytes:
    """Pull a disk that must be signed by the builder."""
    wanted = {"identity": fulcio.IDENTITY, "issuer": fulcio.ISSUER, "trusted_root": root}
    source = pulled.of(registry, registry.reference(name))
    with pulled.demanding(source, trust.Demand(**{**wanted, **changes})) as found:
        assert found.facts.signatures[0].signer == f"{fulcio.IDENTITY} ({fulcio.ISSUER})"
        return pulled.read(found)


def fault(registry: registries.Registry, name: str, root: str, **changes: Any) -> tuple[str, str]:
    """Return why a disk is refused: the fault and the message."""
    with pytest.raises(errors.Untrusted) as caught:
        pull(registry, name, root, **changes)
    read = {path.rpartition("/")[2] for path, _ in registry.answered(name)}
    assert not read & {blob.digest for blob in IMAGE.blobs}
    return str(caught.value.fields["fault"]), str(caught.value)


def test_image_signed_by_the_identity_is_imported(guarded: registries.Registry, name: str, root: str) -> None:
    digest = guarded.push(name, IMAGE)
    signing.refer(guarded, name, digest, INSTANCE.bundle(digest, annotations={"env": "prod"}))
    assert pull(guarded, name, root, annotations=(("env", "prod"),)) == pulled.DISK


def test_other_identities_and_issuers_are_refused(guarded: registries.Registry, name: str, root: str) -> None:
    digest = guarded.push(name, IMAGE)
    signing.refer(guarded, name, digest, INSTANCE.bundle(digest))
    found, message = fault(guarded, name, root, identity="other@example.org")
    assert found == signature.OTHER_SIGNER
    assert "not of other@example.org" in message
    assert fault(guarded, name, root, issuer="https://other.example.org")[0] == signature.OTHER_SIGNER
    assert fault(guarded, name, root, annotations=(("env", "prod"),))[0] == signature.OTHER_ANNOTATION


def test_another_instance_is_refused(guarded: registries.Registry, name: str, tmp_path: Path) -> None:
    digest = guarded.push(name, IMAGE)
    signing.refer(guarded, name, digest, INSTANCE.bundle(digest))
    other = fulcio.Sigstore().trusted_root(tmp_path / "other.json")
    assert fault(guarded, name, other)[0] == signature.OTHER_SIGNER


def test_signature_after_the_certificate_has_expired_is_refused(
    guarded: registries.Registry, name: str, root: str
) -> None:
    digest = guarded.push(name, IMAGE)
    late = fulcio.NOW + dt.timedelta(hours=1)
    signing.refer(guarded, name, digest, INSTANCE.bundle(digest, when=late))
    found, message = fault(guarded, name, root)
    assert found == signature.EXPIRED
    assert "valid until 2026-01-01 12:09 UTC, and the signature is of 2026-01-01 13:00 UTC" in message


def test_signature_of_another_image_is_refused(guarded: registries.Registry, name: str, root: str) -> None:
    digest = guarded.push(name, IMAGE)
    signing.refer(guarded, name, digest, INSTANCE.bundle(f"sha256:{'0' * 64}"))
    assert fault(guarded, name, root)[0] == signature.OTHER_DATA


def _without_entry(document: dict[str, Any]) -> None:
    document["verificationMaterial"]["tlogEntries"] = []


def _without_proof(document: dict[str, Any]) -> None:
    del document["verificationMaterial"]["tlogEntries"][0]["inclusionProof"]


def _earlier(document: dict[str, Any]) -> None:
    entry = document["verificationMaterial"]["tlogEntries"][0]
    entry["integratedTime"] = str(int(entry["integratedTime"]) - 1)


def _other_log(document: dict[str, Any]) -> None:
    other = json.loads(fulcio.Sigstore().bundle(f"sha256:{'0' * 64}").data)
    document["verificationMaterial"]["tlogEntries"] = other["verificationMaterial"]["tlogEntries"]


def _other_entry(document: dict[str, Any]) -> None:
    other = json.loads(INSTANCE.bundle(f"sha256:{'0' * 64}").data)
    document["verificationMaterial"]["tlogEntries"] = other["verificationMaterial"]["tlogEntries"]


def _other_proof(document: dict[str, Any]) -> None:
    document["dsseEnvelope"]["signatures"][0]["sig"] = signing.encoded(b"other")


def _key(document: dict[str, Any]) -> None:
    document["verificationMaterial"] = {"publicKey": {"hint": "x"}}


def _odd_time(document: dict[str, Any]) -> None:
    document["verificationMaterial"]["tlogEntries"][0]["integratedTime"] = "9" * 30


@pytest.mark.parametrize(
    "change",
    [
        _without_entry, _without_proof, _earlier, _other_log, _other_entry, _other_proof, _key, _odd_time,
        lambda document: document.update(mediaType="x"),
        lambda document: document.pop("verificationMaterial"),
    ],
)  # fmt: skip
def test_changed_bundle_is_refused(
    guarded: registries.Registry, name: str, root: str, change: Callable[[dict[str, Any]], None]
) -> None:
    digest = guarded.push(name, IMAGE)
    document = json.loads(INSTANCE.bundle(digest).data)
    change(document)
    changed = containers.Blob(json.dumps(document).encode(), signing.BUNDLE)
    signing.refer(guarded, name, digest, changed)
    assert fault(guarded, name, root)[0] == signature.MALFORMED


def test_older_form_is_not_verifiable(guarded: registries.Registry, name: str, root: str) -> None:
    digest = guarded.push(name, IMAGE)
    signing.attach(guarded, name, digest, signing.Signer().simple(digest, f"{guarded.host}/{name}"))
    assert fault(guarded, name, root)[0] == signature.UNVERIFIABLE


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"mediaType": "x"}'])
def test_malformed_trusted_root_is_a_fault_of_the_request(
    guarded: registries.Registry, name: str, tmp_path: Path, text: str
) -> None:
    path = tmp_path / "root.json"
    path.write_text(text)
    with pytest.raises(errors.RequestError, match=r"root\.json"):
        pull(guarded, name, str(path))


def test_missing_trusted_root_is_a_fault_of_the_request(
    guarded: registries.Registry, name: str, tmp_path: Path
) -> None:
    with pytest.raises(errors.RequestError, match=r"root\.json: no such file"):
        pull(guarded, name, str(tmp_path / "root.json"))


@pytest.mark.parametrize("extension", [b"\x55\x1d\x11", b"\x55\x1d\x0f"])
def test_certificate_with_another_extension_is_refused(tmp_path: Path, extension: bytes) -> None:
    """Without the names of the signer, or without the usage of its key; the library raises what it meets."""
    document = json.loads(INSTANCE.bundle(f"sha256:{'0' * 64}").data)
    certificate = document["verificationMaterial"]["certificate"]
    changed = base64.b64decode(certificate["rawBytes"]).replace(extension, b"\x55\x1d\x7f")
    certificate["rawBytes"] = base64.b64encode(changed).decode()
    demand = trust.Demand(
        identity=fulcio.IDENTITY,
        issuer=fulcio.ISSUER,
        trusted_root=INSTANCE.trusted_root(tmp_path / "root.json"),
    )
    with pytest.raises(errors.Untrusted):
        keyless.verify(demand)(trust.Candidate("image", bundle=json.dumps(document).encode()))
