"""Images that cosign and skopeo have signed, and whose signature is for which image."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.formats import signature
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base, reference
from cdi_worker.sources.registry import locations
from cdi_worker.sources.registry import source as registry
from cdi_worker.sources.trust import images
from tests.support import containers, misbehave, proxy, pulled, repository, signing, tls

#: Test images of containers/image (README.md there).
FIXTURES = repository.ROOT / "tests/support/cosign"
KEY = str(FIXTURES / "cosign.pub")
#: Their names in the signatures.
SAMPLE = "192.168.64.2:5000/cosign-signed-single-sample"
TAGGED = "192.168.64.2:5000/skopeo-signed"
#: Their configurations, which are not among the fixtures; the oldest form of a manifest has none.
CONFIGURATIONS = {
    path.parent.name: found["config"]["digest"]
    for path in FIXTURES.glob("*/manifest.json")
    if "config" in (found := json.loads(path.read_bytes()))
}
DIGEST = f"sha256:{'a' * 64}"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tls.Authority:
    return tls.Authority(tmp_path_factory.mktemp("authority"))


@contextlib.contextmanager
def served(name: str, image: str) -> Iterator[misbehave.Server]:
    """Serve an image as a registry without referrers does, with the signatures in a folder."""
    folder, api = FIXTURES / name, f"/v2/{image.partition('/')[2]}"
    manifest = (folder / "manifest.json").read_bytes() if (folder / "manifest.json").exists() else b""
    digest = containers.Blob(manifest, "").digest
    with misbehave.Server() as server:
        if manifest:
            for target in ("latest", "tag", "othertag", digest):
                server.serve(f"{api}/manifests/{target}", misbehave.Page(manifest))
        layers = [layer(path) for path in sorted(folder.glob("signature-*"))]
        for each in layers:
            server.serve(f"{api}/blobs/{each.digest}", misbehave.Page(each.data))
        if layers:
            tag = f"{digest.replace(':', '-')}.sig"
            page = misbehave.Page(containers.Image(tuple(layers)).manifest.data)
            server.serve(f"{api}/manifests/{tag}", page)
        yield server


def layer(path: Path) -> containers.Blob:
    """Return a signature of the fixtures as cosign stores it in a registry."""
    document = json.loads(path.read_bytes().partition(b"sigstore-json\n")[2])
    payload = signing.decoded(document["payload"])
    return containers.Blob(payload, document["mimeType"], document["annotations"])


def open_image(
    authority: tls.Authority, name: str, image: str = SAMPLE, tag: str = "latest", key: str = KEY
) -> str:
    """Open an image under the name that was signed; return ``accepted`` or the fault."""
    with served(name, image) as server, proxy.Proxy(authority=authority, origin=server.url("")) as between:
        access = base.Access(https_proxy=between.url, ca_files=(str(authority.certificate),))
        location = locations.Registry(f"docker://{image}:{tag}", access)
        return outcome(server, location, key, CONFIGURATIONS.get(name, "none"))


def outcome(server: misbehave.Server, location: locations.Registry, key: str, configuration: str) -> str:
    """Open an image whose configuration, with this digest, is missing; return ``accepted`` or the fault."""
    source = registry.RegistrySource(location, cancelling.Cancel())
    try:
        with pulled.demanding(source, key):
            raise AssertionError("the fixtures have no configuration")
    except errors.Untrusted as err:
        return str(err.fields["fault"])
    except errors.Unreachable as err:
        # Fetched after a signature was verified.
        is_verified = any(configuration in request.path for request in server.requests)
        return "accepted" if is_verified else f"unreachable: {err}"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("valid", "accepted"),
        ("valid-2", "accepted"),
        ("mixed", "accepted"),
        ("unknown-key", signature.OTHER_KEY),
        ("modified-manifest", signature.OTHER_DATA),
        ("valid-with-tag", signature.OTHER_REFERENCE),
        ("other-attachment", signature.MISSING),
        ("unsigned", signature.MISSING),
    ],
)
def test_image_of_containers_image(authority: tls.Authority, name: str, expected: str) -> None:
    assert open_image(authority, name) == expected


def test_image_without_manifest_or_with_an_old_one_is_not_accepted(authority: tls.Authority) -> None:
    assert "no such repository" in open_image(authority, "no-manifest")
    with pytest.raises(errors.Unsupported, match="schema 1"):
        open_image(authority, "manifest-digest-error")


@pytest.mark.parametrize(("tag", "expected"), [("tag", "accepted"), ("othertag", signature.OTHER_REFERENCE)])
def test_tag_that_skopeo_signed_counts(authority: tls.Authority, tag: str, expected: str) -> None:
    assert open_image(authority, "valid-with-tag", TAGGED, tag) == expected


def test_image_under_another_name_is_not_accepted(authority: tls.Authority) -> None:
    other = "192.168.64.2:5000/another"
    assert open_image(authority, "valid", other) == signature.OTHER_REFERENCE


def test_one_of_several_keys_is_enough(authority: tls.Authority, tmp_path: Path) -> None:
    stranger, keys = signing.Signer(), tmp_path / "keys.pem"
    for known, expected in ((Path(KEY).read_bytes(), "accepted"), (b"", signature.OTHER_KEY)):
        keys.write_bytes(stranger.pem + known)
        assert open_image(authority, "valid", key=str(keys)) == expected


def test_bundle_is_found_by_the_api_of_referrers(tmp_path: Path) -> None:
    signer = signing.Signer()
    manifest = containers.Image(()).manifest
    configuration = json.loads(manifest.data)["config"]["digest"]
    bundle = signer.bundle(manifest.digest)
    referrer = signing.referrer(manifest.digest, bundle)
    entry = {**referrer.descriptor, "artifactType": signing.BUNDLE}
    with misbehave.Server() as server:
        for path, data in (
            ("manifests/latest", manifest.data),
            (f"referrers/{manifest.digest}", signing.listing(entry).data),
            (f"manifests/{referrer.digest}", referrer.data),
            (f"blobs/{bundle.digest}", bundle.data),
        ):
            server.serve(f"/v2/r/{path}", misbehave.Page(data))
        location = locations.Registry(f"docker://127.0.0.1:{server.port}/r", base.Access(insecure=True))
        assert outcome(server, location, signer.write(tmp_path / "key.pem"), configuration) == "accepted"
        other = signing.Signer().write(tmp_path / "other.pem")
        assert outcome(server, location, other, configuration) == signature.OTHER_KEY


@pytest.mark.parametrize(
    ("wanted", "signed", "expected"),
    [
        ("h.io/r:1", "h.io/r", True),
        ("h.io/r:1", "h.io/r:1", True),
        ("h.io/r:1", "h.io/r:2", False),
        ("h.io/r", "h.io/r:latest", True),
        ("h.io/r", "h.io/r:1", False),
        ("h.io/r:1", "h.io/r2", False),
        ("h.io/r:1", "h.io/r2:1", False),
        ("h.io:443/r:1", "h.io/r:1", False),
        ("H.IO/r:1", "h.io/r", True),
        ("busybox", "docker.io/library/busybox", True),
        # The digest is compared with that of the signature.
        (f"h.io/r@{DIGEST}", "h.io/r:1", True),
        (f"h.io/r@{DIGEST}", "h.io/r2:1", False),
    ],
)
def test_repository_and_tag_must_be_those_that_were_signed(wanted: str, signed: str, expected: bool) -> None:
    of = reference.parse(f"docker://{wanted}")
    assert isinstance(of, reference.Reference)
    assert images.same_image(of, reference.parse_name(signed)) == expected
