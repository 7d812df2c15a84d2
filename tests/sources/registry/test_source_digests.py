"""Content that does not match its digest is refused."""

from __future__ import annotations

import dataclasses
import gzip
import os

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base
from cdi_worker.sources.registry import locations
from cdi_worker.sources.registry import source as registry
from tests.support import containers, pulled, registries
from tests.support.containers import Entry, Image


def test_image_is_verified_by_its_digest(guarded: registries.Registry) -> None:
    image = Image((containers.layer(*containers.disk(pulled.DISK)),))
    expected = guarded.push("digest", image)
    index = containers.index(containers.for_platform(image.manifest, "s390x"))
    guarded.push_manifest("digest", index, "index")
    for target, digest in ((":latest", expected), (f"@{expected}", expected), (":index", index.digest)):
        location = locations.Registry(guarded.reference("digest", target), guarded.access())
        assert registry.RegistrySource(location, cancelling.Cancel()).digest() == digest


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("disk", "changed"),
        ("after", "changed"),
        ("after", "longer"),
        ("above", "changed"),
        ("above", "shorter"),
        ("config", "changed"),
        ("config", "longer"),
    ],
)
def test_wrong_digest_is_refused(guarded: registries.Registry, part: str, change: str) -> None:
    unique = os.urandom(16)  # blobs are the registry's: other tests do not use the damaged one
    above = containers.layer(Entry("etc/x", unique * 9), compression="")
    disk = containers.layer(*containers.disk(pulled.LARGE + unique), Entry("z", bytes(5000)), compression="")
    image = Image((disk, above), containers.config(env=(f"X={unique.hex()}",)))
    digest = guarded.push("spoiled", image)
    blob = {
        "disk": disk,
        "after": disk,
        "above": above,
        "config": image.config_blob,
    }[part]
    path = guarded.stored(blob.digest)
    data = bytearray(path.read_bytes())
    if change == "changed":
        # In a layer: in the middle of the disk, or in the padding at the end.
        data[-1 if part == "after" else len(data) // 2] ^= 1
    path.write_bytes(
        {"changed": data, "shorter": data[:-600] or data[:-1], "longer": data + bytes(512)}[change]
    )
    with (
        pytest.raises(errors.DigestMismatch),
        pulled.opened(guarded, guarded.reference("spoiled", f"@{digest}")) as found,
    ):
        pulled.read(found)


def test_blob_that_is_not_a_layer_is_refused(guarded: registries.Registry) -> None:
    for data in (b"no tar" * 200, gzip.compress(b"no tar" * 200), gzip.compress(pulled.LARGE)[:-5]):
        blob = containers.Blob(data, "application/vnd.oci.image.layer.v1.tar+gzip")
        with pytest.raises(errors.Corrupt, match=blob.digest):
            pulled.pull(guarded, Image((blob,)))


def test_missing_blob_is_reported(guarded: registries.Registry) -> None:
    image = Image((containers.layer(*containers.disk(b"missing")),))
    guarded.push("missing", image)
    guarded.stored(image.layers[0].digest).unlink()
    with pytest.raises(errors.Unreachable, match="404"):
        pulled.of(guarded, guarded.reference("missing")).open(base.Opening())


def test_unknown_authority_is_reported(guarded: registries.Registry) -> None:
    location = locations.Registry(guarded.reference("r"), guarded.access(ca_files=()))
    with pytest.raises(errors.Unreachable, match="certificate verify failed"):
        pulled.source(location).open(base.Opening())
    guarded.push("r", Image((containers.layer(*containers.disk(pulled.DISK)),)))
    insecure = dataclasses.replace(location.access, insecure=True)
    location = dataclasses.replace(location, access=insecure)
    with pulled.at(location) as found:
        assert pulled.read(found) == pulled.DISK
