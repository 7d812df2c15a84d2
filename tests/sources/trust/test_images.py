"""Signed images in a real registry: which are accepted, and that nothing of the others is fetched."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa, x25519

from cdi_worker import errors
from cdi_worker.formats import signature
from cdi_worker.formats.signature import bundle
from tests.support import containers, pulled, registries, signing
from tests.support.containers import Image

IMAGE = Image((containers.layer(*containers.disk(pulled.DISK)),))
OTHER = Image((containers.layer(*containers.disk(pulled.OTHER)),))
SIGNER = signing.Signer()


@pytest.fixture
def key(tmp_path: Path) -> str:
    return SIGNER.write(tmp_path / "key.pem")


def pull(registry: registries.Registry, name: str, key: str, target: str = ":latest") -> bytes:
    """Pull a disk that must be signed."""
    source = pulled.of(registry, registry.reference(name, target))
    with pulled.demanding(source, key) as found:
        assert found.facts.signatures
        return pulled.read(found)


def refused(registry: registries.Registry, name: str, key: str, fault: str) -> errors.Untrusted:
    """Return why a disk is refused; nothing of its layers or its configuration was read."""
    with pytest.raises(errors.Untrusted) as caught:
        pull(registry, name, key)
    assert caught.value.fields["fault"] == fault, caught.value
    read = {path.rpartition("/")[2] for path, _ in registry.answered(name)}
    assert not read & {blob.digest for image in (IMAGE, OTHER) for blob in image.blobs}
    return caught.value


def reference(registry: registries.Registry, name: str) -> str:
    return registry.name(name)


@pytest.mark.parametrize(
    "private",
    [ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP384R1()),
     rsa.generate_private_key(65537, 2048), ed25519.Ed25519PrivateKey.generate()],
    ids=["p256", "p384", "rsa", "ed25519"],
)  # fmt: skip
def test_image_signed_with_the_key_is_imported(
    guarded: registries.Registry, name: str, private: signing.PrivateKey, tmp_path: Path
) -> None:
    signer = signing.Signer(private)
    digest = guarded.push(name, IMAGE)
    signing.attach(guarded, name, digest, signer.simple(digest, reference(guarded, name)))
    assert pull(guarded, name, signer.write(tmp_path / "key.pem")) == pulled.DISK


def test_image_with_a_bundle_is_imported(guarded: registries.Registry, name: str, key: str) -> None:
    digest = guarded.push(name, IMAGE)
    signing.refer(guarded, name, digest, SIGNER.bundle(digest, annotations={"env": "prod"}))
    assert pull(guarded, name, key) == pulled.DISK


def test_image_without_signature_is_refused(guarded: registries.Registry, name: str, key: str) -> None:
    digest = guarded.push(name, IMAGE)
    error = refused(guarded, name, key, signature.MISSING)
    assert f"signature missing: {digest}: not signed" in str(error)
    assert key in str(error)
    assert error.status == 7


@pytest.mark.parametrize("form", ["simple", "bundle"])
def test_another_key_is_refused(guarded: registries.Registry, name: str, key: str, form: str) -> None:
    digest = guarded.push(name, IMAGE)
    stranger = signing.Signer()
    if form == "simple":
        signing.attach(guarded, name, digest, stranger.simple(digest, reference(guarded, name)))
    else:
        signing.refer(guarded, name, digest, stranger.bundle(digest))
    refused(guarded, name, key, signature.OTHER_KEY)


def test_one_of_several_keys_and_signatures_is_enough(
    guarded: registries.Registry, name: str, tmp_path: Path
) -> None:
    digest = guarded.push(name, IMAGE)
    stranger, known = signing.Signer(), signing.Signer()
    layers = [each.simple(digest, reference(guarded, name)) for each in (stranger, SIGNER)]
    signing.attach(guarded, name, digest, *layers)
    both = tmp_path / "keys.pem"
    both.write_bytes(known.pem + SIGNER.pem)
    assert pull(guarded, name, str(both)) == pulled.DISK
    folder = tmp_path / "keys"
    (folder / "..2026").mkdir(parents=True)
    (folder / "..data").symlink_to("..2026")
    for number, each in enumerate((known, SIGNER)):
        each.write(folder / f"..2026/{number}.pem")
        (folder / f"{number}.pem").symlink_to(f"..data/{number}.pem")
    assert pull(guarded, name, str(folder)) == pulled.DISK


def test_signature_moved_to_another_repository_is_refused(
    guarded: registries.Registry, name: str, key: str
) -> None:
    digest = guarded.push(name, IMAGE)
    moved = SIGNER.simple(digest, reference(guarded, "trusted/disk"))
    signing.attach(guarded, name, digest, moved)
    error = refused(guarded, name, key, signature.OTHER_REFERENCE)
    assert f"signed {guarded.name('trusted/disk')}, not {guarded.name(name)}:latest" in str(error)


def test_tag_that_was_signed_counts(guarded: registries.Registry, name: str, key: str) -> None:
    digest = guarded.push(name, IMAGE, "old")
    guarded.push(name, IMAGE)
    signing.attach(guarded, name, digest, SIGNER.simple(digest, f"{reference(guarded, name)}:old"))
    assert pull(guarded, name, key, ":old") == pulled.DISK
    assert pull(guarded, name, key, f"@{digest}") == pulled.DISK
    with pytest.raises(errors.Untrusted, match="of another reference"):
        pull(guarded, name, key)


def test_signature_of_another_image_is_refused(guarded: registries.Registry, name: str, key: str) -> None:
    other, digest = guarded.push(name, OTHER, "other"), guarded.push(name, IMAGE)
    signing.attach(guarded, name, digest, SIGNER.simple(other, reference(guarded, name)))
    signing.refer(guarded, name, digest, SIGNER.bundle(other))
    assert other in str(refused(guarded, name, key, signature.OTHER_DATA))


def test_statement_about_an_image_is_not_its_signature(
    guarded: registries.Registry, name: str, key: str
) -> None:
    digest = guarded.push(name, IMAGE)
    signing.refer(guarded, name, digest, SIGNER.bundle(digest, predicate="https://slsa.dev/provenance/v1"))
    refused(guarded, name, key, signature.MALFORMED)


def test_bundle_that_names_another_repository_is_refused(
    guarded: registries.Registry, name: str, key: str
) -> None:
    digest = guarded.push(name, IMAGE)
    signing.refer(guarded, name, digest, SIGNER.bundle(digest, name=reference(guarded, "trusted/disk")))
    refused(guarded, name, key, signature.OTHER_REFERENCE)


def test_bundle_with_another_digest_beside_the_right_one_is_refused(
    guarded: registries.Registry, name: str, key: str
) -> None:
    digest = guarded.push(name, IMAGE)
    both = {"sha256": digest.partition(":")[2], "sha512": "0" * 128}
    signing.refer(guarded, name, digest, SIGNER.bundle(digest, digest=both))
    assert "other digests" in str(refused(guarded, name, key, signature.MALFORMED))


@pytest.mark.parametrize("change", ["type", "signatures", "subjects", "statement"])
def test_bundle_of_an_unknown_form_is_refused(
    guarded: registries.Registry, name: str, key: str, change: str
) -> None:
    digest = guarded.push(name, IMAGE)
    document = json.loads(SIGNER.bundle(digest).data)
    envelope = document["dsseEnvelope"]
    if change == "type":
        envelope["payloadType"] = "text/plain"
    elif change == "signatures":
        envelope["signatures"].append({"sig": signing.encoded(b"another")})
    else:
        statement = json.loads(signing.decoded(envelope["payload"]))
        if change == "subjects":
            statement["subject"].append({"digest": {"sha256": "0" * 64}})
        else:
            statement["_type"] = "https://in-toto.io/Statement/v9"
        payload = json.dumps(statement).encode()
        envelope["payload"] = signing.encoded(payload)
        envelope["signatures"] = [{"sig": signing.encoded(SIGNER.sign(bundle.encoded(payload)))}]
    changed = containers.Blob(json.dumps(document).encode(), signing.BUNDLE)
    signing.refer(guarded, name, digest, changed)
    refused(guarded, name, key, signature.MALFORMED)


@pytest.mark.parametrize(("since", "until"), [(-10, -5), (5, 10)])
def test_certificate_that_is_not_valid_is_refused(
    guarded: registries.Registry, name: str, tmp_path: Path, since: int, until: int
) -> None:
    digest = guarded.push(name, IMAGE)
    signing.attach(guarded, name, digest, SIGNER.simple(digest, reference(guarded, name)))
    certificate = tmp_path / "signer.pem"
    now = dt.datetime.now(dt.UTC)
    days = [now + dt.timedelta(days=number) for number in (since, until)]
    certificate.write_bytes(SIGNER.certificate(*days))
    assert "certificate" in str(refused(guarded, name, str(certificate), signature.EXPIRED))
    certificate.write_bytes(SIGNER.certificate(days[0] - dt.timedelta(days=20), now + dt.timedelta(days=1)))
    assert pull(guarded, name, str(certificate)) == pulled.DISK


def test_renewed_certificate_beside_the_expired_one_is_enough(
    guarded: registries.Registry, name: str, tmp_path: Path
) -> None:
    digest = guarded.push(name, IMAGE)
    signing.attach(guarded, name, digest, SIGNER.simple(digest, reference(guarded, name)))
    now = dt.datetime.now(dt.UTC)
    expired, renewed = (
        SIGNER.certificate(*(now + dt.timedelta(days=number) for number in days))
        for days in ((-10, -5), (-5, 5))
    )
    both = tmp_path / "signers.pem"
    for each in (expired + renewed, renewed + expired):
        both.write_bytes(each)
        assert pull(guarded, name, str(both)) == pulled.DISK


@pytest.mark.parametrize("signed", ["index", "manifest"])
def test_signature_of_an_index_or_its_manifest_is_enough(
    guarded: registries.Registry, name: str, key: str, signed: str
) -> None:
    manifest = guarded.push(name, IMAGE, "one")
    index = containers.index(containers.for_platform(IMAGE.manifest, containers.MACHINE))
    guarded.push_manifest(name, index, "latest")
    digest = index.digest if signed == "index" else manifest
    signing.attach(guarded, name, digest, SIGNER.simple(digest, reference(guarded, name)))
    assert pull(guarded, name, key) == pulled.DISK


FOREIGN = "s390x" if containers.MACHINE != "s390x" else "arm64"


@pytest.mark.parametrize(
    ("listed", "own"),
    [
        ({"architecture": containers.MACHINE, "os": "linux"}, {"architecture": FOREIGN}),
        ({"architecture": containers.MACHINE, "os": "linux"}, {"os": "windows"}),
        ({"architecture": containers.MACHINE, "variant": "v3"}, {"variant": "v1"}),
        # Not of this machine, and the only one.
        ({"architecture": FOREIGN, "os": "linux"}, {}),
    ],
)
def test_index_does_not_choose_the_platform_of_a_signed_image(
    guarded: registries.Registry, name: str, key: str, listed: dict[str, str], own: dict[str, str]
) -> None:
    """Only the image is signed: who can write to the tag may list it as anything."""
    image = dataclasses.replace(IMAGE, config={**containers.config(), **own})
    digest = guarded.push(name, image, "one")
    index = containers.index(dataclasses.replace(image.manifest, platform=listed))
    guarded.push_manifest(name, index, "latest")
    signing.attach(guarded, name, digest, SIGNER.simple(digest, reference(guarded, name)))
    for more in ({}, {"architecture": listed["architecture"]}):
        source = pulled.of(guarded, guarded.reference(name), **more)
        demanding = pulled.demanding(source, key)
        with pytest.raises((errors.Untrusted, errors.WrongPlatform)) as caught, demanding:
            pass
        assert more or "its index lists it as" in str(caught.value)
    # Without a demand nothing of it is verified, and the image may be built with a wrong configuration.
    with pulled.opened(guarded, guarded.reference(name)) as found:
        assert pulled.read(found) == pulled.DISK


def test_platform_that_only_the_index_states_is_accepted(
    guarded: registries.Registry, name: str, key: str
) -> None:
    config = {key: value for key, value in containers.config().items() if key not in {"os", "architecture"}}
    image = dataclasses.replace(IMAGE, config=config)
    digest = guarded.push(name, image, "one")
    listed = {"architecture": containers.MACHINE, "os": "linux", "variant": "v8"}
    index = containers.index(dataclasses.replace(image.manifest, platform=listed))
    guarded.push_manifest(name, index, "latest")
    signing.attach(guarded, name, digest, SIGNER.simple(digest, reference(guarded, name)))
    assert pull(guarded, name, key) == pulled.DISK


def test_image_swapped_after_it_was_verified_is_not_fetched(
    guarded: registries.Registry, name: str, key: str
) -> None:
    """The tag is moved when the signatures are read; the disk is that of the verified manifest."""
    digest = guarded.push(name, IMAGE)
    signing.attach(guarded, name, digest, SIGNER.simple(digest, reference(guarded, name)))
    source = pulled.of(guarded, guarded.reference(name))
    with pulled.demanding(source, key) as found:
        guarded.push(name, OTHER)
        assert pulled.read(found) == pulled.DISK
        # A stream that breaks is read again, and the tag is not.
        assert pulled.read(found) == pulled.DISK
    tags = [path for path, status in guarded.answered(name) if path.endswith("/latest") and status == 200]
    assert len(tags) == 1
    with pytest.raises(errors.Untrusted, match="missing"):
        pull(guarded, name, key)


# -- hostile signatures -------------------------------------------------------------------------


PAYLOAD = b'{"critical": {}}'
NESTED = b'{"critical":' + b"[" * 60_000 + b"]" * 60_000 + b"}"


def _signed(payload: bytes) -> containers.Blob:
    return signing.layer(payload, SIGNER.sign(payload))


#: The layer of a signature, and what is wrong with it.
HOSTILE = (
    (signing.layer(PAYLOAD, "!not base64!"), signature.MALFORMED),
    (signing.layer(PAYLOAD, ""), signature.MALFORMED),
    (signing.layer(PAYLOAD, "A" * 1_000_000), signature.MALFORMED),
    (_signed(PAYLOAD), signature.MALFORMED),
    (_signed(b"[1]"), signature.MALFORMED),
    (_signed(b"\xff\xfe"), signature.MALFORMED),
    (_signed(NESTED), signature.MALFORMED),
    (_signed(b'{"critical": {"type": "x"}, "critical": {}}'), signature.MALFORMED),
    (signing.layer(bytes(200_000), b"sig"), signature.MALFORMED),
    (signing.layer(PAYLOAD, SIGNER.sign(b"other")), signature.OTHER_KEY),
    (containers.Blob(b"{}", signing.BUNDLE), signature.MALFORMED),
    (containers.Blob(b'{"dsseEnvelope": 1}', signing.BUNDLE), signature.MALFORMED),
    (containers.Blob(b'{"messageSignature": {}}', signing.BUNDLE), signature.MALFORMED),
    (containers.Blob(NESTED, signing.BUNDLE), signature.MALFORMED),
    (containers.Blob(PAYLOAD, "application/octet-stream"), signature.MISSING),
)


def test_malformed_signature_is_refused(guarded: registries.Registry, name: str, key: str) -> None:
    digest = guarded.push(name, IMAGE)
    for layer, fault in HOSTILE:
        signing.attach(guarded, name, digest, layer)
        refused(guarded, name, key, fault)


@pytest.mark.parametrize(
    "change", ["type", "digest", "no digest", "no identity", "reference", "no reference", "list"]
)
def test_payload_with_a_wrong_member_is_refused(
    guarded: registries.Registry, name: str, key: str, change: str
) -> None:
    digest = guarded.push(name, IMAGE)
    payload = json.loads(SIGNER.simple(digest, reference(guarded, name)).data)
    critical = payload["critical"]
    if change == "type":
        critical["type"] = "atomic container signature"
    elif change == "digest":
        critical["image"]["docker-manifest-digest"] = digest.upper()
    elif change == "no digest":
        critical["image"] = {}
    elif change == "no identity":
        del critical["identity"]
    elif change == "reference":
        critical["identity"]["docker-reference"] = "not a reference"
    elif change == "no reference":
        critical["identity"]["docker-reference"] = ""
    else:
        critical["image"]["docker-manifest-digest"] = [digest]
    signing.attach(guarded, name, digest, _signed(json.dumps(payload).encode()))
    with pytest.raises(
        errors.Untrusted, match="signed no reference" if change == "no reference" else "signature "
    ):
        pull(guarded, name, key)


def test_endless_signatures_are_not_read(guarded: registries.Registry, name: str, key: str) -> None:
    digest = guarded.push(name, IMAGE)
    layer = signing.Signer().simple(digest, reference(guarded, name))
    document = json.loads(Image((layer,)).manifest.data)
    document["layers"] *= 2000
    guarded.push(name, Image((layer,)), "some")
    manifest = dataclasses.replace(Image(()).manifest, data=json.dumps(document).encode())
    guarded.push_manifest(name, manifest, f"{digest.replace(':', '-')}.sig")
    assert "64 signatures were tried" in str(refused(guarded, name, key, signature.OTHER_KEY))
    assert len([path for path, _ in guarded.answered(name) if layer.digest in path]) <= 70


def test_signature_whose_bytes_were_changed_is_refused(
    guarded: registries.Registry, name: str, key: str
) -> None:
    digest = guarded.push(name, IMAGE)
    layer = SIGNER.simple(digest, reference(guarded, name), {"only": name})
    signing.attach(guarded, name, digest, layer)
    guarded.stored(layer.digest).write_bytes(layer.data.replace(b"critical", b"CRITICAL"))
    assert "calculated sha256:" in str(refused(guarded, name, key, signature.MALFORMED))


def test_malformed_key_is_a_fault_of_the_request(
    guarded: registries.Registry, name: str, tmp_path: Path
) -> None:
    path = tmp_path / "key.pem"
    for data in (b"", b"nothing", b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----"):
        path.write_bytes(data)
        with pytest.raises(errors.RequestError, match=r"key\.pem"):
            pull(guarded, name, str(path))


def _pem(public: rsa.RSAPublicKey | x25519.X25519PublicKey) -> bytes:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return public.public_bytes(serialization.Encoding.PEM, form)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (_pem(rsa.generate_private_key(65537, 1024).public_key()), "an RSA key of 1024 bits"),
        (_pem(x25519.X25519PrivateKey.generate().public_key()), "not an ECDSA, RSA or Ed25519 key"),
        (SIGNER.private_pem, "a private key; name the file with the public key"),
    ],
    ids=["short", "other-kind", "private"],
)
def test_unusable_key_is_a_fault_of_the_request(
    guarded: registries.Registry, name: str, tmp_path: Path, data: bytes, reason: str
) -> None:
    path = tmp_path / "key.pem"
    # A key that can be used beside it does not help.
    path.write_bytes(SIGNER.pem + data)
    with pytest.raises(errors.RequestError, match=reason):
        pull(guarded, name, str(path))


def test_missing_key_is_a_fault_of_the_request(
    guarded: registries.Registry, name: str, tmp_path: Path
) -> None:
    with pytest.raises(errors.RequestError, match="no such file"):
        pull(guarded, name, str(tmp_path / "key.pem"))
    (tmp_path / "keys").mkdir()
    with pytest.raises(errors.RequestError, match="no file with a public key in it"):
        pull(guarded, name, str(tmp_path / "keys"))


def test_archive_cannot_have_a_demanded_signature(key: str, tmp_path: Path) -> None:
    path = containers.archive(tmp_path / "image.tar", {"": IMAGE})
    from cdi_worker.sources.registry import locations

    source = pulled.source(locations.Registry(f"oci-archive:{path}"))
    demanding = pulled.demanding(source, key)
    with pytest.raises(errors.Untrusted, match="not verifiable"), demanding:
        pass
