"""Images and artifacts in a real registry: which bytes come, which are refused, what is fetched."""

from __future__ import annotations

import dataclasses
import gzip
import random
import threading
from collections.abc import Iterator

import pytest

from importer import errors
from sources import base, registry
from tests import containers, reading, registries, tls
from tests.containers import Entry, Image

DISK = random.Random(1).randbytes(300_000) + bytes(200_000) + b"end"
LARGE = random.Random(2).randbytes(3 << 20)
OTHER = b"other" * 1000
SYSTEM = containers.layer(Entry("etc/passwd", b"root"), Entry("bin/sh", b"#!" * 5000))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[registries.Registry]:
    """Run a registry with TLS and passwords."""
    directory = tmp_path_factory.mktemp("registry")
    authority = tls.Authority(directory / "ca")
    with registries.registry(directory, authority=authority, password=True) as running:
        yield running


def opened(served: registries.Registry, endpoint: str, **more: str) -> registry.RegistrySource:
    return registry.source(base.Location(endpoint, served.access(), **more), threading.Event())


def read(source: base.Source) -> bytes:
    """Read and verify the disk, as an import does."""
    data = reading.drained(source.stream())
    source.verify()
    return data


def pull(served: registries.Registry, image: Image, name: str = "r", **more: str) -> bytes:
    """Push an image and return the disk that comes back."""
    served.push(name, image)
    with opened(served, served.reference(name), **more) as source:
        assert source.size is not None
        data = read(source)
        assert len(data) == source.size
        assert data.startswith(source.head)
        assert len(source.head) == min(source.size, 256 * 1024)
        return data


@pytest.mark.parametrize("docker", [False, True])
@pytest.mark.parametrize("data", [DISK, LARGE, b"", b"x"], ids=len)
def test_disk(served: registries.Registry, docker: bool, data: bytes) -> None:
    image = Image((SYSTEM, containers.layer(*containers.disk(data))), docker=docker)
    assert pull(served, image) == data


@pytest.mark.parametrize("compression", ["", "+zstd"])
@pytest.mark.parametrize("name", ["disk/a.qcow2", "./disk/Ubuntu 24 \N{SNOWMAN}.img"])
def test_layers(served: registries.Registry, compression: str, name: str) -> None:
    image = Image((containers.layer(*containers.disk(LARGE, name), compression=compression),))
    assert pull(served, image) == LARGE


def test_the_topmost_disk_wins_and_nothing_below_is_fetched(served: registries.Registry) -> None:
    below = containers.layer(*containers.disk(OTHER))
    image = Image((below, containers.layer(*containers.disk(DISK)), SYSTEM))
    served.push("top", image)
    served.stored(below.digest).unlink()
    with opened(served, served.reference("top")) as source:
        assert read(source) == DISK


def test_whiteouts(served: registries.Registry) -> None:
    image = Image(
        (
            containers.layer(Entry("disk/a", DISK), Entry("disk/b", OTHER)),
            containers.layer(Entry("disk/.wh.b")),
            SYSTEM,
        )
    )
    assert pull(served, image) == DISK


@pytest.mark.parametrize("name", ["disk/.wh..wh..opq", ".wh.disk"])
def test_everything_below_is_gone(served: registries.Registry, name: str) -> None:
    below = containers.layer(*containers.disk(DISK))
    served.push("gone", Image((below, containers.layer(Entry(name)))))
    served.stored(below.digest).unlink()
    with (
        pytest.raises(errors.Unsupported, match="failed to find VM disk image file"),
        opened(served, served.reference("gone")),
    ):
        pass


@pytest.mark.parametrize("layers", [(), (SYSTEM,)])
def test_no_disk(served: registries.Registry, layers: tuple[containers.Blob, ...]) -> None:
    with pytest.raises(
        errors.Unsupported, match=r"failed to find VM disk image file: none below /disk in \d layers"
    ):
        pull(served, Image(layers))


def test_two_disks(served: registries.Registry) -> None:
    with pytest.raises(errors.Refused, match="/disk/a, /disk/b"):
        pull(served, Image((containers.layer(Entry("disk/a", DISK), Entry("disk/b", OTHER)),)))


def test_tags_and_digests(served: registries.Registry) -> None:
    first, second = (Image((containers.layer(*containers.disk(data)),)) for data in (DISK, OTHER))
    served.push("tags", first, "one")
    digest = served.push("tags", second, "two")
    for target, data in ((":one", DISK), (":two", OTHER), (f"@{digest}", OTHER), (f":one@{digest}", OTHER)):
        with opened(served, served.reference("tags", target)) as source:
            assert read(source) == data
    with pytest.raises(errors.Unreachable, match="no such repository, tag or digest"):
        opened(served, served.reference("tags", ":three")).__enter__()
    with pytest.raises(errors.Unreachable, match="no such repository, tag or digest"):
        opened(served, served.reference("nobody")).__enter__()


def test_a_stream_begins_anew(served: registries.Registry) -> None:
    served.push("again", Image((containers.layer(*containers.disk(LARGE)),)))
    with opened(served, served.reference("again")) as source:
        reader = source.stream()
        assert reader.readinto(memoryview(bytearray(1000)))
        reader.close()
        assert read(source) == LARGE
        assert read(source) == LARGE
        source.verify()
        with pytest.raises(errors.NoRanges):
            source.stream(1)
        assert source.ranges() is None


# -- platforms ---------------------------------------------------------------------------------


@pytest.mark.parametrize("docker", [False, True])
def test_platforms(served: registries.Registry, docker: bool) -> None:
    manifests = []
    for architecture, data in (("amd64", DISK), ("arm64", OTHER)):
        image = Image(
            (containers.layer(*containers.disk(data)),), containers.config(architecture), docker=docker
        )
        served.push("multi", image, architecture)
        manifests.append(containers.on(image.manifest, architecture))
    index = containers.index(*manifests, docker=docker)
    served.push_manifest("multi", index, "all")
    for wanted, data in (("amd64", DISK), ("arm64", OTHER), ("aarch64", OTHER)):
        with opened(served, served.reference("multi", ":all"), architecture=wanted) as source:
            assert read(source) == data
            assert source.describe()["platforms"] == ["linux/amd64", "linux/arm64"]
    with pytest.raises(errors.WrongPlatform, match="s390x; there is linux/amd64, linux/arm64"):
        opened(served, served.reference("multi", ":all"), architecture="s390x").__enter__()
    # A plain image has to fit as well.
    with pytest.raises(errors.WrongPlatform, match="amd64; there is linux/arm64"):
        opened(served, served.reference("multi", ":arm64"), architecture="amd64").__enter__()


def test_nested_indexes(served: registries.Registry) -> None:
    image = Image((containers.layer(*containers.disk(DISK)),))
    served.push("nested", image)
    document = image.manifest
    for depth in range(1, 5):
        document = containers.index(containers.on(document, containers.MACHINE))
        served.push_manifest("nested", document, f"depth{depth}")
    with opened(served, served.reference("nested", ":depth3"), architecture=containers.MACHINE) as source:
        assert read(source) == DISK
    with pytest.raises(errors.Unsupported, match="nested"):
        opened(served, served.reference("nested", ":depth4"), architecture=containers.MACHINE).__enter__()


# -- what the configuration says -----------------------------------------------------------------


def test_labels(served: registries.Registry) -> None:
    env = ("PATH=/bin", "INSTANCETYPE_KUBEVIRT_IO_DEFAULT_PREFERENCE=fedora", "KUBEVIRT_IO_FOO_BAR=a=b")
    image = Image((containers.layer(*containers.disk(DISK)),), containers.config(env=env))
    digest = served.push("labels", image)
    with opened(served, served.reference("labels")) as source:
        assert source.labels() == {
            "instancetype.kubevirt.io/default-preference": "fedora",
            "kubevirt.io/foo-bar": "a=b",
        }
        told = source.describe()
        assert told["digest"] == digest
        assert told["disk"] == "/disk/disk.img"
        assert told["diskLayer"] == image.layers[0].digest
        layer = image.layers[0].descriptor
        assert told["layers"] == [layer]


@pytest.mark.parametrize("label", ["containers.bootc", "ostree.bootable"])
def test_bootable_containers(served: registries.Registry, label: str) -> None:
    config = containers.config(labels={label: "1"})
    with pytest.raises(errors.Refused, match="an operating system to boot"):
        pull(served, Image((containers.layer(*containers.disk(DISK)),), config))


@pytest.mark.parametrize(
    "part", [{"config": None}, {"config": {"Env": None, "Labels": []}}, {"config": {"Env": [1]}}]
)
def test_odd_configurations(served: registries.Registry, part: dict[str, object]) -> None:
    config = containers.config() | part
    assert pull(served, Image((containers.layer(*containers.disk(DISK)),), config)) == DISK


# -- artifacts ---------------------------------------------------------------------------------


KUBEVIRT = containers.Blob(gzip.compress(LARGE, 1), "application/vnd.kubevirt.disk.raw+gzip")
ARTIFACT = (
    KUBEVIRT,
    containers.titled(DISK, "first.img"),
    containers.titled(OTHER, "second.img", "text/plain"),
)


@pytest.mark.parametrize(
    ("choice", "data"),
    [
        ("", KUBEVIRT.data),
        ("#first.img", DISK),
        (f"#{ARTIFACT[1].digest}", DISK),
        ("#text/plain", OTHER),
    ],
)
def test_artifacts(served: registries.Registry, choice: str, data: bytes) -> None:
    served.push("artifact", Image(ARTIFACT, containers.EMPTY_CONFIG))
    with opened(served, served.reference("artifact") + choice) as source:
        assert read(source) == data
        assert source.labels() == {}
    with pytest.raises(errors.Refused, match="choose one"):
        opened(served, served.reference("artifact", "#third.img")).__enter__()


def test_artifacts_for_platforms(served: registries.Registry) -> None:
    manifests = []
    for architecture, data in (("amd64", DISK), ("arm64", OTHER)):
        image = Image((containers.titled(data, "disk.img"),), containers.EMPTY_CONFIG)
        manifests.append(containers.on(image.manifest, architecture))
        served.push("artifacts", image, architecture)
    served.push_manifest("artifacts", containers.index(*manifests), "all")
    with opened(served, served.reference("artifacts", ":all")) as source:
        assert read(source) == (DISK if containers.MACHINE == "amd64" else OTHER)


def test_a_configuration_that_is_no_json(served: registries.Registry) -> None:
    image = Image((containers.titled(DISK, "disk.img"),), containers.Blob(b"\x00\x01", "application/x-mine"))
    assert pull(served, image) == DISK


# -- digests -----------------------------------------------------------------------------------


def test_digest(served: registries.Registry) -> None:
    image = Image((containers.layer(*containers.disk(DISK)),))
    expected = served.push("digest", image)
    index = containers.index(containers.on(image.manifest, "s390x"))
    served.push_manifest("digest", index, "index")
    for target, digest in ((":latest", expected), (f"@{expected}", expected), (":index", index.digest)):
        location = base.Location(served.reference("digest", target), served.access())
        assert registry.digest(location, threading.Event()) == digest


@pytest.mark.parametrize("where", ["disk", "after", "above", "config"])
@pytest.mark.parametrize("harm", ["changed", "shorter", "longer"])
def test_not_what_the_digest_names(served: registries.Registry, where: str, harm: str) -> None:
    unique = f"{where} {harm}".encode()
    above = containers.layer(Entry("etc/x", unique * 9), compression="")
    disk = containers.layer(*containers.disk(LARGE + unique), Entry("z", bytes(5000)), compression="")
    image = Image((disk, above), containers.config(env=(f"X={where}{harm}",)))
    digest = served.push("spoiled", image)
    blob = {
        "disk": disk,
        "after": disk,
        "above": above,
        "config": image.config_blob,
    }[where]
    path = served.stored(blob.digest)
    data = bytearray(path.read_bytes())
    if harm == "changed":
        # Of a layer: in the middle of the disk, or in the padding at the very end.
        data[-1 if where == "after" else len(data) // 2] ^= 1
    path.write_bytes(
        {"changed": data, "shorter": data[:-600] or data[:-1], "longer": data + bytes(512)}[harm]
    )
    with (
        pytest.raises(errors.DigestMismatch),
        opened(served, served.reference("spoiled", f"@{digest}")) as source,
    ):
        read(source)


@pytest.mark.parametrize("data", [b"no tar" * 200, gzip.compress(b"no tar" * 200), gzip.compress(LARGE)[:-5]])
def test_layers_that_are_none(served: registries.Registry, data: bytes) -> None:
    blob = containers.Blob(data, "application/vnd.oci.image.layer.v1.tar+gzip")
    with pytest.raises(errors.Corrupt, match=blob.digest):
        pull(served, Image((blob,)))


def test_missing_blobs(served: registries.Registry) -> None:
    image = Image((containers.layer(*containers.disk(b"missing")),))
    served.push("missing", image)
    served.stored(image.layers[0].digest).unlink()
    with pytest.raises(errors.Unreachable, match="404"):
        opened(served, served.reference("missing")).__enter__()


def test_an_unknown_authority(served: registries.Registry) -> None:
    location = base.Location(served.reference("r"), served.access(ca_files=()))
    with pytest.raises(errors.Unreachable, match="certificate verify failed"):
        registry.source(location, threading.Event()).__enter__()
    served.push("r", Image((containers.layer(*containers.disk(DISK)),)))
    insecure = dataclasses.replace(location.access, insecure=True)
    location = dataclasses.replace(location, access=insecure)
    with registry.source(location, threading.Event()) as source:
        assert read(source) == DISK
