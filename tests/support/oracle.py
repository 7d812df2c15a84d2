"""Compare a target byte for byte with the disk that qemu-img reads."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

MiB = 1 << 20
RECORD = b"cdi-worker claim 1\n"


def same(target: Path, expected: Path, *, beyond: bytes | None = b"\0") -> None:
    """Check that the target holds the expected bytes, followed by ``beyond`` to its end.

    ``beyond`` is one byte: zero for a file that was grown, ``devices.DIRT`` for what must not have been
    written; None: not checked. The page cache is dropped first, so that a block device is read from the
    device where possible.
    """
    size, offset = expected.stat().st_size, 0
    with target.open("rb", buffering=0) as have, expected.open("rb") as want:
        os.posix_fadvise(have.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while (offset := min(_data(have, offset), _data(want, offset))) < size:
            length = min(MiB, size - offset)
            have.seek(offset)
            want.seek(offset)
            _equal(have.read(length), want.read(length), offset, target)
            offset += length
        have.seek(size)
        while beyond is not None:
            if beyond == b"\0":
                have.seek(_data(have, have.tell()))
            if not (rest := have.read(MiB)):
                break
            _equal(rest, beyond * len(rest), have.tell() - len(rest), target)


def _data(file: BinaryIO, offset: int) -> int:
    """Return where the next data of a file is, or its end: a hole reads as zeros, however many GiB."""
    state = os.fstat(file.fileno())
    if not stat.S_ISREG(state.st_mode):
        return offset
    try:
        return os.lseek(file.fileno(), offset, os.SEEK_DATA)
    except OSError as err:
        if err.errno != errno.ENXIO:
            raise
        return state.st_size


def _equal(have: bytes, want: bytes, offset: int, target: Path) -> None:
    if have == want:
        return
    first = next(
        (i for i, (a, b) in enumerate(zip(have, want, strict=False)) if a != b), min(len(have), len(want))
    )
    where = f"{target} differs at byte {offset + first}"
    raise AssertionError(f"{where}: {have[first : first + 16]!r}, expected {want[first : first + 16]!r}")


def unusable(target: Path, *, disk: bytes = b"") -> None:
    """Check that nothing on the target could be mistaken for a disk after a failure.

    A file must not exist under its final name; a block device must begin with zeros, or be unwritten, in
    the area where partition tables, boot sectors and file systems begin. Its first sector may hold the record
    of an interrupted run, which is text. If that run was killed early, the other sectors are unwritten. If it
    was killed just before its last write, that of the first sector, they hold the rest of ``disk``.
    """
    if not target.is_block_device():
        assert not target.exists(), f"{target} exists"
        return
    with target.open("rb", buffering=0) as device:
        head = device.read(MiB // 4)
        if head.startswith(RECORD):
            assert head[:512].isascii()
            head = head[512:].lstrip(b"\0")
            if disk and head and disk[_sector(target) : MiB // 4].endswith(head):
                rest = disk[MiB // 4 :]
                assert device.read(len(rest)) == rest, f"{target} has the head of a disk that is not whole"
                return
    assert head in (bytes(len(head)), b"\xff" * len(head)), f"{target} begins like a disk"


def _sector(device: Path) -> int:
    """Return the bytes of a device's logical sector (Linux, Documentation/ABI/stable/sysfs-block)."""
    queue = Path("/sys/class/block", device.resolve().name, "queue")
    return int((queue / "logical_block_size").read_text())
