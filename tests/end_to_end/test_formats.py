"""Every format, in every compression, over HTTP onto every kind of target, compared with qemu-img.

Through the library, in this process: starting one for each would take longer than all imports. A format, a
compression and a kind of target meet in pairs: no code knows all three.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from tests.support import devices, misbehave, oracle, pairs, processes, servers, vhdx_images, ways
from tests.support import disks as disks_module

MiB = 1 << 20
TARGETS = ["file", "block512", "block4096"]


@pytest.fixture
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Yield a path with old files, or a dirty device."""
    with devices.target(request.param, tmp_path, 16 * MiB) as path:
        if not path.is_block_device():
            fill(path)
        yield path


def fill(target: Path) -> None:
    for name in (target.name, f"{target.name}.part"):
        devices.fill(target.with_name(name), 12 * MiB)


def import_disk(url: str, target: Path, **options: object) -> cdi_worker.Result:
    """Import a disk, and check that nothing but the disk is left."""
    scratch = options.get("scratch")
    result = ways.import_disk(url, target, existing="remove", permissions=0o660, **options)
    if target.is_file():
        assert not [path for path in target.parent.iterdir() if path.name.startswith("disk.img.")]
        assert target.stat().st_mode & 0o777 == 0o660
    assert not isinstance(scratch, Path) or not [*scratch.iterdir()]
    return result


#: Two formats in every compression, the others in one, and rare variants in one.
FORMATS = [
    *((variant, compression) for variant in ("raw", "qcow2") for compression in disks_module.COMPRESSIONS),
    *pairs.dealt(
        [variant for variant in disks_module.COMMON if variant not in {"raw", "qcow2"}],
        [*disks_module.COMPRESSIONS],
    ),
    ("qcow2-512", "gz"),
    ("vdi-static", "xz"),
]


@pytest.mark.parametrize(
    ("variant", "compression", "target"),
    [(*each, kind) for each, kind in pairs.dealt(FORMATS, TARGETS)],
    indirect=["target"],
)
def test_format_and_compression_are_imported(
    disks: disks_module.Disks,
    web: servers.Web,
    target: Path,
    scratch: Path,
    variant: str,
    compression: str,
) -> None:
    image = disks.wrapped(variant, compression)
    result = import_disk(web.url(image), target, scratch=scratch)
    expected = disks.expected(variant)
    oracle.same(target, expected, beyond=devices.beyond(target))
    assert result.size == expected.stat().st_size
    assert result.compressions == (compression,)


@pytest.mark.parametrize(
    ("variant", "target"), pairs.dealt(disks_module.COMMON, TARGETS), indirect=["target"]
)
def test_ranges_need_no_scratch(
    disks: disks_module.Disks, web: servers.Web, target: Path, variant: str
) -> None:
    result = import_disk(web.url(disks.image(variant)), target)
    expected = disks.expected(variant)
    oracle.same(target, expected, beyond=devices.beyond(target))
    assert (result.size, result.compressions) == (expected.stat().st_size, ())
    assert not target.is_file() or target.stat().st_size == result.size


@pytest.mark.parametrize(
    ("variant", "content", "target"),
    [
        ("qcow2-extended", "mixed", "block4096"),
        ("vmdk-odd", "mixed", "file"),
        ("vmdk-tables-last-zeros", "mixed", "block512"),
        ("iso-hybrid", "mixed", "file"),
        ("vhd-fixed", "mixed", "block4096"),
        ("raw", "ragged", "block4096"),
        ("raw", "bytewise", "file"),
        ("raw", "zero", "block512"),
        ("raw", "dense", "block4096"),
        ("qcow2", "ragged", "block4096"),
    ],
    indirect=["target"],
)
def test_rare_variant_and_content_are_imported(
    disks: disks_module.Disks, web: servers.Web, target: Path, scratch: Path, variant: str, content: str
) -> None:
    import_disk(web.url(disks.image(variant, content)), target, scratch=scratch)
    oracle.same(target, disks.expected(variant, content), beyond=devices.beyond(target))


@pytest.mark.parametrize(
    ("compression", "content", "target"),
    [("gz", "ragged", "block4096"), ("zst", "bytewise", "file")],
    indirect=["target"],
)
def test_disk_of_odd_size_is_imported_from_a_stream(
    disks: disks_module.Disks, web: servers.Web, target: Path, content: str, compression: str
) -> None:
    import_disk(web.url(disks.wrapped("raw", compression, content)), target)
    oracle.same(target, disks.expected("raw", content), beyond=devices.beyond(target))


@pytest.mark.parametrize(
    ("variant", "framing", "target"),
    [
        ("raw", "length", "file"),
        ("qcow2", "chunked", "block512"),
        ("qcow2-zstd", "close", "block4096"),
        ("vmdk", "length", "block512"),
        ("vdi-static", "chunked", "block4096"),
        ("vhd", "close", "file"),
        ("vhd-fixed", "length", "block4096"),
        ("vhdx", "chunked", "file"),
        ("iso", "close", "block512"),
    ],
    indirect=["target"],
)
def test_disk_is_imported_without_ranges(
    disks: disks_module.Disks, target: Path, scratch: Path, variant: str, framing: str
) -> None:
    page = misbehave.Page(disks.image(variant).read_bytes(), ranges=False, framing=framing)
    with misbehave.Server() as server:
        import_disk(server.serve("/disk", page), target, scratch=scratch)
    oracle.same(target, disks.expected(variant), beyond=devices.beyond(target))


def test_vmdk_with_contradictory_markers_is_read_by_its_tables(
    disks: disks_module.Disks, scratch: Path, tmp_path: Path
) -> None:
    """A grain that no table lists has been written: the result must be what qemu-img reads."""
    data = bytearray(disks.image("vmdk-tables-last").read_bytes())
    (directory,) = struct.unpack_from("<Q", data, len(data) - 1024 + 56)
    (table,) = struct.unpack_from("<I", data, directory * 512)
    entries = struct.unpack_from("<512I", data, table * 512)
    gone = max(range(512), key=entries.__getitem__)
    struct.pack_into("<I", data, table * 512 + 4 * gone, 0)
    target = tmp_path / "disk.img"
    (tmp_path / "image").write_bytes(data)
    disks_module.to_raw(tmp_path / "image", "vmdk", tmp_path / "expected")
    assert (tmp_path / "expected").read_bytes() != disks.expected("vmdk-tables-last").read_bytes()
    with misbehave.Server() as server:
        url = server.serve("/disk", misbehave.Page(bytes(data), ranges=False))
        with pytest.raises(errors.ScratchRequired, match="contradict"):
            import_disk(url, target)
        import_disk(url, target, scratch=scratch)
    oracle.same(target, tmp_path / "expected")


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs"])
def test_disk_is_imported_to_file_system(
    disks: disks_module.Disks, web: servers.Web, tmp_path: Path, scratch: Path, kind: str
) -> None:
    with devices.filesystem(kind, tmp_path) as point:
        for variant, direct in (("raw", True), ("qcow2-zlib", False)):
            target = point / "disk.img"
            fill(target)
            import_disk(web.url(disks.image(variant)), target, scratch=scratch, direct=direct)
            oracle.same(target, disks.expected(variant))
            assert target.stat().st_blocks * 512 < 8 * MiB


@pytest.mark.parametrize(("variant", "compression"), [("raw", "zst"), ("qcow2", None), ("vhdx-log", None)])
def test_preallocated_file_has_all_its_blocks(
    disks: disks_module.Disks,
    web: servers.Web,
    tmp_path: Path,
    scratch: Path,
    variant: str,
    compression: str | None,
) -> None:
    target = tmp_path / "disk.img"
    import_disk(web.url(disks.wrapped(variant, compression)), target, scratch=scratch, preallocation=True)
    oracle.same(target, disks.expected(variant))
    assert target.stat().st_blocks * 512 >= target.stat().st_size


@pytest.mark.parametrize(
    ("variant", "compression", "algorithm"),
    [("raw", None, "md5"), ("raw", "gz", "sha256"), ("qcow2", None, "sha512"), ("vhdx", "xz", "sha1")],
)
def test_checksum_is_verified(
    disks: disks_module.Disks,
    web: servers.Web,
    tmp_path: Path,
    scratch: Path,
    variant: str,
    compression: str | None,
    algorithm: str,
) -> None:
    image = disks.wrapped(variant, compression)
    checksum = f"{algorithm}:{disks_module.digest(image, algorithm).upper()}"
    import_disk(web.url(image), tmp_path / "disk.img", scratch=scratch, checksum=checksum)
    oracle.same(tmp_path / "disk.img", disks.expected(variant))


def test_checksum_covers_padding_behind_a_compressed_disk(disks: disks_module.Disks, tmp_path: Path) -> None:
    """Zeros may follow gzip's last member; they belong to the file and so to its checksum."""
    packed = disks.wrapped("raw", "gz").read_bytes()
    served = packed + bytes(700_000)
    with misbehave.Server() as server:
        url = server.serve("/disk", misbehave.Page(served))
        with pytest.raises(errors.ChecksumMismatch):
            import_disk(url, tmp_path / "disk.img", checksum=f"sha256:{hashlib.sha256(packed).hexdigest()}")
        oracle.unusable(tmp_path / "disk.img")
        import_disk(url, tmp_path / "disk.img", checksum=f"sha256:{hashlib.sha256(served).hexdigest()}")
    oracle.same(tmp_path / "disk.img", disks.raw())


@pytest.mark.parametrize(
    ("variant", "compression", "target"),
    [("raw", None, "block512"), ("qcow2", "xz", "file"), ("vdi", None, "block4096")],
    indirect=["target"],
)
def test_local_file_is_imported(
    disks: disks_module.Disks, target: Path, scratch: Path, variant: str, compression: str | None
) -> None:
    import_disk(str(disks.wrapped(variant, compression)), target, scratch=scratch)
    oracle.same(target, disks.expected(variant), beyond=devices.beyond(target))


def test_qemu_gets_no_huge_block_map(tmp_path: Path, scratch: Path) -> None:
    """QEMU writes the metadata behind the table: only what has arrived whole shows that it is too large."""
    processes.need("qemu-img")
    image, target = tmp_path / "image", tmp_path / "disk.img"
    processes.run("qemu-img", "create", "-q", "-f", "vhdx", "-o", "block_size=1M", image, "9T")
    with misbehave.Server() as server:
        url = server.serve("/disk", misbehave.Page(vhdx_images.with_log(image.read_bytes()), ranges=False))
        with pytest.raises(errors.Refused, match=r"the block map has .* at most 67108864 "):
            import_disk(url, target, scratch=scratch)
    oracle.unusable(target)


@pytest.mark.parametrize("ranges", [True, False])
def test_log_that_must_be_replayed_names_the_image(
    server: misbehave.Server, tmp_path: Path, scratch: Path, *, ranges: bool
) -> None:
    """qemu-img names what it reads: a socket, or a file in scratch, which is gone then."""
    body = vhdx_images.unreplayed(b"x" * MiB)
    url = server.serve("/disk.vhdx", misbehave.Page(body, ranges=ranges))
    with pytest.raises(errors.Unsupported) as caught:
        import_disk(url, tmp_path / "disk.img", scratch=scratch)
    cure = "replay it in the file and import that (qemu-img check -r all FILE)"
    assert str(caught.value) == f"unsupported image: vhdx: {url}: has a log that must be replayed; {cure}"
    oracle.unusable(tmp_path / "disk.img")
    image = tmp_path / "disk.vhdx"
    image.write_bytes(body)
    processes.run("qemu-img", "check", "-r", "all", image)
    import_disk(str(image), tmp_path / "disk.img", scratch=scratch)
    assert (tmp_path / "disk.img").read_bytes() == b"x" * MiB


def test_message_of_qemu_names_the_image(server: misbehave.Server, tmp_path: Path, scratch: Path) -> None:
    body = bytearray(vhdx_images.logged(b"x" * MiB))
    struct.pack_into("<I", body, vhdx_images.metadata(bytes(body), vhdx_images.SECTOR), 4096)
    url = server.serve("/disk.vhdx", misbehave.Page(bytes(body)))
    with pytest.raises(errors.Unsupported) as caught:
        import_disk(url, tmp_path / "disk.img", scratch=scratch)
    assert f"could not open {url}: " in str(caught.value)


def test_nearly_empty_disk_is_imported_quickly(
    disks: disks_module.Disks, web: servers.Web, tmp_path: Path
) -> None:
    target = tmp_path / "disk.img"
    result = import_disk(web.url(disks.image("qcow2", "far")), target)
    oracle.same(target, disks.expected("qcow2", "far"))
    assert target.stat().st_blocks * 512 <= 2 * MiB
    assert result.read < 2 * MiB
