"""The first bytes of a source are read on until they show what it is, and what is not a disk is refused."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import logging
import lzma
import random
import struct
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.formats import detect
from cdi_worker.importer import contract
from cdi_worker.importer import report as report_module
from tests.support import containers, hostile, misbehave, oracle, pairs, registries, uploads, ways
from tests.support import disks as disks_module

MiB = 1 << 20
paths = uploads.with_scratch
receiver = uploads.server

#: What wraps a head: nothing, or a compression.
WRAPPINGS: dict[str, Callable[[bytes], bytes]] = {"plain": bytes, **disks_module.COMPRESSIONS}


@pytest.fixture
def importer(server: misbehave.Server, tmp_path: Path) -> ways.Importer:
    return ways.Importer(server, tmp_path, "image")


def skippable(size: int) -> bytes:
    """Return a skippable frame of zstd."""
    return struct.pack("<II", 0x184D2A50, size) + bytes(size)


# -- too little in the head


@pytest.mark.parametrize(
    ("size", "way"), [(300 << 10, "stream"), (3 * MiB, "pipe"), (3 * MiB, "local"), (20 * MiB, "ranges")]
)
def test_long_skippable_frame_is_read_over(
    importer: ways.Importer, disks: disks_module.Disks, way: str, size: int
) -> None:
    result = importer.run(skippable(size) + disks.wrapped("raw", "zst").read_bytes(), way)
    assert result.compressions == ("zst",)
    oracle.same(importer.target, disks.raw())


def test_empty_members_with_long_headers_are_read_over(
    importer: ways.Importer, disks: disks_module.Disks
) -> None:
    name = b"x" * 1000 + b"\0"
    member = struct.pack("<HBBLBB", 0x8B1F, 8, 1 << 3, 0, 0, 255) + name + gzip.compress(b"")[10:]
    data = member * 300
    assert len(data) > detect.HEAD
    importer.run(data + disks.wrapped("raw", "gz").read_bytes(), "pipe")
    oracle.same(importer.target, disks.raw())


def test_disk_of_the_second_block_of_bz2_is_seen(importer: ways.Importer, disks: disks_module.Disks) -> None:
    """A tiny member, and then a qcow2 whose header is in the next block."""
    image = disks.image("qcow2", "far").read_bytes()
    importer.run(bz2.compress(image[:100]) + bz2.compress(image[100:]), "stream")
    oracle.same(importer.target, disks.expected("qcow2", "far"))


@pytest.mark.parametrize(
    ("name", "cut", "way"),
    [
        ("bz2", 700_000, "pipe"),
        ("bz2", 20, "ranges"),
        ("gz", 20, "stream"),
        ("xz", 40, "ranges"),
        ("zst", 12, "local"),
    ],
)
def test_truncated_stream_is_truncated(importer: ways.Importer, way: str, name: str, cut: int) -> None:
    """And not one that needs scratch space, after which the controller starts another pod for ever."""
    data = disks_module.COMPRESSIONS[name](random.Random(1).randbytes(MiB))[:cut]
    failure = importer.refused(data, way, scratch=None)
    assert isinstance(failure, errors.Truncated)
    report = report_module.failure(failure, "http")
    assert report.status == 1
    assert f"truncated {name}" in report.message


@pytest.mark.parametrize("name", [name for name in hostile.IMAGES if name.endswith("-truncated")])
def test_truncated_image_is_truncated(importer: ways.Importer, disks: disks_module.Disks, name: str) -> None:
    """However it arrives: its missing end is no zeros."""
    data = hostile.image(disks, name).read_bytes()
    for way in ways.WAYS:
        assert isinstance(importer.refused(data, way), errors.Truncated), way


def test_stream_that_shows_nothing_is_refused(importer: ways.Importer) -> None:
    failure = importer.refused(skippable(80 * MiB) + bytes(100), "stream")
    assert isinstance(failure, errors.ImageError)
    assert not failure.retryable


# -- xz dictionaries

ONE_BLOCK, SEVERAL_BLOCKS = ("-T1",), ("-T2", "--block-size=1MiB")


def xz_of(data: bytes, dictionary: str, *options: str) -> bytes:
    argv = ["xz", "--stdout", f"--lzma2=preset=0,dict={dictionary}", *options]
    return subprocess.run(argv, input=data, check=True, capture_output=True).stdout


@pytest.mark.parametrize("options", [ONE_BLOCK, SEVERAL_BLOCKS])
def test_dictionary_of_128_mib_is_accepted(
    importer: ways.Importer, disks: disks_module.Disks, options: tuple[str, ...]
) -> None:
    importer.run(xz_of(disks.raw().read_bytes(), "128MiB", *options), "ranges")
    oracle.same(importer.target, disks.raw())


@pytest.mark.parametrize(
    ("first", "options"), [(b"", SEVERAL_BLOCKS), (lzma.compress(bytes(MiB)), ONE_BLOCK)]
)
def test_larger_dictionary_is_refused_by_one_rule(
    importer: ways.Importer, first: bytes, options: tuple[str, ...]
) -> None:
    """Also if only a later stream of the file has it."""
    failure = importer.refused(first + xz_of(bytes(4 * MiB), "192MiB", *options), "ranges")
    assert isinstance(failure, errors.Unsupported)
    assert "(dictionary) of more than 128 MiB" in str(failure)


# -- what is not a disk


@pytest.mark.parametrize(("wrapping", "way"), pairs.dealt(WRAPPINGS, ways.WAYS))
def test_less_than_a_sector_is_not_a_disk(importer: ways.Importer, way: str, wrapping: str) -> None:
    failure = importer.refused(WRAPPINGS[wrapping](bytes(511)), way, scratch=None)
    assert isinstance(failure, errors.ImageError)
    assert "511 bytes are not a disk" in str(failure)


@pytest.mark.parametrize("way", ["stream", "pipe"])
def test_short_source_with_its_checksum_is_refused(importer: ways.Importer, way: str) -> None:
    """With a wrong one, that is reported."""
    right = hashlib.sha256(b"short").hexdigest()
    for digest, words in (("a" * 64, "checksum mismatch"), (right, "not a disk")):
        failure = importer.refused(b"short", way, checksum=f"sha256:{digest}")
        assert isinstance(failure, errors.ImageError)
        assert words in str(failure)


def test_one_sector_is_a_disk(importer: ways.Importer) -> None:
    for wrapping, wrap in WRAPPINGS.items():
        importer.run(wrap(b"x" * 512), "stream")
        assert importer.target.read_bytes() == b"x" * 512, wrapping
        importer.target.unlink()


def test_short_container_disk_is_refused(guarded: registries.Registry, tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(b"not a disk")
    guarded.push("disk", containers.image_of(tmp_path / "image"))
    location = cdi_worker.Location(guarded.reference("disk"), guarded.access())
    request = cdi_worker.Request(
        existing="replace", source="registry", location=location, target=str(tmp_path / "disk.img")
    )
    with pytest.raises(errors.ImageError, match="10 bytes are not a disk"):
        cdi_worker.run(request)
    oracle.unusable(tmp_path / "disk.img")


def test_short_upload_is_refused(receiver: uploads.Server, paths: contract.Paths, disk: Path) -> None:
    answer = receiver.ask("POST", uploads.SYNC, b"x" * 511)
    assert (answer.status, "511 bytes are not a disk" in answer.text) == (400, True)
    oracle.unusable(disk)


def tar_of(**files: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 12345\n"
OVA = tar_of(**{"vm.ovf": b"<Envelope/>", "vm-disk1.vmdk": b"KDMV" + bytes(5000)})
TEXT = b"Access denied: quota exceeded, try again later\n" * 30
NOISE = random.Random(9).randbytes(2 * MiB)
BOOT = bytes(510) + b"\x55\xaa" + NOISE
#: The last sector of a disk image of Apple.
KOLY = b"koly" + struct.pack(">II", 4, 512) + bytes(500)


@pytest.mark.parametrize(
    ("data", "wrapping", "way", "words"),
    [
        (POINTER, "plain", "stream", "git lfs pull"),
        (POINTER, "gz", "local", "git lfs pull"),
        (OVA, "plain", "pipe", "OVA"),
        (OVA, "gz", "ranges", "OVA"),
        (TEXT, "plain", "ranges", "check whether this is the right file; it begins 'Access denied: "),
        (TEXT, "gz", "pipe", "the source is plain text; check whether this is the right file; it begins '"),
        (NOISE + KOLY, "plain", "ranges", "Apple disk image"),
    ],
)
def test_what_is_not_a_disk_is_recognised(
    importer: ways.Importer, data: bytes, wrapping: str, way: str, words: str
) -> None:
    assert words in str(importer.refused(WRAPPINGS[wrapping](data), way, scratch=None))


def test_disk_that_ends_like_an_image_of_apple_is_imported(importer: ways.Importer) -> None:
    importer.run(BOOT + KOLY, "ranges")
    assert importer.target.read_bytes() == BOOT + KOLY


def test_ova_is_unpacked_as_an_archive(importer: ways.Importer, tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    importer.run(OVA, "stream", target=tmp_path / "volume", content_type="archive")
    assert {path.name for path in (tmp_path / "volume").iterdir()} == {"vm.ovf", "vm-disk1.vmdk"}


def test_luks_disk_is_imported_with_a_notice(
    importer: ways.Importer, caplog: pytest.LogCaptureFixture
) -> None:
    header = struct.pack(">6sH32s32s32sII", b"LUKS\xba\xbe", 1, b"aes", b"xts-plain64", b"sha256", 4096, 64)
    data = header.ljust(2 * MiB, b"\0") + random.Random(8).randbytes(MiB)
    with caplog.at_level(logging.WARNING):
        importer.run(gzip.compress(data), "stream")
    assert importer.target.read_bytes() == data
    assert "LUKS" in caplog.text


# -- what is no known disk


def test_text_is_imported_in_a_pod_with_a_warning(
    importer: ways.Importer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As by CDI. ``verify`` reads the disk that is text."""
    result = importer.run(gzip.compress(TEXT), "ranges", existing="remove")
    assert importer.target.read_bytes().rstrip(b"\0") == TEXT
    assert (result.format, result.size) == ("raw", importer.target.stat().st_size)
    assert [each.message.partition(",")[0] for each in caplog.records if each.levelno == logging.WARNING] == [
        "the source is plain text"
    ]
    (tmp_path / "text").write_bytes(TEXT)
    location = cdi_worker.Location(str(tmp_path / "text"))
    request = cdi_worker.Request(location=location, target=str(importer.target))
    assert cdi_worker.verify(request).is_equal


def test_text_is_not_an_archive(importer: ways.Importer, caplog: pytest.LogCaptureFixture) -> None:
    importer.target.mkdir()
    with pytest.raises(errors.Unsupported, match="plain text"):
        importer.run(TEXT, "ranges", existing="remove", content_type="archive")
    assert "imported as it is" not in caplog.text


def test_text_is_uploaded_with_a_warning(
    receiver: uploads.Server, disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert receiver.ask("POST", uploads.SYNC, TEXT).status == 200
    assert disk.read_bytes().rstrip(b"\0") == TEXT
    assert "plain text" in caplog.text


@pytest.mark.parametrize(
    ("data", "wrapping", "way", "warned"),
    [
        (NOISE, "plain", "stream", True),
        (NOISE, "gz", "local", True),
        (BOOT, "plain", "ranges", False),
        (bytes(2 * MiB), "gz", "pipe", False),
    ],
)
def test_only_a_head_without_any_signature_is_warned_of(
    importer: ways.Importer,
    wrapping: str,
    way: str,
    data: bytes,
    warned: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    importer.run(WRAPPINGS[wrapping](data), way)
    assert importer.target.read_bytes() == data
    assert caplog.text.count("no partition table, file system or boot sector") == warned


def test_tar_archive_with_a_disk_is_refused_with_a_command_at_a_terminal(importer: ways.Importer) -> None:
    archive = tar_of(**{"metadata.json": b"{}", "a disk.raw": BOOT, "Vagrantfile": b"x"})
    failure = importer.refused(gzip.compress(archive), "local")
    source = importer.target.parent / "image"
    advice = f"tar -xOf {source} -- 'a disk.raw' | cdi-worker import - {importer.target}"
    assert failure.at_terminal().endswith(f"; for example {advice}")
    assert "tar -x" not in failure.message()
    command = advice.replace("cdi-worker import -", "cat >")
    subprocess.run(command, shell=True, check=True)
    assert importer.target.read_bytes() == BOOT
