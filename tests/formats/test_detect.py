"""Detection by content: what each tool writes, what is not a disk, and what matches two formats."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import subprocess
import tarfile
import time

import hypothesis
import pytest
from hypothesis import strategies as st

from cdi_worker import errors
from cdi_worker.formats import detect

MBR = bytes(510) + b"\x55\xaa"
ISO = bytes(32768) + b"\x01CD001\x01" + bytes(2041)
HYBRID = MBR + ISO[512:]


def patched(head, offset, data):
    changed = bytearray(head.ljust(offset + len(data), b"\0"))
    changed[offset : offset + len(data)] = data
    return bytes(changed)


def test_images_created_by_qemu_img_are_detected(tmp_path):
    """Those that ``test_content`` has not."""
    flat = ("-o", "subformat=monolithicFlat")
    for driver, options in (("vmdk", flat), ("qed", ()), ("parallels", ())):
        path = tmp_path / "disk"
        subprocess.run(["qemu-img", "create", "-q", "-f", driver, *options, path, "10M"], check=True)
        with path.open("rb") as file:
            assert detect.detect(file.read(detect.HEAD)) == driver


def old_tar():
    """Return a header from before POSIX: no magic, only the checksum."""
    info = tarfile.TarInfo("disk.img")
    block = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    block[257:265] = bytes(8)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def new_tar(dialect):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=dialect) as tar:
        tar.addfile(tarfile.TarInfo("disk.img"))
    return file.getvalue()


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"", "empty"),
        (b"\0", "raw"),
        (bytes(detect.HEAD), "raw"),
        (b"\xff" * 1000, "raw"),
        (MBR, "raw"),
        (ISO, "iso"),
        (HYBRID, "iso"),
        (bytes(32768) + b"\0NSR02", "iso"),
        (gzip.compress(b"x"), "gz"),
        (lzma.compress(b"x"), "xz"),
        (bz2.compress(b"x"), "bz2"),
        (bz2.compress(b""), "bz2"),
        (b"\x28\xb5\x2f\xfd\x24", "zst"),
        (b"\x50\x2a\x4d\x18", "zst"),
        (patched(gzip.compress(b"x"), 510, b"\x55\xaa"), "gz"),
        (old_tar(), "tar"),
        (new_tar(tarfile.USTAR_FORMAT), "tar"),
        (new_tar(tarfile.GNU_FORMAT), "tar"),
        (new_tar(tarfile.PAX_FORMAT), "tar"),
        (b"COWD\x01\0\0\0", "vmdk"),
        (b"LUKS\xba\xbe\0\1", "raw"),  # the disk of a guest that is encrypted as a whole
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\n", "lfs"),
        (b"version https://git-lfs.github.com/spec/v1 ", "raw"),
        (b"# Disk DescriptorFile\nversion=1\n", "vmdk"),
        (b"# a comment\n\n \nversion=3\r\nCID=1", "vmdk"),
        (b"version=10\n", "raw"),
        (b"<!DOCTYPE html>\n<html>", "html"),
        (b"\xef\xbb\xbf\r\n <!-- a --> <!-- b -->\n<HTML lang=de>", "html"),
        (b"<?xml version='1.0'?><Error><Code>NoSuchKey</Code></Error>", "xml"),
        (b"<Error><Code>", "xml"),
        (b'{"error": "not found"}\n', "json"),
        (b"[]", "json"),
        (b"{\0\0", "raw"),
        (b"PK\x03\x04", "zip"),
    ],
)
def test_format_is_detected_by_content(head, expected):
    assert detect.detect(head) == expected


@pytest.mark.parametrize(
    "head",
    [
        patched(ISO, 0, b"QFI\xfb"),
        patched(MBR, 0, b"QFI\xfb"),
        patched(b"QFI\xfb", 257, b"ustar"),
        patched(b"conectix", 64, b"\x7f\x10\xda\xbe"),
        patched(HYBRID, 64, b"\x7f\x10\xda\xbe"),
        patched(ISO, 257, b"ustar"),
        patched(ISO, 0, b"<html>"),
        patched(ISO, 0, gzip.compress(b"x")),
        patched(ISO, 0, b"# Disk DescriptorFile"),
    ],
)
def test_several_formats_at_once_are_refused(head):
    with pytest.raises(errors.Refused, match="several formats"):
        detect.detect(head)


def riff(kind):
    return b"RIFF\x24\x08\0\0" + kind + b"fmt "


EXE = patched(b"MZ", 60, b"\x80\0\0\0")
#: Files that are not disks, which have more than a fixed signature; the others are in ``detect``.
STRANGERS = [
    ("html", b"<html>"),
    ("xml", b"<Error><Code>"),
    ("json", b"[]"),
    ("lfs", b"version https://git-lfs.github.com/spec/v1\n"),
    ("lzma", lzma.compress(bytes(1000), format=lzma.FORMAT_ALONE)),
    ("Z", b"\x1f\x9d\x90\x78"),
    ("jpeg", b"\xff\xd8\xff\xe0\0\x10JFIF"),
    ("riff", riff(b"WAVE")),
    ("riff", riff(b"WEBP")),
    ("mp4", b"\0\0\0\x20ftypisom"),
    ("mp4", b"\0\0\0\x14ftypqt  "),
    ("exe", patched(EXE, 128, b"PE\0\0")),
    ("text", b"Access denied: quota exceeded, try again later\n" * 30),
    ("text", "Zugriff verweigert: größer als erlaubt\n".encode() * 30),
    *((name, magic) for name, _, _, magics in detect._STRANGERS for magic in magics),
]


@pytest.mark.parametrize(("name", "head"), STRANGERS)
def test_file_that_is_not_a_disk_is_named(name, head):
    assert detect.detect(head if name in {"text", "json"} else head.ljust(4096, b"\0")) == name
    assert name == "text" or detect.detect(head[1:].ljust(4096, b"\0")) == "raw"


def test_every_stranger_has_a_test_and_long_signatures():
    assert {name for name, _ in STRANGERS} == {name for name, *_ in detect._STRANGERS}
    assert all(len(magic) >= 4 for *_, magics in detect._STRANGERS for magic in magics)


@pytest.mark.parametrize(("name", "head"), [each for each in STRANGERS if each[0] in detect._WEAK])
def test_boot_sector_outweighs_a_short_signature(name, head):
    assert detect.detect(patched(head[:500], 510, b"\x55\xaa")) == "raw"
    assert detect.detect(patched(head[:500], 32769, b"CD001")) == "iso"


@pytest.mark.parametrize(
    "head",
    [
        b"x" * 4096,  # a pattern of a test
        b"words\n" * 700 + b"\0",
        b"words\n" * 80,  # less than a sector
        b"gr\xf6\xdfer als erlaubt\n" * 300,  # may be text, in another encoding
        b"\x5d\0\0\x10\0" + bytes(7) + b"\1" + bytes(100),  # lzma of 2**56 bytes
        b"\x5d\0\0\x11\0" + bytes(100),  # with a dictionary of no size
        b"\x5d\0\0\x10\0" + bytes(8),  # cut
        EXE,
        riff(b"disk"),
        b"\0\0\0\x20ftyp\0\0\0\0",
    ],
)
def test_what_only_resembles_another_file_is_raw(head):
    assert detect.detect(head) == "raw"


def test_text_may_end_in_the_middle_of_a_character():
    text = "größer €\n".encode() * 100
    assert {detect.detect(text[: len(text) - 1 - cut]) for cut in range(3)} == {"text"}


def test_format_that_is_not_a_disk_is_unsupported():
    for name in detect.STRANGERS:
        with pytest.raises(errors.Unsupported):
            detect.refuse_stranger(name)
    for name in detect.DISKS | detect.COMPRESSIONS | {"tar"}:
        detect.refuse_stranger(name)


def test_name_of_a_file_in_a_tar_archive_is_not_a_signature():
    for name in ("VMA", "070701/disk.img", "shdw.img", "%PDF-1", "SQLite format 3", "GIF89a"):
        for dialect in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT):
            assert detect.detect(tarfile.TarInfo(name).tobuf(dialect)) == "tar", name


def test_beginning_of_a_text_is_quoted():
    with pytest.raises(errors.Unsupported, match=r"right file; it begins 'no such \ufffd\[1mobject'$"):
        detect.refuse_stranger("text", b"no such\n\x1b[1mobject")
    with pytest.raises(errors.Unsupported) as caught:
        detect.refuse_stranger("json", b'{"error": "' + b"x" * 1000)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("piece", [b"<!-- -->", b"<!--", b"#\n", b" ", b"{", b"[ ] ", b"\n# ", b"<"])
def test_detection_of_text_is_fast(piece):
    started = time.process_time()
    detect.detect((piece * detect.HEAD)[: detect.HEAD])
    detect.detect((piece * detect.HEAD)[: detect.HEAD - 1] + b"\0")
    assert time.process_time() - started < 10  # a pattern that backtracks at each byte takes minutes


MAGICS = [
    b"QFI\xfb",
    b"conectix",
    b"KDMV",
    b"\x1f\x8b\x08",
    b"<html",
    b"{",
    b"\x7f\x10\xda\xbe",
    b"ustar",
    b"CD001",
]


@hypothesis.given(
    st.lists(
        st.tuples(st.sampled_from([0, 64, 257, 510, 32769]), st.sampled_from(MAGICS) | st.binary(max_size=9))
    )
)
def test_detection_returns_a_known_format_or_refuses(pieces):
    head = b""
    for offset, data in pieces:
        head = patched(head, offset, data)
    known = detect.DISKS | detect.COMPRESSIONS | set(detect.STRANGERS) | {"tar"}
    try:
        assert detect.detect(head) in known
    except errors.Refused as err:
        assert err.fields["rule"] == "ambiguous"  # noqa: PT017 - either outcome is right
