"""Streams without an end: the import ends, with the right disk where the image is complete."""

from __future__ import annotations

import hashlib
import struct
import subprocess
import time
from pathlib import Path

import pytest

from cdi_worker import errors
from tests.support import disks as disks_module
from tests.support import misbehave, oracle, pairs, ways

#: Seconds.
SOON = 60.0
SKIPPABLE = struct.pack("<II", 0x184D2A50, 1 << 18) + bytes(1 << 18)


def endless(body: bytes, tail: bytes) -> misbehave.Page:
    """Return a page without a length that continues with ``tail`` until the client disconnects."""
    return misbehave.Page(body, framing="chunked", ranges=False, tail=(tail, None))


@pytest.mark.parametrize(
    ("variant", "byte"), pairs.dealt(["qcow2", "qcow2-zlib", "vmdk-stream", "vmdk"], [b"\0", b"\xff"])
)
def test_what_follows_a_complete_image_is_not_read(
    server: misbehave.Server, disks: disks_module.Disks, tmp_path: Path, variant: str, byte: bytes
) -> None:
    url = server.serve("/disk", endless(disks.image(variant).read_bytes(), byte * (1 << 18)))
    began = time.monotonic()
    ways.import_disk(url, tmp_path / "disk.img")
    assert time.monotonic() - began < SOON
    oracle.same(tmp_path / "disk.img", disks.expected(variant))


def test_what_follows_an_image_whose_checksum_was_given_is_limited(
    server: misbehave.Server, disks: disks_module.Disks, tmp_path: Path
) -> None:
    url = server.serve("/disk", endless(disks.image("qcow2").read_bytes(), bytes(4 << 20)))
    checksum = f"sha256:{hashlib.sha256().hexdigest()}"
    began = time.monotonic()
    with pytest.raises(errors.Refused, match="follow the end of the image"):
        ways.import_disk(url, tmp_path / "disk.img", checksum=checksum, image_size=64 << 20)
    assert time.monotonic() - began < SOON
    assert not (tmp_path / "disk.img").exists()


def test_compressed_stream_of_nothing_is_an_empty_source(
    server: misbehave.Server, tmp_path: Path, scratch: Path
) -> None:
    for number, packer in enumerate(["gzip", "bzip2", "xz", "zstd"]):
        nothing = subprocess.run([packer, "-c"], input=b"", capture_output=True, check=True).stdout
        url = server.serve("/disk", misbehave.Page(nothing, ranges=number % 2 == 0))
        with pytest.raises(errors.Unsupported, match="the source is empty") as caught:
            ways.import_disk(url, tmp_path / "disk.img", **({"scratch": scratch} if number < 2 else {}))
        assert not caught.value.retryable
        assert not (tmp_path / "disk.img").exists()


def test_endless_skippable_frames_first_are_refused(server: misbehave.Server, tmp_path: Path) -> None:
    frames = struct.pack("<II", 0x184D2A50, 0) * 20_000
    began = time.monotonic()
    with pytest.raises(errors.Refused, match=r"in a row are empty|decompress to nothing"):
        ways.import_disk(server.serve("/disk", endless(frames, frames)), tmp_path / "disk.img")
    assert time.monotonic() - began < SOON


@pytest.mark.parametrize("kind", ["zst", "gz-padding", "bz2"])
def test_compressed_stream_without_content_is_limited(
    server: misbehave.Server, disks: disks_module.Disks, tmp_path: Path, kind: str
) -> None:
    data = disks.image("raw").read_bytes()[: 1 << 20]
    form, _, padding = kind.partition("-")
    packers = {"zst": "zstd", "gz": "gzip", "bz2": "bzip2"}
    packed = subprocess.run([packers[form], "-c"], input=data, capture_output=True, check=True).stdout
    nothing = subprocess.run([packers[form], "-c"], input=b"", capture_output=True, check=True).stdout
    tail = SKIPPABLE if form == "zst" else nothing * 20_000
    if padding:
        tail = bytes(1 << 18)
    url = server.serve("/disk", endless(packed, tail))
    began = time.monotonic()
    with pytest.raises(errors.ImageError, match="in a row are empty"):
        ways.import_disk(url, tmp_path / "disk.img")
    assert time.monotonic() - began < SOON
    assert not (tmp_path / "disk.img").exists()
