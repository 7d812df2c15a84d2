"""The first bytes of a source are read on until they show what it is, and what is not a disk is refused."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import hashlib
import io
import logging
import lzma
import os
import random
import struct
import subprocess
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.importer import contract
from cdi_worker.importer import report as report_module
from tests.support import containers, misbehave, oracle, registries, uploads
from tests.support import disks as disks_module

MiB = 1 << 20
WAYS = ("ranges", "stream", "local", "pipe")
paths = uploads.with_scratch
receiver = uploads.server


class Importer:
    """Imports bytes the given way."""

    def __init__(self, server: misbehave.Server, directory: Path) -> None:
        self._server = server
        self._directory = directory
        self.target = directory / "disk.img"

    def run(self, data: bytes, way: str, existing: str = "replace", **options: str) -> cdi_worker.Result:
        writing = None
        if way in {"ranges", "stream"}:
            page = misbehave.Page(data, ranges=way == "ranges")
            kind, address = "http", self._server.serve("/disk", page)
        else:
            kind, address = "local", str(self._directory / "image")
        if way == "local":
            Path(address).write_bytes(data)
        if way == "pipe":
            os.mkfifo(address)
            writing = threading.Thread(target=_write, args=(address, data))
            writing.start()
        location = cdi_worker.Location(address)
        try:
            return cdi_worker.run(
                cdi_worker.Request(
                    existing=existing, source=kind, location=location, target=str(self.target), **options
                )
            )
        finally:
            if writing is not None:
                writing.join()

    def refused(self, data: bytes, way: str) -> errors.Error:
        with pytest.raises(errors.Error) as caught:
            self.run(data, way)
        oracle.unusable(self.target)
        return caught.value


def _write(path: str, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):
        Path(path).write_bytes(data)


@pytest.fixture
def importer(server: misbehave.Server, tmp_path: Path) -> Importer:
    return Importer(server, tmp_path)


def skippable(size: int) -> bytes:
    """Return a skippable frame of zstd."""
    return struct.pack("<II", 0x184D2A50, size) + bytes(size)


# -- too little in the head


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [300 << 10, 3 * MiB, 20 * MiB])
def test_long_skippable_frame_is_read_over(
    importer: Importer, disks: disks_module.Disks, way: str, size: int
) -> None:
    result = importer.run(skippable(size) + disks.wrapped("raw", "zst").read_bytes(), way)
    assert result.compressions == ("zst",)
    oracle.same(importer.target, disks.raw())


@pytest.mark.parametrize("way", WAYS)
def test_long_gzip_header_and_empty_members_are_read_over(
    importer: Importer, disks: disks_module.Disks, way: str
) -> None:
    data = gzip.compress(b"") * 20_000 + disks.wrapped("raw", "gz").read_bytes()
    importer.run(data, way)
    oracle.same(importer.target, disks.raw())


@pytest.mark.parametrize("way", ["ranges", "stream"])
def test_disk_of_the_second_block_of_bz2_is_seen(
    importer: Importer, disks: disks_module.Disks, way: str
) -> None:
    """A tiny member, and then a qcow2 whose header is in the next block."""
    image = disks.image("qcow2", "dense").read_bytes()
    importer.run(bz2.compress(image[:100]) + bz2.compress(image[100:]), way)
    oracle.same(importer.target, disks.expected("qcow2", "dense"))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "cut"), [("bz2", 700_000), ("bz2", 20), ("gz", 20), ("xz", 40), ("zst", 12)]
)
def test_truncated_stream_is_truncated(importer: Importer, way: str, name: str, cut: int) -> None:
    """And not one that needs scratch space, after which the controller starts another pod for ever."""
    data = disks_module.COMPRESSIONS[name](random.Random(1).randbytes(MiB))[:cut]
    failure = importer.refused(data, way)
    assert isinstance(failure, errors.Truncated)
    report = report_module.failure(failure, "http")
    assert report.status == 1
    assert f"truncated {name}" in report.message


@pytest.mark.parametrize("way", WAYS)
def test_stream_that_shows_nothing_is_refused(importer: Importer, way: str) -> None:
    failure = importer.refused(skippable(80 * MiB) + bytes(100), way)
    assert isinstance(failure, errors.ImageError)
    assert not failure.retryable


def test_uploaded_skippable_frame(
    receiver: uploads.Server, paths: contract.Paths, disk: Path, disks: disks_module.Disks
) -> None:
    body = skippable(3 * MiB) + disks.wrapped("raw", "zst").read_bytes()
    assert receiver.ask("POST", uploads.SYNC, body).status == 200
    oracle.same(disk, disks.raw())


# -- xz dictionaries


def xz_of(data: bytes, dictionary: str, *options: str) -> bytes:
    argv = ["xz", "--stdout", f"--lzma2=preset=0,dict={dictionary}", *options]
    return subprocess.run(argv, input=data, check=True, capture_output=True).stdout


@pytest.mark.parametrize("options", [("-T1",), ("-T2", "--block-size=1MiB")])
def test_dictionary_of_128_mib_is_accepted(
    importer: Importer, disks: disks_module.Disks, options: tuple[str, ...]
) -> None:
    importer.run(xz_of(disks.raw().read_bytes(), "128MiB", *options), "ranges")
    oracle.same(importer.target, disks.raw())


@pytest.mark.parametrize("options", [("-T1",), ("-T2", "--block-size=1MiB")])
@pytest.mark.parametrize("first", [b"", lzma.compress(bytes(MiB))])
def test_larger_dictionary_is_refused_by_one_rule(
    importer: Importer, disks: disks_module.Disks, first: bytes, options: tuple[str, ...]
) -> None:
    """Also if only a later stream of the file has it."""
    failure = importer.refused(first + xz_of(disks.raw().read_bytes(), "192MiB", *options), "ranges")
    assert isinstance(failure, errors.Unsupported)
    assert "(dictionary) of more than 128 MiB" in str(failure)


# -- what is not a disk

SHORT: dict[str, Callable[[bytes], bytes]] = {"plain": bytes, **disks_module.COMPRESSIONS}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrapping", SHORT)
def test_less_than_a_sector_is_not_a_disk(importer: Importer, way: str, wrapping: str) -> None:
    failure = importer.refused(SHORT[wrapping](bytes(511)), way)
    assert isinstance(failure, errors.ImageError)
    assert "511 bytes are not a disk" in str(failure)


@pytest.mark.parametrize("way", ["stream", "pipe"])
def test_short_source_with_its_checksum_is_refused(importer: Importer, way: str) -> None:
    """With a wrong one, that is reported."""
    for digest, words in (
        ("a" * 64, "checksum mismatch"),
        (hashlib.sha256(b"short").hexdigest(), "not a disk"),
    ):
        with pytest.raises(errors.ImageError, match=words):
            importer.run(b"short", way, checksum=f"sha256:{digest}")
        oracle.unusable(importer.target)
        (importer.target.parent / "image").unlink(missing_ok=True)


@pytest.mark.parametrize("wrapping", SHORT)
def test_one_sector_is_a_disk(importer: Importer, wrapping: str) -> None:
    importer.run(SHORT[wrapping](b"x" * 512), "stream")
    assert importer.target.read_bytes() == b"x" * 512


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


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 12345\n"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrapping", ["plain", "gz"])
def test_pointer_of_git_lfs_is_recognised(importer: Importer, way: str, wrapping: str) -> None:
    assert "git lfs pull" in str(importer.refused(SHORT[wrapping](POINTER), way))


def ova() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in (("vm.ovf", b"<Envelope/>"), ("vm-disk1.vmdk", b"KDMV" + bytes(5000))):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrapping", ["plain", "gz"])
def test_ova_is_recognised(importer: Importer, way: str, wrapping: str) -> None:
    assert "OVA" in str(importer.refused(SHORT[wrapping](ova()), way))


def test_ova_is_unpacked_as_an_archive(server: misbehave.Server, tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    location = cdi_worker.Location(server.serve("/vm.ova", misbehave.Page(ova())))
    request = cdi_worker.Request(
        existing="replace",
        source="http",
        location=location,
        target=str(tmp_path / "volume"),
        content_type="archive",
    )
    cdi_worker.run(request)
    assert {path.name for path in (tmp_path / "volume").iterdir()} == {"vm.ovf", "vm-disk1.vmdk"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrapping", ["plain", "gz"])
def test_luks_disk_is_imported_with_a_notice(
    importer: Importer, way: str, wrapping: str, caplog: pytest.LogCaptureFixture
) -> None:
    header = struct.pack(">6sH32s32s32sII", b"LUKS\xba\xbe", 1, b"aes", b"xts-plain64", b"sha256", 4096, 64)
    data = header.ljust(2 * MiB, b"\0") + random.Random(8).randbytes(MiB)
    with caplog.at_level(logging.WARNING):
        importer.run(SHORT[wrapping](data), way)
    assert importer.target.read_bytes() == data
    assert "LUKS" in caplog.text


# -- what is no known disk

TEXT = b"Access denied: quota exceeded, try again later\n" * 30
NOISE = random.Random(9).randbytes(2 * MiB)
BOOT = bytes(510) + b"\x55\xaa" + NOISE


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrapping", ["plain", "gz"])
def test_text_is_refused(importer: Importer, way: str, wrapping: str) -> None:
    failure = str(importer.refused(SHORT[wrapping](TEXT), way))
    assert (
        "the source is plain text; check whether this is the right file; it begins 'Access denied: "
        in failure
    )


@pytest.mark.parametrize("wrapping", ["plain", "gz"])
def test_text_is_imported_in_a_pod_with_a_warning(
    importer: Importer, wrapping: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As by CDI."""
    result = importer.run(SHORT[wrapping](TEXT), "ranges", existing="remove")
    assert importer.target.read_bytes().rstrip(b"\0") == TEXT
    assert (result.format, result.size) == ("raw", importer.target.stat().st_size)
    assert [each.message.partition(",")[0] for each in caplog.records if each.levelno == logging.WARNING] == [
        "the source is plain text"
    ]


def test_disk_that_is_text_is_verified(importer: Importer, tmp_path: Path) -> None:
    importer.run(TEXT, "ranges", existing="remove")
    source = tmp_path / "text"
    source.write_bytes(TEXT)
    request = cdi_worker.Request(location=cdi_worker.Location(str(source)), target=str(importer.target))
    assert cdi_worker.verify(request).is_equal


def test_text_is_not_an_archive(importer: Importer, caplog: pytest.LogCaptureFixture) -> None:
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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrapping", ["plain", "gz"])
@pytest.mark.parametrize(("data", "warned"), [(NOISE, True), (BOOT, False), (bytes(2 * MiB), False)])
def test_only_a_head_without_any_signature_is_warned_of(
    importer: Importer, way: str, wrapping: str, data: bytes, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    importer.run(SHORT[wrapping](data), way)
    assert importer.target.read_bytes() == data
    assert caplog.text.count("no partition table, file system or boot sector") == warned


def test_disk_image_of_apple_is_known_by_its_end(importer: Importer) -> None:
    trailer = b"koly" + struct.pack(">II", 4, 512) + bytes(500)
    assert "Apple disk image" in str(importer.refused(NOISE + trailer, "ranges"))
    importer.run(BOOT + trailer, "ranges")
    assert importer.target.read_bytes() == BOOT + trailer


@pytest.mark.parametrize("wrapping", ["plain", "gz"])
def test_tar_archive_with_a_disk_is_refused_with_a_command_at_a_terminal(
    importer: Importer, wrapping: str
) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, data in (("metadata.json", b"{}"), ("a disk.raw", BOOT), ("Vagrantfile", b"x")):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    failure = importer.refused(SHORT[wrapping](file.getvalue()), "local")
    source = importer.target.parent / "image"
    advice = f"tar -xOf {source} -- 'a disk.raw' | cdi-worker import - {importer.target}"
    assert failure.at_terminal().endswith(f"; for example {advice}")
    assert "tar -x" not in failure.message()
    command = advice.replace("cdi-worker import -", "cat >")
    subprocess.run(command, shell=True, check=True)
    assert importer.target.read_bytes() == BOOT
