"""VMDKs as other programs write and store them: one disk by ranges, as a stream, and in scratch."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cdi_worker.importer.plan import Route
from tests.support import disks as disks_module
from tests.support import misbehave, vmdk_stream, ways

SECTOR = 512
GRAIN = vmdk_stream.GRAIN
DISK = random.Random(1).randbytes(3 * GRAIN) + bytes(GRAIN) + b"x" * GRAIN
METADATA = (vmdk_stream.TABLE, vmdk_stream.DIRECTORY)


@pytest.mark.parametrize("way", ["ranges", "pipe"])
def test_padded_image(server: misbehave.Server, tmp_path: Path, way: str) -> None:
    importer = ways.Importer(server, tmp_path, "image.vmdk")
    importer.run(vmdk_stream.streamed(DISK) + bytes(5000), way)
    assert importer.target.read_bytes() == DISK


@pytest.mark.parametrize(
    ("way", "padding", "route"),
    [("ranges", 5000, Route.PLACE), ("stream", 5000, Route.SPOOL), ("local", 0, Route.PLACE)],
)
def test_image_without_markers_of_its_tables(
    server: misbehave.Server, tmp_path: Path, way: str, padding: int, route: Route
) -> None:
    importer = ways.Importer(server, tmp_path, "image.vmdk")
    result = importer.run(vmdk_stream.streamed(DISK, unmarked=METADATA) + bytes(padding), way)
    assert importer.target.read_bytes() == DISK
    assert result.plan.route is route


@pytest.mark.parametrize(("way", "route"), [("stream", Route.SPOOL), ("local", Route.CONVERT)])
def test_padded_image_that_qemu_reads(
    server: misbehave.Server, tmp_path: Path, way: str, route: Route
) -> None:
    """QEMU searches the footer in the last sectors."""
    importer = ways.Importer(server, tmp_path, "image.vmdk")
    result = importer.run(vmdk_stream.streamed(DISK, flags=1 << 5) + bytes(5000), way)
    assert importer.target.read_bytes() == DISK
    assert result.plan.route is route


def test_image_without_markers_of_its_tables_in_a_pipe(server: misbehave.Server, tmp_path: Path) -> None:
    importer = ways.Importer(server, tmp_path, "image.vmdk")
    error = importer.refused(vmdk_stream.streamed(DISK, unmarked=METADATA), "pipe")
    assert "must be read twice (the image has a table without a marker" in str(error)


#: Names that programs on Windows write; the second byte of the second one is a backslash.
NAMES = (
    ("GBK", "虚拟机"),
    ("GBK", "乗"),
    ("Shift_JIS", "表計算"),
    ("Big5", "功能"),
    ("windows-1252", "Büro\u00a0é"),
    ("UTF-8", "Тест"),
)


@pytest.mark.parametrize("way", ["ranges", "stream"])
def test_name_in_the_encoding_of_the_host(server: misbehave.Server, tmp_path: Path, way: str) -> None:
    """VMware Workstation writes the name of the file as Windows has it."""
    for encoding, name in NAMES:
        image = vmdk_stream.streamed(DISK)
        text = image[SECTOR : 21 * SECTOR].rstrip(b"\0").decode()
        text = text.replace("version=1", f'version=1\nencoding="{encoding}"')
        text = text.replace("disk.vmdk", f"{name}.vmdk") + f'ddb.comment = "{name}"\n# {name}\n'
        image = image[:SECTOR] + text.encode(encoding).ljust(20 * SECTOR, b"\0") + image[21 * SECTOR :]
        importer = ways.Importer(server, tmp_path, "image.vmdk")
        importer.run(image, way)
        assert importer.target.read_bytes() == DISK, name
        (tmp_path / "image").write_bytes(image)
        disks_module.to_raw(tmp_path / "image", "vmdk", tmp_path / "expected")
        assert (tmp_path / "expected").read_bytes() == DISK, name
