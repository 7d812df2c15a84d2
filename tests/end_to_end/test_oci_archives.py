"""OCI archives at any source: by ranges, and as the stream that KubeVirt's export server sends."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from tests.support import containers, devices, misbehave, objectservers, oracle, ways
from tests.support import disks as disks_module
from tests.support.containers import Entry, Image

MiB = 1 << 20
#: Incompressible, and so long that it is not among the first bytes of an archive.
OTHER = random.Random(7).randbytes(9 * MiB)


def exported(disks: disks_module.Disks, other: bytes = OTHER) -> bytes:
    """Return the archive of a virtual machine as KubeVirt's export server streams it."""
    root = disks.wrapped("raw", "zst").read_bytes()
    image = containers.machine(datadisk=(other, f"{len(other)}"), rootdisk=(root, "8Mi"))
    index = containers.index(containers.for_platform(image.manifest, "amd64"))
    top = containers.index(index)
    entries = [
        Entry("oci-layout", b'{"imageLayoutVersion": "1.0.0"}'),
        Entry("index.json", top.data),
        *(containers.blob_entry(blob) for blob in (index, image.manifest, image.config_blob, *image.layers)),
    ]
    return containers.tar(entries)


def tool(image: Image) -> bytes:
    """Return an archive as skopeo writes it: its index comes last."""
    entries = [containers.blob_entry(blob) for blob in (*image.blobs, image.manifest)]
    return containers.tar([*entries, Entry("index.json", containers.index(image.manifest).data)])


@pytest.fixture
def importer(server: misbehave.Server, tmp_path: Path) -> ways.Importer:
    return ways.Importer(server, tmp_path, "export.oci.tar", framing="chunked")


@pytest.mark.parametrize(("way", "kind"), [("ranges", "block"), ("stream", "file"), ("pipe", "block")])
def test_disk_of_an_export_is_imported(
    importer: ways.Importer, disks: disks_module.Disks, way: str, kind: str, tmp_path: Path
) -> None:
    with devices.target(kind, tmp_path, 9 * MiB) as target:
        importer.run(exported(disks), way, disk="rootdisk", target=str(target))
        oracle.same(target, disks.raw(), beyond=devices.beyond(target))


def test_several_disks_are_listed(importer: ways.Importer, disks: disks_module.Disks) -> None:
    error = importer.refused(exported(disks), "stream")
    assert "several files among: datadisk, rootdisk" in str(error)


def test_only_the_wanted_disk_moves(importer: ways.Importer, disks: disks_module.Disks) -> None:
    other = random.Random(8).randbytes(16 * MiB)
    importer.run(exported(disks, other), "ranges", disk="rootdisk")
    oracle.same(importer.target, disks.raw())
    root = disks.wrapped("raw", "zst").stat().st_size
    assert importer.server.sent("/export.oci.tar") < root + 2 * MiB


@pytest.mark.parametrize(("way", "variant"), [("ranges", "qcow2"), ("stream", "raw")])
def test_archive_of_a_tool_is_read(
    importer: ways.Importer, disks: disks_module.Disks, way: str, variant: str
) -> None:
    """The index comes last: a stream is read twice."""
    importer.run(tool(containers.image_of(disks.image(variant))), way)
    oracle.same(importer.target, disks.expected(variant))


def test_index_that_is_too_long_is_refused(importer: ways.Importer) -> None:
    index = Entry("index.json", b" " * (12 << 20))
    layout = Entry("oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
    error = importer.refused(containers.tar([layout, index]), "stream")
    assert "larger than 4194304 bytes" in str(error)


def test_stream_that_passes_once_must_begin_with_its_index(importer: ways.Importer) -> None:
    image = Image((containers.titled_layer(OTHER, "disk.img"),), containers.EMPTY_CONFIG)
    with pytest.raises(errors.Unsupported, match=r"has index\.json in another order"):
        importer.run(tool(image), "pipe")


@pytest.mark.parametrize("way", ["ranges", "stream"])
def test_changed_disk_is_refused(
    importer: ways.Importer, disks: disks_module.Disks, way: str, device: Path
) -> None:
    data = bytearray(exported(disks, OTHER))
    at = data.index(OTHER) + len(OTHER) - 5
    data[at] ^= 1
    error = importer.refused(bytes(data), way, disk="datadisk", target=str(device))
    assert isinstance(error, errors.DigestMismatch)


def test_checksum_is_of_the_archive(importer: ways.Importer, disks: disks_module.Disks) -> None:
    data = exported(disks)
    right, wrong = f"sha256:{hashlib.sha256(data).hexdigest()}", f"sha256:{'0' * 64}"
    importer.run(data, "ranges", disk="rootdisk", checksum=right)
    oracle.same(importer.target, disks.raw())
    importer.target.unlink()
    error = importer.refused(data, "stream", disk="rootdisk", checksum=wrong)
    assert isinstance(error, errors.ChecksumMismatch)


def test_objects_are_read_by_ranges(
    emulator: objectservers.Emulator, disks: disks_module.Disks, tmp_path: Path
) -> None:
    emulator.put("export.oci.tar", exported(disks))
    target = tmp_path / "disk.img"
    location = cdi_worker.Location(emulator.url("export.oci.tar"))
    cdi_worker.run(cdi_worker.Request(source="gcs", location=location, target=str(target), disk="rootdisk"))
    oracle.same(target, disks.raw())
