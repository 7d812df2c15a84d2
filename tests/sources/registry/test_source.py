"""Images and artifacts in a real registry: the bytes read, and the blobs fetched."""

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
from tests.support import containers, members, pulled, registries
from tests.support.containers import Entry, Image

#: The blobs of a registry are those of all tests: what one test removes or damages is made of these bytes.
UNIQUE = os.urandom(16)
SYSTEM = containers.layer(Entry("etc/passwd", b"root"), Entry("bin/sh", b"#!" * 5000))


@pytest.mark.parametrize("docker", [False, True])
def test_disk_is_pulled(guarded: registries.Registry, docker: bool) -> None:
    for data in (pulled.DISK, pulled.LARGE, b"", b"x"):
        image = Image((SYSTEM, containers.layer(*containers.disk(data))), docker=docker)
        assert pulled.pull(guarded, image) == data


@pytest.mark.parametrize(
    ("compression", "name"), [("", "disk/a.qcow2"), ("+zstd", "./disk/Ubuntu 24 \N{SNOWMAN}.img")]
)
def test_compressed_layer_is_pulled(guarded: registries.Registry, compression: str, name: str) -> None:
    image = Image((containers.layer(*containers.disk(pulled.LARGE, name), compression=compression),))
    assert pulled.pull(guarded, image) == pulled.LARGE


@pytest.mark.parametrize(("kind", "name"), [("zst", "zstd"), ("gz", "gzip")])
def test_layer_of_many_members_is_pulled(guarded: registries.Registry, kind: str, name: str) -> None:
    """As podman writes it with ``zstd:chunked``, and bgzip."""
    tar = containers.tar([*containers.disk(pulled.LARGE), Entry("etc/a", pulled.OTHER)])
    packed = containers.Blob(b"".join(members.split(kind, tar)), f"{containers.OCI}.layer.v1.tar+{name}")
    assert pulled.pull(guarded, Image((packed, SYSTEM))) == pulled.LARGE


def test_layers_below_the_topmost_disk_are_not_fetched(guarded: registries.Registry) -> None:
    below = containers.layer(*containers.disk(b"below" + UNIQUE))
    image = Image((below, containers.layer(*containers.disk(pulled.DISK)), SYSTEM))
    guarded.push("top", image)
    guarded.stored(below.digest).unlink()
    with pulled.opened(guarded, guarded.reference("top")) as found:
        assert pulled.read(found) == pulled.DISK


def test_whiteout_hides_the_disk(guarded: registries.Registry) -> None:
    image = Image(
        (
            containers.layer(Entry("disk/a", pulled.DISK), Entry("disk/b", pulled.OTHER)),
            containers.layer(Entry("disk/.wh.b")),
            SYSTEM,
        )
    )
    assert pulled.pull(guarded, image) == pulled.DISK


def test_whiteout_hides_the_disk_of_a_layer_below(guarded: registries.Registry) -> None:
    below = containers.layer(Entry("disk/a", pulled.DISK), Entry("disk/b", pulled.OTHER))
    image = Image((below, containers.layer(Entry("disk/.wh.b")), SYSTEM))
    assert pulled.pull(guarded, image) == pulled.DISK


def test_whiteout_of_the_folder_hides_all_disks(guarded: registries.Registry) -> None:
    below = containers.layer(*containers.disk(b"gone" + UNIQUE))
    guarded.push("gone", Image((below, containers.layer(Entry("disk/.wh..wh..opq")))))
    guarded.stored(below.digest).unlink()
    with pytest.raises(errors.Unsupported, match="failed to find VM disk image file"):
        pulled.of(guarded, guarded.reference("gone")).open(base.Opening())


def test_image_without_disk_is_refused(guarded: registries.Registry) -> None:
    for layers in ((), (SYSTEM,)):
        message = rf"failed to find VM disk image file: none below /disk in {len(layers)} layers"
        with pytest.raises(errors.Unsupported, match=message):
            pulled.pull(guarded, Image(layers))


def test_image_is_found_by_tag_and_digest(guarded: registries.Registry) -> None:
    first, second = (
        Image((containers.layer(*containers.disk(data)),)) for data in (pulled.DISK, pulled.OTHER)
    )
    guarded.push("tags", first, "one")
    digest = guarded.push("tags", second, "two")
    for target, data in (
        (":one", pulled.DISK),
        (":two", pulled.OTHER),
        (f"@{digest}", pulled.OTHER),
        (f":one@{digest}", pulled.OTHER),
    ):
        with pulled.opened(guarded, guarded.reference("tags", target)) as found:
            assert pulled.read(found) == data
    with pytest.raises(errors.Unreachable, match="no such repository, tag or digest"):
        pulled.of(guarded, guarded.reference("tags", ":three")).open(base.Opening())
    with pytest.raises(errors.Unreachable, match="no such repository, tag or digest"):
        pulled.of(guarded, guarded.reference("nobody")).open(base.Opening())


def test_stream_can_be_read_again(guarded: registries.Registry) -> None:
    guarded.push("again", Image((containers.layer(*containers.disk(pulled.LARGE)),)))
    with pulled.opened(guarded, guarded.reference("again")) as found:
        reader = found.ordered(cancelling.Cancel(), lambda _: None)
        assert reader.readinto(memoryview(bytearray(1000)))
        reader.close()
        assert pulled.read(found) == pulled.LARGE
        assert pulled.read(found) == pulled.LARGE
        found.verify()
        assert found.source.ranges is None


# -- platforms ---------------------------------------------------------------------------------


@pytest.mark.parametrize("docker", [False, True])
def test_image_is_chosen_by_platform(guarded: registries.Registry, docker: bool) -> None:
    manifests = []
    for architecture, data in (("amd64", pulled.DISK), ("arm64", pulled.OTHER)):
        image = Image(
            (containers.layer(*containers.disk(data)),), containers.config(architecture), docker=docker
        )
        guarded.push("multi", image, architecture)
        manifests.append(containers.for_platform(image.manifest, architecture))
    index = containers.index(*manifests, docker=docker)
    guarded.push_manifest("multi", index, "all")
    for architecture, data in (("amd64", pulled.DISK), ("arm64", pulled.OTHER), ("aarch64", pulled.OTHER)):
        with pulled.opened(guarded, guarded.reference("multi", ":all"), architecture=architecture) as found:
            assert pulled.read(found) == data
            assert found.source.describe()["platforms"] == ["linux/amd64", "linux/arm64"]
    with pytest.raises(errors.WrongPlatform, match="s390x; available: linux/amd64, linux/arm64"):
        pulled.of(guarded, guarded.reference("multi", ":all"), architecture="s390x").open(base.Opening())
    # The platform of a plain image is checked as well, but only if one was requested.
    with pulled.opened(guarded, guarded.reference("multi", ":arm64")) as found:
        assert pulled.read(found) == pulled.OTHER
    only = containers.index(containers.for_platform(image.manifest, "arm64"), docker=docker)
    guarded.push_manifest("multi", only, "only")
    with pulled.opened(guarded, guarded.reference("multi", ":only")) as found:
        assert pulled.read(found) == pulled.OTHER
    with pytest.raises(errors.WrongPlatform, match="amd64; available: linux/arm64"):
        pulled.of(guarded, guarded.reference("multi", ":arm64"), architecture="amd64").open(base.Opening())


def test_nested_index_is_followed(guarded: registries.Registry) -> None:
    image = Image((containers.layer(*containers.disk(pulled.DISK)),))
    guarded.push("nested", image)
    document = image.manifest
    for depth in range(1, 5):
        document = containers.index(containers.for_platform(document, containers.MACHINE))
        guarded.push_manifest("nested", document, f"depth{depth}")
    with pulled.opened(
        guarded, guarded.reference("nested", ":depth3"), architecture=containers.MACHINE
    ) as found:
        assert pulled.read(found) == pulled.DISK
    with pytest.raises(errors.Unsupported, match="nested"):
        pulled.of(guarded, guarded.reference("nested", ":depth4"), architecture=containers.MACHINE).open(
            base.Opening()
        )


# -- the configuration ---------------------------------------------------------------------------


def test_labels_are_reported(guarded: registries.Registry) -> None:
    env = ("PATH=/bin", "INSTANCETYPE_KUBEVIRT_IO_DEFAULT_PREFERENCE=fedora", "KUBEVIRT_IO_FOO_BAR=a=b")
    image = Image((containers.layer(*containers.disk(pulled.DISK)),), containers.config(env=env))
    guarded.push("labels", image)
    with pulled.opened(guarded, guarded.reference("labels")) as found:
        assert found.source.finish().labels == {
            "instancetype.kubevirt.io/default-preference": "fedora",
            "kubevirt.io/foo-bar": "a=b",
        }


def test_bootable_container_image_is_refused(guarded: registries.Registry) -> None:
    for label in ("containers.bootc", "ostree.bootable"):
        config = containers.config(labels={label: "1"})
        with pytest.raises(errors.Refused, match="is a bootable container image"):
            pulled.pull(guarded, Image((containers.layer(*containers.disk(pulled.DISK)),), config))


def test_unusual_configuration_is_accepted(guarded: registries.Registry) -> None:
    for part in (
        {"config": None},
        {"config": {"Env": None, "Labels": []}},
        {"config": {"Env": [1], "Labels": {"containers.bootc": []}}},
    ):
        image = Image((containers.layer(*containers.disk(pulled.DISK)),), containers.config() | part)
        assert pulled.pull(guarded, image) == pulled.DISK


# -- artifacts ---------------------------------------------------------------------------------


KUBEVIRT = containers.Blob(gzip.compress(pulled.LARGE, 1), "application/vnd.kubevirt.disk.raw+gzip")
ARTIFACT = (
    KUBEVIRT,
    containers.titled_layer(pulled.DISK, "first.img"),
    containers.titled_layer(pulled.OTHER, "second.img", "text/plain"),
)


def test_artifact_is_pulled(guarded: registries.Registry) -> None:
    guarded.push("artifact", Image(ARTIFACT, containers.EMPTY_CONFIG))
    for choice, data in (
        ("", KUBEVIRT.data),
        ("#first.img", pulled.DISK),
        (f"#{ARTIFACT[1].digest}", pulled.DISK),
        ("#text/plain", pulled.OTHER),
    ):
        with pulled.opened(guarded, guarded.reference("artifact") + choice) as found:
            assert pulled.read(found) == data, choice
            assert found.source.finish().labels == {}
    with pytest.raises(errors.Refused, match="choose one"):
        pulled.of(guarded, guarded.reference("artifact", "#third.img")).open(base.Opening())


def test_artifact_is_chosen_by_platform(guarded: registries.Registry) -> None:
    manifests = []
    for architecture, data in (("amd64", pulled.DISK), ("arm64", pulled.OTHER)):
        image = Image((containers.titled_layer(data, "disk.img"),), containers.EMPTY_CONFIG)
        manifests.append(containers.for_platform(image.manifest, architecture))
        guarded.push("artifacts", image, architecture)
    guarded.push_manifest("artifacts", containers.index(*manifests), "all")
    with pulled.opened(guarded, guarded.reference("artifacts", ":all")) as found:
        assert pulled.read(found) == (pulled.DISK if containers.MACHINE == "amd64" else pulled.OTHER)


def test_artifact_configuration_may_be_any_blob(guarded: registries.Registry) -> None:
    image = Image(
        (containers.titled_layer(pulled.DISK, "disk.img"),),
        containers.Blob(b"\x00\x01", "application/x-mine"),
    )
    assert pulled.pull(guarded, image) == pulled.DISK


# -- content that does not match its digest ------------------------------------------------------------


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
    unique = UNIQUE + f"{part} {change}".encode()
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
    image = Image((containers.layer(*containers.disk(b"missing" + UNIQUE)),))
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
