"""One VHD is one disk on every route and in every compression, with all its data."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.importer import contract
from tests.support import (
    containers,
    devices,
    misbehave,
    oracle,
    pairs,
    processes,
    registries,
    uploads,
    vhd_images,
    ways,
)
from tests.support import disks as disks_module

MiB = 1 << 20
#: The geometry covers whole cylinders of 68 sectors: it leaves out the last 40 sectors.
SIZE = 190 * 68 * 512 + 40 * 512
paths = uploads.with_scratch
receiver = uploads.server


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a disk with data in its last sectors, where a backup GPT is."""
    path = tmp_path_factory.mktemp("raw") / "disk"
    dice = random.Random(1)
    path.write_bytes(dice.randbytes(MiB) + bytes(SIZE - MiB - 33 * 512) + dice.randbytes(33 * 512))
    assert vhd_images.cut(SIZE) == SIZE - 40 * 512
    return path


@pytest.mark.parametrize(("creator", "compression"), pairs.dealt(vhd_images.CREATORS, [None, "gz"]))
def test_fixed_vhd_of_every_creator_keeps_its_end(
    server: misbehave.Server, raw: Path, tmp_path: Path, creator: bytes, compression: str | None
) -> None:
    image = vhd_images.fixed(raw.read_bytes(), creator)
    if compression:
        image = disks_module.COMPRESSIONS[compression](image)
    result = ways.import_disk(server.serve("/disk", misbehave.Page(image)), tmp_path / "disk.img")
    assert result.size == raw.stat().st_size
    assert (tmp_path / "disk.img").read_bytes() == raw.read_bytes()


@pytest.mark.parametrize(
    ("wrapping", "kind"),
    [
        ("local", "block512"),
        ("xz", "file"),
        ("zst", "block512"),
        ("stream", "file"),
        ("chunked", "block512"),
        ("checksum", "block512"),
    ],
)
def test_fixed_vhd_is_one_disk_on_every_route(
    server: misbehave.Server, raw: Path, tmp_path: Path, wrapping: str, kind: str
) -> None:
    """The device has exactly the size of the disk: a footer does not count."""
    image, options = vhd_images.fixed(raw.read_bytes(), b"vpc "), {}
    if wrapping in disks_module.COMPRESSIONS:
        image = disks_module.COMPRESSIONS[wrapping](image)
    page = misbehave.Page(image)
    if wrapping in {"stream", "chunked"}:
        page = misbehave.Page(image, ranges=False, framing=wrapping.replace("stream", "length"))
    if wrapping == "checksum":
        options["checksum"] = f"sha256:{hashlib.sha256(image).hexdigest()}"
    url = server.serve("/disk", page)
    if wrapping == "local":
        (tmp_path / "image").write_bytes(image)
        url = str(tmp_path / "image")
    with devices.target(kind, tmp_path, raw.stat().st_size) as target:
        result = ways.import_disk(url, target, **options)
        assert result.size == raw.stat().st_size
        oracle.same(target, raw)


def test_fixed_vhd_in_a_container_disk(guarded: registries.Registry, raw: Path, tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(vhd_images.fixed(raw.read_bytes(), b"vpc "))
    guarded.push("disk", containers.image_of(tmp_path / "image"))
    location = cdi_worker.Location(guarded.reference("disk"), guarded.access())
    request = cdi_worker.Request(
        existing="replace", source="registry", location=location, target=str(tmp_path / "disk.img")
    )
    cdi_worker.run(request)
    oracle.same(tmp_path / "disk.img", raw, beyond=None)
    assert (tmp_path / "disk.img").stat().st_size == raw.stat().st_size


def test_uploaded_fixed_vhd(receiver: uploads.Server, paths: contract.Paths, disk: Path, raw: Path) -> None:
    body = vhd_images.fixed(raw.read_bytes(), b"vpc ")
    assert receiver.ask("POST", uploads.SYNC, body).status == 200
    assert receiver.result().status == 0
    assert disk.read_bytes() == raw.read_bytes()


def test_fixed_vhd_shorter_than_its_footer_says_is_refused(
    server: misbehave.Server, raw: Path, tmp_path: Path
) -> None:
    data = raw.read_bytes()
    image = vhd_images.fixed(data[MiB:], b"win ", size=len(data))
    for way in ("ranges", "stream"):
        error = ways.Importer(server, tmp_path, "image.vhd").refused(image, way)
        assert isinstance(error, errors.Refused)
        assert "more than the file holds" in str(error)


@pytest.mark.parametrize(
    ("creator", "wrapping"), pairs.dealt(vhd_images.CREATORS, ["ranges", "stream", "gz"])
)
def test_dynamic_vhd_keeps_its_end(
    server: misbehave.Server, raw: Path, tmp_path: Path, scratch: Path, creator: bytes, wrapping: str
) -> None:
    image = vhd_images.dynamic(raw, creator, tmp_path / "image").read_bytes()
    if wrapping == "gz":
        image = disks_module.COMPRESSIONS["gz"](image)
    page = misbehave.Page(image, ranges=wrapping != "stream")
    options = {} if wrapping == "ranges" else {"scratch": str(scratch)}
    result = ways.import_disk(server.serve("/disk", page), tmp_path / "disk.img", **options)
    assert result.size == raw.stat().st_size
    oracle.same(tmp_path / "disk.img", raw, beyond=None)


@pytest.mark.parametrize(("wrapping", "end"), [("ranges", 0), ("gz", MiB)])
def test_dynamic_vhd_without_data_at_its_end_has_the_size_of_its_geometry(
    server: misbehave.Server, tmp_path: Path, scratch: Path, wrapping: str, end: int
) -> None:
    """As qemu-img reads it; ``end``: data ends so many bytes before, in the same block or in another."""
    length = vhd_images.cut(SIZE) - end
    (tmp_path / "raw").write_bytes(random.Random(2).randbytes(length) + bytes(SIZE - length))
    image = vhd_images.dynamic(tmp_path / "raw", b"vpc ", tmp_path / "image")
    expected = tmp_path / "expected"
    processes.run("qemu-img", "convert", "-f", "vpc", "-O", "raw", image, expected)
    assert expected.stat().st_size == vhd_images.cut(SIZE)
    data = image.read_bytes()
    if wrapping == "gz":
        data = disks_module.COMPRESSIONS["gz"](data)
    url = server.serve("/disk", misbehave.Page(data))
    result = ways.import_disk(url, tmp_path / "disk.img", scratch=str(scratch))
    assert result.size == expected.stat().st_size
    oracle.same(tmp_path / "disk.img", expected, beyond=None)


def test_vhd_with_a_huge_block_map_is_refused_by_its_header(
    server: misbehave.Server, raw: Path, tmp_path: Path
) -> None:
    """qemu-img would need 1 GiB for the map."""
    image = vhd_images.dynamic(raw, b"win ", tmp_path / "image").read_bytes()
    data = vhd_images.with_entries(image, 1 << 28)
    for wrapped in (data, disks_module.COMPRESSIONS["gz"](data)):
        error = ways.Importer(server, tmp_path, "image.vhd").refused(wrapped, "ranges")
        assert isinstance(error, errors.Refused)
        assert "block map" in str(error)


@pytest.mark.parametrize(
    ("kind", "compression", "way"),
    [(3, None, "ranges"), (4, None, "local"), (3, "gz", "stream"), (4, "gz", "pipe")],
)
def test_vhd_without_its_first_sector_is_refused(
    server: misbehave.Server, raw: Path, tmp_path: Path, kind: int, compression: str | None, way: str
) -> None:
    """The footer at the end shows what it is (3: dynamic, 4: differencing): its own bytes are no disk."""
    image = vhd_images.dynamic(raw, b"vpc ", tmp_path / "image").read_bytes()
    image = bytes(512) + vhd_images.of_type(image, kind)[512:]
    if compression:
        image = disks_module.COMPRESSIONS[compression](image)
    error = ways.Importer(server, tmp_path, "image.vhd").refused(image, way)
    assert isinstance(error, errors.Refused)
    assert "the first sector is damaged" in str(error)
    assert "dd " in str(error)
